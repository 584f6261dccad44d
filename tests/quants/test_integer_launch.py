"""The launch table of products with integers, over GPUs and shapes: launches that fit, and memory that is there."""

from __future__ import annotations

import itertools

import pytest
import torch

from glm5deploy.quants import counters, gpu, integer_products, launch, products, routed_experts
from glm5deploy.quants.formats import FORMATS, Scales
from glm5deploy.quants.planes import Planes, empty_planes

PROCESSORS = (28, 82, 108, 128, 132, 148, 170, 188)
SHAPES = ((16, 256), (64, 256), (512, 6144), (2624, 6144), (6144, 2048), (19360, 6144), (154880, 6144))


@pytest.mark.parametrize("processors", PROCESSORS)
def test_parts_have_counters(processors: int) -> None:
    """Fewer than there are on a stream: a launch that has none would end a server."""
    for m, (n, k) in itertools.product(range(1, 300), SHAPES):
        c = launch.integer_linear_launch(m, n, k // 256, processors)
        if c is not None and c.parts > 1:
            assert -(-m // c.bm) * -(-n // c.bn) <= counters.TICKETS
            assert c.parts <= max(2, k // 256)
    tokens = (5, 6, 8, 17, 64, 200, 1000, 5000, 20000)
    for pairs, experts, n in itertools.product((8 * t for t in tokens), (2, 8, 32, 256), (64, 256, 2048)):
        found = launch.integer_moe_launch(pairs, experts, (n, 24, True), (6144, 1, True), processors)
        if found is not None and found[0].parts > 1:
            assert pairs * -(-n // found[0].bn) <= counters.TICKETS


def _shared(name: str, c: launch.Launch, supers: int, weights: int = 1) -> int:
    """Bytes of shared memory that integer_memory.py takes for so many weights and super-blocks of activations."""
    f = FORMATS[name]
    halves = 2 if f.has_min or f.scales is Scales.X4 else 1
    row = 32 * (f.low + f.high) + 16 + 2 * halves  # of a super-block: codes, four words, halves
    return weights * c.stages * c.bn * row + supers * c.bm * (512 + 64)


@pytest.mark.parametrize("name", ["Q6_K", "Q5_K", "IQ4_XS"])
def test_every_launch_fits_small_gpus(name: str) -> None:
    """A program of GPUs from SM86 on may have 99 KiB."""
    assert _shared("Q6_K", launch.INTEGER_LONG, 2) == 100608  # as compiled: the largest, tests/quants/test_compile.py
    for m, (n, k) in itertools.product((1, 9, 16, 17, 33, 64, 65, 192), SHAPES):
        if c := launch.integer_linear_launch(m, n, k // 256, 82):
            assert _shared(name, c, c.stages) <= 99 * 1024
    for pairs, experts, supers in itertools.product((41, 64, 512, 4096, 100_000), (1, 8, 32, 256), range(1, 17)):
        up, down = launch.integer_moe_launch(pairs, experts, (256 * supers, 24, True), (6144, supers, True), 82) or (
            pytest.fail("none")
        )
        assert _shared(name, up, up.stages, weights=2) <= 99 * 1024
        assert _shared(name, down, supers) <= 99 * 1024


@pytest.mark.parametrize("down_supers", [1, 2, 4, 8, 16, 32])
def test_activations_of_the_second_product_fit(down_supers: int) -> None:
    for pairs in (48, 512, 2048, 8192, 100_000):
        found = launch.integer_moe_launch(pairs, 256, (256, 24, True), (6144, down_supers, True), 132)
        assert (found is None) == (down_supers > 16)
        if found is not None:
            assert found[0].bm == found[1].bm
            assert found[1].bm * down_supers <= launch.INTEGER_X


@pytest.mark.parametrize("can", [(True, True), (True, False), (False, True)])
def test_both_products_have_the_same_pairs(can: tuple[bool, bool]) -> None:
    """Work items are cut once, for a tile of tokens that both have."""
    for pairs, experts in itertools.product((41, 128, 129, 600, 2048, 70_000), (2, 32, 256)):
        found = launch.integer_moe_launch(pairs, experts, (256, 24, can[0]), (6144, 1, can[1]), 132)
        assert (found is None) == (not all(can) and pairs <= launch.SEARCH_PAIRS)
        if found is not None:
            assert found[0].bm == found[1].bm
            assert (found[0].integers, found[1].integers) == can


def test_few_pairs_are_searched_for() -> None:
    both = (256, 24, True), (6144, 1, True), 132
    assert launch.integer_moe_launch(launch.INTEGER_PAIRS, 256, *both) is None
    up, down = launch.integer_moe_launch(64, 256, *both) or pytest.fail("none")
    assert up.parts == 2
    assert up.integers
    assert down.integers


def test_long_weights_are_multiplied_up_to_more_tokens() -> None:
    """Unpacking many rows costs more than a weight of few."""
    assert launch.integer_linear_launch(launch.INTEGER_TOKENS, 19360, 24, 132) is launch.INTEGER_LONG
    assert launch.integer_linear_launch(launch.INTEGER_TOKENS + 1, 19360, 24, 132) is None
    assert launch.integer_linear_launch(launch.DENSE_TOKENS - 1, 2624, 24, 132) is not None
    assert launch.integer_linear_launch(launch.DENSE_TOKENS, 2624, 24, 132) is None


def _planes(name: str, rows: int, columns: int, experts: int = 1) -> Planes:
    return empty_planes(name, rows, columns, experts)


def test_only_what_can_be_is_multiplied_as_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types whose scale times code is no small integer, ragged shapes and GPUs without Gluon take the other kernels."""
    kinds = {name for name, fmt in FORMATS.items() if integer_products.has_integers(fmt, 64, 256)}
    assert kinds == {name for name, fmt in FORMATS.items() if fmt.block_elements == 256 and not fmt.dense}
    assert not integer_products.has_integers(FORMATS["Q4_K"], 72, 256)
    monkeypatch.setattr(gpu, "describe", lambda device: gpu.Gpu(132, True, True))
    device = torch.device("cpu")
    good, other = _planes("Q4_K", 64, 256, 2), _planes("Q8_0", 64, 256, 2)
    down = _planes("Q6_K", 256, 256, 2)
    assert routed_experts._moe_launch(64, 8, good, good, down, device).gate_up.integers
    mixed = routed_experts._moe_launch(64, 8, good, other, down, device)
    assert (mixed.gate_up.integers, mixed.down.integers) == (False, True)
    mixed = routed_experts._moe_launch(64, 8, good, good, _planes("Q6_K", 32, 256, 2), device)
    assert (mixed.gate_up.integers, mixed.down.integers) == (True, False)
    assert not routed_experts._moe_launch(64, 8, other, good, _planes("Q8_0", 256, 256, 2), device).down.integers
    assert products._linear_launch(32, _planes("Q5_K", 64, 512), device).integers  # type: ignore[union-attr]
    assert not products._linear_launch(32, _planes("Q5_K", 16, 512), device).integers  # type: ignore[union-attr]
    assert not products._linear_launch(32, _planes("Q8_0", 64, 512), device).integers  # type: ignore[union-attr]
    monkeypatch.setattr(gpu, "describe", lambda device: gpu.Gpu(132, True, False))
    assert not routed_experts._moe_launch(64, 8, good, good, down, device).gate_up.integers
    assert not products._linear_launch(32, _planes("Q5_K", 64, 512), device).integers  # type: ignore[union-attr]


def test_the_interpreter_has_no_gluon() -> None:
    assert not integer_products.gluon_ready()
