"""Host side of sparse MLA: checks, launch parameters, scratch memory."""

from __future__ import annotations

import torch
import triton

from glm5deploy.kernels.chain import chained
from glm5deploy.kernels.latent_cache import ROPE_DTYPE, byte_view, token_stride
from glm5deploy.kernels.layout import LATENT_DIM, PACKED_ROW_BYTES, QK_DIM, ROPE_DIM, require
from glm5deploy.kernels.sparse_mla import combine_splits_kernel, sparse_mla_fwd_kernel
from glm5deploy.kernels.tuning import Gpu, SparseConfig, gpu, sparse_config, sparse_rows
from glm5deploy.kernels.value_output import value_output, values_fuse

_LOG2_E = 1.4426950408889634
_COMBINE_WARPS = 4
# One token's partial output and its partial lse.
_PARTIAL = LATENT_DIM + 1


Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def sparse_mla_fwd(
    q: Query,
    rows: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor | None,
    scale: float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    config: SparseConfig | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.sparse_mla` on the GPU.

    Args:
        q: [T, H, 576], or the pair [T, H, 512] and [T, H, 64]; bf16 or fp16, unit stride in the last dimension.
        rows: the latent cache as rows [N, 576] of q's type, or packed uint8 [N, 656] (`fp8_ds_mla`, its RoPE
            part bf16 whatever q's type is); contiguous rows, the first at a multiple of 16 bytes. Rows that no slot
            names may hold anything.
        slots: int32 [T, K], physical rows, -1 for none.
        counts: int32 [T]; entries of slots[t] from counts[t] on are not looked at. None: all K are.
        scale: factor on the scores.
        out, lse: [T, H, 512] of q's type and fp32 [T, H], contiguous; made when absent.
        workspace: fp32, `split_workspace_elements` of it; made when absent and needed.
        config, splits: launch parameters in place of the table's.

    Returns:
        out and lse (natural logarithm). A token without a valid slot gives zeros and -inf.
    """
    nope, rope = _halves(q)
    tokens, heads, _ = nope.shape
    out = nope.new_empty((tokens, heads, LATENT_DIM)) if out is None else out
    lse = nope.new_empty((tokens, heads), dtype=torch.float32) if lse is None else lse
    require(out.is_contiguous() and lse.is_contiguous(), "out and lse must be contiguous")
    launch = _Launch(nope, slots.shape[1], rows.dtype == torch.uint8, config, splits)
    if launch.splits == 1:
        launch.attend((nope, rope), rows, slots, counts, scale, out, lse)
        return out, lse
    part, part_lse = launch.parts(workspace)
    launch.attend((nope, rope), rows, slots, counts, scale, part, part_lse)
    if tokens:
        dims = combine_dims(tokens * heads, launch.of)
        combine_splits_kernel[(tokens * heads, LATENT_DIM // dims)](
            part,
            part_lse,
            out,
            lse,
            launch.splits,
            BS=combine_splits(launch.splits),
            BD=dims,
            num_warps=_COMBINE_WARPS,
            **chained(nope.device),
        )
    return out, lse


def sparse_mla_values(
    q: Query,
    rows: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor | None,
    scale: float,
    weight: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor | None = None,
    config: SparseConfig | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Attention's output times W_UV, ``weight`` [H, 512, V], into ``out`` [T, H, V] of q's type, contiguous.

    The rest is :func:`sparse_mla_fwd`'s. Where few rows have splits, their combination and the product are one launch;
    elsewhere the product is cuBLAS's. Both round the attention's output to q's type first.
    """
    nope, rope = _halves(q)
    tokens, heads, _ = nope.shape
    launch = _Launch(nope, slots.shape[1], rows.dtype == torch.uint8, config, splits)
    if values_fuse(tokens * heads, launch.splits, weight):
        part, part_lse = launch.parts(workspace)
        launch.attend((nope, rope), rows, slots, counts, scale, part, part_lse)
        return value_output(part, part_lse, launch.splits, weight, out)
    latent, _ = sparse_mla_fwd(q, rows, slots, counts, scale, None, None, workspace, config, splits)
    torch.bmm(latent.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out


class _Launch:
    """The attention kernel's launch for queries nope [T, H, 512] that look at K slots each."""

    def __init__(
        self, nope: torch.Tensor, keys: int, packed: bool, config: SparseConfig | None, splits: int | None
    ) -> None:
        tokens, heads, _ = nope.shape
        self.of = gpu(nope.device)
        self.config = sparse_config(self.of, packed, heads, tokens) if config is None else config
        wanted = self.config.splits(tokens, heads, keys, self.of.multiprocessors) if splits is None else splits
        self.splits, self.keys_per_split = split_keys(keys, wanted, self.config.block_keys)
        self.nope = nope

    def parts(self, workspace: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the splits' outputs [T * H * splits * 512] and their lse [T * H * splits], fp32."""
        size = self.nope.shape[0] * self.nope.shape[1] * self.splits
        if workspace is None:
            workspace = self.nope.new_empty(size * _PARTIAL, dtype=torch.float32)
        require(workspace.numel() >= size * _PARTIAL, f"workspace must hold {size * _PARTIAL} fp32")
        return workspace[: size * LATENT_DIM], workspace[size * LATENT_DIM : size * _PARTIAL]

    def attend(
        self,
        q: tuple[torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor | None,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Outputs and lse of every split, or of the tokens themselves where there is one."""
        (nope, rope), config, keys = q, self.config, slots.shape[1]
        tokens, heads, _ = nope.shape
        packed = rows.dtype == torch.uint8
        _check(nope, rope, rows, slots, packed)
        if tokens == 0:
            return
        inputs = (slots, slots if counts is None else counts, out, lse, scale * _LOG2_E, keys, self.keys_per_split)
        strides = (token_stride(nope), nope.stride(1), token_stride(rope), rope.stride(1), slots.stride(0))
        constants = {"H": heads, "BH": config.block_heads, "SPLIT": self.splits > 1, "KV_FP8": packed}
        constants |= {"HAS_COUNTS": counts is not None, "num_warps": config.warps} | chained(nope.device)
        grid = (triton.cdiv(heads, config.block_heads), tokens, self.splits)
        if config.wgmma:
            require(rows.data_ptr() % 16 == 0, "rows must begin at a multiple of 16 bytes")
            from glm5deploy.kernels.sparse_mla_hopper import sparse_mla_hopper_kernel  # Gluon: `tuning.wgmma_ready`

            sparse_mla_hopper_kernel[grid](nope, rope, rows, *inputs, *strides, **constants)
        else:
            views = (byte_view(rows, torch.float32), byte_view(rows, ROPE_DTYPE)) if packed else (rows, rows)
            asm = packed and nope.is_cuda and nope.dtype == torch.bfloat16
            constants |= {"BK": config.block_keys, "ASM": asm, "num_stages": config.stages}
            sparse_mla_fwd_kernel[grid](nope, rope, rows, *views, *inputs, *strides, **constants)


def split_keys(keys: int, wanted: int, block_keys: int) -> tuple[int, int]:
    """Splits of K and the slots of each: whole steps, so that rounding up can leave fewer splits than ``wanted``."""
    each = triton.cdiv(triton.cdiv(keys, wanted), block_keys) * block_keys
    return max(1, triton.cdiv(keys, each)), each


def _halves(q: Query) -> tuple[torch.Tensor, torch.Tensor]:
    return q if isinstance(q, tuple) else (q[..., :LATENT_DIM], q[..., LATENT_DIM:])


def _check(nope: torch.Tensor, rope: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, packed: bool) -> None:
    width = PACKED_ROW_BYTES if packed else QK_DIM
    require(rope.shape == (*nope.shape[:2], ROPE_DIM), f"the RoPE part of q must be [T, H, {ROPE_DIM}]")
    require(nope.shape[2] == LATENT_DIM, f"q must have {QK_DIM} dimensions, or {LATENT_DIM} and {ROPE_DIM}")
    require(nope.stride(2) == rope.stride(2) == 1, "q must have unit stride in its last dimension")
    require(rows.shape[1] == width and rows.stride() == (width, 1), f"rows must be contiguous [N, {width}]")
    require(packed or rows.dtype == nope.dtype, "rows must have q's type, or be packed uint8")
    require(slots.dtype == torch.int32 and slots.stride(1) == 1, "slots must be int32 with unit column stride")


def combine_splits(splits: int) -> int:
    """Splits the combine kernel is compiled for: 8, 32 or 64."""
    return 8 if splits <= 8 else 32 if splits <= 32 else 64


def combine_dims(rows: int, of: Gpu) -> int:
    """Dimensions a combine program takes: fewer where the rows alone would leave multiprocessors idle."""
    return 128 if rows < 2 * of.multiprocessors else 512


def split_workspace_elements(heads: int, keys: int, device: torch.device, packed: bool | None = None) -> int:
    """fp32 elements `sparse_mla_fwd` needs at most, over every number of tokens and both cache types (or one)."""
    of = gpu(device)
    kinds = (False, True) if packed is None else (packed,)
    most = 0
    for row in (row for kind in kinds for row in sparse_rows(of, kind, heads)):
        # Splits times programs never exceed this, and one token always gets as many splits as its row allows.
        programs = of.multiprocessors * row.config.per_sm
        head_blocks = triton.cdiv(heads, row.config.block_heads)
        if programs >= 2 * head_blocks:
            most = max(most, programs // head_blocks * heads)
    return max(1, most) * _PARTIAL
