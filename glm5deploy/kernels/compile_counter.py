"""Counts kernels that a process had to compile, or load from the cache on disk, after warm-up: there must be none."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import triton


class CompileCounter:
    """Context manager: `names` lists each kernel specialisation this process met for the first time inside it."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._before: Any = None

    def __enter__(self) -> CompileCounter:
        self._before = triton.knobs.runtime.jit_cache_hook
        triton.knobs.runtime.jit_cache_hook = self._note
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        triton.knobs.runtime.jit_cache_hook = self._before

    def _note(self, **facts: Any) -> Any:
        # Called on a miss of the in-memory cache only. A true result would cancel the compilation.
        self.names.append(str(facts["repr"]))
        return self._before(**facts) if self._before is not None else False
