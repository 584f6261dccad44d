"""Warm-up launches every variant that steps of any size launch, told apart by Triton's own keys, without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from glm5deploy.kernels import topk_config, warmup
from glm5deploy.kernels.prepare import Launch, first_of_each, prepare
from glm5deploy.kernels.topk import topk_variant
from glm5deploy.kernels.tuning import Gpu
from tests.support.compiling import compiling


def compared(arch: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(compiling("-m", "tests.kernels.launch_keys", str(arch), timeout=300)[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("arch", [86, 90])
def test_no_step_launches_what_warm_up_did_not(arch: int) -> None:
    found = compared(arch)
    assert found["missing"] == []
    assert found["noticed"], "a launch that warm-up leaves out must show"
    assert all("glm5deploy.kernels.topk" in line for line in found["noticed"])


@pytest.mark.parametrize("longest", [4097, 8192, 8194, 65_539, 131_074])
def test_selections_are_launched_as_their_variant_says(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rows of a step begin within 16 bytes, which those of the warm-up never do."""
    of, k = Gpu(90, 132, "sm90"), 2048
    launched: list[tuple[object, ...]] = []

    def note(
        logits: torch.Tensor, lengths: torch.Tensor, k: int, width: int, out: torch.Tensor, work: torch.Tensor
    ) -> None:
        launched.append(("selection", *topk_variant(logits.shape[0], width, k, logits.stride(0), of)))

    monkeypatch.setattr(warmup, "gpu", lambda device: of)
    monkeypatch.setattr(warmup, "select_topk", note)
    serving = warmup.Serving(8, 32, k, 64, longest, 64, packed=False)
    launches = list(warmup._selection(serving, torch.device("cpu")))
    for launch in launches:
        launch.call()
    assert launched == [launch.variant for launch in launches]


@pytest.mark.parametrize("by_steps", [False, True])
def test_every_selection_of_any_length_is_launched_and_no_other(
    by_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, k, longest = Gpu(90, 132, "sm90"), 2048, 70_001
    monkeypatch.setattr(topk_config, "steps_ready", lambda: by_steps)
    monkeypatch.setattr(warmup, "gpu", lambda device: of)
    topk_config.topk_config.cache_clear()
    serving = warmup.Serving(8, 32, k, 600, longest, 64, packed=False)
    launched = {launch.variant[1:] for launch in warmup._selection(serving, torch.device("cpu"))}
    ends = range(4096, longest, 4096)
    widths = {k + 1, longest, *(end + near for end in ends for near in range(-4, 5)), *range(k + 1, longest, 61)}
    rows = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 66, 88, 89, 132, 133, 264, 265, 512, 513, 600)
    needed = {topk_variant(count, width, k, width, of) for width in widths for count in rows}
    topk_config.topk_config.cache_clear()
    assert launched == needed
    assert {variant[0] for variant in needed} == (
        {"steps", "stream", "parts"} if by_steps else {"block", "stream", "parts"}
    )


def test_one_number_stands_for_each_kind() -> None:
    assert first_of_each(lambda n: n // 10, range(1, 35)) == [1, 10, 20, 30]


def test_every_launch_runs() -> None:
    ran: list[int] = []
    launches = [Launch((number % 2,), lambda number=number: ran.append(number)) for number in range(5)]
    assert prepare(launches, torch.device("cpu")) == []
    assert ran == [0, 1, 2, 3, 4]
