"""One run of measuring: what compiles, what is right, and which configuration is fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from triton.errors import TritonError

from glm5deploy.errors import DeployError
from glm5deploy.kernels.compile_counter import tagged
from glm5deploy.kernels.measure import relative_rms
from glm5deploy.kernels.prepare import Launch, prepare
from glm5deploy.kernels.tune_cases import Attention, Scores
from glm5deploy.kernels.tuning import SPILL_LIMIT

MAX_ERROR = 5e-3
# What a rival must save of the built-in choice's time to replace it: less is noise.
GAIN = 0.02
Say = Callable[[Mapping[str, Any]], None]


@dataclass
class Measuring:
    """One run: the device, how its calls are timed, when it ends, and what turned out not to fit."""

    device: torch.device
    ends: float
    say: Say
    time: Callable[[Sequence[Callable[[], object]]], float]
    unfit: dict[object, str] = field(default_factory=dict)
    total: int = 0
    done: int = 0

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.ends

    def best(self, name: str, case: Attention | Scores, candidates: list[Any]) -> Any:
        """The fastest of the candidates, of which the first is the built-in choice; None when the time was up first."""
        expected = case.expected()
        times: dict[Any, float] = {}
        for config in candidates:
            if self.over:
                return None
            if replace(config, per_sm=1) in self.unfit:
                continue
            calls = list(case.calls(config))
            error = relative_rms(case.checked(calls[0]()), expected)
            if not error <= MAX_ERROR:
                if config == candidates[0]:
                    raise DeployError(
                        f"{name}: the built-in configuration {config} is wrong by {error:.2g} on this GPU",
                        hint="Do not serve on it with this release, and report this.",
                    )
                self.unfit[replace(config, per_sm=1)] = f"wrong by {error:.2g}"
                continue
            times[config] = self.time(calls)
        if not times:
            raise DeployError(f"{name}: no configuration fits this GPU", hint="Report the GPU and this message.")
        found, built_in = min(times, key=lambda config: times[config]), candidates[0]
        if built_in in times and times[found] > (1 - GAIN) * times[built_in]:
            found = built_in
        self.done += 1
        before = f", built-in {times[built_in]:.1f} µs" if built_in in times else ""
        note = f"{name}: {times[found]:.1f} µs{before}, of {len(times)} configurations that fit"
        self.say({"done": self.done, "total": self.total, "note": note})
        return found

    def compile(self, case: Attention | Scores, candidates: list[Any], limits: Mapping[Any, int]) -> None:
        """Compile every variant side by side; ``unfit`` gets those that break a limit of the GPU."""
        if self.device.type != "cuda":
            return

        def run(shape: Any) -> None:
            with tagged(shape):
                for call in case.variants(shape):
                    try:
                        call()
                    except (TritonError, RuntimeError) as error:  # too large, or more than the compiler can do
                        self.unfit[shape] = str(error).partition("\n")[0]

        shapes = list(dict.fromkeys(replace(config, per_sm=1) for config in candidates))
        note = f"compiling {len(shapes)} configurations of {type(case).__name__.lower()}"
        self.say({"done": self.done, "total": self.total, "note": note})
        for variant in prepare([Launch((shape,), partial(run, shape)) for shape in shapes], self.device):
            limit = limits.get(variant.tag, SPILL_LIMIT)
            if variant.tag is not None and variant.tag not in self.unfit and variant.local_bytes > limit:
                self.unfit[variant.tag] = f"{variant.local_bytes} bytes a thread of local memory, more than {limit}"
