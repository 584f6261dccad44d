"""Pipeline stages on the CPU engine: the buffer that receives a stage's input is made where eager mode forgets it.

vLLM allocates that buffer in a profiling run, which its CPU worker makes only when it compiles the model; without one
the second stage fails at its first request (0.32). The buffer is made on first use instead.
"""

from __future__ import annotations

import functools
from typing import Any

_MARK = "_glm5deploy"


def install() -> None:
    """Wrap the CPU model runner's method that fills the buffer; repeatable."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    original = CPUModelRunner.sync_and_gather_intermediate_tensors
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def sync_and_gather_intermediate_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return original(self, *args, **kwargs)

    setattr(sync_and_gather_intermediate_tensors, _MARK, True)
    CPUModelRunner.sync_and_gather_intermediate_tensors = sync_and_gather_intermediate_tensors
