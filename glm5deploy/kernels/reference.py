"""Plain torch oracles, fp32 throughout, for every kernel of this package. The CPU engine runs on them.

Axis letters, the same in the kernels and the tests: T tokens (queries), H attention heads, K selected positions a
token, N rows of the latent cache, S keys of a context, D = 128 index dimensions, J index heads, R requests.
Source of the formulas: DeepSeek-V3.2's sparse attention as used by GLM-5 (`glm_moe_dsa`), see README.md beside this.
"""

from __future__ import annotations

import torch

from glm5deploy.kernels.layout import (
    AMAX_FLOOR,
    FP8_GROUP,
    FP8_MAX,
    INDEX_DIM,
    INDEX_KEY_BYTES,
    LATENT_DIM,
    LATENT_GROUPS,
    PACKED_ROPE_OFFSET,
    PACKED_ROW_BYTES,
    PACKED_SCALE_OFFSET,
    QK_DIM,
    ROPE_DIM,
    SCALE_CANDIDATES,
    require,
)

# Elements of the largest temporary: 16 Mi fp32 values are 64 MiB.
_CHUNK_ELEMENTS = 1 << 24


def sparse_mla(
    q: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of each query over its own selected latent rows.

    Args:
        q: [T, H, 576], any float dtype; 512 latent dimensions, then 64 RoPE dimensions.
        rows: [N, 576], any float dtype; the first 512 dimensions are key and value at once. Rows that no slot names
            may hold anything, NaN too.
        slots: [T, K] int; physical rows, -1 (any negative) is ignored.
        scale: factor on the scores before the softmax.

    Returns:
        out [T, H, 512] fp32 and lse [T, H] fp32 (natural logarithm). A token without a valid slot gives zeros and -inf.
    """
    tokens, heads, _ = q.shape
    selected = slots.shape[1]
    out = q.new_zeros((tokens, heads, LATENT_DIM), dtype=torch.float32)
    lse = q.new_full((tokens, heads), -torch.inf, dtype=torch.float32)
    if tokens == 0 or selected == 0 or rows.shape[0] == 0:
        return out, lse
    chunk = max(1, _CHUNK_ELEMENTS // (selected * max(QK_DIM, heads)))
    for start in range(0, tokens, chunk):
        part = slice(start, min(start + chunk, tokens))
        valid = slots[part] >= 0
        gathered = rows[slots[part].clamp_min(0).long()].float()  # [t, K, 576]
        gathered.masked_fill_(~valid[:, :, None], 0.0)
        scores = torch.einsum("thd,tkd->thk", q[part].float(), gathered).mul_(scale)
        scores.masked_fill_(~valid[:, None, :], -torch.inf)
        some = valid.any(dim=1)[:, None]
        lse[part] = torch.where(some, torch.logsumexp(scores, dim=-1), -torch.inf)
        weights = torch.exp(scores - lse[part].masked_fill(~some, 0.0)[:, :, None])
        out[part] = torch.bmm(weights, gathered[:, :, :LATENT_DIM])
    return out, lse


def indexer_logits(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Scores of the lightning indexer: logits[t, s] = sum over heads of weights[t, j] * relu(q[t, j] . k[s]).

    q [T, J, D], k [S, D], weights [T, J], any float dtype -> [T, S] fp32. Causal limits are the caller's.
    """
    tokens, heads, _ = q.shape
    out = q.new_empty((tokens, k.shape[0]), dtype=torch.float32)
    keys = k.float().T
    chunk = max(1, _CHUNK_ELEMENTS // max(1, heads * k.shape[0]))
    for start in range(0, tokens, chunk):
        part = slice(start, min(start + chunk, tokens))
        scores = torch.matmul(q[part].float(), keys).relu_()  # [t, J, S]
        torch.sum(scores.mul_(weights[part].float()[:, :, None]), dim=1, out=out[part])
    return out


def select_topk(
    logits: torch.Tensor, lengths: torch.Tensor, k: int, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """The k best positions of each ragged row, exact, ties broken by the lower position.

    Args:
        logits: [T, S] float; NaN counts as -inf.
        lengths: [T] int; row t looks at columns starts[t] .. starts[t] + lengths[t].
        k: at least 1.
        starts: [T] int, zeros when absent.

    Returns:
        int32 [T, k]: positions relative to the row's start, ascending, padded with -1 at the end. A row of at most k
        columns selects all of them.
    """
    tokens, columns = logits.shape
    out = torch.full((tokens, k), -1, dtype=torch.int32, device=logits.device)
    if tokens == 0 or columns == 0:
        return out
    position = torch.arange(columns, device=logits.device)
    chunk = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, tokens, chunk):
        part = slice(start, min(start + chunk, tokens))
        first = torch.zeros_like(lengths[part]) if starts is None else starts[part]
        inside = (position >= first[:, None]) & (position < (first + lengths[part])[:, None])
        score = torch.nan_to_num(logits[part].float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        # Outside columns sort below everything inside, also below an inside -inf: they are excluded by `inside`.
        threshold = score.masked_fill(~inside, -torch.inf).topk(min(k, columns), dim=1).values[:, -1:]
        above = inside & (score > threshold)
        equal = inside & (score == threshold)
        room = k - above.sum(dim=1, keepdim=True)
        chosen = above | (equal & (equal.cumsum(dim=1) <= room))
        rank = chosen.cumsum(dim=1) - 1
        row, column = chosen.nonzero(as_tuple=True)
        relative = (column - first.long()[row]).to(torch.int32)
        out[part].index_put_((row, rank[row, column]), relative)
    return out


def slots_from_positions(
    positions: torch.Tensor,
    request_of_token: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    rows_per_block: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Request-local positions to physical rows of the paged cache.

    Args:
        positions: [T, K] int, -1 padded.
        request_of_token: [T] int, row of the block table.
        block_table: [R, B] int, physical block of each logical block.
        block_size: tokens a block.
        rows_per_block: distance of two blocks in rows; block_size when absent.

    Returns:
        slots int32 [T, K] (-1 kept, also for a position past the table) and the number of valid ones, int32 [T].
    """
    stride = block_size if rows_per_block is None else rows_per_block
    logical = positions.long().div(block_size, rounding_mode="floor")
    valid = (positions >= 0) & (logical < block_table.shape[1])
    logical = torch.where(valid, logical, 0)
    blocks = block_table.long()[request_of_token.long()].gather(1, logical)
    rows = blocks * stride + positions.long() % block_size
    slots = torch.where(valid, rows, -1).to(torch.int32)
    return slots, valid.sum(dim=1, dtype=torch.int32)


def quantise_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values and one power-of-two scale per last axis: scale = 2^ceil(log2(max(amax, 1e-4) / 448)), fp32.

    x [..., G] float -> values float8_e4m3fn [..., G], scale fp32 [...]; x is about values * scale.
    """
    amax = x.float().abs().amax(dim=-1).clamp_min(AMAX_FLOOR)
    mantissa, exponent = torch.frexp(amax / FP8_MAX)  # mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


def quantise_latent(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values and one scale per last axis that leave the least squared error of those tried.

    x [..., G] float -> values float8_e4m3fn [..., G], scale fp32 [...] that bf16 holds; x is about values * scale.

    Codes y for x divided by amax / 448 * 2^(i / 24), i = 0 .. 23: where the steps of e4m3 fall among the numbers is a
    matter of that factor alone, and with another power of two they repeat. For given codes <x, y> / <y, y> is the best
    scale, and leaves <x, x> - <x, y>^2 / <y, y>. Of white noise 2.3 % are lost, 2.6 % with amax / 448 as scale.
    """
    unit = x.float().abs().amax(dim=-1).clamp_min(AMAX_FLOOR) / FP8_MAX
    z = x.float() / unit[..., None]
    gain, chosen = torch.zeros_like(unit), torch.ones_like(unit)
    for i in range(SCALE_CANDIDATES):
        factor = torch.exp2(torch.tensor(-i / SCALE_CANDIDATES))
        y = (z * factor).to(torch.float8_e4m3fn).float()
        its = (z * y).sum(dim=-1) ** 2 / (y * y).sum(dim=-1).clamp_min(1e-30)
        chosen = torch.where(its > gain, factor, chosen)
        gain = torch.maximum(gain, its)
    z = z * chosen[..., None]
    y = z.to(torch.float8_e4m3fn)
    yy = (y.float() ** 2).sum(dim=-1)
    fit = torch.where(yy > 0, (z * y.float()).sum(dim=-1) / yy.clamp_min(1e-30), 1)
    return y, (unit / chosen * fit).bfloat16().float()


def pack_fp8_ds_mla(rows: torch.Tensor) -> torch.Tensor:
    """[N, 576] float -> uint8 [N, 656] in the layout of `layout.py`."""
    count = rows.shape[0]
    packed = torch.empty((count, PACKED_ROW_BYTES), dtype=torch.uint8, device=rows.device)
    values, scales = quantise_latent(rows[:, :LATENT_DIM].reshape(count, LATENT_GROUPS, FP8_GROUP))
    packed[:, :LATENT_DIM] = values.view(torch.uint8).reshape(count, LATENT_DIM)
    packed[:, PACKED_SCALE_OFFSET:PACKED_ROPE_OFFSET] = scales.contiguous().view(torch.uint8)
    packed[:, PACKED_ROPE_OFFSET:] = rows[:, LATENT_DIM:].to(torch.bfloat16).contiguous().view(torch.uint8)
    return packed


def unpack_fp8_ds_mla(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [N, 656] -> fp32 [N, 576]."""
    count = packed.shape[0]
    values = packed[:, :LATENT_DIM].contiguous().view(torch.float8_e4m3fn).float()
    scales = packed[:, PACKED_SCALE_OFFSET:PACKED_ROPE_OFFSET].contiguous().view(torch.float32)
    rope = packed[:, PACKED_ROPE_OFFSET:].contiguous().view(torch.bfloat16).float()
    latent = values.view(count, LATENT_GROUPS, FP8_GROUP) * scales[:, :, None]
    out = packed.new_empty((count, QK_DIM), dtype=torch.float32)
    out[:, :LATENT_DIM] = latent.view(count, LATENT_DIM)
    out[:, LATENT_DIM:] = rope.view(count, ROPE_DIM)
    return out


def index_cache_views(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values uint8 [blocks, block_size, 128] and scales fp32 [blocks, block_size] of a uint8 [blocks, block_size, 132]
    index-key cache, as views (blocks may lie further apart than their size)."""
    blocks, block_size, width = cache.shape
    require(width == INDEX_KEY_BYTES, f"index-key cache must be [blocks, block_size, {INDEX_KEY_BYTES}], got {width}")
    stride = cache.stride(0)
    values = cache.as_strided((blocks, block_size, INDEX_DIM), (stride, INDEX_DIM, 1))
    tail = cache.storage_offset() + block_size * INDEX_DIM
    scale_bytes = cache.as_strided((blocks, block_size * 4), (stride, 1), tail)
    return values, scale_bytes.view(torch.float32)


def store_index_keys(cache: torch.Tensor, k: torch.Tensor, slots: torch.Tensor) -> None:
    """Quantise k [T, 128] and write it at slots [T] (block * block_size + offset) of a uint8 [blocks, block_size, 132]
    cache, in place; a negative slot writes nothing."""
    values, scales = index_cache_views(cache)
    keep = slots >= 0
    quantised, scale = quantise_fp8(k[keep])
    block, offset = slots[keep].long() // cache.shape[1], slots[keep].long() % cache.shape[1]
    values[block, offset] = quantised.view(torch.uint8)
    scales[block, offset] = scale


def prepare_index_key(
    k: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
) -> torch.Tensor:
    """LayerNorm of each index key in fp32, then RoPE on its first dimensions; both are rounded to k's dtype.

    k [T, 128], weight and bias [128], positions int [T], cos_sin [P, 64] -> [T, 128] of k's dtype.
    """
    normed = torch.nn.functional.layer_norm(k.float(), k.shape[-1:], weight.float(), bias.float(), eps).to(k.dtype)
    width = cos_sin.shape[1]
    rotated = rope_interleaved(normed[:, :width], positions, cos_sin).to(k.dtype)
    return torch.cat((rotated, normed[:, width:]), dim=-1)


def load_index_keys(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Keys at slots [S] of a uint8 [blocks, block_size, 132] cache, dequantised: fp32 [S, 128]."""
    values, scales = index_cache_views(cache)
    block, offset = slots.long() // cache.shape[1], slots.long() % cache.shape[1]
    return values[block, offset].view(torch.float8_e4m3fn).float() * scales[block, offset][:, None]


def rope_interleaved(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate adjacent pairs (2i, 2i+1) of the last axis.

    x [T, ..., R], positions [T] int, cos_sin [P, R] (R/2 cosines, then R/2 sines) -> fp32, x's shape.
    """
    table = cos_sin[positions.long()].float()
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (x.shape[-1] // 2,)
    cos, sin = (half.reshape(shape) for half in table.chunk(2, dim=-1))
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def prepare_index_query(
    q: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE on the first dimensions of each index query, quantisation, the query's scale folded into the head weight.

    Args:
        q: [T, J, 128] float; the first cos_sin.shape[1] (64) dimensions are rotated, interleaved, and rounded to q's
            dtype before they are quantised.
        weights: [T, J] float. positions: [T] int. cos_sin: [P, 64].
        factor: softmax scale times head scale, 128^-0.5 * J^-0.5 for GLM-5.

    Returns:
        values float8_e4m3fn [T, J, 128] and weights fp32 [T, J].
    """
    width = cos_sin.shape[1]
    rotated = torch.cat((rope_interleaved(q[..., :width], positions, cos_sin).to(q.dtype), q[..., width:]), dim=-1)
    values, scale = quantise_fp8(rotated)
    return values, weights.float() * scale * factor
