"""The backend against plain float64 arithmetic on this machine, through the very methods that vLLM calls.

Three requests share paged caches whose blocks lie scattered, with another layer's memory between them and NaN wherever
nothing was written. One step has them at different stages (a whole prompt, the end of a longer one, a single decoded
token), which a GPU scores over gathered keys; in two more all of them decode, one token or three at a time, which it
scores over the paged cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from glm5deploy.errors import DeployError
from glm5deploy.kernels.layout import INDEX_DIM, INDEX_KEY_BYTES, LATENT_DIM, PACKED_ROW_BYTES, QK_DIM
from glm5deploy.kernels.reference import pack_fp8_ds_mla, quantise_fp8, store_index_keys, unpack_fp8_ds_mla
from glm5deploy.vllm_plugin import PACKED

HEADS, INDEX_HEADS, TOPK, BLOCK = 4, 32, 64, 64
CONTEXTS = (70, 300, 200)
MIXED = (70, 5, 1)
DECODES = ((1, 1, 1), (3, 3, 3))
_SCALE = 256**-0.5
_HINT = "Do not serve with it: answers would be wrong. Report versions and device of this report."
# Relative root mean square error of attention.
ATTENTION_ERROR = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
# Scores nearer than this, in units of the row's spread, may tie. Products of e4m3 numbers are coarser than those of
# wider ones: SM90's tensor cores keep 13 bits below the largest of 32 products, which moves a score by up to 5e-4.
TIE = 1e-4
TIE_E4M3 = 1e-3


@dataclass(frozen=True)
class Case:
    """One step's inputs on ``device``; caches are empty."""

    metadata: Any
    latent_cache: torch.Tensor
    packed_cache: torch.Tensor
    index_cache: torch.Tensor
    latent: torch.Tensor  # [positions of all requests, 576]
    keys: torch.Tensor  # [positions of all requests, 128]
    slots: torch.Tensor  # [positions of all requests]
    q: torch.Tensor  # [T, H, 576]
    q_index: torch.Tensor  # [T, J, 128]
    weights: torch.Tensor  # [T, J]


def check() -> dict[str, Any]:
    """Figures of the comparison; :class:`DeployError` when selection or attention is off."""
    from vllm.platforms import current_platform

    device = torch.device(current_platform.device_type)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    rows, errors, packed_errors = 0, [], []
    for queries in (MIXED, *DECODES):
        case = make_case(device, dtype, queries)
        selected = _select(case)
        wrong = selection_errors(case, selected, TIE_E4M3 if _scored_in_e4m3(device) else TIE)
        if wrong:
            raise DeployError(f"the indexer's selection differs from the reference in {wrong} rows", hint=_HINT)
        rows += len(selected)
        errors.append(attention_error(case, case.latent, selected, _attend(case, selected, case.latent_cache, "auto")))
        if device.type == "cuda":
            stored = unpack_fp8_ds_mla(pack_fp8_ds_mla(case.latent))
            out = _attend(case, selected, case.packed_cache, PACKED)
            packed_errors.append(attention_error(case, stored, selected, out))
    # Not max(): of NaN it may give any other error.
    for error in (*errors, *packed_errors):
        if not error <= ATTENTION_ERROR[dtype]:
            raise DeployError(f"attention is off by {error:.1e}, allowed {ATTENTION_ERROR[dtype]:.0e}", hint=_HINT)
    return {
        "rows": rows,
        "selection errors": 0,
        "attention error": max(errors),
        **({"packed attention error": max(packed_errors)} if packed_errors else {}),
        "dtype": str(dtype).removeprefix("torch."),
    }


def make_case(device: torch.device, dtype: torch.dtype, queries: tuple[int, ...] = MIXED) -> Case:
    """Random inputs from a fixed seed, the same on every machine; ``queries`` tokens of each request in this step."""
    from glm5deploy.vllm_plugin.metadata import SparseMetadata, plan_scores

    generator = torch.Generator().manual_seed(42)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    per_request = [-(-context // BLOCK) for context in CONTEXTS]
    blocks = torch.randperm(2 * sum(per_request), generator=generator).int()
    table = torch.zeros((len(CONTEXTS), max(per_request)), dtype=torch.int32)
    for row, count in enumerate(per_request):
        table[row, :count], blocks = blocks[:count], blocks[count:]
    position = torch.cat([torch.arange(context) for context in CONTEXTS])
    request = torch.repeat_interleave(torch.arange(len(CONTEXTS)), torch.tensor(CONTEXTS))
    slots = table[request, position // BLOCK].long() * BLOCK + position % BLOCK
    queried = torch.cat([torch.arange(c - n, c) for c, n in zip(CONTEXTS, queries, strict=True)])
    starts = torch.tensor([0, *queries]).cumsum(0)
    of_token = torch.repeat_interleave(torch.arange(len(queries)), torch.tensor(queries))
    tokens, total = int(starts[-1]), 2 * sum(per_request)
    stored = torch.cat([torch.arange(sum(CONTEXTS[:r]), sum(CONTEXTS[: r + 1]))[-n:] for r, n in enumerate(queries)])
    spans = tuple(zip(starts[:-1].tolist(), starts[1:].tolist(), CONTEXTS, strict=True))
    metadata = SparseMetadata(
        num_reqs=len(CONTEXTS),
        num_actual_tokens=tokens,
        max_query_len=max(queries),
        max_seq_len=max(CONTEXTS),
        query_start_loc=starts.int().to(device),
        seq_lens=torch.tensor(CONTEXTS, dtype=torch.int32, device=device),
        slot_mapping=slots[stored].to(device),
        block_table=table.to(device),
        request_of_token=of_token.int().to(device),
        lengths=(queried + 1).int().to(device),
        spans=spans if device.type == "cpu" else None,
        num_decodes=len(CONTEXTS),
        num_decode_tokens=tokens,
    )
    if queries in DECODES:
        metadata.scored_decodes, metadata.scored_rows = len(CONTEXTS), tokens
    if device.type == "cuda":
        _reserve(tokens, device, dtype)
    first = metadata.scored_decodes
    metadata.chunks = plan_scores(metadata, starts.tolist(), list(CONTEXTS), first, max(CONTEXTS), TOPK)
    latent = torch.full((total, 2, BLOCK, QK_DIM), torch.nan, dtype=dtype, device=device)[:, 0]
    # 0xFF is NaN as e4m3, as bf16 and as fp32.
    packed = torch.full((total, 2, BLOCK, PACKED_ROW_BYTES), 0xFF, dtype=torch.uint8, device=device)[:, 0]
    index = torch.full((total, 2, BLOCK, INDEX_KEY_BYTES), 0x7F, dtype=torch.uint8, device=device)[:, 1]
    return Case(
        metadata=metadata,
        latent_cache=latent,
        packed_cache=packed,
        index_cache=index,
        latent=random(len(position), QK_DIM),
        keys=random(len(position), INDEX_DIM),
        slots=slots.to(device),
        q=random(tokens, HEADS, QK_DIM),
        q_index=random(tokens, INDEX_HEADS, INDEX_DIM),
        weights=random(tokens, INDEX_HEADS).float(),
    )


def _reserve(tokens: int, device: torch.device, dtype: torch.dtype) -> None:
    """The scratch memory, as the model makes it in an engine."""
    from glm5deploy.kernels.warmup import Serving
    from glm5deploy.vllm_plugin.device import reserve

    reserve(Serving(HEADS, INDEX_HEADS, TOPK, tokens, sum(CONTEXTS), BLOCK, packed=False, dtype=dtype), device)


def _select(case: Case) -> torch.Tensor:
    from glm5deploy.vllm_plugin.selection import select

    store_index_keys(case.index_cache, case.keys, case.slots)
    values, scale = quantise_fp8(case.q_index)
    if values.is_cuda:
        from glm5deploy.vllm_plugin.device import scratch

        values = values.to(scratch(values.device).query.dtype)  # 16 bits where no product takes e4m3
    selected = torch.full((len(case.q), TOPK), -1, dtype=torch.int32, device=case.q.device)
    select(values, case.weights * scale, case.index_cache, case.metadata, selected, TOPK)
    return selected


def _attend(case: Case, selected: torch.Tensor, cache: torch.Tensor, cache_dtype: str) -> torch.Tensor:
    from glm5deploy.vllm_plugin.attention import Glm5SparseImpl

    impl = Glm5SparseImpl(
        *(HEADS, QK_DIM, _SCALE, 1, None, None, cache_dtype, None, "decoder", None, selected),
        kv_lora_rank=LATENT_DIM,
    )
    scale = torch.ones((), device=case.q.device)
    latent, rope = case.latent.split([LATENT_DIM, QK_DIM - LATENT_DIM], dim=-1)
    impl.do_kv_cache_update(latent, rope.unsqueeze(1), cache, case.slots, cache_dtype, scale)
    out, _ = impl.forward_mqa(case.q.split([LATENT_DIM, QK_DIM - LATENT_DIM], dim=-1), cache, case.metadata, None)
    return out


def _scored_in_e4m3(device: torch.device) -> bool:
    """Whether queries and keys are multiplied as they are stored, once the scratch memory is there."""
    if device.type == "cpu":
        return False
    from glm5deploy.vllm_plugin.device import scratch

    return scratch(device).query.dtype == torch.float8_e4m3fn


def selection_errors(case: Case, selected: torch.Tensor, tie: float = TIE) -> int:
    """Rows whose selection is not the best TOPK positions by float64 scores of the quantised values.

    ``tie``: scores no further apart than this times the row's spread count as equal.
    """
    keys, key_scale = quantise_fp8(case.keys)
    queries, query_scale = quantise_fp8(case.q_index)
    k = keys.double() * key_scale.double()[:, None]
    q = queries.double() * query_scale.double()[..., None]
    return sum(
        not _is_best(_scores(q[row], k[seen_positions(case, row)], case.weights[row].double()), selected[row], tie)
        for row in range(len(selected))
    )


def seen_positions(case: Case, row: int) -> slice:
    """Where the positions that token ``row`` may see stand among those of all requests."""
    first = sum(CONTEXTS[: int(case.metadata.request_of_token[row])])
    return slice(first, first + int(case.metadata.lengths[row]))


def _scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (weights[:, None] * (q @ k.T).clamp(min=0)).sum(dim=0)


def _is_best(scores: torch.Tensor, row: torch.Tensor, tie: float) -> bool:
    chosen = row[row >= 0].long()
    expected = min(TOPK, len(scores))
    if len(chosen) != expected or len(chosen.unique()) != expected or int(chosen.max()) >= len(scores):
        return False
    if expected == len(scores):
        return True
    rest = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
    rest[chosen] = False
    return bool(scores[rest].max() - scores[chosen].min() <= tie * scores.std())


def attention_error(case: Case, latent: torch.Tensor, selected: torch.Tensor, out: torch.Tensor) -> float:
    """Root mean square error of ``out`` [T, H, 512], relative to float64 attention over ``selected``; NaN counts.

    ``latent`` [positions of all requests, 576] is what the cache holds of ``case.latent``.
    """
    expected = torch.empty(out.shape, dtype=torch.float64, device=out.device)
    for row in range(len(selected)):
        chosen = selected[row][selected[row] >= 0].long()
        rows = latent[seen_positions(case, row)][chosen].double()
        weights = torch.softmax(case.q[row].double() @ rows.T * _SCALE, dim=-1)
        expected[row] = weights @ rows[:, :LATENT_DIM]
    return float((out.double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())
