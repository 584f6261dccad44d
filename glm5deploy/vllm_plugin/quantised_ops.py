"""Products with planes as operations that torch.compile and CUDA graphs take whole.

An operation gets planes as a flat list of tensors and a string that says what they are, ``TYPE:ROWS:COLUMNS`` for each
part of a module, separated by commas. On a GPU the Triton products run; on a CPU, torch dequantises in fp32.
"""

# No `from __future__ import annotations` here: torch derives the operations' schemas from annotations that are objects.
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from vllm.utils.torch_utils import direct_register_custom_op

from glm5deploy.quants.formats import Format, format_of
from glm5deploy.quants.planes import Planes
from glm5deploy.quants.token_experts import Choice, Shared

MOE_TOKENS = 4096  # of a MoE call: bounds what its terms take in memory


def plane_names(fmt: Format) -> tuple[str, ...]:
    """The planes that a type has, in the order of :attr:`Planes.tensors`."""
    present = (True, fmt.high > 0, fmt.word_count > 0, fmt.half_count > 0)
    names = ("low", "high", "words", "halves")
    return tuple(name for name, here in zip(names, present, strict=True) if here)


@lru_cache(maxsize=4096)
def _parts(spec: str) -> tuple[tuple[Format, int, int], ...]:
    parts = (part.split(":") for part in spec.split(","))
    return tuple((format_of(name), int(rows), int(columns)) for name, rows, columns in parts)


def describe(fmt: Format, rows: int, columns: int) -> str:
    return f"{fmt.name}:{rows}:{columns}"


def assemble(spec: str, tensors: Sequence[torch.Tensor]) -> list[Planes]:
    """Planes from their flat list of tensors; ValueError when there are too few or too many."""
    rest = list(tensors)
    found = []
    for fmt, rows, columns in _parts(spec):
        names = plane_names(fmt)
        mine: dict[str, Any] = dict.fromkeys(("low", "high", "words", "halves"))
        mine |= {name: rest.pop(0) for name in names}
        found.append(Planes(fmt, rows, columns, **mine))
    if rest:
        raise ValueError(f"{len(rest)} planes more than {spec} has")
    return found


def glm5_linear(x: torch.Tensor, planes: list[torch.Tensor], spec: str) -> torch.Tensor:
    """x [..., K] times every part's weight, results side by side: [..., rows of all parts] in x's type."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    parts = assemble(spec, planes)
    out = x.new_empty((rows.shape[0], sum(part.rows for part in parts)))
    _linear(rows, parts, out)
    return out.view(*x.shape[:-1], out.shape[1])


def _linear(x: torch.Tensor, parts: Sequence[Planes], out: torch.Tensor) -> None:
    if not x.is_cuda:
        from glm5deploy.quants import reference

        torch.cat([reference.linear(x, part) for part in parts], dim=1, out=out)
    else:
        _linear_on_gpu(x, parts, out)


def _linear_on_gpu(x: torch.Tensor, parts: Sequence[Planes], out: torch.Tensor) -> None:
    from glm5deploy.quants import products

    if len(parts) == 2:  # of one layer, of types that differ, or of two layers
        products.linear_pair(x, parts[0], parts[1], out=out)
        return
    start = 0
    for part in parts:
        products.linear(x, part, out=out[:, start : start + part.rows])
        start += part.rows


def _linear_fake(x: torch.Tensor, planes: list[torch.Tensor], spec: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], sum(rows for _, rows, _ in _parts(spec))))


def glm5_embed(ids: torch.Tensor, planes: list[torch.Tensor], spec: str, dtype: torch.dtype) -> torch.Tensor:
    """Rows ``ids`` (int64, any shape) of a weight: [..., columns] of ``dtype``."""
    (table,) = assemble(spec, planes)
    flat = ids.reshape(-1)
    return _rows(table.take(flat), dtype).view(*ids.shape, table.columns)


def _rows(planes: Planes, dtype: torch.dtype) -> torch.Tensor:
    if planes.low.is_cuda and planes.rows:
        from glm5deploy.quants import products

        return products.unpack_rows(planes, 0, planes.rows, dtype)
    from glm5deploy.quants import reference

    return reference.dequantize_planes(planes)[0].to(dtype)


def _embed_fake(ids: torch.Tensor, planes: list[torch.Tensor], spec: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty((*ids.shape, _parts(spec)[0][2]), dtype=dtype, device=ids.device)


def moe(
    x: torch.Tensor,
    planes: Sequence[torch.Tensor],
    spec: str,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    also: Callable[[], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Sum over each token's experts of weight * down(silu(gate x) * up x): [T, hidden] in x's type.

    ``planes`` and ``spec`` are gate, up and down of this rank's experts; ids < 0 are other ranks' or padding. What
    ``also`` gives, asked for once the products are launched, is added; ValueError beyond :data:`MOE_TOKENS`.
    """
    if also is not None and x.shape[0] > MOE_TOKENS:
        raise ValueError(f"{x.shape[0]} tokens are taken in turns, which cannot add what is computed beside them")
    gate, up, down = assemble(spec, planes)
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty((x.shape[0], down.rows))
    for start in range(0, x.shape[0], MOE_TOKENS):
        here = slice(start, start + MOE_TOKENS)
        _moe(x[here], gate, up, down, topk_ids[here], topk_weights[here], out[here], also)
    return out


def _moe(
    x: torch.Tensor,
    gate: Planes,
    up: Planes,
    down: Planes,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    also: Callable[[], torch.Tensor] | None,
) -> None:
    if x.is_cuda:
        from glm5deploy.quants import routed_experts

        routed_experts.moe(x, gate, up, down, ids, weights, out=out, also=also)
    else:
        from glm5deploy.quants import reference

        found = reference.moe(x, gate, up, down, ids, weights)
        out.copy_(found if also is None else found + also())


def experts_of_one(x: torch.Tensor, planes: Sequence[Planes], shared: Shared, choice: Choice) -> torch.Tensor:
    """As ``moe`` for one token, which chooses here, with the shared expert: see :mod:`glm5deploy.quants.one_token`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return _one_on_gpu(x, planes, shared, choice) if x.is_cuda else _one(x, planes, shared, choice)


def _one_on_gpu(x: torch.Tensor, planes: Sequence[Planes], shared: Shared, choice: Choice) -> torch.Tensor:
    from glm5deploy.quants import one_token

    gate, up, down = planes
    return one_token.experts(x, gate, up, down, shared, choice)


def _one(x: torch.Tensor, planes: Sequence[Planes], shared: Shared, choice: Choice) -> torch.Tensor:
    from glm5deploy.quants import reference

    gate, up, down = planes
    return reference.experts_of_one(x, gate, up, down, shared, choice).to(x.dtype)


direct_register_custom_op(op_name="glm5_linear", op_func=glm5_linear, mutates_args=[], fake_impl=_linear_fake)
direct_register_custom_op(op_name="glm5_embed", op_func=glm5_embed, mutates_args=[], fake_impl=_embed_fake)
linear = torch.ops.vllm.glm5_linear
embed = torch.ops.vllm.glm5_embed
