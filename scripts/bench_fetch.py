"""Fetch against ``curl | sha256sum`` and verify against ``sha256sum``, on a synthetic set over loopback.

``.venv/bin/python scripts/bench_fetch.py [--size-mb 2000] [--shards 4] [--dir DIR]`` runs the transfer tests first,
then interleaved rounds, and prints medians and ratios. The set and the downloads are written below ``--dir``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


def timed(command: list[str] | str, **options: object) -> tuple[float, str]:
    begun = time.monotonic()
    done = subprocess.run(
        command, shell=isinstance(command, str), check=True, capture_output=True, text=True, cwd=ROOT, **options
    )
    return time.monotonic() - begun, done.stdout


def pipelines(urls: list[str], at_once: int, tail: str) -> tuple[float, str]:
    """``curl URL | tail`` for every URL, ``at_once`` at a time."""
    shell = f'curl -sSL --fail "$0" | {tail}'
    return timed(["xargs", "-P", str(at_once), "-n", "1", "bash", "-o", "pipefail", "-c", shell], input="\n".join(urls))


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
    paths = make_set(folder / "hub" / REPO / QUANT, size, shards)
    total = sum(path.stat().st_size for path in paths)
    cores = os.cpu_count() or 1
    seconds: dict[str, list[float]] = {}
    peaks: list[int] = []
    with served(folder / "hub") as endpoint:
        urls = [f"{endpoint}/{REPO}/resolve/main/{QUANT}/{path.name}" for path in paths]
        pipelines(urls, 1, "cat > /dev/null")  # files into the page cache, hashes into the hub
        sums = set()

        def note(what: str, result: tuple[float, str]) -> str:
            seconds.setdefault(what, []).append(result[0])
            return result[1]

        for _ in range(rounds):
            sums.add(note("curl | sha256sum, one after another", pipelines(urls, 1, "sha256sum -")))
            note("curl | sha256sum, as many at once as we do", pipelines(urls, shards, "sha256sum -"))
            note("curl | tee FILE | sha256sum, as many at once", to_disk(urls, folder / "tee", shards))
            note("curl | openssl dgst -sha256, as many at once", pipelines(urls, shards, "openssl dgst -sha256"))
            work = folder / "work"
            child = [sys.executable, "-m", "tests.support.fetch_child", endpoint, REPO, QUANT, str(work)]
            output = json.loads(
                note("fetch, to disk, whole process", timed([*child, json.dumps({"parallel": shards})]))
            )
            peaks.append(output["peak"])
            hashed = note("sha256sum of the files, all cores", all_cores([str(work / QUANT / p.name) for p in paths]))
            assert len(hashed.splitlines()) == shards
            note("verify, whole process", timed([sys.executable, "-c", VERIFY, str(work)]))
            shutil.rmtree(work)
    rates = {what: round(total / statistics.median(values) / 1e6) for what, values in seconds.items()}
    fetch, verify = rates["fetch, to disk, whole process"], rates["verify, whole process"]
    return {
        "machine": f"{cores} cores, {platform.machine()}, Python {platform.python_version()}",
        "set": f"{shards} shards, {total / 1e9:.2f} GB",
        f"MB/s (median of {rounds})": rates,
        "fetch / (curl | sha256sum, one after another)": round(fetch / rates["curl | sha256sum, one after another"], 2),
        "fetch / (curl | sha256sum, at once)": round(fetch / rates["curl | sha256sum, as many at once as we do"], 2),
        "fetch / (curl | tee | sha256sum)": round(fetch / rates["curl | tee FILE | sha256sum, as many at once"], 2),
        "fetch / (curl | openssl)": round(fetch / rates["curl | openssl dgst -sha256, as many at once"], 2),
        "verify / sha256sum on all cores": round(verify / rates["sha256sum of the files, all cores"], 2),
        "peak resident MB of fetch": round(max(peaks) / 1e6),
    }


def to_disk(urls: list[str], folder: Path, at_once: int) -> tuple[float, str]:
    """The same work as fetch does: bytes hashed and durable on disk."""
    folder.mkdir()
    shell = f'f="{folder}/$(basename "$0")"; curl -sSL --fail "$0" | tee "$f" | sha256sum - && sync "$f"'
    command = ["xargs", "-P", str(at_once), "-n", "1", "bash", "-o", "pipefail", "-c", shell]
    result = timed(command, input="\n".join(urls))
    shutil.rmtree(folder)
    return result


def all_cores(paths: list[str]) -> tuple[float, str]:
    return timed(["xargs", "-P", str(os.cpu_count() or 1), "-n", "1", "sha256sum"], input="\n".join(paths))


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
