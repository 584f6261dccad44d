"""The top-k kernels as a GPU runs them, stores in assembly included, against the reference, position by position.

Run there with `pytest -m gpu tests/kernels`.
"""

from __future__ import annotations

import pytest
import torch

from glm5deploy.kernels import reference
from glm5deploy.kernels.compile_counter import CompileCounter
from glm5deploy.kernels.prepare import prepare
from glm5deploy.kernels.topk import select_topk, topk_variant, topk_workspace_elements
from glm5deploy.kernels.topk_config import STEPS_ARCH, VARIANTS, runnable, steps_ready, topk_config
from glm5deploy.kernels.tuning import gpu
from glm5deploy.kernels.warmup import Serving, launches
from tests.kernels.topk_rows import POISON, awkward_rows, close_rows, deceiving_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("k", [1, 64, 2048, 4096])
@pytest.mark.parametrize(
    ("copies", "width", "variant"), [(1, 8192, "block"), (1, 40_001, "parts"), (60, 17_003, "stream")]
)
def test_awkward_rows(copies: int, width: int, variant: str, k: int) -> None:
    logits = awkward_rows(width, "cuda").repeat(copies, 1)
    rows, of = len(logits), gpu(logits.device)
    expected = "steps" if topk_config(k, of.arch).step(width) else variant
    assert topk_variant(rows, width, k, width, of)[0] == expected
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    lengths[1::3] -= torch.arange(len(lengths[1::3]), dtype=torch.int32, device="cuda") % 9
    lengths[-2:] = torch.tensor([0, 2047], dtype=torch.int32, device="cuda")
    scratch = torch.full((topk_workspace_elements(rows, width, k),), POISON, dtype=torch.int32, device="cuda")
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
    arch = gpu(torch.device("cuda", 0)).arch
    if VARIANTS[name].steps_columns and not (steps_ready() and arch == STEPS_ARCH):
        pytest.skip("selection by steps is for SM90 and the Gluon of triton 3.8")
    config = runnable(VARIANTS[name], arch)
    kinds = awkward_rows(width, "cuda"), deceiving_rows(width, "cuda"), close_rows(width, k, "cuda")
    logits = torch.cat(kinds)
    count = len(logits)
    starts = torch.arange(count, dtype=torch.int32, device="cuda") % 7
    lengths = width - starts - torch.arange(count, dtype=torch.int32, device="cuda") % 4
    lengths[:5] = torch.tensor([0, k - 1, k, k + 1, 127], dtype=torch.int32, device="cuda")
    scratch = torch.full((topk_workspace_elements(count, width, k, config),), POISON, dtype=torch.int32, device="cuda")
    for first in (None, starts):  # each form is compiled apart
        expected = reference.select_topk(logits, lengths, k, first)
        for few in (count, 8, 1):  # so many at a time: the fewer, the more programs share one
            out = torch.full((count, k + 1), -7, dtype=torch.int32, device="cuda")
            for rows in torch.arange(count).split(few):
                taken = slice(int(rows[0]), int(rows[-1]) + 1)
                begin = None if first is None else first[taken]
                select_topk(logits[taken], lengths[taken], k, width, out[taken], scratch, begin, config)
            assert torch.equal(out[:, :k], expected)
            assert (out[:, k] == -7).all()


def test_after_warm_up_nothing_compiles_for_rows_of_any_length() -> None:
    serving, device = Serving(8, 32, 2048, 600, 140_000, 64, packed=False), torch.device("cuda")
    prepare([launch for launch in launches(serving, device) if launch.variant[0] == "selection"], device)
    scratch = torch.full((topk_workspace_elements(600, 140_000, 2048),), POISON, dtype=torch.int32, device="cuda")
    out = torch.empty(600, 2048, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(603, dtype=torch.int32, device="cuda")
    memory = torch.zeros(600 * 140_000, device="cuda")
    ends = (4096, 8192, 16_384, 32_768, 65_536, 131_072)
    with CompileCounter() as counter:
        for width in (
            2049,
            140_000,
            *(end + near for end in ends for near in range(-4, 5)),
            *range(2050, 140_000, 997),
        ):
            for rows in (1, 2, 5, 8, 9, 33, 64, 512, 513, 600):
                scores = memory[: rows * width].view(rows, width)
                select_topk(scores, lengths[rows % 4 :][:rows], 2048, width, out[:rows], scratch)
    assert counter.names == []


def test_rows_may_start_anywhere() -> None:
    logits = awkward_rows(30_000, "cuda")
    starts = torch.arange(13, dtype=torch.int32, device="cuda") * 701
    lengths = 30_000 - starts - starts % 5
    for count in (13, 4):
        scratch = torch.full((topk_workspace_elements(13, 30_000, 2048),), POISON, dtype=torch.int32, device="cuda")
        out = torch.empty(count, 2048, dtype=torch.int32, device="cuda")
        rows, first, sizes = logits[:count], starts[:count], lengths[:count]
        select_topk(rows, sizes, 2048, 30_000, out, scratch, first)
        assert torch.equal(out, reference.select_topk(rows, sizes, 2048, first))


def test_graphs_of_kernels_that_start_early_replay_on_other_rows() -> None:
    first, second = awkward_rows(70_000, "cuda"), awkward_rows(70_000, "cuda").flip(0).contiguous()
    lengths = torch.full((13,), 70_000, dtype=torch.int32, device="cuda")
    scratch = torch.full((topk_workspace_elements(13, 70_000, 2048),), POISON, dtype=torch.int32, device="cuda")
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
