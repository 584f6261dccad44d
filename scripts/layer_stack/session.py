"""Everything that is asked of a running engine, in order of worth."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from . import measure, report, trace
from .course import Course
from .engine import Engine
from .experts import spread
from .sanity import ask, judge
from .stack import Stack


@dataclass(frozen=True)
class Session:
    """A running engine and everything that is asked of it."""

    course: Course
    engine: Engine
    stack: Stack
    wanted: measure.Wanted
    traces: Path | None

    def run(self, experts: bool) -> None:
        """Every measurement, the most wanted first; the tables last."""
        course, wanted = self.course, self.wanted
        summary: list[str] = []
        course.attempt("decode steps", 30, lambda: summary.extend(self.steps()))
        course.attempt("profile of decode 1", 25, lambda: summary.extend(self.decode_profile(wanted.decode[0])))
        course.attempt("prefill", 25, lambda: summary.extend(self.rates()))
        course.attempt("sanity", 5, lambda: summary.append(self.sanity()))
        course.attempt("profile of decode 32", 30, lambda: summary.extend(self.decode_profile(wanted.decode[-1])))
        course.attempt("profile of prefill", 20, lambda: summary.extend(self.prefill_profile(wanted.prefill[-1])))
        if experts:
            course.attempt("experts", 10, lambda: summary.extend(self.experts()))
        course.table(report.loading(self.engine, self.stack))
        course.table(summary)

    def steps(self) -> list[str]:
        points = measure.decode_steps(self.engine.url, self.engine.name, self.wanted, self.course.say)
        self.course.keep("decode", [asdict(point) for point in points])
        return list(report.steps(points, self.stack))

    def rates(self) -> list[str]:
        points = measure.prefill_rates(self.engine.url, self.engine.name, self.wanted, self.course.say)
        self.course.keep("prefill", [asdict(point) for point in points])
        return list(report.prefill(points))

    def sanity(self) -> str:
        """Of answers to three prompts, the longest of them longer than the indexer's selection."""
        lengths = (50, self.stack.hparams.index_topk // 2, self.stack.hparams.index_topk + 200)
        rng = random.Random(1)
        prompts = [[rng.randrange(self.vocabulary - 100) for _ in range(length)] for length in lengths]
        return judge([ask(self.engine.url, self.engine.name, prompt) for prompt in prompts])

    def experts(self) -> list[str]:
        found = spread(self.engine.url, self.engine.name, self.vocabulary, self.wanted.decode[-1], self.stack.hparams)
        self.course.keep("experts", asdict(found))
        return list(found.lines())

    @property
    def vocabulary(self) -> int:
        return self.stack.hparams.vocab_size

    def decode_profile(self, batch: int) -> list[str]:
        """Of a quarter of a second; the first two steps in it are left out."""
        wanted = self.wanted

        def take(profiler: measure.Profiler) -> Path:
            return profiler.decode(batch, wanted.context, wanted.output * 5, 0.25)

        return self._profile(f"decode {batch}", take, f"execute_context_0(0)_generation_{batch}(", 2)

    def prefill_profile(self, prompt: int) -> list[str]:
        return self._profile(f"prefill {prompt}", lambda p: p.prefill(prompt), "execute_context_1(", 0)

    def _profile(self, name: str, take: Callable[[measure.Profiler], Path], mark: str, skip: int) -> list[str]:
        if self.traces is None:
            return []
        events = trace.read_events(
            take(measure.Profiler(self.engine.url, self.engine.name, self.vocabulary, self.traces))
        )
        found = trace.breakdown(events, mark, skip)
        self.course.keep(name, asdict(found))
        sequence = "\n".join(report.sequence(trace.steps_of(events, mark, skip)[-1]))
        (self.course.out / f"{name.replace(' ', '-')}.txt").write_text(sequence + "\n")
        self.course.table(report.kernels(name, found))
        return list(report.shares(name, found))
