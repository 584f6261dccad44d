"""A decoded token's products, each with the launch that the table takes and with those that may be quicker.

A variant is checked against fp32 first; what is not right is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from glm5deploy.kernels.measure import graph_time
from glm5deploy.quants import launch, products, routed_experts
from glm5deploy.quants.launch import Launch
from glm5deploy.quants.planes import Planes
from quant_speed import cases
from quant_speed.report import LIMIT, RATE

# A layer's linear weights on one of eight ranks: what, types (one, or two in one launch), rows of each, columns
LINEAR = (
    ("q_a", ("Q5_K",), (2048,), 6144),
    ("kv_a", ("Q8_0",), (576,), 6144),
    ("q_a + kv_a", ("Q5_K", "Q8_0"), (2048, 576), 6144),
    ("q_b", ("Q8_0",), (2048,), 2048),
    ("o", ("Q5_K",), (6144,), 2048),
    ("shared gate + up", ("Q5_K",), (512,), 6144),
    ("shared down", ("Q6_K",), (6144,), 256),
    ("wq_b", ("Q8_0",), (4096,), 2048),
    ("q_b + wq_b", ("Q8_0", "Q8_0"), (2048, 4096), 2048),
    ("head", ("Q6_K",), (19360,), 6144),
)
TOKENS = (1, 2, 4, 8, 16)
Weights = tuple[Planes, ...]


@dataclass
class Timed:
    """One variant: microseconds (None: wrong, and not timed), and its error against fp32."""

    what: str
    tokens: int
    variant: str
    floor: float
    error: float
    us: float | None = None


def _gpu() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def linear_variants(weights: Weights, rows: tuple[int, ...], tokens: int) -> dict[str, Launch | None]:
    """For weights of ``rows`` rows; None is two launches for two weights."""
    if len(weights) == 1:
        w = weights[0]
        return {"table": products.linear_launch(tokens, w.format, sum(rows), w.columns, w.low.device)}
    both = launch.pair_launch(tokens, sum(rows), weights[0].supers, _gpu())
    if both is None:
        return {"two launches": None}
    fewer, more = max(1, both.parts - 2), min(launch.MOST_PARTS, both.parts + 2)
    others = {f"one launch, {parts} parts": replace(both, parts=parts) for parts in (fewer, more)}
    return {"two launches": None, "one launch": both} | others


def moe_variants(gate: Planes) -> dict[str, tuple[Launch, Launch]]:
    """For one token."""
    a = launch.gate_up_launch(cases.TOPK, cases.EXPERTS, cases.UNITS, gate.supers, _gpu())
    b = launch.down_launch(cases.TOPK, cases.EXPERTS, cases.HIDDEN, _gpu())
    return {"table": (a, b)}


def call_linear(x: torch.Tensor, weights: Weights, c: Launch | None) -> torch.Tensor:
    if len(weights) == 1:
        return products.linear(x, weights[0], config=c)
    if c is None:
        return torch.cat([products.linear(x, planes) for planes in weights], 1)
    return products.linear_pair(x, *weights, config=c)


def compilations() -> Iterator[Callable[[], object]]:
    """Every variant once, with few rows: a variant does not depend on how many there are."""
    for _, types, rows, columns in LINEAR:
        small = tuple(cases.weights(name, 64, columns).planes for name in types)
        for m in TOKENS:
            x = cases.activations(m, columns)
            for c in linear_variants(small, rows, m).values():
                yield lambda x=x, w=small, c=c: call_linear(x, w, c)
    for names in cases.MOE_TYPES:
        few = [w.planes for w in cases.expert_weights(names, cases.TOPK)]
        ids = torch.arange(cases.TOPK, dtype=torch.int32, device="cuda")[None]
        x = cases.activations(1, cases.HIDDEN)
        for c in moe_variants(few[0]).values():
            yield lambda x=x, w=few, i=ids, c=c: routed_experts.moe(x, *w, i, i.float(), configs=c)


def timed_row(row: Timed, calls: list[Callable[[], torch.Tensor]], expected: torch.Tensor) -> Timed:
    """The row with the error of the first call and, if that is right, the time of all in turn."""
    row.error = cases.error(calls[0](), expected)
    if row.error <= LIMIT:
        row.us = graph_time(calls, 10, len(calls))
    return row


def linear_times() -> Iterator[Timed]:
    for what, types, rows, columns in LINEAR:
        nbytes = sum(r * columns * cases.format_of(t).plane_bytes // 256 for t, r in zip(types, rows, strict=True))
        count = max(2, min(48, round(2e8 / nbytes)))
        sets = [
            tuple(cases.weights(t, r, columns).planes for t, r in zip(types, rows, strict=True)) for _ in range(count)
        ]
        exact = torch.cat([cases.reference.dequantize_planes(p)[0] for p in sets[0]]).T
        for m in TOKENS:
            xs = [cases.activations(m, columns) for _ in sets]
            for label, c in linear_variants(sets[0], rows, m).items():
                calls = [lambda x=x, w=w, c=c: call_linear(x, w, c) for x, w in zip(xs, sets, strict=True)]
                row = Timed(f"{what} {'+'.join(types)}", m, label, nbytes / RATE * 1e6, 0.0)
                yield timed_row(row, calls, xs[0].float() @ exact)


def moe_times() -> Iterator[Timed]:
    for names in cases.MOE_TYPES:
        weights = cases.expert_weights(names)
        planes = [w.planes for w in weights]
        calls = cases.routed(1, 16)
        expected = cases.moe_reference(calls[0], tuple(w.dense() for w in weights))  # type: ignore[arg-type]
        floor = cases.TOPK * sum(p.nbytes for p in planes) / cases.EXPERTS / RATE * 1e6
        for label, c in moe_variants(planes[0]).items():
            runs = [lambda r=r, w=planes, c=c: routed_experts.moe(r.x, *w, r.ids, r.share, configs=c) for r in calls]
            yield timed_row(Timed(f"MoE {'/'.join(names)}", 1, label, floor, 0.0), runs, expected)


def table(rows: list[Timed]) -> str:
    """One line a product and count of tokens: the table's time, and the others', the quickest first."""
    lines = []
    for what, tokens in dict.fromkeys((r.what, r.tokens) for r in rows):
        mine = [r for r in rows if (r.what, r.tokens) == (what, tokens)]
        times = ", ".join(f"{r.variant} {r.us:.2f}" for r in sorted((r for r in mine if r.us), key=lambda r: r.us or 0))
        wrong = "".join(f"; WRONG {r.variant} {r.error:.1e}" for r in mine if r.us is None)
        lines.append(f"{what} {tokens}: floor {mine[0].floor:.1f} | {times}{wrong}")
    return "\n".join(lines)
