"""Amounts of bytes as people read them."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """Decimal units, as disks and hubs count: ``12 B``, ``1.5 MB``, ``430.2 GB``, ``1.44 TB``."""
    if count < 0:
        return f"-{human_bytes(-count)}"
    if round(count) < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if round(count, 1) < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.2f} TB"
