"""An extension of vLLM's worker that tells what the loaded model takes; named by ``--worker-extension-cls``."""

from __future__ import annotations

from typing import Any


class WorkerSizes:
    """Mixed into vLLM's worker class."""

    def weight_bytes(self: Any) -> int:
        """Bytes of all parameters, each storage counted once."""
        seen = {}
        for parameter in self.model_runner.model.parameters():
            storage = parameter.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        return sum(seen.values())
