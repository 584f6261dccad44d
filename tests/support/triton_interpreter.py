"""Runs Triton kernels on the CPU. Import this before anything imports triton: the choice is made at its first import.

The interpreter patches triton.language anew at every call of a device function, which takes half of a test's time.
Once a launch, and once for the functions of triton.language itself, is enough.
"""

from __future__ import annotations

import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

    from triton.runtime import interpreter

    patched: set[str] = set()

    def call_directly(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__module__
        if module.startswith("triton.") and module not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(module)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call_directly
