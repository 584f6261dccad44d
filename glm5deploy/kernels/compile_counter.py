"""Notes every variant of our kernels that Triton prepares: compiles, or loads from its cache on disk.

After warm-up there must be none: a compilation takes seconds and neither is legal inside a graph capture. Where the
variable GLM5DEPLOY_COMPILE_LOG names a file, each process appends a JSON line to it for every variant: ``pid``,
``kernel``, ``variant``, ``phase`` ("warm-up", then "serving") and ``cached`` (it came from the disk).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import triton

LOG_VARIABLE = "GLM5DEPLOY_COMPILE_LOG"
_OURS = "glm5deploy."


@dataclass(frozen=True, slots=True)
class Prepared:
    """One variant: its kernel's full name, what tells it from others, and what it needs of a GPU."""

    kernel: str
    variant: str
    late: bool  # prepared while serving
    cached: bool
    shared: int  # bytes of shared memory a program
    binary: str  # path of the cubin; empty when Triton was told not to keep it
    tag: object = None  # what the launching thread said it was for

    @property
    def local_bytes(self) -> int:
        """Bytes of local memory a thread needs, spilled registers above all."""
        return local_bytes(Path(self.binary))


_found: list[Prepared] = []
_late: Callable[[Prepared], None] | None = None
_tag: ContextVar[object] = ContextVar("tag", default=None)
_watching = False


def watch() -> None:
    """Note from here on; every call but the first does nothing."""
    global _watching
    if _watching:
        return
    _watching = True
    before = triton.knobs.compilation.listener

    def listener(**facts: Any) -> None:
        if before is not None:
            before(**facts)
        # Sources that are not Python functions are of other libraries.
        function = getattr(facts["src"], "fn", None)
        if function is not None and str(function.fn.__module__).startswith(_OURS):
            _note(facts["src"], facts["metadata"], facts["metadata_group"], bool(facts["cache_hit"]))

    triton.knobs.compilation.listener = listener


def serving_begins(late: Callable[[Prepared], None]) -> None:
    """Warm-up is over in this process: ``late`` is called with every variant that is prepared from now on."""
    global _late
    _late = late


def _note(source: Any, metadata: Any, files: dict[str, str], cached: bool) -> None:
    binary = next((path for name, path in files.items() if name.endswith(".cubin")), "")
    kernel = f"{source.fn.fn.__module__}.{source.fn.fn.__qualname__}"
    variant = _variant(source, metadata)
    found = Prepared(kernel, variant, _late is not None, cached, int(metadata["shared"]), binary, _tag.get())
    _found.append(found)
    log = os.environ.get(LOG_VARIABLE)
    if log:
        phase = "serving" if found.late else "warm-up"
        facts = {"pid": os.getpid(), "kernel": kernel, "variant": found.variant, "phase": phase, "cached": cached}
        with open(log, "a") as file:  # noqa: PTH123  one write of one line, which other processes' do not cut
            file.write(json.dumps(facts) + "\n")
    if _late is not None:
        _late(found)


def _variant(source: Any, metadata: Any) -> str:
    """Warps and stages, constants (an argument equal to 1 is one) and types, ``:16`` for multiples of 16."""
    names = source.fn.arg_names
    constants = {names[path[0]]: value for path, value in source.constants.items()}
    multiples = {names[path[0]] for path, attributes in source.attrs.items() if attributes}
    words = [f"warps={metadata['num_warps']}", f"stages={metadata['num_stages']}"]
    words += [f"{name}={value}".replace(" ", "") for name, value in constants.items()]
    words += [
        f"{name}:{kind}{':16' if name in multiples else ''}"
        for name, kind in source.signature.items()
        if name not in constants
    ]
    return " ".join(words)


class CompileCounter:
    """Context manager: ``found`` lists the variants that this process prepared inside it, ``names`` their kernels."""

    def __init__(self) -> None:
        self.found: list[Prepared] = []
        self._first = 0

    @property
    def names(self) -> list[str]:
        return [variant.kernel for variant in self.found]

    def __enter__(self) -> CompileCounter:
        watch()
        self._first = len(_found)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.found = _found[self._first :]


@contextmanager
def tagged(tag: object) -> Iterator[None]:
    """Variants that this thread prepares in the context carry ``tag``."""
    before = _tag.set(tag)
    try:
        yield
    finally:
        _tag.reset(before)


def local_bytes(cubin: Path) -> int:
    """Bytes of local memory a thread of a binary needs, from the binary's own resource table."""
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    run = subprocess.run([tool, "--dump-resource-usage", cubin], check=True, capture_output=True, text=True)
    found = re.search(r"STACK:(\d+)", run.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump told nothing about {cubin}")
    return int(found[1])
