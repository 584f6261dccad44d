"""The launches of a GPU step, interpreted: both ways of scoring, selection, and attention over either cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from glm5deploy.vllm_plugin import numerics


def test_prompts_and_decode_steps_select_and_attend_like_float64() -> None:
    command = [sys.executable, "-m", "tests.support.interpreted_device"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert child.returncode == 0, child.stderr[-3000:]
    steps = json.loads(child.stdout.splitlines()[-1])
    assert len(steps) == 1 + len(numerics.DECODES)
    queries = (numerics.MIXED, *numerics.DECODES)
    assert [step["whole"] for step in steps] == [sum(step) for step in queries]
    for step in steps:
        assert (step["rows"], step["errors"]) == (0, 0), steps
        assert step["attention"] <= 1e-5, steps
        assert step["packed"] <= 5e-3, steps  # the interpreter cuts off what bf16 does not hold instead of rounding it
