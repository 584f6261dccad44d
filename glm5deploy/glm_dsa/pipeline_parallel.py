"""Where layers may be divided among pipeline stages.

vLLM hands hidden states from one stage to the next, but not the token positions that an indexer has selected: those lie
in a buffer of the process. A stage that began with a layer that shares an earlier selection would read whatever its own
buffer holds and answer fluently and wrongly. So every stage begins with a layer that has its own indexer.
"""

from __future__ import annotations

from functools import cache

from glm5deploy.errors import UsageError

VARIABLE = "VLLM_PP_LAYER_PARTITION"
"""vLLM reads the layers of each stage from here, as ``38,40``; every process of every node needs it."""


def stage_layers(pattern: str, pp: int) -> tuple[int, ...]:
    """Layers of each of ``pp`` stages for an indexer schedule (``FFFS…``): vLLM's own division where it is right, else
    the most even one that begins every stage with F. Raises UsageError when there are too few F layers."""
    own = vllm_division(len(pattern), pp) if pp <= len(pattern) else ()
    if own and not wrong_stages(pattern, own):
        return own
    starts = [layer for layer, letter in enumerate(pattern) if letter == "F"]
    if pp > len(starts):
        raise UsageError(
            f"{pp} pipeline stages, but only {len(starts)} of {len(pattern)} layers have an indexer to begin a stage",
            hint=f"use at most {len(starts)} stages",
        )

    @cache
    def best(first: int, stages: int) -> tuple[int, int, tuple[int, ...]]:
        """(largest stage, sum of squares, sizes) for the layers from ``starts[first]`` on."""
        if stages == 1:
            size = len(pattern) - starts[first]
            return size, size * size, (size,)
        options = []
        for after in range(first + 1, len(starts) - stages + 2):
            size = starts[after] - starts[first]
            largest, squares, sizes = best(after, stages - 1)
            options.append((max(size, largest), squares + size * size, (size, *sizes)))
        return min(options)

    return best(0, pp)[2]


def vllm_division(num_layers: int, pp: int) -> tuple[int, ...]:
    """As vLLM deals layers out by itself: evenly, what remains to the last stages but one."""
    counts = [num_layers // pp] * pp
    for extra in range(num_layers % pp):
        counts[-2 - extra if pp > 1 else -1] += 1
    return tuple(counts)


def wrong_stages(pattern: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Stages (counted from 0) of this division that would begin with a layer that shares a selection."""
    return tuple(stage for stage in range(1, len(sizes)) if pattern[sum(sizes[:stage])] == "S")


def partition_variable(pattern: str, pp: int) -> str | None:
    """What :data:`VARIABLE` must hold for ``pp`` stages; None where vLLM divides rightly by itself."""
    sizes = stage_layers(pattern, pp)
    return None if sizes == vllm_division(len(pattern), pp) else ",".join(map(str, sizes))


def check_partition(value: str | None, pattern: str, pp: int) -> None:
    """Raise UsageError when a user's :data:`VARIABLE` would begin a stage with a layer that shares a selection."""
    if value is None or pp == 1 or not pattern:
        return
    counts = [int(word) if word.strip().isdigit() else -1 for word in value.split(",")]
    hint = f"unset it: {partition_variable(pattern, pp) or 'vLLM divides rightly by itself'}"
    if len(counts) != pp or min(counts) < 1 or sum(counts) != len(pattern):
        raise UsageError(f"{VARIABLE}={value}: expected {pp} numbers that add up to {len(pattern)} layers", hint=hint)
    wrong = wrong_stages(pattern, tuple(counts))
    if wrong:
        raise UsageError(
            f"{VARIABLE}={value}: stage {wrong[0]} would begin with a layer that shares an earlier selection, "
            "which is in another process; its answers would be wrong",
            hint=hint,
        )
