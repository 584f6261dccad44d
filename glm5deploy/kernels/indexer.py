"""Host side of the lightning indexer: preparation of queries and keys, key cache, logits."""

from __future__ import annotations

import torch
import triton

from glm5deploy.kernels.chain import chained
from glm5deploy.kernels.index_cache import (
    gather_keys_kernel,
    prepare_key_kernel,
    prepare_query_kernel,
    store_keys_kernel,
)
from glm5deploy.kernels.index_checks import check_cache, check_key, check_query
from glm5deploy.kernels.indexer_logits import paged_logits_kernel, ragged_logits_kernel
from glm5deploy.kernels.latent_cache import byte_view, token_stride
from glm5deploy.kernels.layout import INDEX_DIM, require
from glm5deploy.kernels.tuning import LogitsConfig, gpu, paged_config, ragged_config

_FP8 = torch.float8_e4m3fn
_PREPARE_TOKENS = 4
_STORE_TOKENS = 16
_GATHER_KEYS = 32


def prepare_index_query(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    factor: float,
    values: torch.Tensor,
    weights_out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.prepare_index_query` on the GPU.

    q [T, J, 128], weights [T, J], positions int [T], cos_sin [P, 64] -> values [T, J, 128], either float8_e4m3fn or a
    16-bit float that holds the same numbers (for GPUs whose matrix unit takes no e4m3), and weights_out fp32 [T, J].
    """
    codes = check_query(q, weights, cos_sin, values, weights_out)
    tokens, heads, _ = q.shape
    if tokens == 0:
        return values, weights_out
    prepare_query_kernel[(tokens,)](
        q,
        weights,
        positions,
        cos_sin,
        values.view(torch.uint8) if codes else values,
        weights_out,
        factor,
        token_stride(q),
        q.stride(1),
        weights.stride(0),
        J=heads,
        CODES=codes,
        num_warps=4,
    )
    return values, weights_out


def prepare_index_key(
    k: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """`reference.prepare_index_key` on the GPU, in one launch: k [T, 128] -> out [T, 128] of the same type."""
    tokens = k.shape[0]
    check_key(k, weight, bias, cos_sin)
    require(out.is_contiguous() and out.shape == k.shape and out.dtype == k.dtype, "out must be k's like, contiguous")
    if tokens == 0:
        return out
    prepare_key_kernel[(triton.cdiv(tokens, _PREPARE_TOKENS),)](
        k,
        weight,
        bias,
        positions,
        cos_sin,
        out,
        eps,
        tokens,
        token_stride(k),
        BT=_PREPARE_TOKENS,
        num_warps=4,
    )
    return out


def store_index_keys(cache: torch.Tensor, k: torch.Tensor, slots: torch.Tensor) -> None:
    """`reference.store_index_keys` on the GPU: k [T, 128], slots int [T], cache uint8 [blocks, block_size, 132]."""
    check_cache(cache)
    tokens = slots.shape[0]
    require(k.shape[1] == INDEX_DIM and k.stride(1) == 1, f"k must be [T, {INDEX_DIM}] with unit column stride")
    if tokens == 0:
        return
    store_keys_kernel[(triton.cdiv(tokens, _STORE_TOKENS),)](
        k,
        slots,
        cache,
        byte_view(cache, torch.float32),
        tokens,
        token_stride(k),
        cache.stride(0),
        BLOCK=cache.shape[1],
        BT=_STORE_TOKENS,
        num_warps=4,
    )


def gather_index_keys(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cumulative: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Copy the keys of R requests out of the paged cache, one request after the other.

    cumulative int32 [R + 1] are the requests' first rows in keys [S, 128] and the total. keys is float8_e4m3fn, and
    scales fp32 [S] is written too, or a 16-bit float, and the keys are dequantised (scales is left alone).
    """
    check_cache(cache)
    requests = block_table.shape[0]
    total = keys.shape[0]
    codes = keys.dtype == _FP8
    if total == 0 or requests == 0:
        return
    gather_keys_kernel[(triton.cdiv(total, _GATHER_KEYS),)](
        cache,
        byte_view(cache, torch.float32),
        block_table,
        cumulative,
        keys.view(torch.uint8) if codes else keys,
        scales,
        total,
        requests,
        requests.bit_length(),
        block_table.stride(0),
        cache.stride(0),
        BLOCK=cache.shape[1],
        BS=_GATHER_KEYS,
        CODES=codes,
        num_warps=4,
    )


def ragged_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    logits: torch.Tensor,
    config: LogitsConfig | None = None,
) -> torch.Tensor:
    """Scores of prefill queries: logits[t, s - starts[t]] for s in starts[t] .. ends[t] - 1; other columns stay.

    q [T, J, 128] and k [S, 128] share a type: float8_e4m3fn with k_scale fp32 [S], or a 16-bit float. weights fp32
    [T, J]; starts, ends int32 [T]; logits fp32 [T, >= longest row].
    """
    tokens, heads, _ = q.shape
    require(q.dtype == k.dtype and q.is_contiguous() and k.is_contiguous(), "q and k must share a type, contiguous")
    require(weights.is_contiguous() and weights.dtype == torch.float32, "weights must be contiguous fp32")
    if tokens == 0 or k.shape[0] == 0:
        return logits
    of = gpu(q.device)
    config = ragged_config(of, q.dtype == _FP8) if config is None else config
    query_blocks = triton.cdiv(tokens, config.block_queries)
    splits = max(1, min(of.multiprocessors * config.per_sm // query_blocks, triton.cdiv(k.shape[0], config.block_keys)))
    ragged_logits_kernel[(query_blocks, splits)](
        q,
        k,
        weights if k_scale is None else k_scale,
        weights,
        starts,
        ends,
        logits,
        tokens,
        logits.stride(0),
        J=heads,
        BQ=config.block_queries,
        BS=config.block_keys,
        HAS_SCALE=k_scale is not None,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return logits


def paged_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    logits: torch.Tensor,
    config: LogitsConfig | None = None,
) -> torch.Tensor:
    """Scores of decode queries, next_n = T / B to a request: logits[r, s] for s < lengths[r]; other columns stay.

    q [T, J, 128] (float8_e4m3fn, or a 16-bit float holding e4m3 values), cache uint8 [blocks, block_size, 132],
    weights fp32 [T, J], lengths int32 [T], block_table int32 [B, columns], logits fp32 [T, >= longest length].
    """
    check_cache(cache)
    tokens, heads, _ = q.shape
    requests = block_table.shape[0]
    if tokens == 0:
        return logits
    next_n = tokens // requests
    require(tokens == requests * next_n, f"{tokens} query rows are no multiple of {requests} requests")
    require(lengths.shape == (tokens,) and lengths.is_contiguous(), f"lengths must be [{tokens}], contiguous")
    fp8 = q.dtype == _FP8
    of = gpu(q.device)
    config = paged_config(of, fp8) if config is None else config
    per_request = max(
        1, min(of.multiprocessors * config.per_sm // requests, triton.cdiv(logits.shape[1], config.block_keys))
    )
    paged_logits_kernel[(requests, per_request)](
        q,
        byte_view(cache, _FP8) if fp8 else cache,
        byte_view(cache, torch.float32),
        weights,
        lengths,
        block_table,
        logits,
        next_n,
        block_table.stride(0),
        cache.stride(0),
        logits.stride(0),
        J=heads,
        NQ=triton.next_power_of_2(next_n),
        BS=config.block_keys,
        BLOCK=cache.shape[1],
        KEYS_FP8=fp8,
        num_warps=config.warps,
        num_stages=config.stages,
        **chained(q.device),
    )
    return logits
