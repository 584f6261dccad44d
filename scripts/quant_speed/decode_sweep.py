"""A decoded token's products with every launch, kept as they come."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import torch

from quant_speed import cases, decode, decode_chain


def decode_sweep(out: Path | None) -> int:
    """What a decoded token's products take with other launches; 1 where a variant is wrong."""
    rows: list[decode.Timed] = []
    layers: list[dict[str, object]] = []
    for found in chain(decode.linear_times(), decode.moe_times()):
        rows.append(found)
        print(f"{found.what} {found.tokens} {found.variant}: {found.us} us, error {found.error:.2e}", flush=True)
        _keep(out, rows, layers)
    for names in cases.MOE_TYPES:
        for mode, us, same in decode_chain.times(names):
            layers.append({"experts": "/".join(names), "launches": mode, "us": us, "same": same})
            print(
                f"a layer's products in turn, {'/'.join(names)}, {mode}: {us:.1f} us, same numbers: {same}", flush=True
            )
            _keep(out, rows, layers)
    print(decode.table(rows))
    for layer in layers:
        print("layer", *layer.values())
    return int(any(row.us is None for row in rows) or not all(layer["same"] for layer in layers))


def _keep(out: Path | None, rows: list[decode.Timed], layers: list[dict[str, object]]) -> None:
    """Written after every figure, for a run may be cut off."""
    if out is not None:
        figures = {"gpu": torch.cuda.get_device_name(), "decode": [asdict(row) for row in rows], "layers": layers}
        out.write_text(json.dumps(figures, indent=1))
