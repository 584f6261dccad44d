"""Python processes in which Triton compiles kernels, whatever this one does with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def compiling(*words: str, timeout: float | None = None, **variables: str) -> list[str]:
    """The lines that ``python WORDS`` prints at the repository's root, with these variables besides ours."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    run = subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.splitlines()
