from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from glm5deploy.config import Config, load_config
from glm5deploy.errors import DeployError, UsageError
from glm5deploy.pipeline.events import Event, Events
from glm5deploy.pipeline.lock import work_lock
from glm5deploy.pipeline.runner import Pipeline
from glm5deploy.pipeline.stage import Context, Json, Stage
from glm5deploy.pipeline.status import BlockedBy, Stale, UpToDate
from tests.support.stages import AppendStage


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_text("text")
    return path


def stages(source: Path) -> list[AppendStage]:
    return [AppendStage("one", str(source)), AppendStage("two", "stage:one"), AppendStage("three", "stage:two")]


def pipeline(
    stages: list[Stage] | list[AppendStage],
    source: Path,
    events: list[Event] | None = None,
    config: Config | None = None,
) -> Pipeline:
    sink = events.append if events is not None else lambda _: None
    return Pipeline(list(stages), source.parent / "work", config or Config(), Events(sink))


def test_a_second_run_does_nothing_and_status_agrees(source: Path) -> None:
    first = pipeline(stages(source), source)
    assert [r.ran for r in first.run()] == [True, True, True]
    assert (source.parent / "work" / "three").read_text() == "text+one+two+three"
    again = stages(source)
    events: list[Event] = []
    second = pipeline(again, source, events)
    assert all(isinstance(s, UpToDate) for s in second.statuses().values())
    assert [r.ran for r in second.run()] == [False, False, False]
    assert [s.ran for s in again] == [[], [], []]
    assert [e.kind for e in events] == ["up-to-date"] * 3


def test_a_changed_input_reruns_what_depends_on_it_and_names_the_reason(source: Path) -> None:
    pipeline(stages(source), source).run()
    source.write_text("other")
    statuses = pipeline(stages(source), source).statuses()
    assert statuses["one"] == Stale(("source changed from text to other",))
    results = pipeline(stages(source), source).run()
    assert [r.ran for r in results] == [True, True, True]
    assert (source.parent / "work" / "three").read_text() == "other+one+two+three"


def test_a_changed_setting_is_a_reason(source: Path) -> None:
    pipeline(stages(source), source).run()
    config = load_config(None, {}, {"serve.port": 9})
    assert pipeline(stages(source), source, config=config).statuses()["one"] == Stale(("port changed from 8000 to 9",))


@pytest.mark.parametrize("damage", ["missing", "modified", "size"])
def test_damaged_outputs_are_stale_with_the_file_named(source: Path, damage: str) -> None:
    pipeline(stages(source), source).run()
    output = source.parent / "work" / "two"
    if damage == "missing":
        output.unlink()
    elif damage == "modified":
        os.utime(output, ns=(1, 1))
    else:
        output.write_text("x")
    status = pipeline(stages(source), source).statuses()["two"]
    assert isinstance(status, Stale)
    assert str(output) in status.reasons[0]
    pipeline(stages(source), source).run()
    assert output.read_text() == "text+one+two"


def test_a_failure_leaves_no_success_and_keeps_earlier_ones(source: Path) -> None:
    pipeline(stages(source), source).run()
    failing = [AppendStage("one", str(source)), AppendStage("two", "stage:one", fails=True)]
    events: list[Event] = []
    with pytest.raises(DeployError, match="no luck"):
        pipeline(failing, source, events).run(force=True)
    assert [e.kind for e in events if e.stage == "two"] == ["started", "checkpoint", "failed"]
    statuses = pipeline(stages(source), source).statuses()
    assert isinstance(statuses["one"], UpToDate)
    assert statuses["two"] == Stale(("has not succeeded yet",))
    assert statuses["three"] == BlockedBy("two")


def test_a_stage_whose_predecessor_never_ran_says_what_to_run(source: Path) -> None:
    with pytest.raises(DeployError, match="two needs one") as raised:
        pipeline(stages(source), source).run("two", "two")
    assert raised.value.hint == f"glm5deploy run --until two --workdir {source.parent / 'work'}"


def test_ranges(source: Path) -> None:
    made = stages(source)
    pipeline(made, source).run(last="two")
    assert [s.ran for s in made] == [["one"], ["two"], []]
    with pytest.raises(UsageError, match="three comes after one"):
        pipeline(made, source).run("three", "one")
    with pytest.raises(UsageError, match="no stage 'four'"):
        pipeline(made, source).run("four")


def test_plans_change_nothing(source: Path) -> None:
    plans = pipeline(stages(source), source).plans()
    assert [(p.name, p.plan is None) for p in plans] == [("one", False), ("two", False), ("three", False)]
    assert not (source.parent / "work").exists()


def test_reset_forgets_the_record_and_keeps_the_files(source: Path) -> None:
    line = pipeline(stages(source), source)
    line.run()
    assert line.reset("two")
    assert not line.reset("two")
    assert (source.parent / "work" / "two").exists()
    assert line.statuses()["two"] == Stale(("has not succeeded yet",))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": 1}',
        b'{"format": 2}',
        b'{"format":1,"inputs":1,"outputs":{},"finished":"","seconds":0,"version":""}',
        b"\xff",
    ],
)
def test_a_corrupt_record_counts_as_absent_and_is_named(source: Path, content: bytes) -> None:
    pipeline(stages(source), source).run()
    record = source.parent / "work" / ".glm5deploy" / "two.json"
    record.write_bytes(content)
    events: list[Event] = []
    line = pipeline(stages(source), source, events)
    assert line.statuses()["two"] == Stale(("has not succeeded yet",))
    assert any(str(record) in e.message for e in events if e.kind == "warning")
    line.run()
    assert json.loads(record.read_text())["outputs"]["size"] == len("text+one+two")


def _run_and_die_at(source: Path, event_number: int) -> None:
    """In a child: run the pipeline and kill this very process when the event with that number is emitted."""
    seen = 0

    def sink(_: Event) -> None:
        nonlocal seen
        if seen == event_number:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    Pipeline(list(stages(source)), source.parent / "work", Config(), Events(sink)).run()


def test_sigkill_at_every_event_in_turn_then_a_rerun_gives_the_same_bytes(source: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    events: list[Event] = []
    for number in range(100):
        child = spawn.Process(target=_run_and_die_at, args=(source, number))
        child.start()
        child.join()
        killed = child.exitcode == -signal.SIGKILL
        events.clear()
        pipeline(stages(source), source, events).run()
        assert (source.parent / "work" / "three").read_text() == "text+one+two+three"
        assert not list((source.parent / "work" / ".glm5deploy").glob("*.tmp")) or killed
        if not killed:
            break
        for name in ("one", "two", "three"):
            pipeline(stages(source), source).reset(name)
    assert number == 12  # three stages of four events each, then one undisturbed run


def _hold_lock(workdir: Path, ready: object) -> None:
    with work_lock(workdir):
        ready.set()  # type: ignore[attr-defined]
        signal.pause()


def test_one_process_at_a_time_and_a_dead_owners_lock_is_free(source: Path) -> None:
    workdir = source.parent / "work"
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    holder = spawn.Process(target=_hold_lock, args=(workdir, ready))
    holder.start()
    assert ready.wait(30)
    with pytest.raises(DeployError, match=rf"in use by process {holder.pid} on "):
        pipeline(stages(source), source).run()
    holder.kill()
    holder.join()
    assert [r.ran for r in pipeline(stages(source), source).run()] == [True, True, True]


@pytest.mark.parametrize("outputs", ["{}", '{"path": "x"}', '{"path": 1, "size": "a"}'])
def test_a_record_without_what_its_stage_writes_is_stale_and_named(source: Path, outputs: str) -> None:
    pipeline(stages(source), source).run()
    record = source.parent / "work" / ".glm5deploy" / "two.json"
    content = json.loads(record.read_text())
    record.write_text(json.dumps({**content, "outputs": json.loads(outputs)}))
    status = pipeline(stages(source), source).statuses()["two"]
    assert isinstance(status, Stale)
    pipeline(stages(source), source).run()
    assert (source.parent / "work" / "three").read_text() == "text+one+two+three"


def test_files_get_the_rights_of_the_umask_and_leftovers_go(source: Path) -> None:
    workdir = source.parent / "work"
    (workdir / ".glm5deploy").mkdir(parents=True)
    left = workdir / ".glm5deploy" / ".two.json.1-2.tmp"
    left.write_text("half")
    before = os.umask(0o022)
    try:
        pipeline(stages(source), source).run()
    finally:
        os.umask(before)
    assert (workdir / "three").stat().st_mode & 0o777 == 0o644
    assert not left.exists()


def test_a_stage_that_is_refused_before_it_changes_anything_keeps_its_success(source: Path) -> None:
    pipeline(stages(source), source).run()

    class Refusing(AppendStage):
        def run(self, context: Context) -> Json:
            raise UsageError("no such thing")

    refusing = [Refusing("one", str(source)), *stages(source)[1:]]
    with pytest.raises(UsageError):
        pipeline(refusing, source).run(force=True)
    assert all(isinstance(s, UpToDate) for s in pipeline(stages(source), source).statuses().values())
