"""Numbers and nested values as people read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from glm5deploy.sizes import human_bytes


def human_seconds(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def is_table(value: object) -> bool:
    """A non-empty list of objects with the same keys is shown as a table."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(row, Mapping) and list(row) == list(value[0]) for row in value)
    )


def cell(key: str, value: object) -> str:
    """One value; integers under a key that ends in ``bytes`` or ``size`` are sizes."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and (key.endswith("bytes") or key == "size"):
        return human_bytes(value)
    if isinstance(value, float):
        return human_seconds(value) if key.endswith("seconds") else f"{value:g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(cell("", item) for item in value) if value else "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={cell(k, v)}" for k, v in value.items())
    return str(value)


def lines(value: Mapping[str, object], indent: str = "") -> Iterator[str | Sequence[Mapping[str, object]]]:
    """``key: value`` lines of a nested object; a table comes out as itself, after its key."""
    width = max((len(key) for key in value), default=0)
    for key, item in value.items():
        label = key.replace("_", " ")
        if is_table(item):
            yield f"{indent}{label}:"
            yield item  # type: ignore[misc]
        elif isinstance(item, Mapping) and item:
            yield f"{indent}{label}:"
            yield from lines(item, indent + "  ")
        else:
            yield f"{indent}{label:<{width}}  {cell(key, item)}"
