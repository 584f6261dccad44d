"""The top-k kernels as a GPU runs them, stores in assembly included, against the reference, position by position.

Run there with `pytest -m gpu tests/kernels`.
"""

from __future__ import annotations

import pytest
import torch

from glm5deploy.kernels import reference
from glm5deploy.kernels.topk import select_topk, topk_variant, topk_workspace_elements
from glm5deploy.kernels.topk_config import VARIANTS, runnable, steps_ready
from glm5deploy.kernels.tuning import gpu
from tests.kernels.topk_rows import awkward_rows, deceiving_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("k", [1, 64, 2048, 4096])
@pytest.mark.parametrize(
    ("copies", "width", "variant"), [(1, 8192, "block"), (1, 40_001, "parts"), (60, 9003, "stream")]
)
def test_awkward_rows(copies: int, width: int, variant: str, k: int) -> None:
    logits = awkward_rows(width, "cuda").repeat(copies, 1)
    rows = len(logits)
    assert topk_variant(rows, width, k, width, gpu(logits.device))[0] == variant
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    lengths[1::3] -= torch.arange(len(lengths[1::3]), dtype=torch.int32, device="cuda") % 9
    lengths[-2:] = torch.tensor([0, 2047], dtype=torch.int32, device="cuda")
    scratch = torch.empty(topk_workspace_elements(rows, width, k), dtype=torch.int32, device="cuda")
    out = torch.full((rows, k + 1), -7, dtype=torch.int32, device="cuda")
    expected = reference.select_topk(logits, lengths, k)
    for _ in range(2):  # the scratch memory's contents do not matter
        select_topk(logits, lengths, k, width, out, scratch)
        assert torch.equal(out[:, :k], expected)
        assert (out[:, k] == -7).all()


@pytest.mark.parametrize("k", [1, 64, 128, 2048])
@pytest.mark.parametrize("width", [4093, 8192, 16_001, 32_768, 131_072])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant(name: str, width: int, k: int) -> None:
    if VARIANTS[name].steps and not steps_ready():
        pytest.skip("selection by steps needs the Gluon of triton 3.8")
    config = runnable(VARIANTS[name])
    logits = torch.cat((awkward_rows(width, "cuda"), deceiving_rows(width, "cuda")))
    count = len(logits)
    starts = torch.arange(count, dtype=torch.int32, device="cuda") % 7
    lengths = width - starts - torch.arange(count, dtype=torch.int32, device="cuda") % 4
    lengths[:5] = torch.tensor([0, k - 1, k, k + 1, 127], dtype=torch.int32, device="cuda")
    scratch = torch.empty(topk_workspace_elements(count, width, k, config), dtype=torch.int32, device="cuda")
    for first in (None, starts) if name in ("keys", "steps") else (None,):  # each form is compiled apart
        out = torch.full((count, k + 1), -7, dtype=torch.int32, device="cuda")
        select_topk(logits, lengths, k, width, out, scratch, first, config)
        assert torch.equal(out[:, :k], reference.select_topk(logits, lengths, k, first))
        assert (out[:, k] == -7).all()


def test_rows_may_start_anywhere() -> None:
    logits = awkward_rows(30_000, "cuda")
    starts = torch.arange(13, dtype=torch.int32, device="cuda") * 701
    lengths = 30_000 - starts - starts % 5
    for count in (13, 4):
        scratch = torch.empty(topk_workspace_elements(13, 30_000, 2048), dtype=torch.int32, device="cuda")
        out = torch.empty(count, 2048, dtype=torch.int32, device="cuda")
        rows, first, sizes = logits[:count], starts[:count], lengths[:count]
        select_topk(rows, sizes, 2048, 30_000, out, scratch, first)
        assert torch.equal(out, reference.select_topk(rows, sizes, 2048, first))


def test_graphs_of_kernels_that_start_early_replay_on_other_rows() -> None:
    first, second = awkward_rows(70_000, "cuda"), awkward_rows(70_000, "cuda").flip(0).contiguous()
    lengths = torch.full((13,), 70_000, dtype=torch.int32, device="cuda")
    scratch = torch.empty(topk_workspace_elements(13, 70_000, 2048), dtype=torch.int32, device="cuda")
    outs = [torch.empty(13, 2048, dtype=torch.int32, device="cuda") for _ in range(2)]

    def both() -> None:
        for logits, out in zip((first, second), outs, strict=True):
            select_topk(logits, lengths, 2048, 70_000, out, scratch)

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    for turn in range(5):
        first.copy_(awkward_rows(70_000, "cuda"))
        second.copy_(awkward_rows(70_000, "cuda").roll(turn, 0))
        lengths.copy_(torch.randint(0, 70_001, (13,), device="cuda"))
        graph.replay()
        for logits, out in zip((first, second), outs, strict=True):
            assert torch.equal(out, reference.select_topk(logits, lengths, 2048))
