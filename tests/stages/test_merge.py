"""The merge stage after a real fetch from a loopback hub: modes, reruns, released shards."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5deploy.config import Config, load_config
from glm5deploy.demo.local_hub import LocalHub
from glm5deploy.errors import FileFormatError, UsageError
from glm5deploy.pipeline.events import Event, Events
from glm5deploy.pipeline.runner import Pipeline, StageResult
from glm5deploy.pipeline.status import Stale, UpToDate
from glm5deploy.stages import merge as merge_module
from glm5deploy.stages.fetch import FetchStage
from glm5deploy.stages.merge import MergeStage
from tests.support.cli import killed_at
from tests.support.gguf_factory import encode, merged_bytes, small_model, write_split

REPO = "tiny/small-GGUF"
MODEL = small_model()


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A repository with a set of four shards and a single file."""
    folder = tmp_path_factory.mktemp("repository")
    write_split(MODEL, folder / "Q4_K_M", [0, 8, 11, 11], prefix="small-Q4_K_M")
    (folder / "small-Q8_0.gguf").write_bytes(encode(MODEL.pairs, MODEL.tensors, 32))
    with LocalHub() as hub:
        hub.publish(REPO, folder)
        yield hub.endpoint


@pytest.fixture(autouse=True)
def use_hub(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)


def settings(**flags: object) -> Config:
    values = {"model.repo": REPO, "model.quant": "Q4_K_M"}
    return load_config(None, {}, {**values, **{name.replace("__", "."): value for name, value in flags.items()}})


def pipeline(workdir: Path, config: Config | None = None, stage: MergeStage | None = None) -> Pipeline:
    return Pipeline([FetchStage(), stage or MergeStage()], workdir, config or settings(), Events())


def merged(results: list[StageResult]) -> StageResult:
    assert results[-1].name == "merge"
    return results[-1]


def paths(result: StageResult) -> list[Path]:
    files = result.outputs["files"]
    assert isinstance(files, list)
    return [Path(facts["path"]) for facts in files]


def test_one_file_comes_out_and_a_rerun_costs_nothing(tmp_path: Path) -> None:
    result = merged(pipeline(tmp_path).run())
    assert paths(result) == [tmp_path / "merged" / "small-Q4_K_M.gguf"]
    assert paths(result)[0].read_bytes() == merged_bytes(MODEL)
    assert result.outputs["kind"] == "merged"
    line = pipeline(tmp_path)
    assert isinstance(line.statuses()["merge"], UpToDate)
    assert merged(line.run()).ran is False
    assert merged(line.run(force=True)).ran is True


def test_a_lost_record_does_not_copy_again_and_force_does(tmp_path: Path) -> None:
    merged(pipeline(tmp_path).run())
    output = tmp_path / "merged" / "small-Q4_K_M.gguf"
    inode = output.stat().st_ino
    line = pipeline(tmp_path)
    assert line.reset("merge")
    assert "was merged already" in str(merged(line.run()).outputs["summary"])
    assert output.stat().st_ino == inode
    merged(pipeline(tmp_path, stage=MergeStage(redo=True)).run(force=True))
    assert output.stat().st_ino != inode


def test_stale_when_the_merged_file_or_the_wish_changed(tmp_path: Path) -> None:
    output = paths(merged(pipeline(tmp_path).run()))[0]
    status = pipeline(tmp_path, settings(merge__mode="never")).statuses()["merge"]
    assert status == Stale(("mode changed from always to never",))
    output.write_bytes(output.read_bytes()[:-1])
    status = pipeline(tmp_path).statuses()["merge"]
    assert isinstance(status, Stale)
    assert status.reasons[0].endswith(f"bytes, not {len(merged_bytes(MODEL))}")
    merged(pipeline(tmp_path).run())
    assert output.read_bytes() == merged_bytes(MODEL)
    output.unlink()
    assert pipeline(tmp_path).statuses()["merge"] == Stale((f"{output} is missing",))


def test_never_checks_the_set_and_hands_on_the_shards(tmp_path: Path) -> None:
    result = merged(pipeline(tmp_path, settings(merge__mode="never")).run())
    assert result.outputs["kind"] == "shards"
    assert [path.name for path in paths(result)] == [f"small-Q4_K_M-0000{n}-of-00004.gguf" for n in (1, 2, 3, 4)]
    assert not (tmp_path / "merged").exists()
    line = pipeline(tmp_path, settings(merge__mode="never"))
    line.reset("merge")
    shutil.copy(paths(result)[1], paths(result)[2])
    with pytest.raises(FileFormatError, match=r"split\.no is 1"):
        line.run("merge")


def test_a_single_file_needs_no_merge(tmp_path: Path) -> None:
    result = merged(pipeline(tmp_path, settings(model__quant="Q8_0")).run())
    assert (result.outputs["kind"], [p.name for p in paths(result)]) == ("single", ["small-Q8_0.gguf"])


def test_auto_skips_when_the_disk_is_too_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_module, "free_bytes", lambda _: 100_000)
    result = merged(pipeline(tmp_path, settings(merge__mode="auto")).run())
    assert result.outputs["kind"] == "shards"
    assert "100.0 kB are free" in str(result.outputs["summary"])
    monkeypatch.undo()
    monkeypatch.setattr(merge_module, "free_bytes", lambda _: 10**12)
    line = pipeline(tmp_path, settings(merge__mode="auto"))
    line.reset("merge")
    assert merged(line.run("merge")).outputs["kind"] == "merged"


def test_the_plan_writes_nothing(tmp_path: Path) -> None:
    pipeline(tmp_path).run(None, "fetch")
    before = sorted(tmp_path.rglob("*"))
    plan = pipeline(tmp_path).plans("merge")[0].plan
    assert plan is not None
    assert (plan["would"], plan["bytes"], plan["tensors"]) == ("merge 4 shards", len(merged_bytes(MODEL)), 30)
    plan = pipeline(tmp_path, settings(merge__mode="never")).plans("merge")[0].plan
    assert plan is not None
    assert plan["would"] == "load the 4 files as they are"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_of_the_user_is_not_replaced(tmp_path: Path) -> None:
    output = tmp_path / "mine.gguf"
    output.write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists and is not the merge of these shards"):
        pipeline(tmp_path, settings(merge__output=output)).run()
    assert output.read_bytes() == b"mine"


def test_released_shards_are_not_fetched_again(tmp_path: Path) -> None:
    events: list[Event] = []
    config = settings(merge__consume=True)
    line = Pipeline([FetchStage(), MergeStage()], tmp_path, config, Events(events.append))
    result = merged(line.run())
    assert paths(result)[0].read_bytes() == merged_bytes(MODEL)
    assert list((tmp_path / "shards").rglob("*.gguf")) == []
    assert {name: type(status) for name, status in line.statuses().items()} == {"fetch": UpToDate, "merge": UpToDate}
    assert [r.ran for r in line.run()] == [False, False]
    paths(result)[0].unlink()
    assert isinstance(line.statuses()["fetch"], Stale)
    assert merged(line.run()).ran
    assert paths(result)[0].read_bytes() == merged_bytes(MODEL)


@pytest.mark.slow
def test_killed_at_every_event_of_a_releasing_merge(tmp_path: Path) -> None:
    """The same command again ends with the same bytes, and fetch brings nothing back."""
    config, number, killed = settings(merge__consume=True), 0, True
    while killed:
        workdir = tmp_path / str(number)
        line = Pipeline([FetchStage(), MergeStage()], workdir, config, Events())
        line.run(None, "fetch")
        killed = killed_at(number, tmp_path / "log", "merge", "--consume", "--workdir", workdir)
        assert isinstance(line.statuses()["fetch"], UpToDate), number
        fetched, result = line.run()
        assert fetched.ran is False, number
        assert paths(result)[0].read_bytes() == merged_bytes(MODEL), number
        assert [p for p in workdir.rglob("small-Q4_K_M*") if p.suffix != ".json"] == paths(result), number
        number += 1
    assert number > 6
