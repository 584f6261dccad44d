"""Compiling ahead in several processes, and other launch parameters than the table's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

import torch

from glm5deploy.kernels.measure import graph_time
from glm5deploy.quants import launch, products, routed_experts
from glm5deploy.quants.formats import FORMATS
from glm5deploy.quants.integer_products import gluon_ready, has_integers
from glm5deploy.quants.launch import Launch
from glm5deploy.quants.planes import Planes
from quant_speed import cases, decode

_FEW = (Launch(32, 8, warps=2), Launch(32, 8, warps=1), Launch(64, 8, warps=2))
_SOME = (Launch(32, 16, warps=2), Launch(64, 16, warps=2), Launch(32, 16, warps=1))
_MANY = (Launch(64, 32), Launch(64, 64), Launch(128, 64, warps=8))
_INTEGERS = tuple(
    Launch(bn, bm, warps=warps, stages=stages, integers=True)
    for bm in (8, 16, 32, 64)
    for bn, warps, stages in ((64, 4, 2), (64, 4, 3), (32, 2, 2), (128, 4, 2))
)
Job = Callable[[], object]


def tiles(tokens: float, integers: bool) -> list[Launch]:
    """Tiles worth trying for so many tokens of a weight, as ``tokens`` are at most 4, 8, 16 or more."""
    plain = _FEW if tokens <= 4 else (*_FEW, *_SOME) if tokens <= 8 else _SOME if tokens <= 16 else (*_SOME, *_MANY)
    wide = (8,) if tokens <= 4 else (8, 16) if tokens <= 16 else (16, 32, 64)
    return [*plain, *(c for c in _INTEGERS if integers and c.bm in wide)]


def can_integers(*weights: Planes) -> bool:
    """Whether products with integers are among what can be tried."""
    return gluon_ready() and all(has_integers(w.format, w.rows, w.columns) for w in weights)


def linear_launches(tokens: int, planes: Planes) -> list[Launch | None]:
    """The table's choice (None) first."""
    found = [
        replace(c, parts=parts)
        for c in tiles(tokens, can_integers(planes))
        for parts in (1, 2, 3, 4, 6, 8)
        if 2 * parts <= planes.supers
    ]
    return [None, *dict.fromkeys(found)]


def moe_launches(tokens: int, gate: Planes, up: Planes, down: Planes) -> list[tuple[Launch, Launch] | None]:
    """The table's choice (None) first; then both products in a tile, and the parts of one or the tiles of the other."""
    searched = tokens * cases.TOPK <= launch.SEARCH_PAIRS
    found = []
    for c in tiles(tokens * cases.TOPK / cases.EXPERTS, can_integers(gate, up, down)):
        parts = (1, 2, 4, 8) if searched or c.integers else (1,)
        found += [(replace(c, parts=count), replace(c, tiles=6)) for count in parts if count <= gate.supers]
        found += [(c, replace(c, tiles=count)) for count in (1, 3, 12, 24)]
    return [None, *dict.fromkeys(found)]


def _linear_options(name: str, tokens: int, sweep: bool) -> list[Launch | None]:
    """What the timed shapes of a type are launched with; a small weight alone would not have all of it."""
    if name not in cases.LINEAR_TYPES or tokens >= launch.DENSE_TOKENS:
        return [None]
    fmt = FORMATS[name]
    table = [products.linear_launch(tokens, fmt, *shape, torch.device("cuda")) for shape in cases.LINEAR_SHAPES]
    more = tiles(tokens, gluon_ready() and has_integers(fmt, 64, 256)) if sweep else []
    found = {c.variant: c for c in (*table, *more) if c is not None}
    return [None, *(replace(c, parts=1) for c in found.values())]


def _compilations(sweep: bool) -> Iterator[Job]:
    """A small product for every variant that the cases run; a variant does not depend on how large a weight is."""
    tokens = sorted({*cases.CHECKED_TOKENS, *cases.LINEAR_TOKENS, *cases.MOE_TOKENS})
    for name in FORMATS:
        weight = cases.weights(name, 128, 512).planes
        for m in tokens:
            yield from (
                lambda m=m, w=weight, c=c: products.linear(cases.activations(m, 512), w, config=c)
                for c in _linear_options(name, m, sweep)
            )
    for names in cases.MOE_TYPES:
        gate, up, down = (cases.weights(name, 256, 256, cases.EXPERTS).planes for name in names)
        for m in tokens:
            ids = torch.zeros((m, cases.TOPK), dtype=torch.int32, device="cuda")
            yield from (
                lambda m=m, w=(gate, up, down), i=ids, c=c: routed_experts.moe(
                    cases.activations(m, 256), *w, i, i.float(), configs=c
                )
                for c in (moe_launches(m, gate, up, down) if sweep else [None])
            )


def compile_share(part: int, parts: int, sweep: str) -> None:
    """``sweep`` as on the command line; empty for none."""
    whole = () if sweep == "decode" else _compilations(bool(sweep))
    for k, job in enumerate(chain(whole, decode.compilations() if sweep else ())):
        if k % parts == part:
            job()
    torch.cuda.synchronize()


def compile_all(script: str, jobs: int, sweep: str) -> None:
    """Fill Triton's cache on disk from ``jobs`` processes of the script."""
    command = [sys.executable, script, *(["--sweep", sweep] if sweep else []), "--compile-share"]
    helpers = [subprocess.Popen([*command, str(k), str(jobs)]) for k in range(jobs)]
    ended = [helper.wait() for helper in helpers]
    if any(ended):
        raise SystemExit(f"processes that compile ended with {ended}")


def _brief(c: Launch) -> str:
    kind = "integers " if c.integers else ""
    return f"{kind}{c.bn}x{c.bm} warps {c.warps} stages {c.stages} parts {c.parts} tiles {c.tiles}"


def sweep_linear(name: str, rows: int, columns: int, tokens: int) -> list[str]:
    """Lines, the quickest first; the table's own choice is marked."""
    count = cases.copies(name, rows, columns)
    planes = [cases.weights(name, rows, columns).planes for _ in range(count)]
    xs = [cases.activations(tokens, columns) for _ in range(count)]
    found = []
    for c in linear_launches(tokens, planes[0]):
        calls = [lambda x=x, w=w, c=c: products.linear(x, w, config=c) for x, w in zip(xs, planes, strict=True)]
        found.append((graph_time(calls, 7, len(calls)), _brief(c) if c else "(table)"))
    return [f"{rows}x{columns} {name} {tokens}: {us:.1f} {text}" for us, text in sorted(found)[:8]]


def sweep_moe(weights: tuple[cases.Weights, cases.Weights, cases.Weights], tokens: int) -> list[str]:
    calls = cases.routed(tokens, 8 if tokens <= 64 else 2)
    gate, up, down = (w.planes for w in weights)
    found = []
    for pair in moe_launches(tokens, gate, up, down):
        runs = [lambda r=r, c=pair: routed_experts.moe(r.x, gate, up, down, r.ids, r.share, configs=c) for r in calls]
        text = f"{_brief(pair[0])} | {_brief(pair[1])}" if pair else "(table)"
        found.append((graph_time(runs, 7, len(runs)), text))
    return [f"MoE {tokens}: {us:.1f} {text}" for us, text in sorted(found)[:8]]
