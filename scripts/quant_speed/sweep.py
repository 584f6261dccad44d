"""Compiling ahead in several processes, and other launch parameters than the table's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

import torch

from glm5deploy.kernels.measure import graph_time
from glm5deploy.quants import launch, products
from glm5deploy.quants.formats import FORMATS
from glm5deploy.quants.launch import Launch
from quant_speed import cases, decode

_FEW = (Launch(32, 8, warps=2), Launch(32, 8, warps=1), Launch(64, 8, warps=2))
_SOME = (Launch(32, 16, warps=2), Launch(64, 16, warps=2), Launch(32, 16, warps=1))
_MANY = (Launch(64, 32), Launch(64, 64), Launch(128, 64, warps=8))
Job = Callable[[], object]


def tiles(tokens: float) -> tuple[Launch, ...]:
    """Tiles worth trying for so many tokens of a weight."""
    return _FEW if tokens <= 4 else (*_FEW, *_SOME) if tokens <= 8 else _SOME if tokens <= 16 else (*_SOME, *_MANY)


def linear_launches(tokens: int, rows: int, supers: int) -> list[Launch]:
    """The table's choice first."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    found = [launch.linear_launch(tokens, rows, supers, multiprocessors)]
    found += [replace(c, parts=parts) for c in tiles(tokens) for parts in (1, 2, 4, 8) if 2 * parts <= supers]
    return list(dict.fromkeys(found))


def moe_launches(tokens: int, supers: int) -> list[tuple[Launch, Launch]]:
    """The table's choice, then one launch at a time; where pairs are sorted both have the same tile of tokens."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    pairs = tokens * cases.TOPK
    a = launch.gate_up_launch(pairs, cases.EXPERTS, cases.UNITS, supers, multiprocessors)
    b = launch.down_launch(pairs, cases.EXPERTS, cases.HIDDEN, multiprocessors)
    searched = pairs <= launch.SEARCH_PAIRS
    mean = pairs / cases.EXPERTS
    found = [(a, b)]
    for c in tiles(mean):
        if searched or c.bm == a.bm:
            found += [(replace(c, parts=parts), b) for parts in ((1, 2, 4, 8) if searched else (1,))]
            found += [(a, replace(c, tiles=count)) for count in (1, 2, 4, 8, 16)]
        else:
            found.append((c, replace(c, tiles=8)))
    return list(dict.fromkeys(found))


def _linear_options(name: str, tokens: int, sweep: bool) -> list[Launch | None]:
    """What the timed shapes of a type are launched with; a small weight alone would not have all of it."""
    if name not in cases.LINEAR_TYPES or tokens >= launch.DENSE_TOKENS:
        return [None]
    tables = [linear_launches(tokens, rows, columns // 256)[0] for rows, columns in cases.LINEAR_SHAPES]
    found = {c.variant: c for c in (*tables, *(tiles(tokens) if sweep else ()))}
    return [None, *(replace(c, parts=1) for c in found.values())]


def _compilations(sweep: bool) -> Iterator[Job]:
    """A small product for every variant that the cases run; a variant does not depend on how large a weight is."""
    tokens = sorted({*cases.CHECKED_TOKENS, *cases.LINEAR_TOKENS, *cases.MOE_TOKENS})
    for name in FORMATS:
        weight = cases.weights(name, 64, 512).planes
        for m in tokens:
            yield from (
                lambda m=m, w=weight, c=c: products.linear(cases.activations(m, 512), w, config=c)
                for c in _linear_options(name, m, sweep)
            )
    for names in cases.MOE_TYPES:
        gate, up, down = (cases.weights(name, 256, 256, cases.EXPERTS).planes for name in names)
        for m in tokens:
            ids = torch.zeros((m, cases.TOPK), dtype=torch.int32, device="cuda")
            options = [None, *moe_launches(m, 24)[: None if sweep else 1]]  # the table, for these and the timed sizes
            yield from (
                lambda m=m, w=(gate, up, down), i=ids, c=c: products.moe(
                    cases.activations(m, 256), *w, i, i.float(), configs=c
                )
                for c in options
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
    return f"{c.bn}x{c.bm} warps {c.warps} stages {c.stages} parts {c.parts} tiles {c.tiles}"


def sweep_linear(name: str, rows: int, columns: int, tokens: int) -> list[str]:
    """Lines, the quickest first; the table's own choice is marked."""
    count = cases.copies(name, rows, columns)
    planes = [cases.weights(name, rows, columns).planes for _ in range(count)]
    xs = [cases.activations(tokens, columns) for _ in range(count)]
    found = []
    for k, c in enumerate(linear_launches(tokens, rows, planes[0].supers)):
        calls = [lambda x=x, w=w, c=c: products.linear(x, w, config=c) for x, w in zip(xs, planes, strict=True)]
        found.append((graph_time(calls, 7, len(calls)), f"{_brief(c)}{' (table)' if k == 0 else ''}"))
    return [f"{rows}x{columns} {name} {tokens}: {us:.1f} {text}" for us, text in sorted(found)[:8]]


def sweep_moe(weights: tuple[cases.Weights, cases.Weights, cases.Weights], tokens: int) -> list[str]:
    calls = cases.routed(tokens, 8 if tokens <= 64 else 2)
    planes = [w.planes for w in weights]
    found = []
    for k, pair in enumerate(moe_launches(tokens, planes[0].supers)):
        runs = [lambda r=r, c=pair: products.moe(r.x, *planes, r.ids, r.share, configs=c) for r in calls]
        text = f"{_brief(pair[0])} | {_brief(pair[1])}{' (table)' if k == 0 else ''}"
        found.append((graph_time(runs, 7, len(runs)), text))
    return [f"MoE {tokens}: {us:.1f} {text}" for us, text in sorted(found)[:8]]
