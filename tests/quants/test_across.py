"""One token's products with K spread over a program's warps, against fp32 products of the dequantised weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from glm5deploy.quants import across, counters, launch, products, reference
from glm5deploy.quants.arguments import early_options
from glm5deploy.quants.planes import Planes
from tests.quants.blocks import QUANTISED
from tests.quants.test_products import DEVICE, DTYPE, GPU, LIMIT, planes_of, rms_error, routing, tokens

# one of each way to store codes and scales
TYPES = QUANTISED if GPU else ("Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4", "IQ2_XXS")
NAN = float("nan")


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "ACROSS", True)


def poisoned(rows: int) -> torch.Tensor:
    return torch.full((1, rows), NAN, device=DEVICE, dtype=DTYPE)


@pytest.mark.parametrize("name", TYPES)
def test_one_weight_of_every_type(name: str) -> None:
    planes, x = planes_of(name, 24, 512), tokens(1, 512)
    assert products.linear_key(1, planes, x.device) == across.linear_launch((planes,)).variant
    assert rms_error(products.linear(x, planes, out=poisoned(24)), reference.linear(x, planes)) < LIMIT


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [("Q8_0", 33, 288), ("Q5_K", 1, 256), ("Q4_K", 17, 1536), ("Q6_K", 40, 4096), ("Q5_1", 20, 800)],
    ids=str,
)
def test_shapes(name: str, rows: int, columns: int) -> None:
    """Rows that no tile divides, rows that end inside a super-block, one round and several."""
    planes, x = planes_of(name, rows, columns), tokens(1, columns)
    assert rms_error(products.linear(x, planes, out=poisoned(rows)), reference.linear(x, planes)) < LIMIT


def test_activations_far_from_zero() -> None:
    planes, x = planes_of("Q5_K", 32, 512), tokens(1, 512) + 8
    assert rms_error(products.linear(x, planes), reference.linear(x, planes)) < LIMIT


@pytest.mark.parametrize("names", [("Q5_K", "Q8_0"), ("Q8_0", "IQ4_NL"), ("Q6_K", "Q6_K"), ("Q4_K", "BF16")], ids=str)
@pytest.mark.parametrize("m", [1, 3])
def test_pair(names: tuple[str, str], m: int) -> None:
    """Side by side in a view, with one launch and, for more tokens or weights without scales, with two."""
    first, second = planes_of(names[0], 40, 512), planes_of(names[1], 24, 512, seed=7)
    x, out = tokens(m, 512), torch.full((m, 72), 7.0, device=DEVICE, dtype=DTYPE)
    products.linear_pair(x, first, second, out=out[:, 4:68])
    expected = torch.cat((reference.linear(x, first), reference.linear(x, second)), 1)
    assert rms_error(out[:, 4:68], expected) < LIMIT
    assert torch.all(out[:, :4] == 7.0)
    assert torch.all(out[:, 68:] == 7.0)
    key = products.linear_pair_key(m, first, second, x.device)
    assert (key[0] == "pair") == (m == 1 and names[1] != "BF16")  # type: ignore[index]


def check_experts(gate: Planes, up: Planes, down: Planes, ids: torch.Tensor, share: torch.Tensor) -> None:
    x = tokens(1, gate.columns)
    ours = products.moe(x, gate, up, down, ids, share, out=poisoned(down.rows))
    assert rms_error(ours, reference.moe(x, gate, up, down, ids, share)) < LIMIT


@pytest.mark.parametrize(
    ("names", "topk", "units", "kernels"),
    [
        (("Q5_K", "Q5_K", "Q6_K"), 2, 256, (2, 1)),
        (("Q8_0", "Q8_0", "Q5_1"), 8, 64, (2, 1)),
        (("Q4_0", "Q4_0", "Q8_0"), 2, 320, (2, 2)),  # experts of two super-blocks, of which the second ends early
        (("Q4_0", "Q8_0", "Q8_0"), 4, 32, (0, 1)),  # gate and up of two types
        (("Q8_0", "Q8_0", "Q8_0"), 3, 32, (2, 0)),  # no power of two
    ],
    ids=str,
)
def test_experts(names: tuple[str, str, str], topk: int, units: int, kernels: tuple[int, int]) -> None:
    gate, up = planes_of(names[0], units, 512, 9), planes_of(names[1], units, 512, 9, seed=50)
    down = planes_of(names[2], 70, units, 9, seed=90)
    ids, share = routing(1, topk, 9)
    key = products.moe_key(1, gate, up, down, topk, ids.device)
    assert (key[0][4], key[1][4]) == kernels  # type: ignore[index]
    ids[0, 1] = -1
    check_experts(gate, up, down, ids.to(torch.int64), share)


def test_no_experts_here() -> None:
    gate, down = planes_of("Q8_0", 32, 256, 3), planes_of("Q8_0", 20, 32, 3)
    ids = torch.full((1, 4), -1, dtype=torch.int32, device=DEVICE)
    share = torch.ones((1, 4), device=DEVICE)
    assert torch.all(products.moe(tokens(1, 256), gate, gate, down, ids, share, out=poisoned(20)) == 0)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs CUDA graphs")
@pytest.mark.parametrize("spread", [True, False], ids=["across", "parts"])
def test_launches_that_begin_early_see_what_was_written_before(spread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of products gives every bit of what late launches give, whatever its memory held before."""
    monkeypatch.setattr(launch, "ACROSS", spread)
    chain = [planes_of("Q8_0", 2048, 2048, seed=k) for k in range(4)]
    chosen = [products._linear_launch(1, planes, chain[0].low.device) for planes in chain]
    torch.cuda.synchronize()

    def run(x: torch.Tensor, early: bool) -> torch.Tensor:
        for k, (planes, c) in enumerate(zip(chain, chosen, strict=True)):
            assert c is not None
            x = products.linear(x, planes, config=replace(c, early=early))
            if k % 2:  # between kernels of ours, and after kernels that know nothing of it
                x = torch.nn.functional.rms_norm(x, x.shape[-1:])
        return x

    start = tokens(1, 2048)
    run(start, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(start, True)
    for seed in range(20):
        start.copy_(tokens(1, 2048, seed))
        graph.replay()
        found = out.clone()
        assert torch.equal(found, run(tokens(1, 2048, seed), False))


def test_any_first_product_makes_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured product of more tokens may follow it, and could not make them."""
    monkeypatch.setattr(counters, "_tickets", {})
    planes = planes_of("Q8_0", 16, 256)
    products.linear(tokens(1, 256), planes)
    assert planes.low.device in counters._tickets


def test_rows_that_entries_do_not_divide_are_refused() -> None:
    planes = planes_of("Q8_0", 16, 768)
    with pytest.raises(ValueError, match="2 at a time"):
        products.linear(tokens(1, 768), planes, config=launch.Launch(16, 1, across=2, warps=2))


@pytest.mark.parametrize("shared", [99, 227])
def test_memory_under_way_fits(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(across, "shared_memory", lambda device: shared)
    for name in ("Q8_0", "Q6_K", "Q4_K", "Q3_K"):
        for columns in (256, 1536, 2048, 6144, 12288):
            planes = planes_of(name, 1, columns)
            found = (
                across.linear_launch((planes,)),
                across.gate_up_launch(planes, planes),
                across.down_launch(planes, 8),
            )
            for c in found:
                assert c is not None
                assert c.warps <= 16
                assert planes.supers % c.across == 0
                assert 1 <= c.stages - 1 <= max(1, planes.supers // c.across)
                assert (c.stages - 1) * c.warps * c.bn * planes.format.plane_bytes <= shared << 10


def test_a_launch_by_hand_is_refused_for_more_than_one_token() -> None:
    planes = planes_of("Q8_0", 32, 256)
    config = launch.across_launch(1, planes.format.plane_bytes, 99)
    with pytest.raises(ValueError, match="one token, not 3"):
        products.linear(tokens(3, 256), planes, config=config)
    with pytest.raises(ValueError, match="cannot be taken 0 at a time"):
        products.linear_pair(tokens(1, 256), planes, planes, config=launch.FEW_SPREAD)


def test_launches_begin_early_on_gpus_that_can_alone() -> None:
    can = GPU and torch.cuda.get_device_capability() >= (9, 0)
    assert early_options(True, torch.device(DEVICE)) == (
        {"EARLY": True, "launch_pdl": True} if can else {"EARLY": False}
    )
    assert early_options(False, torch.device(DEVICE)) == {"EARLY": False}
