"""The ways of selecting that `topk_config.VARIANTS` names: compiled side by side, compared, timed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from vllm_topk import FAILURES, Choose, decode_choice, prefill_choice, reason, vllm_ops

from glm5deploy.kernels import reference
from glm5deploy.kernels.measure import graph_time
from glm5deploy.kernels.topk import select_topk, topk_workspace_elements
from glm5deploy.kernels.topk_config import MOST_SHARED_ROWS, VARIANTS, TopkConfig, runnable, topk_config
from glm5deploy.kernels.tuning import gpu
from tests.kernels.topk_rows import POISON, awkward_rows, close_rows, deceiving_rows

K = 2048
BOTH = ("keys", "steps")
# By columns of a row: which ways are measured.
NAMES: dict[int, tuple[str, ...]] = {
    4096: BOTH,
    8192: BOTH,
    12_288: BOTH,
    16_384: BOTH,
    24_576: ("keys",),
    32_768: ("keys",),
    131_072: ("keys",),
}
SHAPES = [(rows, width) for width in NAMES for rows in ((1, 2048) if width == 4096 else (1, 8, 64, 2048))]
INPUT_SETS = 4
MOST_COOPERATIVE = 64  # rows of vLLM's cooperative_topk
ALONE = MOST_SHARED_ROWS + 1  # as many rows as no two programs share one of
MOST_BYTES = 2 << 30  # of one kind of inputs
Row = dict[str, object]


def launched(config: TopkConfig, rows: int, width: int) -> Hashable:
    """The same for two configurations that launch the same."""
    multiprocessors = gpu(torch.device("cuda", 0)).multiprocessors
    if held := config.step(width, rows > multiprocessors) or config.block(width):
        return held
    return config.parts(rows, width, multiprocessors)


def variants(rows: int, width: int) -> dict[str, TopkConfig]:
    """Those of this width that differ at this shape."""
    arch = gpu(torch.device("cuda", 0)).arch
    found: dict[Hashable, str] = {}
    for name in NAMES[width]:
        found.setdefault(launched(runnable(VARIANTS[name], arch), rows, width), name)
    return {name: runnable(VARIANTS[name], arch) for name in found.values()}


def choice(config: TopkConfig, rows: int, width: int) -> Choose:
    """select_topk as (scores, lengths, out, longest), with scratch memory for this shape."""
    size = topk_workspace_elements(rows, width, K, config)
    scratch = torch.full((max(1, size),), POISON, dtype=torch.int32, device="cuda")

    def choose(scores: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, longest: int) -> object:
        return select_topk(scores, lengths, out.shape[1], longest, out, scratch, config=config)

    return choose


def compile_share(part: int, parts: int) -> None:
    """Launch every parts-th variant, on rows without columns."""
    jobs = {launched(config, *shape): (config, *shape) for shape in SHAPES for config in variants(*shape).values()}
    for config, rows, width in list(jobs.values())[part::parts]:
        scores = torch.zeros((1, width), device="cuda").expand(rows, -1)
        out = torch.empty((rows, K), dtype=torch.int32, device="cuda")
        choice(config, rows, width)(scores, torch.zeros(rows, dtype=torch.int32, device="cuda"), out, width)
    torch.cuda.synchronize()


def compile_all(script: str, jobs: int = 16) -> None:
    """Fill Triton's cache on disk from so many processes of the script."""
    began = time.monotonic()
    helpers = [
        subprocess.Popen([sys.executable, script, "--sweep", "--compile-share", str(k), str(jobs)]) for k in range(jobs)
    ]
    ended = [helper.wait() for helper in helpers]
    print(f"compiled in {time.monotonic() - began:.0f} s; processes that failed: {sum(map(bool, ended))}", flush=True)


def wrong_rows(choose: Choose, rows: int, width: int) -> int:
    """Of rows with ties, crowds, NaN, infinities and misleading samples, 27 kinds, how many differ from the reference.

    As many at a time as are launched together at this shape.
    """
    kinds = torch.cat((awkward_rows(width, "cuda"), deceiving_rows(width, "cuda"), close_rows(width, K, "cuda")))
    total = -(-len(kinds) // rows) * rows
    lengths = width - torch.arange(total, dtype=torch.int32, device="cuda") % 5
    lengths[:3] = torch.tensor([0, K, K + 1], dtype=torch.int32, device="cuda")
    wrong = 0
    for first in range(0, total, rows):
        taken = torch.arange(first, first + rows, device="cuda")
        for scores, sizes in (
            (kinds[taken % len(kinds)], lengths[taken]),
            (kinds[(taken + 5) % len(kinds)], torch.full_like(lengths[taken], width)),
        ):
            out = torch.full((rows, K), -7, dtype=torch.int32, device="cuda")
            choose(scores, sizes, out, width)
            wrong += int((out != reference.select_topk(scores, sizes, K)).any(dim=1).sum())
    return wrong


def score_like(rows: int, width: int, parts: int = 8) -> torch.Tensor:
    """Sums of weighted positive parts, as index scores are. Of eight parts, one in 256 sums is exactly 0."""
    total = torch.zeros(rows, width, device="cuda")
    for _ in range(parts):
        total += torch.randn(rows, width, device="cuda").relu_() * torch.randn(rows, 1, device="cuda")
    return total


def inputs(rows: int, width: int, make: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    return [make(rows, width) for _ in range(max(1, min(INPUT_SETS, MOST_BYTES // (rows * width * 4))))]


def timed(choose: Choose, scores: list[torch.Tensor], lengths: torch.Tensor) -> float:
    rows, width = scores[0].shape
    out = torch.empty(rows, K, dtype=torch.int32, device="cuda")
    calls = [partial(choose, s, lengths, out, width) for s in scores]
    return graph_time(calls, repeats=30 if rows <= 64 else 10, per_graph=8 if rows <= 64 else 2)


def figures(name: str, rows: int, width: int, make: Callable[[], Choose], kinds: list[list[torch.Tensor]]) -> Row:
    """Times of one choice on each kind of inputs; of ours only where it is right."""
    row: Row = {"T": rows, "context": width, "name": name}
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    try:
        choose = make()
        wrong = wrong_rows(choose, min(rows, ALONE), width) if name in VARIANTS else 0
        if wrong:
            row["WRONG rows"] = wrong
        else:
            row |= dict(zip(KINDS, (timed(choose, scores, lengths) for scores in kinds), strict=True))
    except FAILURES as error:
        row["failed"] = reason(error)
    return row


def sweep() -> Iterator[Row]:
    """Figures of each shape and choice, vLLM's own before ours."""
    ops = vllm_ops()
    shipped = topk_config(K, gpu(torch.device("cuda", 0)).arch)
    print(f"top-k of K {K}, microseconds; what ships takes steps up to {shipped.steps_columns} columns", flush=True)
    for rows, width in SHAPES:
        kinds = [inputs(rows, width, make) for make in KINDS.values()]
        choices: dict[str, Callable[[], Choose]] = {}
        if ops is not None and rows <= MOST_COOPERATIVE:
            choices["cooperative_topk"] = partial(decode_choice, "cooperative_topk")
        elif ops is not None:
            choices["top_k_per_row_prefill"] = partial(prefill_choice, ops, rows)
        for name, config in variants(rows, width).items():
            choices[name] = partial(choice, config, rows, width)
        for name, make in choices.items():
            yield figures(name, rows, width, make, kinds)


KINDS: dict[str, Callable[..., torch.Tensor]] = {
    "noise": partial(torch.randn, device="cuda"),
    "score-like": score_like,
    "of 32 parts": partial(score_like, parts=32),
}
