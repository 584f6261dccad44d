"""``chat``: talk to a running server from the terminal, or pipe a question through it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glm5deploy.cli.options import DEFAULT_WORKDIR, ConfigOpt, JsonOpt, WorkdirOpt
from glm5deploy.cli.output import Output
from glm5deploy.cli.server_choice import KeyFileOpt, ModelNameOpt, UrlOpt, choose_server
from glm5deploy.cli.session import Session
from glm5deploy.errors import DeployError, UsageError

if TYPE_CHECKING:
    from glm5deploy.server.client import Client

LONGEST_QUESTION = 16 << 20
_EXIT_TERMINATED = 143


def chat(
    question: Annotated[str | None, typer.Argument(help="Ask this and end. Default: a conversation, or stdin.")] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Longest answer. Default: what the context leaves.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0, help="Default: what the model's authors advise.")
    ] = None,
    thinking: Annotated[bool, typer.Option("--think/--no-think", help="Let the model think first.")] = True,
    url: UrlOpt = None,
    model: ModelNameOpt = None,
    api_key_file: KeyFileOpt = None,
    workdir: WorkdirOpt = DEFAULT_WORKDIR,
    config: ConfigOpt = None,
    json_mode: JsonOpt = False,
) -> None:
    """Chat with a running server: /clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."""
    # Elsewhere SIGTERM counts as Ctrl-C, which here would only end the answer.
    signal.signal(signal.SIGTERM, _terminate)
    flags = {"serve.api_key_file": api_key_file}
    session = Session.open(workdir=workdir, config=config, json_mode=json_mode, flags=flags)
    interactive = question is None and sys.stdin.isatty()
    if json_mode and interactive:
        raise UsageError("--json answers one question", hint="give the question as an argument or through a pipe")
    if question is None and not interactive:
        question = _piped_question()
    server = choose_server(session, url, model)
    from glm5deploy.server.client import Client

    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    options = {key: value for key, value in options.items() if value is not None}
    if not thinking:
        options["chat_template_kwargs"] = {"enable_thinking": False}
    opening = [{"role": "system", "content": system}] if system else []
    with Client(server.url, server.model, server.key, timeout=3600.0) as client:
        talk = Conversation(client, session.output, options, list(opening))
        if question is not None:
            _answer_once(talk, question)
            return
        session.output.note(f"{server.model} at {server.url}; /clear forgets the conversation, /exit leaves")
        for line in _lines(session.output):
            if line == "/clear":
                talk.messages = list(opening)
                session.output.note("the conversation is forgotten")
            else:
                _answer(talk, line)


@dataclass
class Conversation:
    client: Client
    output: Output
    options: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, question: str) -> dict[str, object]:
        """Stream the answer, remember both; what was said until a Ctrl-C is remembered too.

        A failed request raises DeployError and leaves the conversation as it was.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        content, reasoning, tokens, interrupted = "", "", 0, False
        try:
            for delta in self.client.stream(asked, **self.options):
                tokens = delta.tokens or tokens
                reasoning += delta.reasoning
                self._show(delta.reasoning, thinking=True)
                if delta.content and reasoning and not content:
                    self._show("\n\n", thinking=True)
                content += delta.content
                self._show(delta.content)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self._show("\n", thinking=not content)
        self.messages = [*asked, {"role": "assistant", "content": content}]
        return {"content": content, "reasoning": reasoning, "tokens": tokens, "interrupted": interrupted}

    def _show(self, text: str, *, thinking: bool = False) -> None:
        if text and not self.output.json_mode:
            self.output.piece(text, thinking=thinking)


def _answer_once(talk: Conversation, question: str) -> None:
    try:
        answer = talk.ask(question)
    except BrokenPipeError:
        # The reader of our output has enough; what Python still holds must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    if answer["interrupted"]:
        raise KeyboardInterrupt
    if talk.output.json_mode:
        talk.output.result(answer)


def _answer(talk: Conversation, question: str) -> None:
    """One turn of a conversation: an error is shown, and the conversation goes on."""
    try:
        talk.ask(question)
    except DeployError as error:
        talk.output.error(error.message, error.hint, error.exit_code)


def _lines(output: Output) -> Iterator[str]:
    """What the user types, without empty lines, until /exit or the end of input."""
    import readline  # noqa: F401  (input() edits lines and keeps a history once this is imported)

    while True:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt:
            output.note("\n/exit or Ctrl-D leaves")
            continue
        except EOFError:
            output.note("")
            return
        if line in ("/exit", "/quit"):
            return
        if line:
            yield line


def _piped_question() -> str:
    data = sys.stdin.buffer.read(LONGEST_QUESTION + 1)
    if len(data) > LONGEST_QUESTION:
        raise UsageError(f"the question on stdin is longer than {LONGEST_QUESTION} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"the question on stdin is not UTF-8: byte {error.start} is {data[error.start]:#x}") from None
    if not text.strip():
        raise UsageError("there is no question on stdin", hint='glm5deploy chat "What is a sparse attention indexer?"')
    return text.strip()


def _terminate(*_: object) -> None:
    raise SystemExit(_EXIT_TERMINATED)
