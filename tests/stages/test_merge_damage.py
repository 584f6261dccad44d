"""The merge stage and shards that are damaged, repaired, replaced or released behind its back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from glm5deploy.config import Config, load_config
from glm5deploy.demo.local_hub import LocalHub
from glm5deploy.errors import DeployError
from glm5deploy.pipeline.events import Event, Events
from glm5deploy.pipeline.runner import Pipeline
from glm5deploy.stages.fetch import FetchStage
from glm5deploy.stages.merge import MergeStage
from glm5deploy.stages.model_headers import open_headers
from glm5deploy.stages.released import is_released_in
from tests.support.gguf_factory import merged_bytes, small_model, write_split

REPO = "tiny/small-GGUF"
MODEL = small_model()
SIZES = [0, 8, 11, 11]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("repository")
    write_split(MODEL, folder / "Q4_K_M", SIZES, prefix="small-Q4_K_M")
    mixed = write_split(MODEL, folder / "mixed-Q5_K_M", SIZES, prefix="small-Q5_K_M")
    other = write_split(small_model(quant="Q8_0"), folder / "aside", SIZES)
    mixed[2].write_bytes(other[2].read_bytes())
    for path in other:
        path.unlink()
    with LocalHub() as hub:
        hub.publish(REPO, folder)
        yield hub.endpoint


@pytest.fixture(autouse=True)
def use_hub(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)


def settings(*, consume: bool = False) -> Config:
    return load_config(None, {}, {"model.repo": REPO, "model.quant": "Q4_K_M", "merge.consume": consume})


def pipeline(workdir: Path, events: Events | None = None, *, consume: bool = False, repair: bool = False) -> Pipeline:
    return Pipeline([FetchStage(repair=repair), MergeStage()], workdir, settings(consume=consume), events or Events())


def output(workdir: Path) -> Path:
    return workdir / "merged" / "small-Q4_K_M.gguf"


def rot(workdir: Path) -> Path:
    """Flip a bit of a tensor in shard 3; its date stays."""
    shard = next((workdir / "shards").rglob("*-00003-of-00004.gguf"))
    date, data = shard.stat().st_mtime_ns, bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(date, date))
    return shard


def test_what_was_merged_from_a_damaged_shard_is_merged_again_after_the_repair(tmp_path: Path) -> None:
    pipeline(tmp_path).run(None, "fetch")
    shard = rot(tmp_path)
    pipeline(tmp_path).run()
    assert output(tmp_path).read_bytes() != merged_bytes(MODEL), "nothing can be noticed yet"
    shard.unlink()  # what finding the damage comes to: the shard is fetched again
    pipeline(tmp_path, repair=True).run(None, "fetch", force=True)
    assert [result.ran for result in pipeline(tmp_path).run()] == [False, True]
    assert output(tmp_path).read_bytes() == merged_bytes(MODEL)


@pytest.mark.parametrize("found", ["date", "hash"])
def test_a_shard_known_to_be_damaged_is_not_merged(tmp_path: Path, found: str) -> None:
    pipeline(tmp_path).run(None, "fetch")
    shard = rot(tmp_path)
    if found == "date":
        os.utime(shard)
    else:  # as `verify` leaves it
        record = next((tmp_path / "shards").rglob(f"{shard.name}.verified.json"))
        record.write_text(json.dumps({"prefixes": []}))
    with pytest.raises(DeployError, match=f"{shard.name} was (modified|found damaged), so it is not merged") as caught:
        pipeline(tmp_path).run("merge")
    assert caught.value.hint is not None
    assert "fetch" in caught.value.hint
    assert not output(tmp_path).exists()


def stop_at_release(event: Event) -> None:
    if event.kind == "checkpoint" and event.message.startswith("released"):
        raise KeyboardInterrupt


def test_plans_during_and_after_a_release(tmp_path: Path) -> None:
    """Neither needs the shards, and neither writes anything."""
    with pytest.raises(KeyboardInterrupt):
        pipeline(tmp_path, Events(stop_at_release), consume=True).run()
    before = sorted(tmp_path.rglob("*"))
    plan = pipeline(tmp_path).plans("merge")[0].plan
    assert plan == {
        "would": "finish the interrupted merge --consume",
        "output": str(output(tmp_path)),
        "consume": True,
    }
    assert sorted(tmp_path.rglob("*")) == before
    pipeline(tmp_path, consume=True).run("merge")
    assert output(tmp_path).read_bytes() == merged_bytes(MODEL)
    plan = pipeline(tmp_path).plans("merge")[0].plan
    assert plan == {"would": "keep the merged file, its shards are released", "output": str(output(tmp_path))}


def test_the_release_is_known_without_the_records_of_stages(tmp_path: Path) -> None:
    pipeline(tmp_path, consume=True).run()
    facts = pipeline(tmp_path).state.read("fetch")
    assert facts is not None
    files = facts.outputs["files"]
    assert isinstance(files, list)
    for path in (tmp_path / ".glm5deploy").rglob("*"):
        if path.is_file() and not path.name.startswith("fetch"):
            path.unlink()
    for file in files:
        assert is_released_in(tmp_path, Path(file["path"]), file["sha256"])
        assert not is_released_in(tmp_path, Path(file["path"]), "0" * 64), "a newer commit's shard is not released"
    result = pipeline(tmp_path).run("merge")[0]
    assert result.outputs["summary"] == f"{output(tmp_path)}: merged before, shards released"


@pytest.mark.parametrize("finished", [False, True])
def test_a_release_of_another_commit_is_not_taken_over(tmp_path: Path, finished: bool) -> None:
    if finished:
        pipeline(tmp_path, consume=True).run()
    else:
        with pytest.raises(KeyboardInterrupt):
            pipeline(tmp_path, Events(stop_at_release), consume=True).run()
    line = pipeline(tmp_path, consume=True)
    record = line.state.read("fetch")
    assert record is not None
    files = record.outputs["files"]
    assert isinstance(files, list)
    files[3] = {**files[3], "sha256": "0" * 64}
    line.state.write("fetch", replace(record, outputs={**record.outputs, "files": files}))
    words = "shards are missing" if finished else "an interrupted merge --consume of other shards"
    with pytest.raises(DeployError, match=words):
        line.run("merge")


def test_a_mix_of_types_within_one_commit_was_meant() -> None:
    assert len(open_headers(f"{REPO}:Q5_K_M").shards.headers) == 4
