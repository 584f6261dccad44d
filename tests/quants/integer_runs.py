"""Products with integers, run as they are compiled for a GPU, without one, and how far they are off."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from glm5deploy.quants.arguments import pointers
from glm5deploy.quants.launch import Launch
from tests.kernels.ptx_program import Program
from tests.quants.gluon_source import integer_source
from tests.quants.integer_cases import TOPK, awkward_planes, awkward_rows, missed, pairs_of, products

POISON = 0x7FE1  # where nothing belongs: bf16 NaN of its own
NOBODY = 0x7FFF_FFFF  # in lists of pairs
FIT_ROWS = 2  # that a program fits
EMPTY = 0  # the expert without pairs, whose weights are NaN


@dataclass(frozen=True)
class Case:
    """Weights' types, launch, outputs, super-blocks, rows or pairs of each expert, the GPU, and terms' type."""

    types: tuple[str, ...]
    launch: Launch
    n: int
    supers: int
    counts: tuple[int, ...]
    arch: int = 90
    terms: str = "*bf16"


FIT = Case((), Launch(0, 0), 0, 0, ())
Change = tuple[str, str]  # of a kernel's text: what is sought, and what is put there


def build(
    kernel: Any, case: Case, formats: dict[str, str], others: dict[str, Any], change: Change = ("", "")
) -> Program:
    import triton
    from triton.backends.compiler import GPUTarget

    c = case.launch
    constants = {"BN": c.bn, "BM": c.bm, "WARPS": c.warps, "STAGES": c.stages} | others
    constants = {n: value for n, value in constants.items() if n in kernel.arg_names}
    source = integer_source(kernel, formats, constants, case.terms)
    made = triton.compile(source, target=GPUTarget("cuda", case.arch, 32), options=c.options)
    text = made.asm["ptx"]
    assert change[0] in text
    return Program(text.replace(*change) if change[0] else text, 32 * c.warps, made.metadata.shared)


def run_grid(program: Program, grid: Sequence[int], parameters: list[Any]) -> None:
    """All programs, in an order of no order."""
    places = list(itertools.product(*(range(size) for size in grid)))
    for at in np.random.default_rng(2).permutation(len(places)):
        program.run(places[at], parameters, grid)


def memory_for(x: torch.Tensor) -> list[Any]:
    """x bf16 [R, K], and room for what products take of it; see ``fit_kernel``."""
    rows, columns = x.shape
    room = [np.full(size, np.nan, np.float16) for size in ((rows, columns), (rows, columns // 8))]
    return [x.view(torch.int16).numpy(), *room, np.full(rows, np.nan, np.float32)]


def fit_constants(columns: int) -> dict[str, int]:
    """One kernel for most, as compiling takes longer than running."""
    return {"SUPERS": 4 if columns <= 1024 else 16, "ROWS": FIT_ROWS}


def fitted(x: torch.Tensor, used: Any) -> list[Any]:
    """What products take of x; NaN of rows that nothing uses."""
    from glm5deploy.quants.activations import fit_kernel

    (rows, columns), memory = x.shape, memory_for(x)
    program = build(fit_kernel, FIT, {}, fit_constants(columns))
    run_grid(program, (-(-rows // FIT_ROWS),), [*memory, rows, columns, columns])
    return without_others(memory[1:], used)


def without_others(fit: list[Any], used: Any) -> list[Any]:
    for numbers in fit:
        numbers[~np.isin(np.arange(len(numbers)), used)] = np.nan
    return fit


def sorted_and_fitted(ids: torch.Tensor, x: torch.Tensor, experts: int, bm: int) -> tuple[list[Any], list[Any]]:
    """Order and work items of pairs, and what products take of x."""
    from glm5deploy.quants.activations import sort_fit_kernel

    pairs, (rows, columns), memory = ids.numel(), x.shape, memory_for(x)
    order, work = np.full(pairs, NOBODY, np.int32), np.full((experts + pairs // bm, 3), NOBODY, np.int32)
    program = build(sort_fit_kernel, FIT, {}, fit_constants(columns) | {"BM": bm, "CHUNK": 32})
    given = [ids.numpy(), order, work, pairs, experts, *memory, rows, columns, columns]
    run_grid(program, (experts + -(-rows // FIT_ROWS),), given)
    return [order, work], without_others(memory[1:], np.flatnonzero((ids >= 0).any(1).numpy()))


def verdict(out: Any, rows: Any, exact: torch.Tensor, slack: torch.Tensor, tickets: Any) -> dict[str, Any]:
    """`out` bits of bf16 or fp32 [R, N or more], of which `rows` belong to `exact` [rows, N]."""
    n, half = exact.shape[1], out.itemsize == 2
    found = torch.from_numpy(out[rows, :n].view(np.int16 if half else np.int32))
    found = found.view(torch.bfloat16 if half else torch.float32)
    rest = out.copy()
    rest[rows, :n] = POISON
    return missed(found, exact, slack) | {"stray": int((rest != POISON).sum()), "unfinished": int((tickets != 0).sum())}


def bits(planes: Any) -> list[Any]:
    return [plane.numpy() for plane in pointers(planes)]


def gate_up(case: Case, change: Change = ("", "")) -> dict[str, Any]:
    from glm5deploy.quants.integer_moe import integer_gate_up_kernel

    c, n, experts = case.launch, case.n, len(case.counts)
    ids = pairs_of(case.counts)
    mine, count = np.flatnonzero(ids.reshape(-1).numpy() >= 0), ids.numel()
    x = awkward_rows(len(ids), case.supers * 256, 1e15)
    gate, up = (awkward_planes(name, experts, n, case.supers, EMPTY, seed) for seed, name in enumerate(case.types))
    lists, fit = sorted_and_fitted(ids, x, experts, c.bm)
    blocks = -(-n // c.bn)
    hidden, parts = np.full((count, n), POISON, np.uint16), np.full((c.parts, count, 2 * n), np.nan, np.float32)
    tickets = np.zeros(count * blocks, np.int32)
    formats = dict(zip("GU", case.types, strict=True))
    program = build(integer_gate_up_kernel, case, formats, {"TOPK": TOPK}, change)
    given = [*fit, *bits(gate), *bits(up), *lists, hidden, parts, tickets, count, n, case.supers, c.parts]
    run_grid(program, (blocks, len(lists[1]), c.parts), given)
    chosen = ids.reshape(-1)[mine].long()
    a, b = (products(x[mine // TOPK], planes, chosen) for planes in (gate, up))
    active = torch.nn.functional.silu(a.exact)
    slack = 1.1 * a.slack * (b.exact.abs() + b.slack) + active.abs() * (b.slack + 2.0**-18 * b.exact.abs())
    return verdict(hidden, mine, active * b.exact, slack, tickets)


def down(case: Case) -> dict[str, Any]:
    from glm5deploy.quants.integer_moe import integer_down_kernel

    c, n, experts = case.launch, case.n, len(case.counts)
    ids = pairs_of(case.counts)
    mine, count = np.flatnonzero(ids.reshape(-1).numpy() >= 0), ids.numel()
    x = awkward_rows(count, case.supers * 256, 1e30)
    (name,) = case.types
    planes = awkward_planes(name, experts, n, case.supers, EMPTY, 2)
    weights = torch.rand(count, generator=torch.Generator().manual_seed(1))
    (order, work), _ = sorted_and_fitted(ids, x[:: ids.shape[1]].contiguous(), experts, c.bm)
    terms = np.full((count, n), POISON, np.uint16 if case.terms == "*bf16" else np.uint32)
    program = build(integer_down_kernel, case, {"FMT": name}, {"SUPERS": case.supers})
    given = [*fitted(x, mine), *bits(planes), order, work, weights.numpy(), terms, n, c.tiles]
    run_grid(program, (-(-n // (c.bn * c.tiles)), len(work)), given)
    found, share = products(x[mine], planes, ids.reshape(-1)[mine].long()), weights[mine, None].double()
    return verdict(terms, mine, found.exact * share, found.slack * share, np.zeros(1))


def linear(case: Case) -> dict[str, Any]:
    from glm5deploy.quants.integer_linear import integer_linear_kernel

    c, n, (name,), (m,) = case.launch, case.n, case.types, case.counts
    x = awkward_rows(m, case.supers * 256, 1e30)
    planes = awkward_planes(name, 1, n, case.supers, 1, 4)
    blocks = -(-m // c.bm), -(-n // c.bn)
    y, parts = np.full((m, n + 16), POISON, np.uint16), np.full((*blocks, c.parts, c.bm, c.bn), np.nan, np.float32)
    tickets = np.zeros(blocks, np.int32)
    program = build(integer_linear_kernel, case, {"FMT": name}, {})
    given = [*fitted(x, np.arange(m)), *bits(planes), y, parts, tickets, m, n, n + 16, case.supers, c.parts]
    run_grid(program, (*blocks, c.parts), given)
    found = products(x, planes, torch.zeros(m, dtype=torch.int64))
    return verdict(y, np.arange(m), found.exact, found.slack, tickets)
