"""Fetch against ``curl | sha256sum`` and verify against ``sha256sum``, on a synthetic set over loopback.

``.venv/bin/python scripts/bench_fetch.py [--size-mb 2000] [--shards 4] [--dir DIR]`` runs the transfer tests first,
then interleaved rounds, and prints medians and ratios. The set and the downloads are written below ``--dir``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.shard_sets import gguf_head  # noqa: E402  (the path is set above)

REPO, QUANT = "bench/set", "Q4_K"
BLOCK = 8 << 20


def make_set(folder: Path, total: int, shards: int) -> list[Path]:
    """A split set of random bytes; its sizes are whole blocks, so that no padding is needed."""
    folder.mkdir(parents=True)
    blocks = max(1, total // shards // BLOCK)
    paths = []
    for index in range(shards):
        path = folder / f"m-{index + 1:05d}-of-{shards:05d}.gguf"
        with path.open("wb") as file:
            name = f"blk.{index}.data"
            file.write(gguf_head(blocks * BLOCK, number=index, count=shards, tensors=shards, name=name))
            for _ in range(blocks):
                file.write(os.urandom(BLOCK))
        paths.append(path)
    return paths


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The loopback hub in a process of its own, as a real one would be."""
    command = [sys.executable, "-m", "glm5deploy.demo.local_hub", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip().removeprefix("HF_ENDPOINT=")
        finally:
            process.terminate()


class Result(NamedTuple):
    wall: float
    cpu: float
    output: str


def timed(command: list[str], stdin: str = "") -> Result:
    """Wall and CPU seconds of a command and all its children."""
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, input=stdin)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Result(time.monotonic() - begun, cpu, done.stdout)


def pipelines(urls: list[str], at_once: int, tail: str) -> Result:
    """``curl URL | tail`` for every URL, ``at_once`` at a time."""
    shell = f'curl -sSL --fail "$0" | {tail}'
    return timed(["xargs", "-P", str(at_once), "-n", "1", "bash", "-o", "pipefail", "-c", shell], "\n".join(urls))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size-mb", type=int, default=2000)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="Where to write. Default: a temporary folder.")
    arguments = parser.parse_args()

    subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/hub", "-x"], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="bench-fetch-") as name:
        report = measure(Path(name), arguments.size_mb * 1_000_000, arguments.shards, arguments.rounds)
    print(json.dumps(report, indent=1))


def measure(folder: Path, size: int, shards: int, rounds: int) -> dict[str, object]:
    """``fetch`` writes to memory (``/dev/shm``), so that a slow disk does not hide its rate; ``to disk`` is apart."""
    paths = make_set(folder / "hub" / REPO / QUANT, size, shards)
    total = sum(path.stat().st_size for path in paths)
    work = folder / "work"
    results: dict[str, list[Result]] = {}
    load = os.getloadavg()[0]
    with served(folder / "hub") as endpoint:
        urls = [f"{endpoint}/{REPO}/resolve/main/{QUANT}/{path.name}" for path in paths]
        child = [sys.executable, "-m", "tests.support.fetch_child", endpoint, REPO, QUANT]
        options = json.dumps({"parallel": shards})
        fetched = [str(work / QUANT / path.name) for path in paths]
        candidates: dict[str, Callable[[], Result]] = {
            "curl | sha256sum": lambda: pipelines(urls, shards, "sha256sum -"),
            "curl | openssl dgst -sha256": lambda: pipelines(urls, shards, "openssl dgst -sha256"),
            "curl | tee FILE | sha256sum, sync": lambda: to_disk(urls, folder / "tee", shards),
            "fetch": lambda: in_memory(lambda place: timed([*child, str(place), options])),
            "fetch to disk": lambda: timed([*child, str(work), options]),
            "sha256sum, all cores": lambda: all_cores(fetched),
            "verify": lambda: timed([sys.executable, "-c", VERIFY, str(work)]),
        }
        pipelines(urls, 1, "cat > /dev/null")  # files into the page cache, hashes into the hub
        for _ in range(rounds):
            for name, run in candidates.items():
                results.setdefault(name, []).append(run())
            shutil.rmtree(work)
    wall = {name: total / statistics.median(r.wall for r in runs) / 1e6 for name, runs in results.items()}
    cpu = {name: total / statistics.median(r.cpu for r in runs) / 1e6 for name, runs in results.items()}
    peak = max(json.loads(run.output)["peak"] for run in results["fetch"])
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "load before": round(load, 1),
        "set": f"{shards} shards, {total / 1e9:.2f} GB, {shards} at once, median of {rounds}",
        "MB/s": {name: round(rate) for name, rate in wall.items()},
        "MB per CPU second": {name: round(rate) for name, rate in cpu.items()},
        "fetch / (curl | sha256sum)": ratio(wall, cpu, "fetch", "curl | sha256sum"),
        "fetch to disk / (curl | tee | sha256sum)": ratio(
            wall, cpu, "fetch to disk", "curl | tee FILE | sha256sum, sync"
        ),
        "fetch / (curl | openssl)": ratio(wall, cpu, "fetch", "curl | openssl dgst -sha256"),
        "verify / sha256sum on all cores": ratio(wall, cpu, "verify", "sha256sum, all cores"),
        "peak resident MB of fetch": round(peak / 1e6),
    }


def in_memory(run: Callable[[Path], Result]) -> Result:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-fetch-") as name:
        return run(Path(name) / "work")


def ratio(wall: dict[str, float], cpu: dict[str, float], ours: str, theirs: str) -> dict[str, float]:
    return {"by wall time": round(wall[ours] / wall[theirs], 2), "by CPU time": round(cpu[ours] / cpu[theirs], 2)}


def to_disk(urls: list[str], folder: Path, at_once: int) -> Result:
    """The same work as fetch does: bytes hashed and durable on disk."""
    folder.mkdir()
    shell = f'f="{folder}/$(basename "$0")"; curl -sSL --fail "$0" | tee "$f" | sha256sum - && sync "$f"'
    command = ["xargs", "-P", str(at_once), "-n", "1", "bash", "-o", "pipefail", "-c", shell]
    result = timed(command, "\n".join(urls))
    shutil.rmtree(folder)
    return result


def all_cores(paths: list[str]) -> Result:
    return timed(["xargs", "-P", str(os.cpu_count() or 1), "-n", "1", "sha256sum"], "\n".join(paths))


VERIFY = """
import sys
from pathlib import Path
from glm5deploy.hub.plan import recorded_plans
from glm5deploy.hub.verify import verify
folder = Path(sys.argv[1])
assert all(not v.problem for v in verify(recorded_plans(folder)[0], folder))
"""


if __name__ == "__main__":
    main()
