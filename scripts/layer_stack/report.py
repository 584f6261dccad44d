"""The benchmark's figures as text: loading, steps against the goal, prefill, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Iterator

from glm5deploy.server.bench import Point

from .engine import Engine
from .generate import file_bytes, tensors_of
from .groups import group_of
from .measure import Steps
from .stack import LAYERS, Stack
from .trace import Breakdown, Share, Step

GOAL_MS = 6.0  # of a step at batch 1
COPY_RATE = 4.3e12  # bytes a second that a large copy reaches on an H200
RSS_LIMIT = 2 << 30
_BF16 = ("attn_k_b", "attn_v_b", "indexer.attn_k", "indexer.proj")  # kept dense whatever the file has


def step_bytes(stack: Stack) -> int:
    """Bytes of weights that a step of one token must read."""
    used, experts = stack.hparams.num_experts_used, stack.hparams.num_experts
    total = 0.0
    for placement, tensor in zip(stack.placements(), tensors_of(stack), strict=True):
        stem = placement.kind.gguf.rsplit(".", 1)[0]
        if stem == "token_embd":
            continue
        nbytes = float(tensor.nbytes)
        if stem in _BF16:
            nbytes = 2.0
            for size in tensor.shape:
                nbytes *= size
        total += nbytes * used / experts if stem.endswith("_exps") else nbytes
    return round(total)


def loading(engine: Engine, stack: Stack) -> Iterator[str]:
    read = engine.loading
    total = file_bytes(stack)
    rate = total / read.seconds / 1e9 if read.seconds else 0.0
    yield f"file {total / 1e9:.2f} GB; vLLM's loading took {read.seconds:.1f} s ({rate:.2f} GB/s)"
    yield f"ready {engine.ready_seconds:.1f} s after the start"
    yield f"bytes by read calls while loading {read.read / 1e9:.2f} GB ({read.read / total:.3f} of the file)"
    verdict = "met" if read.above <= RSS_LIMIT else "MISSED"
    yield f"host memory above base {read.above / 2**30:.2f} GiB (base {read.base / 2**30:.2f}); limit 2 GiB {verdict}"
    if read.device:
        yield f"GPU memory in use at most {read.device / 1e9:.1f} GB while loading"
    yield from read.lines


def steps(found: Steps, stack: Stack) -> Iterator[str]:
    goal = ""
    if found.batch == 1 and stack.layers == LAYERS and stack.scale == "real":
        floor = step_bytes(stack) / COPY_RATE * 1e3
        yield f"floor of a step at batch 1: {step_bytes(stack) / 1e9:.2f} GB of weights, {floor:.2f} ms at 4.3 TB/s"
        goal = f", goal {GOAL_MS:g} ms {'met' if found.mean <= GOAL_MS else 'MISSED'}"
    yield (
        f"batch {found.batch:2}, context {found.context}: {found.mean:.2f} ms a step{goal}, median {found.median:.2f}, "
        f"{found.batch / found.mean * 1e3:.1f} tokens/s"
    )


def prefill(points: list[Point]) -> Iterator[str]:
    for point in points:
        if point.wave is None:
            yield f"prefill {point.prompt} x {point.concurrency}: not measured {point.note}"
        else:
            yield (
                f"prefill {point.prompt} x {point.concurrency}: {point.wave.prefill_rate:8.0f} tokens/s, "
                f"first token after {point.wave.ttft_median * 1e3:.0f} ms"
            )


def shares(name: str, found: Breakdown) -> Iterator[str]:
    yield (
        f"{name}: {found.steps} steps of {found.step_us / 1e3:.3f} ms, GPU busy {found.busy_us / 1e3:.3f} ms, "
        f"idle {found.idle_us / 1e3:.3f} ms, {found.launches:.0f} launches"
    )
    for share in found.grouped(group_of):
        yield _line(share.name, share, found.step_us)
    yield f"  {'idle':28} {found.idle_us / 1e3:8.3f} ms {100 * found.idle_us / found.step_us:5.1f} %"


def kernels(name: str, found: Breakdown, most: int = 60) -> Iterator[str]:
    yield f"{name}, by kernel:"
    for share in found.kernels[:most]:
        yield _line(f"[{group_of(share.name)}] {share.name[:110]}", share, found.step_us)


def sequence(step: Step) -> Iterator[str]:
    """One step's kernels in order: microseconds since its begin, idle before, length, name."""
    until = step.begin
    for kernel in step.kernels:
        idle = max(0.0, kernel.start - until)
        until = max(until, kernel.end)
        yield f"{kernel.start - step.begin:10.1f} {idle:7.1f} {kernel.length:8.2f}  {kernel.name[:150]}"


def _line(name: str, share: Share, step_us: float) -> str:
    ms, part, each = share.us / 1e3, 100 * share.us / step_us, share.us / share.launches
    return f"  {name:28} {ms:8.3f} ms {part:5.1f} % {share.launches:7.1f} x {each:7.2f} us"
