from __future__ import annotations

import json

import pytest

from glm5deploy.cli.output import Output
from glm5deploy.cli.text import human_seconds
from glm5deploy.pipeline.events import Event
from glm5deploy.progress import Progress

RESULT = {
    "repo": "a/b",
    "free_bytes": 430_000_000_000,
    "shards": [{"name": "s1", "size": 12}, {"name": "s2", "size": 1_500_000}],
}


def test_people_get_lines_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    Output().result(RESULT)
    out, err = capsys.readouterr()
    assert "repo" in out
    assert "430.0 GB" in out
    assert "1.5 MB" in out
    assert err == ""


def test_scripts_get_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(json_mode=True)
    output.note("never seen")
    output.event(Event("fetch", "warning", "look"))
    output.result(RESULT)
    out, err = capsys.readouterr()
    assert json.loads(out) == RESULT
    assert json.loads(err) == {"stage": "fetch", "kind": "warning", "message": "look"}


def test_untrusted_text_is_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    Output().result({"name": "[bold red]x[/] [/nothing]", "rows": [{"a": "[b]"}]})
    out, _ = capsys.readouterr()
    assert "[bold red]x[/] [/nothing]" in out
    assert "[b]" in out


def test_in_a_pipe_progress_is_a_line_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("glm5deploy.cli.output.time.monotonic", lambda: now[0])
    output = Output()
    for second in range(11):
        now[0] = 100.0 + second
        output.event(Event("fetch", "progress", progress=Progress("shard-1", second * 10_000_000, 200_000_000)))
    _, err = capsys.readouterr()
    assert err.splitlines() == [
        "fetch    shard-1: 50.0 MB of 200.0 MB, 10.0 MB/s, 15 s left",
        "fetch    shard-1: 100.0 MB of 200.0 MB, 10.0 MB/s, 10 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "0.2 s"), (59.6, "60 s"), (125, "2 min 05 s"), (7260, "2 h 01 min")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_control_characters_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    output.result({"name": "a\x1b[2Jb\x07", "rows": [{"x": "c\x1b]0;t\x07"}]})
    output.warning("d\x1b[31m")
    output.result({}, "e\x1b[0m\n")
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert "\x07" not in out + err
