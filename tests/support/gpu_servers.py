"""Servers for the tests on a GPU: all that the selected tests need start side by side, are asked, and are stopped.

A server is asked everything while it runs; the tests then look at what was recorded. On a machine with two GPUs the
servers are spread over both; where there is but one, two ranks share it, each as a machine of its own
(`tests/support/one_gpu.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import torch

from tests.support import one_gpu
from tests.support.engine import Answer, Engine, engine
from tests.support.goldens import PROMPTS, prompts
from tests.vllm_plugin.conftest import Recording, Run, record_prompts

LIMIT_SECONDS = float(os.environ.get("GPU_SERVERS_SECONDS", "600"))
LOGS = os.environ.get("GPU_SERVERS_LOGS")  # a folder that is to have every server's log when it is done
START_SECONDS = 480.0  # several servers at once may have to compile every kernel
CORES_A_RANK = 2  # most of a start is imports, on one core (docs/benchmarks/gpu-engine.md)
# The cache's size is given: profiling it would count what the servers beside this one allocate meanwhile.
FLAGS = ("--kv-cache-memory-bytes", str(2 << 30), "--max-num-seqs", "16", "--disable-flashinfer-autotune")
FLAGS += ("--gpu-memory-utilization", "0.02", "--jit-monitor-verbose")
PACKED = ("--kv-cache-dtype", "fp8_ds_mla")
# Ranks talk through NCCL alone: vLLM's other ways may create NVLink multicast objects, which a shared host may forbid.
TWO_RANKS = ("--disable-custom-all-reduce", "--compilation-config", '{"pass_config": {"fuse_allreduce_rms": false}}')
NO_MULTICAST = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0", "NCCL_NVLS_ENABLE": "0"}
NO_MULTICAST |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

Loaded = list[tuple[list[int], Answer]]
"""Requests that ran beside others: what each was asked, and its answer."""


@dataclass(frozen=True)
class LongAnswer:
    """One long prompt: answered afresh, then from the prefix cache, which gave ``hits`` positions."""

    cold: Answer
    warm: Answer
    hits: float
    selections: dict[tuple[int, int], frozenset[int]]


@dataclass
class Result:
    """What a server answered; ``failure`` is why it did not, ``seconds`` its start.

    Of two ranks ``joined`` is how they share one GPU, None where each has its own, and ``nccl`` is what NCCL said.
    """

    record: Recording | None = None
    together: Loaded = field(default_factory=list)
    long: dict[int, LongAnswer] = field(default_factory=dict)
    prompted: Answer | None = None
    preempted: Loaded = field(default_factory=list)
    preemptions: float = 0.0
    accepted: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    seconds: float = 0.0
    log: str = ""
    joined: one_gpu.Joined | None = None
    nccl: str = ""
    compiled: list[dict[str, str]] = field(default_factory=list)


Task = Callable[["GpuRun", Engine, Result], None]


@dataclass(frozen=True)
class GpuRun:
    """One server: what is loaded, which expected results it is compared with, and what it is asked."""

    name: str
    run: Run
    tasks: tuple[Task, ...]
    expected: str = "topk64/fp8"
    flags: tuple[str, ...] = ()
    native: bool = False  # vLLM's own attention
    traced: bool = True  # records selections
    empty_cache: bool = False  # no compiled kernel to begin with
    prepare: Callable[[], object] | None = None  # work for this process while the servers start
    joined: str = "sockets"  # how two ranks share one GPU, where that works

    @property
    def topk(self) -> int:
        return int(dict(self.run.change).get("index_topk", 64))

    @property
    def packed(self) -> bool:
        return PACKED[1] in self.flags


def bf16(key: str, tp: int = 1, **change: int) -> Run:
    return Run(key, tp=tp, dtype="bfloat16", change=tuple(change.items()))


def random_prompt(length: int, seed: int) -> list[int]:
    """Ordinary tokens of the reference models."""
    draw = random.Random(seed)
    return [draw.randrange(990) for _ in range(length)]


def ask_prompts(run: GpuRun, served: Engine, result: Result) -> None:
    result.record = record_prompts(served, run.run.tp)


def ask_together(run: GpuRun, served: Engine, result: Result) -> None:
    """All prompts three times over at once: decode and prefill share steps, prefixes come from the cache."""
    result.together = answer_at_once(served, [prompts()[name].ids for name in PROMPTS] * 3, 16)


def ask_under_pressure(run: GpuRun, served: Engine, result: Result) -> None:
    """More context at once than the cache holds: requests are preempted, and their contexts computed again."""
    before = sum(served.counter("num_preemptions").values())
    wanted = [random_prompt(100 + 13 * i, seed=i) for i in range(16)]
    result.preempted = answer_at_once(served, wanted, 320)
    result.preemptions = sum(served.counter("num_preemptions").values()) - before


def ask_lengths(run: GpuRun, served: Engine, result: Result) -> None:
    """Steps of many sizes, alone and mixed: what may be compiled for a size would be compiled now."""
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 47, 63, 64, 65, 100, 127, 128, 129, 192, 255, 256]
    lengths += [257, 300, 400, 511, 512, 513, 640, 777, 1000, 1023, 1024, 1025, 1300, 1536, 1791, 1999]
    for length in lengths:
        served.complete(random_prompt(length, seed=length), tokens=2, prompt_logprobs=False)
    for size in (2, 3, 5, 9, 16):
        wanted = [random_prompt(lengths[(7 * i + size) % len(lengths)], seed=1000 + i) for i in range(size)]
        answer_at_once(served, wanted, 12)


def answer_at_once(served: Engine, wanted: Sequence[list[int]], tokens: int) -> Loaded:
    with ThreadPoolExecutor(len(wanted)) as pool:
        answers = pool.map(lambda ids: served.complete(ids, tokens=tokens, prompt_logprobs=False), wanted)
        return list(zip(wanted, answers, strict=True))


class Places:
    """The machine's cores and GPUs, handed out to one server after the other."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._free = max(2, len(os.sched_getaffinity(0)) // CORES_A_RANK)
        self._used = dict.fromkeys(gpus, 0)
        self._changed = threading.Condition()
        self._closed = False

    def close(self) -> None:
        """Who has no room yet gets none any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @contextmanager
    def take(self, ranks: int) -> Iterator[list[str]]:
        """Wait for room for ``ranks`` ranks; the GPUs they are to run on. AssertionError after :meth:`close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._free >= ranks)
            assert not self._closed, "the time was up before this server could start"
            self._free -= ranks
            gpus = sorted(sorted(self._used, key=self._used.__getitem__)[:ranks])
            for gpu in gpus:
                self._used[gpu] += 1
        try:
            yield gpus
        finally:
            with self._changed:
                self._free += ranks
                for gpu in gpus:
                    self._used[gpu] -= 1
                self._changed.notify_all()


def visible_gpus() -> list[str]:
    """GPUs that servers may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def serve_all(runs: Sequence[GpuRun], folders: dict[str, tuple[Path, Path]], gpus: Sequence[str]) -> dict[str, Result]:
    """Every run's result; ``folders`` are each run's model folder and an empty one for its server.

    Servers that have not answered after LIMIT_SECONDS are killed, so that what the others answered is judged.
    """
    places = Places(gpus)
    limit = threading.Timer(LIMIT_SECONDS, _kill_servers, [places])
    limit.start()
    try:
        with ThreadPoolExecutor(2 * len(runs) + 1) as pool:
            for prepare in {run.prepare for run in runs if run.prepare is not None}:
                pool.submit(prepare)  # a failure shows when a test asks for what was to be prepared
            served = [pool.submit(_serve, run, *folders[run.name], places) for run in runs]
            try:
                return {run.name: future.result() for run, future in zip(runs, served, strict=True)}
            except BaseException:  # Ctrl-C: the pool would wait for servers that nobody asks any more
                _kill_servers(places)
                raise
    finally:
        limit.cancel()


def _kill_servers(places: Places) -> None:
    """Each server leads its own process group, and so does every other child that this process starts meanwhile."""
    places.close()
    for child in psutil.Process().children():
        print(f"stopped before its end: process {child.pid}", flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def _serve(run: GpuRun, folder: Path, work: Path, places: Places) -> Result:
    result = Result()
    variables = {"TRITON_CACHE_DIR": str(work / "triton")} if run.empty_cache else {}
    if not run.traced:
        variables["GLM5DEPLOY_TRACE_DIR"] = ""
    flags = (*FLAGS, *run.flags)
    if run.run.tp > 1:
        flags, variables = (*flags, *TWO_RANKS), variables | NO_MULTICAST | one_gpu.nccl_log(work)
    begun = time.monotonic()
    try:
        with places.take(run.run.tp) as gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            if len(gpus) < run.run.tp:
                result.joined = one_gpu.join_ranks(gpus[0], run.joined, NO_MULTICAST)
                flags = (*flags, "--enforce-eager") if result.joined.eager else flags
            begun = time.monotonic()
            with engine(
                folder,
                work,
                tp=run.run.tp,
                dtype=run.run.dtype,
                flags=flags,
                variables=variables,
                start_seconds=START_SECONDS / 2 if result.joined else START_SECONDS,  # which may hang
                nodes=result.joined.nodes() if result.joined else (),
            ) as served:
                result.seconds = time.monotonic() - begun
                for task in run.tasks:
                    task(run, served, result)
                lines = served.compile_log.read_text().splitlines() if served.compile_log.exists() else []
                result.compiled = [json.loads(line) for line in lines]
    except (AssertionError, LookupError, OSError, ValueError, httpx.HTTPError) as error:
        result.failure = f"{type(error).__name__}: {error}"[-3000:]
    logs = [log for log in (work / "serve.log", work / "node1.log") if log.exists()]
    result.log = "\n".join(log.read_text(errors="replace") for log in logs)
    result.nccl = one_gpu.nccl_said(work)
    if LOGS:
        (Path(LOGS) / f"serve-{run.name}.log").write_text(result.log + result.nccl)
    times = f"up after {result.seconds:.0f} s, done after {time.monotonic() - begun:.0f} s"
    print(f"{run.name}: {times} {_cause(result)}", flush=True)
    return result


def _cause(result: Result) -> str:
    """The first error in a failed server's log, which its last lines seldom hold, and NCCL's first warning."""
    if not result.failure:
        return ""
    errors = (line for line in result.log.splitlines() if re.search(r"\w(Error|Exception|error): ", line))
    warned = re.findall(r"NCCL WARN .*", result.nccl)[:1]
    return " | ".join((f"FAILED: {next(errors, result.failure[-300:])}", *warned)).replace("\n", " | ")
