"""Rows of the tables, and what they are held to."""

from __future__ import annotations

from dataclasses import asdict, dataclass

RATE = 4.3e12  # bytes a second that a large copy reaches on an H200
LIMIT = 4e-3  # relative error of a product, root mean square
_HEAD = ("product", "tokens", "floor", "goal", "ours", "cuBLAS bf16", "plugin", "error", "plugin's error")


@dataclass
class Row:
    """One case: microseconds, and errors against fp32. None: not there, or not timed."""

    what: str
    tokens: int
    error: float
    floor: float = 0.0
    ours: float | None = None
    cublas: float | None = None
    plugin: float | None = None
    plugin_error: float | None = None

    @property
    def experts(self) -> bool:
        return self.what.startswith("MoE")

    @property
    def goal(self) -> float | None:
        """Microseconds at most, as far as a goal is set and its peer was timed."""
        if self.tokens <= 16 or (self.experts and self.tokens <= 64):
            return 2.5 * self.floor + 10 if self.experts else 2 * self.floor + 8
        if self.experts and self.tokens >= 256:
            return self.plugin and self.plugin / 5
        if not self.experts and self.tokens >= 512:
            return self.cublas and 2 * self.cublas
        return None

    @property
    def missed(self) -> list[str]:
        """What of the goals this case misses."""
        found = []
        if not self.error <= LIMIT:
            found.append(f"error {self.error:.2e}")
        if self.ours is not None and self.goal is not None and self.ours > self.goal:
            found.append(f"{self.ours:.1f} us, goal {self.goal:.1f}")
        if self.ours is not None and self.plugin is not None and self.tokens <= 64 and self.ours > self.plugin:
            found.append(f"slower than the plugin ({self.ours:.1f} us against {self.plugin:.1f})")
        return found

    def cells(self, plugin_here: bool) -> tuple[str, ...]:
        met = "" if self.goal is None or self.ours is None else " met" if self.ours <= self.goal else " **missed**"
        peer = _number(self.plugin) if plugin_here else "absent"
        if self.plugin and self.ours:
            peer += f" (x{self.plugin / self.ours:.1f})"
        return (
            self.what,
            str(self.tokens),
            f"{self.floor:.1f}",
            _number(self.goal) + met,
            _number(self.ours),
            _number(self.cublas),
            peer,
            f"{self.error:.2e}",
            "–" if self.plugin_error is None else f"{self.plugin_error:.2e}",
        )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def head() -> str:
    return f"{_line(_HEAD)}\n{_line(('---',) * len(_HEAD))}"


def line(row: Row, plugin_here: bool) -> str:
    return _line(row.cells(plugin_here))


def as_json(rows: list[Row]) -> list[dict[str, object]]:
    return [asdict(row) | {"goal": row.goal, "missed": row.missed} for row in rows]
