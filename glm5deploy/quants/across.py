"""Launches of the kernels that take one token: which products they can take, and the calls."""

from __future__ import annotations

import torch
import triton

from glm5deploy.quants import launch
from glm5deploy.quants.across_kernel import down_across_kernel, gate_up_across_kernel, linear_across_kernel
from glm5deploy.quants.arguments import early_options, kernel_format, pointers, shared_memory
from glm5deploy.quants.counters import prepare
from glm5deploy.quants.formats import Format
from glm5deploy.quants.planes import Planes


def _super_bytes(fmt: Format) -> int:
    """What a super-block takes in shared memory: halves are copied with the 32 bits that hold them."""
    return fmt.plane_bytes + 2 * fmt.half_count


def _launch(planes: Planes, beside: int = 1) -> launch.Launch:
    shared = shared_memory(planes.low.device)
    return launch.across_launch(planes.supers, _super_bytes(planes.format), shared, beside)


def _check_launch(planes: Planes, c: launch.Launch, tokens: int) -> None:
    """Refuse launches that do not fit; make the counters, which a later product in a capture could not make."""
    prepare(planes.low.device)
    if tokens != 1:
        raise ValueError(f"these kernels take one token, not {tokens}")
    if not c.across or planes.supers % c.across:
        raise ValueError(f"{planes.supers} super-blocks along K cannot be taken {c.across} at a time")


def linear_launch(weights: tuple[Planes, ...]) -> launch.Launch | None:
    """For one token times weights of equal inputs; None where a type has no scales and the other kernels take it."""
    if any(planes.format.dense for planes in weights):
        return None
    most = max(weights, key=lambda planes: _super_bytes(planes.format))
    return _launch(most)


def linear(x: torch.Tensor, weights: tuple[Planes, ...], out: torch.Tensor, c: launch.Launch) -> None:
    """x [1, K] times one weight or two, side by side into out [1, rows of both]."""
    first, second = weights[0], weights[-1]
    _check_launch(first, c, x.shape[0])
    others = sum(planes.rows for planes in weights[1:])
    formats = [kernel_format(planes.format) for planes in weights]
    grid = (sum(triton.cdiv(planes.rows, c.bn) for planes in weights),)
    linear_across_kernel[grid](
        x, *pointers(first), *pointers(second), out, first.rows, others, first.columns, first.supers,
        A=formats[0], B=formats[1] if others else (), BN=c.bn, E=c.warps, STAGES=c.stages,
        EVEN=first.columns % 256 == 0, PTX=x.dtype == torch.bfloat16, num_warps=c.warps,
        **early_options(c.early, x.device),
    )  # fmt: skip


def gate_up_launch(gate: Planes, up: Planes) -> launch.Launch | None:
    """For gate and up of one token's experts: of one type with scales, or None."""
    if gate.format.dense or gate.format.name != up.format.name:
        return None
    return _launch(gate, 2)


def gate_up(
    x: torch.Tensor, gate: Planes, up: Planes, ids: torch.Tensor, hidden: torch.Tensor, c: launch.Launch
) -> None:
    """hidden [TOPK, units] = silu(gate x) * up x of the experts ids [1, TOPK]; rows of ids < 0 stay as they are."""
    _check_launch(gate, c, ids.shape[0])
    gate_up_across_kernel[(triton.cdiv(gate.rows, c.bn), ids.shape[1])](
        x, *pointers(gate), *pointers(up), ids, hidden, gate.rows, gate.columns, gate.supers,
        FMT=kernel_format(gate.format), BN=c.bn, E=c.warps, STAGES=c.stages,
        EVEN=gate.columns % 256 == 0, PTX=x.dtype == torch.bfloat16, num_warps=c.warps,
        **early_options(c.early, x.device),
    )  # fmt: skip


def down_launch(down: Planes, topk: int) -> launch.Launch | None:
    """For down and the sum over ``topk`` experts of one token, a power of two up to 16; else None."""
    if down.format.dense or topk > 16 or topk & (topk - 1):
        return None
    return _launch(down, topk)


def down(
    hidden: torch.Tensor,
    planes: Planes,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    c: launch.Launch,
) -> None:
    """out [1, rows] = sum over the experts ids [1, TOPK] of weights * (down hidden [TOPK, units])."""
    _check_launch(planes, c, ids.shape[0])
    down_across_kernel[(triton.cdiv(planes.rows, c.bn),)](
        hidden, *pointers(planes), ids, weights, out, planes.rows, planes.columns, planes.supers,
        FMT=kernel_format(planes.format), TOPK=ids.shape[1], BN=c.bn, E=c.warps, STAGES=c.stages,
        EVEN=planes.columns % 256 == 0, PTX=out.dtype == torch.bfloat16, num_warps=c.warps,
        **early_options(c.early, out.device),
    )  # fmt: skip
