"""Tiles of 8 and 16 tokens with launches that the table does not take yet: loads where they are multiplied, two widths.

A variant is checked against fp32 first; what is not right is not timed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import torch

from glm5deploy.quants import launch, products
from glm5deploy.quants.launch import Launch
from glm5deploy.quants.planes import Planes
from quant_speed import cases
from quant_speed.decode import Timed, table, timed_row
from quant_speed.report import RATE

SHAPES = ((2624, 6144), (19360, 6144))
TYPES = ("Q4_K", "Q6_K")
# (types, tokens); fp32 terms up to 128 tokens, then bf16
LAYERS = ((cases.MOE_TYPES[0], 256), (cases.MOE_TYPES[1], 256), (cases.MOE_TYPES[0], 64), (cases.MOE_TYPES[0], 128))

_GATE_UP = {
    "late": Launch(64, 8, warps=2, stages=2, late=True),
    "late, 3 stages": Launch(64, 8, warps=2, late=True),
    "late, 128 registers": Launch(64, 8, warps=2, stages=2, late=True, registers=128),
    "two widths": Launch(64, 16, warps=2, narrow=8),
    "two widths, 32 rows": Launch(32, 16, warps=1, narrow=8),
    "two widths, late": Launch(64, 16, warps=2, stages=2, narrow=8, late=True),
    "two widths, late, 128 registers": Launch(64, 16, warps=2, stages=2, narrow=8, late=True, registers=128),
    "two widths, late, 32 rows": Launch(32, 16, warps=1, stages=2, narrow=8, late=True),
    "16 wide, late": Launch(64, 16, warps=2, stages=2, late=True),
}
_DOWN = {
    "late": Launch(64, 8, warps=2, stages=2, late=True),
    "late, 3 stages": Launch(64, 8, warps=2, late=True),
    "two widths": Launch(64, 16, warps=2, narrow=8),
    "two widths, late": Launch(64, 16, warps=2, stages=2, narrow=8, late=True),
    "two widths, 32 rows": Launch(32, 16, warps=1, stages=2, narrow=8, late=True),
}
# Each launch of gate and up with its own of down, then one part from another
_PAIRS = {name: (name, name) for name in _DOWN} | {
    "late, 128 registers": ("late, 128 registers", "late"),
    "two widths, 32 rows": ("two widths, 32 rows", "two widths"),
    "two widths, late, 128 registers": ("two widths, late, 128 registers", "two widths, late"),
    "two widths, late, 32 rows": ("two widths, late, 32 rows", "two widths, 32 rows"),
    "16 wide, late": ("16 wide, late", "two widths, late"),
}


def _processors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def linear_variants(tokens: int, rows: int, supers: int) -> dict[str, Launch]:
    """The table's launch, and late ones with the parts that suit their resident programs, one fewer and one more."""
    first = launch.linear_launch(tokens, rows, supers, _processors())
    found = {"table": first}
    if tokens > 8:
        late = {
            "64 rows, late": Launch(64, 16, warps=2, stages=2, late=True, resident=7),
            "64 rows, late, 3 stages": Launch(64, 16, warps=2, late=True, resident=6),
            "64 rows, late, 112 registers": Launch(64, 16, warps=2, stages=2, late=True, registers=112, resident=9),
            "32 rows, late": Launch(32, 16, warps=1, stages=2, late=True, resident=14),
        }
    else:
        late = {"late": replace(first, stages=2, late=True, resident=19 if first.warps == 1 else first.resident)}
    for name, c in late.items():
        best = launch._parts(c, -(-rows // c.bn), supers, _processors())
        for parts in sorted({max(1, best - 1), best, best + 1}):
            found[f"{name}, {parts} parts"] = replace(c, parts=parts)
    return found


def moe_variants(tokens: int) -> dict[str, tuple[Launch, Launch]]:
    """The table's pair of launches, then others."""
    pairs = tokens * cases.TOPK
    first = (
        launch.gate_up_launch(pairs, cases.EXPERTS, cases.UNITS, cases.HIDDEN // 256, _processors()),
        launch.down_launch(pairs, cases.EXPERTS, cases.HIDDEN, _processors()),
    )
    spans = first[1].tiles * first[1].bn  # outputs of a program of down
    return {"table": first} | {
        name: (_GATE_UP[a], replace(_DOWN[b], tiles=max(1, spans // _DOWN[b].bn))) for name, (a, b) in _PAIRS.items()
    }


def compilations() -> Iterator[Callable[[], object]]:
    """Every kernel once, with few rows: a variant does not depend on how many there are."""
    layers = {(names[2], tokens * cases.TOPK <= products.EXACT_TERMS): (names, tokens) for names, tokens in LAYERS}
    done = set()
    for names, tokens in layers.values():
        gate, up, down = (cases.weights(name, 256, 256, cases.EXPERTS).planes for name in names)
        ids = torch.zeros((tokens, cases.TOPK), dtype=torch.int32, device=cases.DEVICE)
        for a, b in moe_variants(tokens).values():
            for which, key in (("gate_up", a.variant), ("down", (names[2], tokens, b.variant))):
                if (which, key) not in done:
                    done.add((which, key))
                    yield lambda w=which, p=(gate, up, down), i=ids, c=(a, b): _one_kernel(w, *p, i, c)
    for name in TYPES:
        small = cases.weights(name, 64, 6144).planes
        for m in (1, 8, 16):
            x = cases.activations(m, 6144)
            found = {
                c.variant: c for rows, columns in SHAPES for c in linear_variants(m, rows, columns // 256).values()
            }
            for c in found.values():
                yield lambda x=x, w=small, c=c: products.linear(x, w, config=replace(c, parts=1))


def _one_kernel(
    which: str, gate: Planes, up: Planes, down: Planes, ids: torch.Tensor, configs: tuple[Launch, Launch]
) -> None:
    """Gate and up, or sort, down and sum, of a layer of experts: each compiles in a process of its own."""
    x = cases.activations(ids.shape[0], 256)
    c = products._moe_launch(ids.shape[0], ids.shape[1], gate, up, down, ids.device, configs)
    work = products._find_pairs(ids, gate.experts, c)
    hidden = torch.zeros((ids.numel(), gate.rows), dtype=x.dtype, device=ids.device)
    if which == "gate_up":
        products._gate_up(x, gate, up, ids, work, hidden, c)
    else:
        products._down(hidden, down, ids, ids.float(), work, torch.empty_like(x), c, None)


def moe_times() -> Iterator[Timed]:
    made: dict[tuple[str, str, str], tuple[cases.Weights, cases.Weights, cases.Weights]] = {}
    for names, tokens in LAYERS:
        if names not in made:
            made.clear()
            made[names] = cases.expert_weights(names)
        planes = [w.planes for w in made[names]]
        calls = cases.routed(tokens, 4)
        gate, up, down = (w.dense() for w in made[names])
        expected = cases.moe_reference(calls[0], (gate, up, down))
        del gate, up, down
        floor = cases.mean_active(calls) * sum(p.nbytes for p in planes) / cases.EXPERTS / RATE * 1e6
        for label, c in moe_variants(tokens).items():
            runs = [lambda r=r, p=planes, c=c: products.moe(r.x, *p, r.ids, r.share, configs=c) for r in calls]
            yield timed_row(Timed(f"MoE {'/'.join(names)}", tokens, label, floor, 0.0), runs, expected)


def linear_times() -> Iterator[Timed]:
    for name in TYPES:
        for rows, columns in SHAPES:
            sets = [cases.weights(name, rows, columns).planes for _ in range(cases.copies(name, rows, columns))]
            exact = cases.reference.dequantize_planes(sets[0])[0].T
            for m in (16, 8, 1):
                xs = [cases.activations(m, columns) for _ in sets]
                expected = xs[0].float() @ exact
                for label, c in linear_variants(m, rows, columns // 256).items():
                    calls = [
                        lambda x=x, w=w, c=c: products.linear(x, w, config=c) for x, w in zip(xs, sets, strict=True)
                    ]
                    row = Timed(f"{rows}x{columns} {name}", m, label, sets[0].nbytes / RATE * 1e6, 0.0)
                    yield timed_row(row, calls, expected)


def tiles_sweep(out: Path | None) -> int:
    """Print and keep each figure as it comes; 1 where a variant is wrong."""
    rows: list[Timed] = []
    for row in chain(linear_times(), moe_times()):
        rows.append(row)
        us = "WRONG" if row.us is None else f"{row.us:.1f} us"
        print(f"{row.what} {row.tokens} {row.variant}: {us}, error {row.error:.2e}", flush=True)
        if out is not None:
            out.write_text(
                json.dumps({"gpu": torch.cuda.get_device_name(), "tiles": [asdict(r) for r in rows]}, indent=1)
            )
    print(table(rows))
    return int(any(row.us is None for row in rows))
