from __future__ import annotations

from pathlib import Path

import pytest

from glm5deploy.cli.remembered import read_remembered, remember
from glm5deploy.pipeline.lock import work_lock
from tests.support.cli import glm5deploy


def kept(workdir: Path) -> dict[str, object]:
    return read_remembered(workdir, {}, pytest.fail)


def test_flags_that_decide_what_the_folder_holds_are_kept(tmp_path: Path) -> None:
    remember(tmp_path, {"model.repo": "a/b", "model.quant": "Q", "serve.port": 1, "merge.mode": None})
    remember(tmp_path, {"merge.output": Path("/x.gguf")})
    assert kept(tmp_path) == {"model.repo": "a/b", "model.quant": "Q", "merge.output": "/x.gguf"}


def test_another_model_forgets_what_described_the_old_one(tmp_path: Path) -> None:
    remember(tmp_path, {"model.repo": "a/b", "model.quant": "Q", "patch.indexer_schedule": "FSFS"})
    remember(tmp_path, {"model.quant": "Q"})
    assert kept(tmp_path)["patch.indexer_schedule"] == "FSFS"
    remember(tmp_path, {"model.quant": "R"})
    assert kept(tmp_path) == {"model.repo": "a/b", "model.quant": "R"}
    remember(tmp_path, {"model.repo": "c/d"})
    assert kept(tmp_path) == {"model.repo": "c/d"}


def test_nothing_is_written_where_nothing_was_given(tmp_path: Path) -> None:
    remember(tmp_path, {"model.repo": None, "serve.tp": 2})
    assert list(tmp_path.iterdir()) == []


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    remember(tmp_path, {"model.repo": "a/b"})
    (tmp_path / ".glm5deploy" / "flags.json").write_text("{")
    warnings: list[str] = []
    assert read_remembered(tmp_path, {}, warnings.append) == {}
    assert "flags.json" in warnings[0]


@pytest.mark.parametrize("content", ['{"model.repo": 1}', '{"merge.mode": {"a": 1}}', "[" * 100_000])
def test_damaged_flags_count_as_none_and_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / ".glm5deploy").mkdir()
    (tmp_path / ".glm5deploy" / "flags.json").write_text(content)
    warnings: list[str] = []
    assert read_remembered(tmp_path, {}, warnings.append) == {}
    assert "flags.json" in warnings[0]


def test_a_new_model_does_not_read_what_described_the_old_one(tmp_path: Path) -> None:
    remember(tmp_path, {"model.repo": "a/old", "model.revision": "abc", "patch.indexer_schedule": "FSFS"})
    assert read_remembered(tmp_path, {"model.repo": "b/new"}, pytest.fail) == {}
    assert read_remembered(tmp_path, {"serve.port": 1}, pytest.fail)["patch.indexer_schedule"] == "FSFS"


def test_a_refused_command_changes_nothing(tmp_path: Path) -> None:
    """Another process holds the folder, or the repository is mistyped: what was remembered stays."""
    remember(tmp_path, {"model.repo": "a/b", "model.quant": "Q", "patch.indexer_schedule": "FSFS"})
    before = kept(tmp_path)
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    with work_lock(tmp_path):
        assert glm5deploy("fetch", "typo/other:Q", "--workdir", tmp_path, env=nowhere).returncode == 1
    assert glm5deploy("fetch", "typo/other:Q", "--workdir", tmp_path, env=nowhere).returncode == 1
    assert kept(tmp_path) == before
