"""The top-k kernels against the reference, which they must equal position by position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from glm5deploy.kernels import reference, topk_config
from glm5deploy.kernels.topk import select_topk, topk_variant, topk_workspace_elements
from glm5deploy.kernels.topk_config import TopkConfig
from glm5deploy.kernels.tuning import Gpu
from tests.kernels.topk_rows import POISON, awkward_rows

# A program holds 512 columns, and the stand-in GPU four programs.
SMALL = TopkConfig((1,), 1, 1, samples=(128, 256), per_sm=8, spared=1)
ONE_PROGRAM = replace(SMALL, spared=1000)
LAUNCHES = {"parts": SMALL, "one program": ONE_PROGRAM}
every_launch = pytest.mark.parametrize("config", LAUNCHES.values(), ids=LAUNCHES)
WIDTH = 3001


class Run:
    """One selection, compared with the reference, and what it left in its scratch memory."""

    def __init__(
        self,
        logits: torch.Tensor,
        lengths: list[int],
        k: int,
        config: TopkConfig | None,
        starts: list[int] | None = None,
        max_length: int = 0,
    ) -> None:
        rows, longest = len(lengths), max(max_length, *lengths)
        sizes = torch.tensor(lengths, dtype=torch.int32)
        first = None if starts is None else torch.tensor(starts, dtype=torch.int32)
        out = torch.empty(rows, k + 3, dtype=torch.int32)
        self.scratch = torch.full((topk_workspace_elements(rows, longest, k, config),), POISON, dtype=torch.int32)
        select_topk(logits, sizes, k, longest, out, self.scratch, first, config)
        assert torch.equal(out[:, :k], reference.select_topk(logits, sizes, k, first))
        assert (out[:, k:] == -77).all(), "columns past k are not the kernel's"
        self.rows, self.longest, self.most = rows, longest, SMALL.stream_warps * 512

    def searched(self) -> bool:
        """Whether a program wrote down where lists begin, one behind the other."""
        return bool((self.scratch[: 2 * self.rows * self.most] != POISON).any())

    def part_counts(self) -> torch.Tensor:
        """How many columns of each row the parts listed."""
        parts, _ = SMALL.parts(self.rows, self.longest + 3, 4)
        lists = self.rows * (self.most + 512 * parts)
        counts = self.scratch.view(torch.int64)[lists : lists + self.rows * parts]
        return counts.to(torch.int32).view(self.rows, parts).sum(1)


@every_launch
@pytest.mark.parametrize("k", [1, 300])
def test_awkward_rows(k: int, config: TopkConfig) -> None:
    lengths = [WIDTH] * 13
    lengths[:4] = WIDTH, WIDTH - 1, WIDTH - 2, WIDTH - 3
    Run(awkward_rows(WIDTH), lengths, k, config)


@pytest.mark.parametrize("k", [1, 33, 300, 511])
def test_awkward_rows_that_one_program_holds(k: int) -> None:
    Run(awkward_rows(505), [505, 504, 503, 502, 0, 1, 33, 32, 300, 301, 505, 505, 505], k, SMALL)


@every_launch
def test_lengths_around_k_and_a_program(config: TopkConfig) -> None:
    lengths = [0, 1, 39, 40, 41, 511, 512, 513, 1023, 1025]
    Run(torch.randn(10, WIDTH), lengths, 40, config, max_length=WIDTH)


@every_launch
def test_rows_may_start_anywhere(config: TopkConfig) -> None:
    Run(torch.randn(5, WIDTH), [1800, 0, 509, 510, 2997], 33, config, starts=[1201, 3001, 1, 3, 4])


def test_rows_that_one_program_holds_may_start_anywhere() -> None:
    Run(torch.randn(4, 700), [505, 0, 1, 509], 33, SMALL, starts=[195, 700, 3, 2])


def hidden_from_the_sample(high: float, low: float, config: TopkConfig) -> torch.Tensor:
    """A row whose sampled columns are around `high`, all others around `low`."""
    row = torch.randn(1, WIDTH) + low
    groups, eights = config.sample(WIDTH, config.parts(1, WIDTH + 3, 4)[0]) // 8, WIDTH // 8
    for group in range(groups):
        start = group * eights // groups * 8
        row[0, start : start + 8] += high - low
    return row


def test_a_sample_that_promises_too_much_is_given_up() -> None:
    hidden = {config: hidden_from_the_sample(100.0, 0.0, config) for config in LAUNCHES.values()}
    assert int(Run(hidden[SMALL], [WIDTH], 300, SMALL).part_counts()[0]) < 300
    Run(hidden[ONE_PROGRAM], [WIDTH], 300, ONE_PROGRAM)


def test_lists_that_overflow_are_cut() -> None:
    same = torch.full((1, WIDTH), 0.25)
    for logits in (hidden_from_the_sample(0.0, 100.0, SMALL), same):
        assert int(Run(logits, [WIDTH], 300, SMALL).part_counts()[0]) > 512
    for logits in (hidden_from_the_sample(0.0, 100.0, ONE_PROGRAM), same):
        Run(logits, [WIDTH], 300, ONE_PROGRAM)


def test_a_good_sample_spares_the_list_most_columns() -> None:
    counts = Run(torch.randn(8, WIDTH), [WIDTH] * 8, 100, SMALL).part_counts()
    assert (counts >= 100).all()
    assert (counts <= 512).all()


def test_lists_that_fit_are_selected_from_as_they_lie() -> None:
    """A program of 512 columns has room for 64 of each of six parts."""
    even, uneven = torch.arange(WIDTH, dtype=torch.float32)[None] % 29, torch.arange(WIDTH, dtype=torch.float32)[None]
    assert not Run(even, [WIDTH], 40, SMALL).searched()
    assert not Run(even, [20], 40, SMALL, max_length=WIDTH).searched()
    assert Run(uneven, [WIDTH], 40, SMALL).searched()


def test_the_largest_k() -> None:
    Run(torch.randn(2, 9000), [9000, 5000], 4096, None)
    Run(torch.randn(1, 4500).round(), [4500], 4096, None)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chosen as where they can be compiled."""
    topk_config.topk_config.cache_clear()
    monkeypatch.setattr(topk_config, "steps_ready", lambda: True)
    yield
    topk_config.topk_config.cache_clear()


@pytest.mark.usefixtures("steps")
def test_steps_take_rows_up_to_their_limit_on_the_architecture_that_was_measured() -> None:
    of, limit = Gpu(90, 132, "sm90"), topk_config.STEPS_COLUMNS
    assert limit == 16_384
    for rows, most in ((1, 0), (132, 0), (133, 64), (2048, 64)):
        assert topk_variant(rows, 4096, 2048, 4096, of) == ("steps", 8, 4, 64)
        assert topk_variant(rows, 4095, 2048, 4095, of) == ("steps", 16, 4, 64)
        assert topk_variant(rows, 8192, 2048, 8192, of) == ("steps", 16, 4, 64)
        assert topk_variant(rows, 8190, 2048, 8191, of) == ("steps", 16, 6, most)
        assert topk_variant(rows, 12_288, 2048, 12_288, of) == ("steps", 16, 6, most)
        assert topk_variant(rows, 12_286, 2048, 12_287, of) == ("steps", 16, 8, most)
        assert topk_variant(rows, limit, 2048, limit, of) == ("steps", 16, 8, most)
        beyond = "parts" if rows == 1 else "stream"
        assert topk_variant(rows, limit - 2, 2048, limit - 1, of)[0] == beyond
        assert topk_variant(rows, limit, 2049, limit, of)[0] == beyond
        assert topk_variant(rows, 8192, 2048, 8192, Gpu(100, 148, "sm90")) == ("block", 16, 0, 0)
        assert topk_variant(rows, 8192, 2048, 8192, Gpu(86, 46, "small")) == ("block", 16, 0, 0)


def test_without_gluon_keys_take_all_rows() -> None:
    assert topk_variant(1, 8192, 2048, 8192, Gpu(90, 132, "sm90")) == ("block", 16, 0, 0)


def test_variants_and_scratch_for_every_launch() -> None:
    of = Gpu(100, 132, "sm90")
    assert topk_variant(1, 4096, 2048, 4096, of) == ("block", 8, 0, 0)
    assert topk_variant(1, 4095, 2048, 4095, of) == ("block", 16, 0, 0)
    assert topk_variant(2048, 8192, 2048, 8192, of) == ("block", 16, 0, 0)
    assert topk_variant(1, 8190, 2048, 8191, of) == ("stream", 8, 2048, 0)
    assert topk_variant(1, 32_768, 2048, 32_768, of) == ("parts", 8, 4096, 8)
    assert topk_variant(3, 100_000, 2048, 100_001, of) == ("parts", 8, 8192, 32)
    assert topk_variant(64, 202_752, 2048, 202_752, of) == ("parts", 8, 8192, 4)
    assert topk_variant(64, 202_752, 2049, 202_752, of) == ("parts", 16, 8192, 4)
    assert topk_variant(2048, 131_072, 2048, 131_072, of) == ("stream", 8, 4096, 0)
    assert topk_variant(2048, 202_752, 2048, 202_752, of) == ("stream", 8, 8192, 0)
    for k in (1, 2048, 2049, 4096):
        held = topk_workspace_elements(2048, 131_072, k)
        assert all(topk_workspace_elements(rows, 8193, k) <= held for rows in range(1, 2049))
        config = topk_config.topk_config(k, 90)
        columns = 512 * config.part_warps
        for rows in (1, 2, 3, 16, 17, 64, 511, 512, 513, 2048):
            parts, each = config.parts(rows, 131_072, 300)
            assert parts <= topk_config.MAX_PARTS
            assert rows * parts <= max(rows, 512)
            assert (parts - 1) * each * columns < 131_072 <= parts * each * columns


def test_limits_are_named() -> None:
    out = torch.empty(1, 5000, dtype=torch.int32)
    lengths = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="k must be"):
        select_topk(torch.zeros(1, 64), lengths, 4097, 64, out)
    with pytest.raises(ValueError, match="k must be less"):
        select_topk(torch.zeros(1, 1000), lengths, 512, 1000, out, config=SMALL)
    with pytest.raises(ValueError, match="workspace"):
        select_topk(torch.zeros(1, 1000), lengths, 20, 1000, out, config=SMALL)
    with pytest.raises(ValueError, match="fp32"):
        select_topk(torch.zeros(1, 64).double(), lengths, 20, 64, out)
    with pytest.raises(ValueError, match="sample"):
        replace(SMALL, samples=(128, 1024))
