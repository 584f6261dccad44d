"""scripts/check_gpu.sh: steps one after the other, each kept as it goes, whatever becomes of the one before."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "check_gpu.sh"

# Stands in for the interpreter: what a GPU would do is not to be tried here, what becomes of exit codes and time is.
STEPS = """#!/bin/sh
case "$*" in
  *bench_sparse_mla*) echo "figures so far"; exit 3 ;;
  *bench_indexer*) echo "hangs"; exec sleep 60 ;;
  *) echo "$@" ;;
esac
"""


def check(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    everything = {**os.environ, **environment}
    return subprocess.run([SCRIPT, *words], env=everything, capture_output=True, text=True, timeout=60, check=False)


def stub(folder: Path) -> str:
    path = folder / "python"
    path.write_text(STEPS)
    path.chmod(0o755)
    return str(path)


def test_steps_are_listed_with_their_limits() -> None:
    lines = check("--list").stdout.splitlines()
    assert [line.split()[0] for line in lines][:2] == ["kernels", "products"]
    assert all(int(line.split()[1]) > 0 and line.split()[3] in ("vllm", "-") for line in lines)


def test_every_gpu_test_belongs_to_a_step() -> None:
    text = SCRIPT.read_text()
    marked = [p for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu\n" in p.read_text()]
    assert len(marked) >= 7
    missing = [p for p in (path.relative_to(ROOT) for path in marked) if not {str(p), str(p.parent)} & {*text.split()}]
    assert missing == []


def test_an_unknown_step_or_option_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = check(tmp_path / "out", "kernels", "nonsense")
    assert done.returncode == 2
    assert "no step nonsense; there are: kernels" in done.stderr
    assert check("--nonsense").returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_fails_is_kept_and_the_next_ones_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = check(out, "sparse", "products", "kernels", PYTHON=stub(tmp_path))
    assert done.returncode == 1
    summary = [line.split(", ")[0] for line in (out / "summary.txt").read_text().splitlines()]
    assert summary == ["sparse: exit 3", "products: exit 0", "kernels: exit 0"]
    assert (out / "sparse.log").read_text() == "figures so far\n"
    assert (out / "products.log").read_text().startswith(f"scripts/bench_quants.py --out {out}/products.json")
    assert " -m gpu " in (out / "kernels.log").read_text()
    again = subprocess.run([SCRIPT, "out", "products"], cwd=tmp_path, env={**os.environ, "PYTHON": stub(tmp_path)})
    assert again.returncode == 0
    assert len((out / "summary.txt").read_text().splitlines()) == 4, "a second call adds to the first one's"


def test_a_cut_off_run_leaves_what_was_found(tmp_path: Path) -> None:
    out = tmp_path / "out"
    environment = {**os.environ, "PYTHON": stub(tmp_path)}
    child = subprocess.Popen([SCRIPT, out, "products", "indexer"], env=environment, start_new_session=True)
    try:
        log, until = out / "indexer.log", time.monotonic() + 20
        while not (log.exists() and log.read_text()) and time.monotonic() < until:
            time.sleep(0.02)
        assert log.read_text() == "hangs\n"
        assert (out / "summary.txt").read_text().startswith("products: exit 0")
    finally:
        for process in [*psutil.Process(child.pid).children(recursive=True), child]:
            process.kill()
        child.wait()


def test_an_interrupt_ends_the_step_and_those_after_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    environment = {**os.environ, "PYTHON": stub(tmp_path)}
    child = subprocess.Popen([SCRIPT, out, "indexer", "products"], env=environment, start_new_session=True)
    log, until = out / "indexer.log", time.monotonic() + 20
    while not (log.exists() and log.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    begun = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 130
    assert begun
    assert not [process for process in begun if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert (out / "summary.txt").read_text().startswith("indexer: stopped")


def test_a_scale_that_the_shell_cannot_count_with_is_refused(tmp_path: Path) -> None:
    for scale in ("1.5", "0", "two"):
        done = check(tmp_path / "out", "indexer", PYTHON=stub(tmp_path), SECONDS_SCALE=scale)
        assert (done.returncode, "a whole number" in done.stderr) == (2, True)
    assert not (tmp_path / "out").exists()


def test_a_step_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = check(out, "indexer", "products", PYTHON=stub(tmp_path), SECONDS_SCALE="1/50")
    assert done.returncode == 1
    summary = [line.split(", ")[0] for line in (out / "summary.txt").read_text().splitlines()]
    assert summary == ["indexer: exit 124", "products: exit 0"]
