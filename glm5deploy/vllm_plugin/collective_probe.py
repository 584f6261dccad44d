"""Do the ranks reach each other? ``python -m glm5deploy.vllm_plugin.collective_probe RANKS cuda|cpu SECONDS``.

Starts RANKS processes that all-reduce small tensors (the sizes of a decode step) with NCCL, or with Gloo on the CPU,
and prints one JSON object: ``ok``, ``error``, and ``microseconds`` of one all-reduce by size in kB. A rank that hangs
or dies is found within SECONDS and named with what it was doing.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KILOBYTES = (12, 24, 48, 96)  # hidden size 6144 in bf16 for 1, 2, 4 and 8 tokens
_WARM_UP, _TIMED = 5, 50


def probe(ranks: int, device: str, seconds: float) -> dict[str, Any]:
    """The report described in the module's head."""
    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory(prefix="glm5deploy-collective-") as name:
        folder = Path(name)
        context = processes.get_context("spawn")
        started = [
            context.Process(target=_rank, args=(rank, ranks, device, name), daemon=True) for rank in range(ranks)
        ]
        for process in started:
            process.start()
        end = time.monotonic() + seconds
        while any(p.exitcode is None for p in started) and time.monotonic() < end:
            if any(p.exitcode not in (None, 0) for p in started):
                break
            time.sleep(0.05)
        error = _error(folder, [p.exitcode for p in started], seconds)
        for process in started:
            process.kill()
            process.join()
        if error:
            return {"ok": False, "error": error, "microseconds": {}}
        return {"ok": True, "error": "", "microseconds": json.loads((folder / "result.json").read_text())}


def _rank(rank: int, ranks: int, device: str, name: str) -> None:
    folder = Path(name)

    def doing(what: str) -> None:
        (folder / f"rank{rank}").write_text(what)

    doing("importing torch")
    import torch
    import torch.distributed as dist

    place = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    try:
        if device == "cuda":
            torch.cuda.set_device(place)
        doing("meeting the other ranks")
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder / 'meet'}", rank=rank, world_size=ranks)
        times = {}
        for kilobytes in KILOBYTES:
            doing(f"all-reducing {kilobytes} kB")
            times[str(kilobytes)] = _microseconds(torch, dist, place, kilobytes * 1000 // 4, ranks)
        if rank == 0:
            (folder / "result.json").write_text(json.dumps(times))
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, ValueError, OSError) as error:
        doing("failing: " + str(error).partition("\n")[0][:300])
        os._exit(1)


def _microseconds(torch: Any, dist: Any, place: Any, count: int, ranks: int) -> float:
    """Time of one all-reduce of ``count`` fp32 values; RuntimeError when a sum is wrong."""
    values = torch.ones(count, device=place)
    dist.all_reduce(values)
    if not bool((values == ranks).all()):
        raise RuntimeError(f"the sum over {ranks} ranks is wrong: data is corrupted on the way")
    values.zero_()
    for turn in range(_WARM_UP + _TIMED):
        if turn == _WARM_UP:
            _synchronise(torch, place)
            begun = time.perf_counter()
        dist.all_reduce(values)
    _synchronise(torch, place)
    return round((time.perf_counter() - begun) / _TIMED * 1e6, 1)


def _synchronise(torch: Any, place: Any) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _error(folder: Path, codes: list[int | None], seconds: float) -> str:
    def last(rank: int) -> str:
        path = folder / f"rank{rank}"
        return path.read_text() if path.exists() else "starting"

    dead = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
    if dead:
        return f"rank {dead[0]} ended while {last(dead[0])}"
    stuck = [rank for rank, code in enumerate(codes) if code is None]
    if stuck:
        return f"rank {stuck[0]} was still {last(stuck[0])} after {seconds:.0f} s"
    return ""


if __name__ == "__main__":
    report = probe(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
    print(json.dumps(report))  # noqa: T201
    sys.exit(0 if report["ok"] else 1)
