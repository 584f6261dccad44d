"""What really runs: attention backend and KV type from the server's log, indexer calls from the workers' counters."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

STATUS_VARIABLE = "GLM5DEPLOY_STATUS_DIR"
_LARGEST = 64 << 10
_MOST_RANKS = 4096


@dataclass(frozen=True, slots=True)
class IndexerCount:
    """Over all ranks: ``calls``; over one rank: ``rows`` (tokens) and ``sparse_rows`` (tokens for which something was
    left out, the least of any rank). ``ranks`` is how many ranks reported."""

    ranks: int
    calls: int
    rows: int
    sparse_rows: int
    layers: tuple[int, ...]


def read_indexer_counts(folder: Path) -> IndexerCount:
    """Sum the counters that every rank's indexer writes into ``folder``; unreadable ones count as not there."""
    counts = [count for path in sorted(folder.glob("indexer-rank*.json"))[:_MOST_RANKS] if (count := _one(path))]
    if not counts:
        return IndexerCount(0, 0, 0, 0, ())
    return IndexerCount(
        ranks=len(counts),
        calls=sum(count.calls for count in counts),
        rows=min(count.rows for count in counts),
        sparse_rows=min(count.sparse_rows for count in counts),
        layers=tuple(sorted({layer for count in counts for layer in count.layers})),
    )


def _one(path: Path) -> IndexerCount | None:
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(_LARGEST))
        calls, rows, sparse_rows, layers = (value[key] for key in ("calls", "rows", "sparse_rows", "layers"))
        if not all(type(number) is int for number in [calls, rows, sparse_rows, *layers]):
            return None
        return IndexerCount(1, calls, rows, sparse_rows, tuple(layers))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def clear_counts(folder: Path) -> None:
    """Make ``folder`` exist without counters of an earlier server."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("indexer-rank*.json"):
        path.unlink(missing_ok=True)


_BACKEND = re.compile(r"\bUsing (?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]{3,}) (?:attention )?backend\b")
_CACHE_TYPE = re.compile(r"\bkv_cache_dtype=['\"]?([\w.]+)")
_MODEL_TYPE = re.compile(r"\bdtype=(?:torch\.)?(\w+)")
_CAPACITY = re.compile(r"KV cache size: ([\d,]+) tokens")


@dataclass(frozen=True, slots=True)
class Running:
    """What the log says about the engine that came up; an empty string or 0 where it says nothing."""

    backend: str
    kv_dtype: str
    kv_tokens: int


def read_running(lines: list[str]) -> Running:
    """Backend, KV type ("auto" resolved to the model's type), KV capacity in tokens."""
    text = "\n".join(lines)
    cache = _last(_CACHE_TYPE, text)
    return Running(
        backend=_last(_BACKEND, text),
        kv_dtype=_last(_MODEL_TYPE, text) if cache == "auto" else cache,
        kv_tokens=int(_last(_CAPACITY, text).replace(",", "") or 0),
    )


def _last(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.findall(text)
    return str(found[-1]) if found else ""
