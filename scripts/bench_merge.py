"""Merge against `cat` of the same shards: wall time until the result is on the disk, CPU time, peak memory.

    python scripts/bench_merge.py --size 4 --rounds 5 [--dir FOLDER] [--modes buffered,direct] [--chunks 1,4]

The tests of glm5deploy.gguf_files run first, in this process: no timing without green tests. Each round runs every
candidate once, cold (page cache dropped, needs root) and warm (shards read just before), each writing to a new file;
`cat` is followed by `sync FILE`, the merge flushes by itself. Medians are compared. Numbers of a machine that does
anything else meanwhile are worth nothing; the load is printed.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402

from glm5deploy.gguf_files.space import memory_bytes  # noqa: E402
from tests.support.gguf_factory import BLOCKS, Layout, Model, Tensor, encode, split_pairs  # noqa: E402

MERGE = """
import sys
from pathlib import Path
from glm5deploy.gguf_files.copy import merge
from glm5deploy.gguf_files.merge_options import MergeOptions
_, source, output, mode, chunk, threads = sys.argv
merge(Path(source), Path(output), MergeOptions(mode=mode, chunk_bytes=int(chunk), threads=int(threads), reflink=False))
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@dataclass(frozen=True)
class Run:
    wall: float
    cpu: float
    rss: int


def write_set(folder: Path, size: int, shards: int) -> list[Path]:
    """A set of ``size`` bytes with a header-only first shard and F32 tensors of 64 MiB plus a little."""
    block = os.urandom(8 << 20)
    rows = (64 << 20) // 4 + 8
    count = max(shards, size // (rows * 4))
    per_shard = -(-count // shards)
    paths = []
    for number in range(shards + 1):
        own = range(0) if number == 0 else range((number - 1) * per_shard, min(number * per_shard, count))
        tensors = [Tensor(f"blk.{index}.ffn_up.weight", "F32", (rows,)) for index in own]
        path = folder / f"bench-{number + 1:05}-of-{shards + 1:05}.gguf"
        with path.open("wb") as file:
            file.write(_header(tensors, number, shards + 1, count))
            for _ in tensors:
                left = rows * 4
                while left:
                    left -= file.write(block[: min(left, len(block))])
            file.flush()
            os.fsync(file.fileno())
        paths.append(path)
    return paths


def _header(tensors: list[Tensor], number: int, shards: int, total: int) -> bytes:
    """The header alone, with offsets of tensors whose size is a multiple of 32."""
    model = Model()
    pairs = (*(model.pairs if number == 0 else ()), *split_pairs(number, shards, total))
    size = 4 * tensors[0].shape[0] if tensors else 0
    hollow = [_Hollow(t.name, t.type, t.shape) for t in tensors]
    offsets = {t.name: i * size for i, t in enumerate(tensors)}
    assert size % 32 == 0
    assert BLOCKS["F32"][2] == 4
    return encode(pairs, hollow, 32, Layout(offsets=offsets))


class _Hollow(Tensor):
    @property
    def data(self) -> bytes:
        return b""


def measure(command: list[str]) -> Run:
    """Run ``command``; the merge prints its peak memory in KiB (a child's ru_maxrss would include this process)."""
    begin = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.monotonic() - begin
    if status:
        raise SystemExit(f"{command[:3]} failed")
    return Run(wall, usage.ru_utime + usage.ru_stime, int(printed or b"0") * 1024)


def drop_caches(_: list[Path]) -> None:
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")


def warm_up(paths: list[Path]) -> None:
    subprocess.run(["sync"], check=True)
    subprocess.run(["cat", *map(str, paths)], stdout=subprocess.DEVNULL, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=4.0, help="GB (10^9 bytes)")
    parser.add_argument("--shards", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--modes", default="auto")
    parser.add_argument("--chunks", default="0", help="KiB, comma-separated; 0 is the default of the mode")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--states", default="cold,warm")
    parser.add_argument("--skip-tests", action="store_true", help="only while working on this script")
    arguments = parser.parse_args()
    if not arguments.skip_tests and pytest.main(["-q", "-x", str(ROOT / "tests/gguf_files"), "-m", "not slow"]) != 0:
        raise SystemExit("no timing without green tests")
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="bench-merge-") as name:
        bench(Path(name), arguments)


def bench(folder: Path, arguments: argparse.Namespace) -> None:
    paths = write_set(folder, int(arguments.size * 1e9), arguments.shards)
    output = folder / "merged.gguf"
    candidates: dict[str, list[str]] = {"cat": ["sh", "-c", 'out=$0; cat "$@" > "$out" && sync "$out"', str(output)]}
    candidates["cat"] += map(str, paths)
    for mode in arguments.modes.split(","):
        for chunk in arguments.chunks.split(","):
            for threads in arguments.threads.split(","):
                options = [mode, str(int(chunk) * 1024), threads]
                label = f"merge {mode}" + (f", {chunk} KiB" if int(chunk) else "") + f", {threads} threads"
                candidates[label] = [sys.executable, "-c", MERGE, str(paths[0]), str(output), *options]
    kernel, memory = platform.release(), memory_bytes()
    total = sum(path.stat().st_size for path in paths)
    print(f"{total} bytes in {len(paths)} shards; Linux {kernel}, {os.cpu_count()} CPUs, {memory >> 20} MiB memory,")
    print(f"Python {platform.python_version()}, load {os.getloadavg()}, {arguments.rounds} rounds, medians")
    states: dict[str, Callable[[list[Path]], None]] = {"cold": drop_caches, "warm": warm_up}
    for state in arguments.states.split(","):
        runs: dict[str, list[Run]] = {name: [] for name in candidates}
        for _ in range(arguments.rounds):
            for name, command in candidates.items():
                output.unlink(missing_ok=True)
                states[state](paths)
                runs[name].append(measure(command))
        report(state, runs)


def report(state: str, runs: dict[str, list[Run]]) -> None:
    def median(name: str, field: str) -> float:
        return statistics.median(getattr(run, field) for run in runs[name])

    print(f"\n| {state} | wall s | min-max | CPU s | peak MiB | wall / cat | CPU / cat |")
    print("|---|---|---|---|---|---|---|")
    for name, own in runs.items():
        wall, cpu = median(name, "wall"), median(name, "cpu")
        spread = f"{min(run.wall for run in own):.2f}-{max(run.wall for run in own):.2f}"
        peak = f"{median(name, 'rss') / 2**20:.0f}" if name != "cat" else ""
        ratios = f"{wall / median('cat', 'wall'):.2f} | {cpu / median('cat', 'cpu'):.2f}"
        print(f"| {name} | {wall:.2f} | {spread} | {cpu:.2f} | {peak} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
