"""Kernels run under Triton's interpreter here, and memory that nobody wrote holds NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  chooses the interpreter


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh floats are NaN and fresh integers far out of range: what a kernel fails to write is then noticed."""

    def poisoned(make: Any) -> Any:
        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = make(*args, **kwargs)
            if tensor.dtype == torch.float8_e4m3fn:
                tensor.view(torch.uint8).fill_(0x7F)
            elif tensor.is_floating_point():
                tensor.fill_(torch.nan)
            else:
                tensor.fill_(-77 if tensor.dtype.is_signed else 0xFF)
            return tensor

        return empty

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(42)
