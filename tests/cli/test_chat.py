"""The `chat` command: in a pipe, as one question, and on a real terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import pytest

from tests.support.streaming_server import Pace, StreamingServer

THOUGHT = ({"reasoning": "two and "}, {"reasoning": "two"}, {"content": "It is "}, {"content": "four."})


def chat(cwd: Path, *args: str, given: str | bytes = "") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "glm5deploy", "chat", *args]
    data = given if isinstance(given, bytes) else given.encode()
    return subprocess.run(command, cwd=cwd, capture_output=True, input=data, timeout=60)


@contextmanager
def server(*chat: dict[str, str], between: float = 0.0, break_after: int = 0) -> Iterator[StreamingServer]:
    pace = Pace(first=0, between=between, chat=chat or THOUGHT, break_after=break_after)
    with StreamingServer(pace) as running:
        yield running


def test_a_pipe_gets_the_answer_alone(tmp_path: Path) -> None:
    with server() as running:
        done = chat(tmp_path, "--url", running.url, given="What is\n2 + 2?\n")
    assert (done.returncode, done.stdout) == (0, b"It is four.\n")
    assert done.stderr == b"two and two\n\n"
    (body,) = running.pace.requests
    assert body["messages"] == [{"role": "user", "content": "What is\n2 + 2?"}]
    assert body["stream"] is True
    assert "max_tokens" not in body


def test_options_reach_the_server(tmp_path: Path) -> None:
    options = ("--system", "Be brief.", "--max-tokens", "9", "--temperature", "0", "--no-think")
    with server() as running:
        assert chat(tmp_path, "Hello", "--url", running.url, *options).returncode == 0
    (body,) = running.pace.requests
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["max_tokens"], body["temperature"]) == (9, 0)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_json_is_one_object(tmp_path: Path) -> None:
    with server() as running:
        done = chat(tmp_path, "Hello", "--json", "--url", running.url)
    answer = json.loads(done.stdout)
    assert (answer["content"], answer["reasoning"]) == ("It is four.", "two and two")
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("given", "words"), [("", b"no question on stdin"), ("  \n", b"no question on stdin"), (b"\xff", b"not UTF-8")]
)
def test_a_pipe_without_a_question_is_wrong_usage(tmp_path: Path, given: str | bytes, words: bytes) -> None:
    done = chat(tmp_path, given=given)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_broken_answer_ends_with_what_the_server_said(tmp_path: Path) -> None:
    with server(break_after=3) as running:
        done = chat(tmp_path, "Hello", "--url", running.url)
    assert done.returncode == 1
    assert done.stdout == b"It is \n"
    assert b"error: the server broke off: out of memory" in done.stderr


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    with server(*({"content": "line\n"} for _ in range(200)), between=0.005) as running:
        command = f"{sys.executable} -m glm5deploy chat Hello --url {running.url} | head -n 1"
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.stdout == b"line\n"
    assert b"Traceback" not in done.stderr
    assert b"Broken" not in done.stderr


class Terminal:
    """`chat` on a pseudo-terminal."""

    def __init__(self, cwd: Path, *args: str) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm"}
        environment.pop("NO_COLOR")
        command = [sys.executable, "-m", "glm5deploy", "chat", *args]
        self.process = subprocess.Popen(
            command, cwd=cwd, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, text: str, *, limit: float = 30.0) -> str:
        """Read until ``text`` was seen; returns what came up to it and forgets that."""
        return self._until(text, limit, lambda: None)

    def interrupt(self, text: str) -> None:
        """Ctrl-C until ``text`` was seen."""
        self._until(text, 30.0, lambda: os.kill(self.process.pid, signal.SIGINT), pause=0.5)

    def _until(self, text: str, limit: float, again: Callable[[], None], pause: float = 0.1) -> str:
        end = time.monotonic() + limit
        while text not in self.seen:
            again()
            assert time.monotonic() < end, f"{text!r} did not appear in {self.seen!r}"
            if select.select([self._master], [], [], pause)[0]:
                try:
                    self.seen += os.read(self._master, 4096).decode(errors="replace")
                except OSError:  # the other end is closed
                    assert text in self.seen, f"{text!r} did not appear in {self.seen!r}"
        before, _, self.seen = self.seen.partition(text)
        return before

    def end(self, number: signal.Signals | None = None) -> int:
        """The exit code, once the process has ended by itself or by ``number``; the terminal is read meanwhile.

        A signal that comes in the instant before the process waits for a key is seen at the next one: so it is sent
        again, here as in :meth:`interrupt`.
        """
        end, sent = time.monotonic() + 60, 0.0
        while self.process.poll() is None:
            assert time.monotonic() < end, self.seen
            if number is not None and time.monotonic() - sent > 5:
                self.process.send_signal(number)
                sent = time.monotonic()
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self._master, 4096).decode(errors="replace")
                except OSError:
                    break
        return self.process.wait(30)


def test_a_conversation_on_a_terminal(tmp_path: Path) -> None:
    with server() as running, Terminal(tmp_path, "--url", running.url) as terminal:
        terminal.until("> ")
        terminal.type("two plus two\n")
        shown = terminal.until("> ")
        assert "\x1b[2mtwo and \x1b[0m" in shown
        assert "It is four." in shown
        assert "\x1b[2mIt is" not in shown
        terminal.type("and again\n")
        terminal.until("four.")
        terminal.until("> ")
        terminal.type("/clear\n")
        terminal.until("forgotten")
        terminal.until("> ")
        terminal.type("fresh\n")
        terminal.until("four.")
        terminal.until("> ")
        terminal.type("/exit\n")
        assert terminal.end() == 0
    lengths = [[m["role"] for m in body["messages"]] for body in running.pace.requests]
    assert lengths == [["user"], ["user", "assistant", "user"], ["user"]]


def test_ctrl_c_ends_the_answer_and_ctrl_d_the_conversation(tmp_path: Path) -> None:
    pieces = ({"content": f"w{i} "} for i in range(1000))
    with server(*pieces, between=0.02) as running, Terminal(tmp_path, "--url", running.url) as terminal:
        terminal.until("> ")
        terminal.type("go\n")
        terminal.until("w3 ")
        os.kill(terminal.process.pid, signal.SIGINT)
        terminal.until("> ")
        running.pace.chat = THOUGHT
        terminal.type("go on\n")
        terminal.until("four.")
        terminal.until("> ")
        terminal.interrupt("Ctrl-D leaves")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.end() == 0
    kept = running.pace.requests[1]["messages"][1]
    assert kept["role"] == "assistant"
    assert kept["content"].startswith("w0 w1 w2 w3 ")


def test_a_failed_answer_leaves_the_conversation_as_it_was(tmp_path: Path) -> None:
    with server(break_after=3) as running, Terminal(tmp_path, "--url", running.url) as terminal:
        terminal.until("> ")
        terminal.type("first\n")
        terminal.until("out of memory")
        terminal.until("> ")
        terminal.type("second\n")
        terminal.until("out of memory")
        terminal.until("> ")
        terminal.type("/exit\n")
        assert terminal.end() == 0
    assert [m["content"] for m in running.pace.requests[1]["messages"]] == ["second"]


def test_a_model_cannot_steer_the_terminal(tmp_path: Path) -> None:
    with (
        server({"content": "safe\x1b]0;owned\x07\x9b2J"}, {"content": " done"}) as running,
        Terminal(tmp_path, "hi", "--url", running.url) as terminal,
    ):
        shown = terminal.until("done")
    assert shown.endswith("safe]0;owned2J ")
    assert "\x07" not in shown


def test_sigterm_ends_it(tmp_path: Path) -> None:
    with server() as running, Terminal(tmp_path, "--url", running.url) as terminal:
        terminal.until("> ")
        assert terminal.end(signal.SIGTERM) == 143
