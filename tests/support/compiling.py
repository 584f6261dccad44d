"""Python processes in which Triton compiles kernels, whatever this one does with them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def kernel_source(kernel: Any, types: dict[str, str], constants: dict[str, Any], aligned: Iterable[str]) -> Any:
    """A Triton or Gluon kernel to compile without a GPU: an argument without a type is an int32.

    `aligned`: arguments that are multiples of 16.
    """
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    return (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel,
        signature,
        {(names.index(n),): value for n, value in constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
