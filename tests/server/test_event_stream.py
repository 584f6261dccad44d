"""Server-sent events by the standard's rules, however a stream is cut, and the commands that read them."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5deploy.errors import DeployError
from glm5deploy.server.bench_request import BenchTarget, measure
from glm5deploy.server.client import Client, RequestFailed
from glm5deploy.server.event_stream import EventReader, answer_events, answer_events_async
from tests.support.streaming_server import NAME, Pace, StreamingServer

# What str.splitlines takes for the end of a line and the standard does not.
NO_ENDS = "\v\f\x1c\x1d\x1e\x85\u2028\u2029"
UNESCAPED = "\x85\u2028\u2029"  # those of them that JSON need not escape
DONE = b"data: [DONE]\n\n"


def by_the_standard(text: str) -> list[str]:
    """The same by splitting the whole text, which a reader of pieces cannot do."""
    found: list[str] = []
    data: list[str] = []
    for line in re.split("\r\n|\r|\n", text.removeprefix("\ufeff"))[:-1]:
        if not line:
            found += ["\n".join(data)] if data else []
            data = []
        elif re.match("data(:|$)", line):
            data.append(re.sub("^data:? ?", "", line))
    return found


def read(stream: bytes, cuts: list[int]) -> list[str]:
    reader = EventReader()
    places = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [data for a, b in pairwise(places) for data in reader.feed(stream[a:b])]


begins = ("", "data", "data:", "data: ", "data:  ", "dat", "datax", ":data: ", "id: 1", "data : ", " data:")
texts = st.text(st.sampled_from(f"a: é{NO_ENDS}\ufeff𝄞"), max_size=4)
ends = st.sampled_from(["\n", "\r\n", "\r"])


@given(
    st.sampled_from(["", "\ufeff"]),
    st.lists(st.builds("{}{}{}".format, st.sampled_from(begins), texts, ends) | ends),
    texts,
    st.lists(st.integers(0, 400), max_size=12),
)
def test_a_stream_reads_the_same_however_it_is_cut(start: str, parts: list[str], rest: str, cuts: list[int]) -> None:
    stream = start + "".join(parts) + rest
    assert read(stream.encode(), cuts) == by_the_standard(stream)


@given(st.lists(st.text().filter(lambda text: not re.search("[\r\n]", text))), st.lists(st.integers(0, 2000)))
def test_what_a_server_sends_is_what_is_read(sent: list[str], cuts: list[int]) -> None:
    stream = "".join(f"data: {text}\n\n" for text in sent)
    assert read(stream.encode(), cuts) == sent


def test_an_event_does_not_wait_for_a_line_feed_after_a_return() -> None:
    reader = EventReader()
    assert [reader.feed(piece) for piece in (b"data: a\r", b"\r", b"\n\r", b"data: b\r\n", b"\r\n", b"")] == [
        [],
        ["a"],
        [],
        [],
        ["b"],
        [],
    ]


def test_bytes_that_are_no_utf_8_are_refused() -> None:
    with pytest.raises(ValueError, match="utf-8"):
        EventReader().feed(b"data: \xff\n")


@pytest.mark.parametrize("character", NO_ENDS, ids=lambda character: f"U+{ord(character):04X}")
def test_characters_that_end_no_line_arrive_over_http(character: str) -> None:
    data = [f'{{"text": "a{character}b"}}', character, f"{character}{character} é"]
    stream = "".join(f"data: {text}\r\n\r\n" for text in data).encode() + DONE
    pieces = tuple(stream[i : i + 5] for i in range(0, len(stream), 5))

    async def read_async(url: str) -> list[str]:
        async with httpx.AsyncClient() as http, http.stream("POST", url, json={}) as response:
            return [data async for data in answer_events_async(response)]

    with StreamingServer(Pace(first=0, raw=pieces)) as server:
        with httpx.stream("POST", f"{server.url}/any", json={}) as response:
            assert list(answer_events(response)) == data
        assert asyncio.run(read_async(f"{server.url}/any")) == data


def test_chat_and_bench_take_them_for_text(tmp_path: Path) -> None:
    pace = Pace(first=0, between=0, chat=tuple({"content": f"a{c}b\n"} for c in UNESCAPED), text=UNESCAPED)
    with StreamingServer(pace) as server:
        command = [sys.executable, "-m", "glm5deploy", "chat", "Hello", "--url", server.url, "--json"]
        chat = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60)
        assert chat.returncode == 0, chat.stderr
        assert json.loads(chat.stdout)["content"] == "".join(f"a{c}b\n" for c in UNESCAPED)
        options = ("--concurrency", "1", "--prompt", "8", "--output", "5", "--json")
        command = [sys.executable, "-m", "glm5deploy", "bench", "--url", server.url, *options]
        bench = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60)
        assert bench.returncode == 0, bench.stderr
        assert json.loads(bench.stdout)["points"][0]["wave"]["output_tokens"] == 5


@pytest.mark.parametrize(
    ("end", "words"),
    [(b"", "it ended without"), (b'data: {"choices": [', "it ended without"), (b"data: \xff\n\n", "utf-8")],
)
def test_an_answer_that_is_cut_short_is_no_answer(end: bytes, words: str) -> None:
    event = {"choices": [{"delta": {"content": "half"}}], "usage": {"completion_tokens": 1}}
    pace = Pace(first=0, raw=(f"data: {json.dumps(event)}\n\n".encode(), end))
    with StreamingServer(pace) as server:
        with Client(server.url, NAME) as client, pytest.raises(RequestFailed, match=words):
            list(client.stream([{"role": "user", "content": "Hello"}]))
        with BenchTarget(server.url, NAME).connect() as http, pytest.raises(DeployError, match=words):
            measure(http, {})
