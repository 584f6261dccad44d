"""Merge in a process of its own that kills itself just before its n-th call that changes anything on the disk.

    python -m tests.support.kill_merge N SOURCE OUTPUT OPTIONS_AS_JSON

Prints the number of such calls if it got to the end. One thread, so that the n-th call is the same every time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glm5deploy.gguf_files import consume, linux_files, merge_job
from glm5deploy.gguf_files.copy import merge
from glm5deploy.gguf_files.merge_options import MergeOptions

CHANGING = ("write", "pwrite", "fsync", "fdatasync", "ftruncate", "rename", "replace", "unlink")


class Trap:
    def __init__(self, deadly: int) -> None:
        self.calls = 0
        self._deadly = deadly

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def trapped(*arguments: Any, **named: Any) -> Any:
            if self.calls == self._deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            self.calls += 1
            return call(*arguments, **named)

        return trapped


def main() -> None:
    deadly, source, output, options = sys.argv[1:]
    trap = Trap(int(deadly))
    for name in CHANGING:
        setattr(os, name, trap.wrap(getattr(os, name)))
    for module, name in ((consume, "punch_hole"), (merge_job, "reserve"), (linux_files, "clone_range")):
        setattr(module, name, trap.wrap(getattr(module, name)))
    merge(Path(source), Path(output), MergeOptions(threads=1, **json.loads(options)))
    print(trap.calls)


if __name__ == "__main__":
    main()
