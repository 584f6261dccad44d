"""Memory for products whose programs split K: their parts, and the counters at which the last one is known."""

from __future__ import annotations

import torch

TICKETS = 1 << 14  # tiles of one launch that parts of K can be counted at
STREAMS = 128  # of one process that products run on: more than torch deals out
_tickets: dict[torch.device, tuple[torch.Tensor, dict[int, int]]] = {}


def prepare(device: torch.device) -> None:
    """Make the counters of all streams; not in a capture, where zeroing would happen at the graph's replay only."""
    if device not in _tickets and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        _tickets[device] = torch.zeros((STREAMS, TICKETS), dtype=torch.int32, device=device), {}
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # other streams do not wait for this one's zeros


def stream_tickets(count: int, device: torch.device) -> torch.Tensor:
    """``count`` counters of the current stream, which every kernel leaves zeroed."""
    prepare(device)
    if device not in _tickets:
        raise RuntimeError("a device's first product cannot be captured in a CUDA graph")
    counters, places = _tickets[device]
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    place = places.setdefault(stream, len(places))
    if place >= STREAMS or count > TICKETS:
        raise RuntimeError(
            f"no counters for {count} tiles on stream {place + 1}: {TICKETS} on each of {STREAMS} streams"
        )
    return counters[place]


def part_memory(
    parts: int, rows: int, width: int, tiles: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [parts, rows, width] and counters for ``tiles`` tiles; nothing where a program sums all of K."""
    prepare(device)
    if parts == 1:
        return torch.empty(0, device=device), torch.empty(0, dtype=torch.int32, device=device)
    return torch.empty((parts, rows, width), dtype=torch.float32, device=device), stream_tickets(tiles, device)
