from __future__ import annotations

from pathlib import Path

import pytest

from glm5deploy.cli.remembered import read_remembered, remember


def kept(workdir: Path) -> dict[str, object]:
    return read_remembered(workdir, pytest.fail)


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
    assert read_remembered(tmp_path, warnings.append) == {}
    assert "flags.json" in warnings[0]
