"""Measuring launch parameters: a real run under the interpreter, its table, and what happens when it is cut off.

The times mean nothing on a CPU; that the right candidates are launched, compared and written does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5deploy.errors import DeployError
from glm5deploy.kernels import table_file, tune_cases, tuning
from glm5deploy.kernels.tune import Request
from glm5deploy.kernels.tune_run import Measuring

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
REQUEST = Request(heads=2, topk=16, packed=False, index_heads=4)


def command(table: Path, *more: str) -> list[str]:
    numbers = ("--heads", "2", "--topk", "16", "--index-heads", "4", "--out", str(table))
    return [sys.executable, "-W", "ignore", "-m", "glm5deploy.kernels.tune", *numbers, *more]


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


def run(table: Path, *more: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        command(table, *more),
        cwd=ROOT,
        env=environment(TRITON_INTERPRET="1", GLM5DEPLOY_KERNEL_TABLE=str(ROOT / "README.md")),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_run_writes_a_table_that_launches_take_and_a_second_run_does_nothing(tmp_path: Path) -> None:
    """In place of a table for another cache; the damaged table that the environment names is not looked at."""
    table = tmp_path / "table.json"
    of = tuning.gpu(CPU)
    other = table_file.Measured(request={**REQUEST.as_json(), "packed": True}, complete=True)
    table_file.save_table(table, of, other)
    assert run(table, "--seconds", "0")[-1]["complete"] is False
    assert table_file.load_table(table, of) == other
    *pieces, last = run(table)
    assert [(piece["done"], piece["total"]) for piece in pieces] == [(n, 4) for n in range(1, 5)]
    assert "attention, 1 tokens" in pieces[0]["note"]
    assert (last["table"], last["rows"], last["complete"]) == (str(table), 2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
    held = table_file.load_table(table, of)
    assert (held.request, held.refused) == (REQUEST.as_json(), "")
    assert [row.max_tokens for row in held.rows] == [2, 1 << 30]
    for row in held.rows:
        assert row.config in tune_cases.attention_candidates(2, tuning.sparse_config(of, False, 2, 1))
    assert held.ragged in tune_cases.logits_candidates(tuning.ragged_config(of, True), True)
    before = table.read_bytes()
    assert run(table) == [last]
    assert table.read_bytes() == before


def test_a_killed_run_leaves_the_old_table_and_the_next_one_goes_on(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.write_text("the table of before")
    child = subprocess.Popen(
        command(table), cwd=ROOT, env=environment(TRITON_INTERPRET="1"), stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    progress = tmp_path / "table.json.progress"
    child.stdout.readline()
    until = time.monotonic() + 60
    while not progress.exists() and time.monotonic() < until:
        time.sleep(0.01)
    child.kill()
    child.wait()
    assert table.read_text() == "the table of before"
    measured = len(table_file.load_table(progress, tuning.gpu(CPU)).rows)
    assert measured >= 1
    *pieces, last = run(table)
    assert [piece["done"] for piece in pieces] == list(range(measured + 1, 5))
    assert last["complete"]
    assert not progress.exists()
    assert len(table_file.load_table(table, tuning.gpu(CPU)).rows) == 2


def test_without_a_gpu_it_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path / "t"), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 2
    assert "torch finds none here" in json.loads(done.stdout)["error"]
    assert list(tmp_path.iterdir()) == []


class Case:
    """Calls that take as long as their configuration says, and one that is wrong."""

    def __init__(self, wrong: Any = None) -> None:
        self.wrong = wrong

    def calls(self, config: Any) -> list[Any]:
        return [lambda: torch.full((1,), 2.0 if config == self.wrong else 1.0)]

    def checked(self, out: torch.Tensor) -> torch.Tensor:
        return out

    def expected(self) -> torch.Tensor:
        return torch.ones(1)


BUILT_IN = tuning.SparseConfig(16, 64, 4, 2, 1)
RIVALS = [BUILT_IN, *(replace(BUILT_IN, warps=warps) for warps in (1, 2, 8))]


def best(times: list[float], wrong: Any = None, unfit: tuple[Any, ...] = (), seconds: float = 60) -> Any:
    """The choice among the built-in configuration and three rivals that take these times."""
    left = iter(times)
    measuring = Measuring(CPU, time.monotonic() + seconds, lambda _: None, lambda calls: next(left))
    measuring.unfit = dict.fromkeys(unfit, "")
    return measuring.best("attention", Case(wrong), RIVALS)  # type: ignore[arg-type]


def test_the_fastest_wins_where_it_wins_clearly() -> None:
    assert best([10.0, 9.0, 8.0, 9.5]) == RIVALS[2]
    assert best([10.0, 9.9, 9.85, 9.95]) == BUILT_IN


def test_when_the_time_is_up_nothing_is_chosen() -> None:
    assert best([10.0, 5.0, 5.0, 5.0], seconds=0) is None


def test_what_is_wrong_or_does_not_fit_is_never_chosen() -> None:
    assert best([10.0, 5.0, 9.0], wrong=RIVALS[3]) == RIVALS[1]
    assert best([10.0, 9.0], unfit=(RIVALS[1], RIVALS[3])) == RIVALS[2]
    with pytest.raises(DeployError, match=r"built-in configuration .* is wrong by 1"):
        best([10.0, 1.0, 1.0], wrong=BUILT_IN)
    with pytest.raises(DeployError, match="no configuration fits"):
        best([], unfit=tuple(RIVALS))
