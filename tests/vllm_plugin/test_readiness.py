"""What a rank says about measured launch parameters, and about a kernel that warm-up missed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from glm5deploy.kernels import table_file, tuning
from glm5deploy.kernels.compile_counter import Prepared
from glm5deploy.kernels.table_file import Measured
from glm5deploy.vllm_plugin import readiness

Said = list[tuple[str, str]]
CPU = torch.device("cpu")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[Said]:
    """Level and text of every line; the process's own watch on Triton stays as it is."""
    monkeypatch.setattr(readiness, "watch", lambda: None)
    lines: Said = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    monkeypatch.setattr(readiness.logger, "level", logging.INFO)
    readiness.logger.addHandler(handler)
    yield lines
    readiness.logger.removeHandler(handler)
    tuning.measured.cache_clear()


def test_a_table_that_fits_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[tuple[str, str]]
) -> None:
    table = tmp_path / "table.json"
    table_file.save_table(table, tuning.gpu(CPU), Measured(request={"heads": 8}))
    monkeypatch.setenv(tuning.TABLE_VARIABLE, str(table))
    readiness.begin(CPU)
    assert said == [("INFO", f"launch parameters from {table}: 0 rows measured for {{'heads': 8}}")]


@pytest.mark.parametrize("there", [True, False], ids=["of another GPU", "gone"])
def test_a_table_that_does_not_fit_is_warned_of(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[tuple[str, str]]
) -> None:
    table = tmp_path / "table.json"
    if there:
        table_file.save_table(table, tuning.Gpu(80, 108, "sm80", "NVIDIA A100"), Measured())
    monkeypatch.setenv(tuning.TABLE_VARIABLE, str(table))
    readiness.begin(CPU)
    ((level, text),) = said
    assert level == "WARNING"
    assert f"the launch parameters in {table} are not used: " in text
    assert ("name NVIDIA A100, here" if there else "there is no such file") in text


def test_without_a_table_nothing_is_said(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    monkeypatch.delenv(tuning.TABLE_VARIABLE, raising=False)
    readiness.begin(CPU)
    assert said == []


def test_a_kernel_that_warm_up_missed_is_named(said: Said) -> None:
    readiness._warn(Prepared("glm5deploy.kernels.topk.topk_kernel", "warps=8 BLOCK=8192", True, False, 0, ""))
    ((level, text),) = said
    assert level == "WARNING"
    assert "topk_kernel was compiled after warm-up" in text
    assert "warps=8 BLOCK=8192" in text
