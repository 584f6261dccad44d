"""What only a GPU can show: nothing compiles after warm-up, graphs capture, addresses go beyond 2^31.

Run there with `pytest -m gpu tests/kernels`.
"""

from __future__ import annotations

import pytest
import torch

from glm5deploy.kernels import indexer, reference
from glm5deploy.kernels.attention import sparse_mla_fwd, split_workspace_elements
from glm5deploy.kernels.compile_counter import CompileCounter
from glm5deploy.kernels.latent_cache import store_latent
from glm5deploy.kernels.prepare import prepare
from glm5deploy.kernels.slots import slots_from_positions
from glm5deploy.kernels.topk import select_topk, topk_workspace_elements
from glm5deploy.kernels.tuning import SparseConfig, gpu, sparse_config, wgmma_ready
from glm5deploy.kernels.warmup import Serving, launches
from tests.kernels.cases import sparse_case
from tests.support.compare import assert_close, relative_rms

pytestmark = pytest.mark.gpu
BLOCK, J = 64, 32


class Step:
    """One serving step's tensors and launches: T tokens, one query a request, over a paged cache."""

    def __init__(self, tokens: int, serving: Serving, context: int) -> None:
        device = torch.device("cuda")
        self.serving, self.tokens, self.context = serving, tokens, context
        blocks_each = -(-context // BLOCK)
        blocks = tokens * blocks_each
        width = 656 if serving.packed else 576
        kind = torch.uint8 if serving.packed else serving.dtype
        self.cache = torch.zeros(blocks, BLOCK, width, dtype=kind, device=device)
        self.keys = torch.zeros(blocks, BLOCK, 132, dtype=torch.uint8, device=device)
        self.table = torch.randperm(blocks, device=device).int().view(tokens, blocks_each)
        self.lengths = torch.randint(1, context + 1, (tokens,), device=device, dtype=torch.int32)
        self.requests = torch.arange(tokens, device=device)
        every = torch.arange(blocks * BLOCK, device=device)
        store_latent(self.random(len(every), 512), self.random(len(every), 64), every, self.cache)
        indexer.store_index_keys(self.keys, self.random(len(every), 128), every)
        self.q = self.random(tokens, serving.heads, 576)
        self.index_q, self.weights = self.random(tokens, J, 128), self.random(tokens, J)
        self.cos_sin = self.random(context + 1, 64)
        self.values = torch.empty(tokens, J, 128, dtype=torch.float8_e4m3fn, device=device)
        self.folded = torch.empty(tokens, J, device=device)
        self.logits = torch.empty(tokens, context, device=device)
        self.selected = torch.empty(tokens, serving.topk, dtype=torch.int32, device=device)
        self.slots, self.counts = torch.empty_like(self.selected), torch.empty_like(self.lengths)
        self.scratch = torch.empty(
            max(1, topk_workspace_elements(tokens, context, serving.topk)), dtype=torch.int32, device=device
        )
        self.workspace = torch.empty(split_workspace_elements(serving.heads, serving.topk, device), device=device)
        self.out = torch.empty(tokens, serving.heads, 512, dtype=serving.dtype, device=device)
        self.lse = torch.empty(tokens, serving.heads, device=device)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(self.serving.dtype)

    def run(self) -> None:
        positions = (self.lengths - 1).long()
        indexer.prepare_index_query(self.index_q, self.weights, positions, self.cos_sin, 0.1, self.values, self.folded)
        indexer.paged_logits(self.values, self.keys, self.folded, self.lengths, self.table, self.logits)
        k = self.serving.topk
        select_topk(self.logits, self.lengths, k, self.context, self.selected, self.scratch)
        slots_from_positions(self.selected, self.requests, self.table, BLOCK, self.slots, self.counts)
        rows = self.cache.view(-1, self.cache.shape[2])
        sparse_mla_fwd(self.q, rows, self.slots, self.counts, 0.06, self.out, self.lse, self.workspace)

    def expected(self) -> torch.Tensor:
        rows = self.cache.view(-1, self.cache.shape[2])
        plain = reference.unpack_fp8_ds_mla(rows) if self.serving.packed else rows
        return reference.sparse_mla(self.q, plain, self.slots, 0.06)[0]


@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize("heads", [8, 64])
def test_after_warm_up_nothing_compiles_and_graphs_replay(packed: bool, heads: int) -> None:
    serving = Serving(heads, J, topk=2048, max_tokens=2048, max_length=20_000, block_size=BLOCK, packed=packed)
    prepare(launches(serving, torch.device("cuda")), torch.device("cuda"))
    with CompileCounter() as counter:
        for tokens in (1, 2, 3, 5, 8, 16, 17, 33, 64, 100):
            step = Step(tokens, serving, context=20_000 if tokens < 4 else 3_001)
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    step.run()
            step.out.fill_(torch.nan)
            step.lengths.copy_(torch.randint(1, step.context + 1, (tokens,), device="cuda"))
            graph.replay()
            torch.cuda.synchronize()
            assert_close(step.out, step.expected(), limit=5e-3)
    assert counter.names == []


class TestHopper:
    """The portable kernel's tests run on a CPU; this kernel has no interpreter."""

    SHAPES = (
        (64, 2048, 1),
        (64, 2048, 8),
        (40, 1000, 3),
        (128, 515, 1),
        (32, 1000, 1),
        (16, 65, 2),
        (8, 2048, 32),
        (1, 63, 1),
    )

    @pytest.fixture(autouse=True)
    def ready(self) -> None:
        if not wgmma_ready(gpu(torch.device("cuda"))):
            pytest.skip("a kernel for SM90 and Triton 3.8")

    @pytest.mark.parametrize("packed", [False, True], ids=["plain", "fp8_ds_mla"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("heads", "keys", "splits"), SHAPES)
    def test_equals_the_reference(self, heads: int, keys: int, splits: int, dtype: torch.dtype, packed: bool) -> None:
        case = sparse_case(tokens=5, heads=heads, keys=keys, dtype=dtype, rows=3000)
        # Queries as a batched product leaves them, and at a stride that no vector of elements fits.
        nope = case.q[..., :512].transpose(0, 1).contiguous().transpose(0, 1).cuda()
        rope = torch.cat((case.q[..., 511:], case.q[..., 512:]), dim=-1).cuda()[..., 1:65]
        counts = torch.tensor([keys, keys, keys // 3, 0, keys + 9], dtype=torch.int32)
        cut = case.slots.clone()
        poison = int(case.rows.isnan().any(1).nonzero()[0])
        for t in (2, 3):
            cut[t, counts[t] :] = -1
            case.slots[t, counts[t] :] = poison
        rows = reference.pack_fp8_ds_mla(case.rows) if packed else case.rows
        plain = reference.unpack_fp8_ds_mla(rows) if packed else rows
        expected, expected_lse = reference.sparse_mla(case.q, plain, cut, 0.06)
        out, lse = torch.full((5, heads, 512), torch.nan, dtype=dtype).cuda(), torch.full((5, heads), torch.nan).cuda()
        scratch = torch.full((5 * heads * splits * 513,), torch.nan).cuda()
        q, slots = (nope, rope), case.slots.cuda()
        config = SparseConfig(next(b for b in (8, 16, 32, 64) if b >= min(heads, 64)), 64, 4, 2, 1, wgmma=1)
        sparse_mla_fwd(q, rows.cuda(), slots, counts.cuda(), 0.06, out, lse, scratch, config, splits)
        assert_close(out.cpu(), expected, limit=5e-3)
        assert_close(lse.cpu(), expected_lse, limit=2e-3)
        assert torch.equal(out[3].cpu(), torch.zeros(heads, 512, dtype=dtype))

    def test_the_table_takes_it_for_many_heads(self) -> None:
        of = gpu(torch.device("cuda"))
        assert sparse_config(of, False, 64, 128).wgmma
        assert not sparse_config(of, False, 8, 4096).wgmma


def test_rows_beyond_2_to_the_31_bytes_and_elements() -> None:
    rows = torch.empty(4_000_000, 576, dtype=torch.bfloat16, device="cuda")  # 2.3e9 elements
    slots = torch.randint(3_800_000, 4_000_000, (3, 2048), dtype=torch.int32, device="cuda")
    rows[slots.flatten().long()] = torch.randn(3 * 2048, 576, device="cuda").bfloat16()
    q = torch.randn(3, 8, 576, device="cuda").bfloat16()
    out, _ = sparse_mla_fwd(q, rows, slots, None, 0.06)
    assert relative_rms(out, reference.sparse_mla(q, rows, slots, 0.06)[0]) <= 5e-3


def test_logits_beyond_2_to_the_31_elements() -> None:
    tokens, keys = 17_000, 131_072
    q = torch.randn(tokens, J, 128, device="cuda").to(torch.float8_e4m3fn)
    k = torch.randn(keys, 128, device="cuda").to(torch.float8_e4m3fn)
    scales, weights = torch.rand(keys, device="cuda"), torch.randn(tokens, J, device="cuda")
    starts = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    ends = torch.full((tokens,), keys, dtype=torch.int32, device="cuda")
    logits = torch.full((tokens, keys), torch.nan, device="cuda")
    indexer.ragged_logits(q, k, scales, weights, starts, ends, logits)
    for part in (slice(0, 4), slice(tokens - 4, tokens)):
        expected = reference.indexer_logits(q[part], k.float() * scales[:, None], weights[part])
        assert_close(logits[part], expected, limit=2e-3)
    out = torch.empty(tokens, 2048, dtype=torch.int32, device="cuda")
    scratch = torch.empty(topk_workspace_elements(tokens, keys, 2048), dtype=torch.int32, device="cuda")
    select_topk(logits, ends, 2048, keys, out, scratch)
    assert torch.equal(out[-4:], reference.select_topk(logits[-4:], ends[-4:], 2048))
