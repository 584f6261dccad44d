"""What is measured: inputs, the launch parameters worth trying, and a reference for each kind of launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from glm5deploy.kernels import reference
from glm5deploy.kernels.attention import sparse_mla_fwd
from glm5deploy.kernels.indexer import paged_logits, ragged_logits
from glm5deploy.kernels.layout import INDEX_DIM, INDEX_KEY_BYTES, QK_DIM
from glm5deploy.kernels.tuning import SPARSE_TABLE, LogitsConfig, SparseConfig, gpu, index_value_dtype

_SCALE = 0.06
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """``tokens``: attention is measured at the first number, the result used up to the second."""

    tokens: tuple[tuple[int, int], ...] = ((1, 2), (8, 16), (64, 128), (256, 512), (2048, 1 << 30))
    cache_rows: int = 131_072  # 151 MB of plain rows: more than any L2 cache
    queries: int = 2048
    keys: int = 32_768
    requests: int = 32
    input_sets: int = 4
    candidates: int = 1 << 30
    dtype: torch.dtype = torch.bfloat16


# For Triton's interpreter, which has no products of bf16 and takes seconds for what a GPU does in microseconds.
SMALL = Sizes(((1, 2), (3, 1 << 30)), 64, 3, 70, 2, 1, 2, torch.float16)


def attention_candidates(heads: int, chosen: SparseConfig) -> list[SparseConfig]:
    """The built-in choice first, then other tiles, warps, stages and programs a multiprocessor."""
    blocks = (16,) if heads <= 16 else (16, 32, 64)
    tiles = ((64, 4, 2), (64, 8, 2), (32, 4, 2), (32, 4, 3), (32, 8, 3), (32, 2, 2))
    grid = [SparseConfig(block, *tile, 1) for block in blocks for tile in tiles]
    configs = [row.config for row in SPARSE_TABLE if row.config.block_heads in blocks]
    built_in = [config for config in configs if config.wgmma <= chosen.wgmma]  # where one is chosen, it runs
    every = (replace(config, per_sm=each) for config in (*built_in, *grid) for each in (1, 2, 4))
    return list(dict.fromkeys([chosen, *every]))


def logits_candidates(chosen: LogitsConfig, ragged: bool) -> list[LogitsConfig]:
    """The built-in choice first."""
    every = (
        LogitsConfig(queries, keys, warps, stages, chosen.per_sm)
        for queries in ((2, 4, 8) if ragged else (chosen.block_queries,))
        for keys in (64, 128)
        for warps in (4, 8)
        for stages in (2, 3)
    )
    return list(dict.fromkeys([chosen, *every]))


class Attention:
    """Calls of one cache type and number of tokens over rows that no cache holds."""

    def __init__(self, rows: torch.Tensor, heads: int, topk: int, tokens: int, sizes: Sizes) -> None:
        device, shape = rows.device, (tokens, topk)
        self.rows, self.few = rows, min(tokens, 4)
        self.q = [torch.randn(tokens, heads, QK_DIM, device=device).to(sizes.dtype) for _ in range(sizes.input_sets)]
        self.slots = [
            torch.randint(0, len(rows), shape, dtype=torch.int32, device=device) for _ in range(sizes.input_sets)
        ]
        self.counts = torch.full((tokens,), topk, dtype=torch.int32, device=device)

    def calls(self, config: SparseConfig, splits: int | None = None) -> list[Callable[[], torch.Tensor]]:
        """``splits`` in place of what follows from the number of tokens."""

        def call(q: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            return sparse_mla_fwd(q, self.rows, slots, self.counts, _SCALE, config=config, splits=splits)[0]

        return [partial(call, q, slots) for q, slots in zip(self.q, self.slots, strict=True)]

    def variants(self, config: SparseConfig) -> list[Callable[[], torch.Tensor]]:
        """A call for every variant that serving may need of the configuration: with and without splits."""
        return [self.calls(config, splits)[0] for splits in (1, 2)]

    def checked(self, out: torch.Tensor) -> torch.Tensor:
        return out[: self.few]

    def expected(self) -> torch.Tensor:
        """fp32 result of the first call's first tokens."""
        rows, slots = self.rows, self.slots[0][: self.few].long()
        picked = rows[slots.flatten()]
        plain = reference.unpack_fp8_ds_mla(picked) if rows.dtype == torch.uint8 else picked
        order = torch.arange(len(plain), device=rows.device).view(slots.shape)
        return reference.sparse_mla(self.q[0][: self.few], plain, order, _SCALE)[0]


def cache_rows(packed: bool, device: torch.device, sizes: Sizes) -> torch.Tensor:
    rows = torch.randn(sizes.cache_rows, QK_DIM, device=device)
    return reference.pack_fp8_ds_mla(rows) if packed else rows.to(sizes.dtype)


class Scores:
    """Calls of the prefill (ragged) or decode (paged) scores."""

    def __init__(self, ragged: bool, index_heads: int, device: torch.device, sizes: Sizes) -> None:
        self.ragged, self.width = ragged, sizes.keys
        kind = index_value_dtype(gpu(device)) if device.type == "cuda" else sizes.dtype
        self.rows = sizes.queries if ragged else sizes.requests
        values, _ = reference.quantise_fp8(torch.randn(self.rows, index_heads, INDEX_DIM, device=device))
        self.q = values if kind == torch.float8_e4m3fn else values.to(kind)
        self.weights = torch.randn(self.rows, index_heads, device=device)
        self.out = torch.zeros(self.rows, self.width, device=device)
        self.lengths = torch.full((self.rows,), self.width, dtype=torch.int32, device=device)
        if ragged:
            keys, self.scales = reference.quantise_fp8(torch.randn(self.width, INDEX_DIM, device=device))
            self.dequantised = keys.float() * self.scales[:, None]
            self.keys = keys if kind == torch.float8_e4m3fn else self.dequantised.to(kind)
            return
        each = -(-self.width // _BLOCK)
        self.cache = torch.zeros(self.rows * each, _BLOCK, INDEX_KEY_BYTES, dtype=torch.uint8, device=device)
        self.table = torch.randperm(self.rows * each, device=device).int().view(self.rows, each)
        slots = torch.arange(self.rows * each * _BLOCK, device=device)
        for part in slots.split(1 << 18):
            reference.store_index_keys(self.cache, torch.randn(len(part), INDEX_DIM, device=device), part)
        first = (self.table[0].long()[:, None] * _BLOCK + torch.arange(_BLOCK, device=device)).flatten()[: self.width]
        self.dequantised = reference.load_index_keys(self.cache, first)

    def calls(self, config: LogitsConfig, next_n: int = 1) -> Sequence[Callable[[], torch.Tensor]]:
        if not self.ragged:
            requests = self.rows // next_n
            arguments = (self.q[: requests * next_n], self.cache, self.weights[: requests * next_n])
            lengths, out = self.lengths[: requests * next_n], self.out[: requests * next_n]
            return [partial(paged_logits, *arguments, lengths, self.table[:requests], out, config)]
        scales = self.scales if self.q.dtype == torch.float8_e4m3fn else None
        starts = torch.zeros_like(self.lengths)
        return [partial(ragged_logits, self.q, self.keys, scales, self.weights, starts, self.lengths, self.out, config)]

    def variants(self, config: LogitsConfig) -> list[Callable[[], torch.Tensor]]:
        """A call for every variant that serving may need of the configuration: up to four rows a request."""
        most = (1,) if self.ragged or self.rows < 4 else (1, 4)
        return [self.calls(config, next_n)[0] for next_n in most]

    def checked(self, out: torch.Tensor) -> torch.Tensor:
        return out[:1]

    def expected(self) -> torch.Tensor:
        return reference.indexer_logits(self.q[:1].float(), self.dequantised, self.weights[:1])
