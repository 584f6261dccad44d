"""Everything that is asked of a running engine, in order of worth."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from . import measure, report, trace
from .course import Course
from .engine import Engine
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

    def run(self) -> None:
        """Every measurement, the most wanted first; the tables last."""
        wanted = self.wanted
        first, last, longest = wanted.decode[0], wanted.decode[-1], wanted.prefill[-1]
        self.course.table(report.loading(self.engine, self.stack))
        summary: list[str] = []

        def attempt(name: str, least: float, work: Callable[[], list[str]]) -> None:
            def keep() -> None:
                lines = work()
                self.course.table(lines)
                summary.extend(lines)

            self.course.attempt(name, least, keep)

        attempt(f"decode {first}", 8, lambda: self.steps(first))
        attempt(f"profile of decode {first}", 12, lambda: self.decode_profile(first))
        for batch in wanted.decode[1:]:
            attempt(f"decode {batch}", 6 + batch / 2, lambda batch=batch: self.steps(batch))
        attempt("sanity", 4, self.sanity)
        attempt("prefill", 15, self.rates)
        attempt(f"profile of prefill {longest}", 12, lambda: self.prefill_profile(longest))
        attempt(f"profile of decode {last}", 25, lambda: self.decode_profile(last))
        self.course.say("all again:")
        self.course.table(report.loading(self.engine, self.stack))
        self.course.table(summary)

    def steps(self, batch: int) -> list[str]:
        found = measure.decode_steps(self.engine.url, self.engine.name, self.wanted, batch, self.course.say)
        self.course.keep(f"steps of {batch}", asdict(found))
        return list(report.steps(found, self.stack))

    def rates(self) -> list[str]:
        points = measure.prefill_rates(self.engine.url, self.engine.name, self.wanted, self.course.say)
        self.course.keep("prefill", [asdict(point) for point in points])
        return list(report.prefill(points))

    def sanity(self) -> list[str]:
        """Of answers to three prompts, the longest of them longer than the indexer's selection."""
        lengths = (50, self.stack.hparams.index_topk // 2, self.stack.hparams.index_topk + 200)
        rng = random.Random(1)
        prompts = [[rng.randrange(self.vocabulary - 100) for _ in range(length)] for length in lengths]
        return [judge([ask(self.engine.url, self.engine.name, prompt) for prompt in prompts])]

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
