"""Optional records of what the indexer did: selections for comparison, and counters that prove it ran.

Both are off unless their environment variable names a folder, and cost one comparison with None then. Inside a CUDA
graph neither sees the replays: they describe the steps that ran from Python.

``GLM5DEPLOY_TRACE_DIR``  one ``.npz`` a call and layer: ``layer``, ``request`` [T], ``position`` [T], ``selected``
[T, topk] int32, -1 padded.
``GLM5DEPLOY_STATUS_DIR``  ``indexer-rank<N>.json``: calls, rows (tokens), rows with more positions than topk, layers.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from glm5deploy.vllm_plugin.metadata import SparseMetadata

TRACE_VARIABLE = "GLM5DEPLOY_TRACE_DIR"
STATUS_VARIABLE = "GLM5DEPLOY_STATUS_DIR"
logger = logging.getLogger("vllm.glm5deploy")
_SECONDS_BETWEEN_WRITES = 0.2


def _folder(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None


_trace_folder = _folder(TRACE_VARIABLE)
_status_folder = _folder(STATUS_VARIABLE)
_calls = 0


class _Counter:
    def __init__(self, folder: Path) -> None:
        self.path = folder / f"indexer-rank{_rank()}.json"
        self.calls = self.rows = self.sparse_rows = 0
        self.layers: set[int] = set()
        self.written = 0.0

    def add(self, layer: int, rows: int, sparse_rows: int) -> None:
        self.calls += 1
        self.rows += rows
        self.sparse_rows += sparse_rows
        self.layers.add(layer)
        now = time.monotonic()
        if now - self.written >= _SECONDS_BETWEEN_WRITES:
            self.written = now
            self.write()

    def write(self) -> None:
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(
            json.dumps(
                {
                    "calls": self.calls,
                    "rows": self.rows,
                    "sparse_rows": self.sparse_rows,
                    "layers": sorted(self.layers),
                }
            )
        )
        temporary.replace(self.path)


_counter: _Counter | None = None


def count(layer_name: str, metadata: SparseMetadata, topk: int) -> None:
    """Count one indexer call (see the module's head)."""
    global _counter, _status_folder
    if _status_folder is None or _capturing(metadata.lengths):
        return
    if _counter is None:
        _counter = _Counter(_status_folder)
    # A GPU's lengths are not read back: the host knows the step's longest context, and that bounds every row.
    on_host = metadata.lengths.device.type == "cpu"
    sparse = (
        int((metadata.lengths > topk).sum()) if on_host else metadata.num_actual_tokens * (metadata.max_seq_len > topk)
    )
    try:
        _counter.add(_layer(layer_name), metadata.num_actual_tokens, sparse)
    except OSError as error:
        _status_folder = None
        _tell(STATUS_VARIABLE, error)


def record(layer_name: str, metadata: SparseMetadata, selected: torch.Tensor) -> None:
    """Write one indexer call's selection, int32 [T, topk] (see the module's head)."""
    global _calls, _trace_folder
    if _trace_folder is None or _capturing(selected):
        return
    import numpy as np

    _calls += 1
    layer = _layer(layer_name)
    name = f"rank{_rank()}-layer{layer:03d}-{_calls:06d}.npz"
    try:
        with (_trace_folder / f".{name}").open("wb") as file:
            np.savez(
                file,
                layer=np.int32(layer),
                request=metadata.request_of_token.cpu().numpy(),
                position=metadata.lengths.cpu().numpy() - 1,
                selected=selected.cpu().numpy(),
            )
        (_trace_folder / f".{name}").replace(_trace_folder / name)
    except OSError as error:
        _trace_folder = None
        _tell(TRACE_VARIABLE, error)


def _tell(variable: str, error: OSError) -> None:
    """A record that cannot be written must not stop a server that answers."""
    logger.warning("%s: no more records are written: %s", variable, error)


def _capturing(tensor: torch.Tensor) -> bool:
    import torch

    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _rank() -> int:
    """Among all processes of the server: the stages of a pipeline count from 0 each in their tensor-parallel group."""
    from vllm.distributed import get_world_group

    return int(get_world_group().rank)


def _layer(layer_name: str) -> int:
    from vllm.model_executor.models.utils import extract_layer_index

    return int(extract_layer_index(layer_name))
