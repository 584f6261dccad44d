"""The indexer's optional records: off without their variables, exact with them, never in the way."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.distributed import parallel_state

from glm5deploy.vllm_plugin import numerics, trace

LAYER = "model.layers.3.self_attn.indexer.k_cache"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the second stage of a pipeline without tensor parallelism: one of its group, two of the server."""
    for group, rank in (("_WORLD", 1), ("_TP", 0)):
        monkeypatch.setattr(parallel_state, group, SimpleNamespace(rank=rank, rank_in_group=rank))
    for name, value in (("_counter", None), ("_trace_folder", tmp_path), ("_status_folder", tmp_path)):
        monkeypatch.setattr(trace, name, value)
    return tmp_path


@pytest.fixture
def case() -> numerics.Case:
    return numerics.make_case(torch.device("cpu"), torch.float32)


def test_nothing_is_written_without_the_variables(case: numerics.Case, folder: Path) -> None:
    trace._trace_folder = trace._status_folder = None
    trace.count(LAYER, case.metadata, 64)
    trace.record(LAYER, case.metadata, torch.zeros((76, 64), dtype=torch.int32))
    assert list(folder.iterdir()) == []


def test_counters(case: numerics.Case, folder: Path) -> None:
    trace.count(LAYER, case.metadata, 64)
    report = json.loads((folder / "indexer-rank1.json").read_text())
    # Contexts 70, 300 and 200 with 70, 5 and 1 tokens: six of the first and all of the others see more than 64.
    assert report == {"calls": 1, "rows": 76, "sparse_rows": 12, "layers": [3]}


def test_selections(case: numerics.Case, folder: Path) -> None:
    selected = torch.arange(76 * 64, dtype=torch.int32).view(76, 64)
    trace.record(LAYER, case.metadata, selected)
    (file,) = folder.glob("*.npz")
    assert file.name.startswith("rank1-layer003-")
    with np.load(file, allow_pickle=False) as record:
        assert int(record["layer"]) == 3
        assert record["position"].tolist() == [*range(70), *range(295, 300), 199]
        assert record["request"].tolist() == [0] * 70 + [1] * 5 + [2]
        assert np.array_equal(record["selected"], selected.numpy())


def test_a_folder_that_went_away_ends_the_records_and_not_the_server(
    case: numerics.Case, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace._trace_folder = trace._status_folder = folder / "gone"
    with caplog.at_level(logging.WARNING, logger="vllm.glm5deploy"):
        trace.count(LAYER, case.metadata, 64)
        trace.record(LAYER, case.metadata, torch.zeros((76, 64), dtype=torch.int32))
    assert (trace._trace_folder, trace._status_folder) == (None, None)
