"""Launches that begin while the one ahead of them ends (programmatic dependent launch, SM90 on).

Between two kernels of a stream or a CUDA graph a GPU is idle for 0.4 us, and a program's first instructions take as
long again. A launch with Triton's option ``launch_pdl`` may begin once every program of the launch ahead has called
:func:`let_next_begin` or ended. What keeps such a chain in order, whatever runs before and after:

- Every program calls :func:`wait_for_previous` before it reads or writes anything that another launch writes or reads.
  It returns when the launch ahead has ended and what it wrote is visible. That launch waited likewise, so everything
  before it has ended too, and memory that an allocator deals out again has no reader left.
- Before that a program reads weights at most, which nobody writes while a model runs.
- :func:`let_next_begin` comes behind the wait. A launch that begins then finds all but this one ended, which is what
  kernels of others, with waits of their own, were written for. Called behind a kernel's main loop it leaves the
  multiprocessors to that loop; a launch of few programs calls it at once. A launch with a program on nearly every
  multiprocessor does not call it: what begins beside it finds room on the few that are free, and crowds them (the
  output projection behind `value_output` took 16.6 us for 8.7 so). The next one then begins as these programs end.
- A launch without the option, an event, and a copy wait for the whole launch ahead, as ever.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FIRST_CHAINED_ARCH = 90
_allowed = True


@triton.jit
def wait_for_previous(CHAINED: tl.constexpr):
    """Return once the launch ahead has ended and its writes can be read."""
    if CHAINED:
        gdc_wait()


@triton.jit
def let_next_begin(CHAINED: tl.constexpr):
    """Let the next launch begin as soon as every program of this one has come here."""
    if CHAINED:
        gdc_launch_dependents()


def allow(chained: bool) -> None:
    """Whether this process's launches are chained where the GPU can; they are unless this says otherwise."""
    global _allowed
    _allowed = chained


def chained(device: torch.device) -> dict[str, bool]:
    """A launch's ``CHAINED``, the kernel's constant, and Triton's option with it."""
    if _allowed and _can_chain(device):
        return {"CHAINED": True, "launch_pdl": True}
    return {"CHAINED": False}


@lru_cache(maxsize=16)
def _can_chain(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor >= FIRST_CHAINED_ARCH
