"""Products of planes against fp32 products of the dequantised weights."""

from __future__ import annotations

import pytest
import torch

from glm5deploy.quants import counters, gpu, launch, products, reference, routed_experts
from glm5deploy.quants.formats import FORMATS
from glm5deploy.quants.launch import Launch
from glm5deploy.quants.planes import Planes, repack
from tests.quants.blocks import QUANTISED, TYPES, random_rows

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# On a GPU the activations are bf16 and so are the rounded weights; the interpreter works in fp32, in another order.
DTYPE = torch.bfloat16 if GPU else torch.float32
LIMIT = 4e-3 if GPU else 3e-5


def rms_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    assert torch.isfinite(ours).all()
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def planes_of(name: str, rows: int, columns: int, experts: int = 1, seed: int = 0) -> Planes:
    raw = torch.stack([random_rows(name, rows, columns, seed + e) for e in range(experts)])
    return repack(name, raw.to(DEVICE))


def tokens(m: int, k: int, seed: int = 1) -> torch.Tensor:
    return torch.randn((m, k), generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, so an element that no program wrote is seen."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("name", TYPES)
def test_linear_of_every_type(name: str) -> None:
    planes, x = planes_of(name, 40, 512), tokens(3, 512)
    assert rms_error(products.linear(x, planes), reference.linear(x, planes)) < LIMIT


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (1, 64, 256, None),
        (17, 100, 512, None),
        (2, 33, 768, Launch(64, 16, parts=3)),
        (40, 130, 256, Launch(64, 32)),
        (70, 64, 256, Launch(64, 64)),
        (9, 150, 512, Launch(32, 8, parts=2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_linear_shapes(name: str, m: int, n: int, k: int, config: Launch | None) -> None:
    planes, x = planes_of(name, n, k), tokens(m, k)
    expected = reference.linear(x, planes)
    for _ in range(2):  # the second call finds the tickets as the first left them
        assert rms_error(products.linear(x, planes, config=config), expected) < LIMIT


@pytest.mark.parametrize("name", ["Q8_0", "Q5_1", "MXFP4", "F16"])
def test_linear_rows_that_end_inside_a_super_block(name: str) -> None:
    planes, x = planes_of(name, 20, 288), tokens(5, 288)
    assert rms_error(products.linear(x, planes), reference.linear(x, planes)) < LIMIT


def test_linear_reads_and_writes_views() -> None:
    planes = planes_of("Q6_K", 48, 256)
    wide, out = tokens(4, 320), torch.full((4, 96), 7.0, device=DEVICE, dtype=DTYPE)
    x = wide[:, 32:288]
    products.linear(x, planes, out=out[:, 48:])
    assert rms_error(out[:, 48:], reference.linear(x, planes)) < LIMIT
    assert torch.all(out[:, :48] == 7.0)


@pytest.mark.parametrize(
    ("names", "m", "rows", "columns", "one"),
    [
        (("Q5_K", "Q8_0"), 1, (40, 24), 512, True),
        (("Q8_0", "Q5_K"), 1, (90, 60), 512, True),  # many rows: a warp to itself
        (("Q8_0", "Q8_0"), 1, (90, 60), 512, True),
        (("Q4_K", "Q4_K"), 9, (40, 100), 768, True),
        (("BF16", "Q4_K"), 3, (33, 1), 768, True),
        (("Q6_K", "IQ4_XS"), 16, (70, 100), 256, True),
        (("Q8_0", "Q8_0"), 17, (40, 24), 256, False),
        (("Q8_0", "Q5_1"), 1, (40, 24), 256, False),
    ],
    ids=str,
)
def test_pair(
    names: tuple[str, str], m: int, rows: tuple[int, int], columns: int, one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side in a view; in one launch with every bit of two."""
    monkeypatch.setattr(launch, "PAIR_TOKENS", 16 if one or m > 16 else 0)
    first, second = planes_of(names[0], rows[0], columns), planes_of(names[1], rows[1], columns, seed=7)
    x, end = tokens(m, columns), 4 + sum(rows)
    key = products.linear_pair_key(m, first, second, x.device)
    assert (key[0] == "pair") == one  # type: ignore[index]
    c = products._pair_launch(m, first, second, x.device)
    expected = torch.cat((reference.linear(x, first), reference.linear(x, second)), 1)
    apart = torch.cat((products.linear(x, first, config=c), products.linear(x, second, config=c)), 1)
    for _ in range(2):  # the second call finds the tickets as the first left them
        out = torch.full((m, end + 4), 7.0, device=DEVICE, dtype=DTYPE)
        products.linear_pair(x, first, second, out=out[:, 4:end])
        assert rms_error(out[:, 4:end], expected) < LIMIT
        assert torch.equal(out[:, 4:end], apart)
        assert torch.all(out[:, :4] == 7.0)
        assert torch.all(out[:, end:] == 7.0)


@pytest.mark.parametrize("parts", [1, 3])
def test_pair_whose_rows_end_inside_a_super_block(parts: int) -> None:
    first, second = planes_of("Q8_0", 20, 800), planes_of("Q5_1", 50, 800)
    x, c = tokens(5, 800), Launch(32, 8, parts=parts, warps=2)
    expected = torch.cat((reference.linear(x, first), reference.linear(x, second)), 1)
    assert rms_error(products.linear_pair(x, first, second, config=c), expected) < LIMIT


def test_many_tokens_go_through_dense_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "DENSE_CHUNK_BYTES", 2 * 512 * 64)  # chunks of 64 rows
    planes, x = planes_of("Q5_K", 150, 512), tokens(200, 512)
    assert rms_error(products.linear(x, planes), reference.linear(x, planes)) < LIMIT


@pytest.mark.parametrize("name", QUANTISED)
def test_unpacked_rows_are_the_dequantised_weights(name: str) -> None:
    planes = planes_of(name, 40, 256)
    ours = products.unpack_rows(planes, 8, 40, DTYPE)
    assert rms_error(ours, reference.dequantize_planes(planes)[0, 8:]) < LIMIT


def routing(t: int, topk: int, experts: int, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=g)[:topk] for _ in range(t)])
    return ids.to(DEVICE, torch.int32), torch.rand((t, topk), generator=g).to(DEVICE)


def check_moe(
    gate: Planes, up: Planes, down: Planes, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, **options: object
) -> None:
    expected = reference.moe(x, gate, up, down, ids, weights)
    for _ in range(2):
        ours = routed_experts.moe(x, gate, up, down, ids, weights, **options)  # type: ignore[arg-type]
        assert rms_error(ours, expected) < LIMIT


MIXED = [("Q4_K", "Q4_K", "Q6_K"), ("Q5_K", "Q4_K", "Q8_0"), ("IQ2_XXS", "IQ2_XXS", "IQ3_XXS"), ("MXFP4",) * 3]


@pytest.mark.parametrize("names", MIXED, ids=str)
@pytest.mark.parametrize("searched", [True, False], ids=["searched", "sorted"])
def test_moe_mixed_types(names: tuple[str, str, str], searched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not searched:
        monkeypatch.setattr(launch, "SEARCH_PAIRS", 0)
    units = FORMATS[names[2]].block_elements
    gate, up = planes_of(names[0], units, 256, 3), planes_of(names[1], units, 256, 3, seed=50)
    down = planes_of(names[2], 70, units, 3, seed=90)
    check_moe(gate, up, down, tokens(3, 256), *routing(3, 2, 3))


@pytest.fixture(scope="module")
def experts() -> tuple[Planes, Planes, Planes]:
    return planes_of("Q8_0", 64, 512, 5), planes_of("BF16", 64, 512, 5, seed=9), planes_of("Q8_0", 70, 64, 5, seed=5)


FEW = Launch(16, 8, parts=2), Launch(32, 8, tiles=3)


@pytest.mark.parametrize("searched", [True, False], ids=["searched", "sorted"])
@pytest.mark.parametrize(
    "configs",
    [None, (Launch(64, 16, parts=2), Launch(64, 16, tiles=2)), (Launch(64, 32), Launch(64, 32)), FEW],
    ids=["table", "parts", "wide", "few"],
)
def test_moe_all_tokens_on_one_expert(
    experts: tuple[Planes, Planes, Planes], searched: bool, configs: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not searched:
        monkeypatch.setattr(launch, "SEARCH_PAIRS", 0)
    ids, weights = routing(37, 2, 5)
    ids[:, 0], ids[:, 1] = 3, torch.where(torch.arange(37, device=DEVICE) % 9 == 0, 1, 4)
    check_moe(*experts, tokens(37, 512), ids, weights, configs=configs)


@pytest.mark.parametrize("searched", [True, False], ids=["searched", "sorted"])
def test_moe_experts_of_other_ranks_and_padding(
    experts: tuple[Planes, Planes, Planes], searched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not searched:
        monkeypatch.setattr(launch, "SEARCH_PAIRS", 0)
    ids, weights = routing(6, 3, 5)
    ids[0], ids[1, :2], ids[4, 1] = -1, -1, -1
    x = tokens(6, 512)
    check_moe(*experts, x, ids.to(torch.int64), weights)
    out = torch.full((6, 70), torch.nan, device=DEVICE, dtype=DTYPE)
    assert torch.all(routed_experts.moe(x, *experts, ids, weights, out=out)[0] == 0)


def test_moe_keeps_terms_of_many_pairs_in_the_activations_type(
    experts: tuple[Planes, Planes, Planes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed_experts, "EXACT_TERMS", 0)
    check_moe(*experts, tokens(5, 512), *routing(5, 4, 5))


def test_moe_of_one_token(experts: tuple[Planes, Planes, Planes]) -> None:
    ids, weights = routing(1, 4, 5)
    ids[0, 2] = -1
    check_moe(*experts, tokens(1, 512), ids, weights)


@pytest.mark.parametrize("rows", [1, 18])
def test_moe_adds_what_is_computed_beside_it(experts: tuple[Planes, Planes, Planes], rows: int) -> None:
    """To rows without an expert as well; asked for once, when the products before the sum are launched."""
    ids, weights = routing(rows, 2, 5)
    ids[0] = -1
    x, beside = tokens(rows, 512), tokens(rows, 70, seed=8)
    asked: list[int] = []
    ours = routed_experts.moe(x, *experts, ids, weights, also=lambda: asked.append(0) or beside)  # type: ignore[func-returns-value]
    assert asked == [0]
    assert torch.equal(ours[0], beside[0])
    assert rms_error(ours, reference.moe(x, *experts, ids, weights) + beside.float()) < LIMIT
    with pytest.raises(ValueError, match="cannot be added"):
        routed_experts.moe(x, *experts, ids, weights, also=lambda: beside[:, 1:])


def test_sorted_pairs_are_multiplied_by_the_tile_they_are_cut_for(
    experts: tuple[Planes, Planes, Planes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "SEARCH_PAIRS", 0)
    with pytest.raises(ValueError, match="cut for 16 tokens"):
        routed_experts.moe(tokens(3, 512), *experts, *routing(3, 2, 5), configs=(Launch(64, 16), Launch(64, 8)))


@pytest.mark.parametrize("processors", [28, 82, 132, 188])
@pytest.mark.parametrize("hidden", [256, 512, 6144])
def test_the_table_cuts_sorted_pairs_for_both_products_alike(hidden: int, processors: int) -> None:
    many = range(launch.SEARCH_PAIRS + 1, 2049)
    for experts in (8, 16, 32, 256):
        first = [launch.gate_up_launch(pairs, experts, 64, 1, processors).bm for pairs in many]
        assert first == [launch.down_launch(pairs, experts, hidden, processors).bm for pairs in many]


def test_keys_tell_apart_what_is_compiled_apart(
    experts: tuple[Planes, Planes, Planes], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device(DEVICE)
    monkeypatch.setattr(gpu, "describe", lambda device: gpu.Gpu(132, True, False))
    planes = planes_of("Q4_K", 64, 512)
    linear = [products.linear_key(m, planes, device) for m in range(1, 400)]
    assert len(set(linear)) == 4  # tiles of 8, 16 and 32 tokens, and cuBLAS
    moe = [routed_experts.moe_key(m, *experts, 2, device) for m in range(1, 400)]
    assert {key[2] for key in moe} == {1, launch.SEARCH_PAIRS, 0}  # one token, searched, sorted
    assert {key[3] for key in moe} == {True}
    assert not routed_experts.moe_key(routed_experts.EXACT_TERMS, *experts, 2, device)[3]


def test_any_first_product_makes_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured product of more tokens may follow it, and could not make them."""
    monkeypatch.setattr(counters, "_tickets", {})
    planes = planes_of("Q8_0", 16, 256)
    products.linear(tokens(1, 256), planes, config=Launch(32, 8))
    assert planes.low.device in counters._tickets


def test_counters_stay_within_a_stream() -> None:
    device = torch.device(DEVICE)
    assert counters.stream_tickets(1, device).shape == (counters.TICKETS,)
    assert not counters.stream_tickets(1, device).any()
    with pytest.raises(RuntimeError, match="no counters"):
        counters.stream_tickets(counters.TICKETS + 1, device)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs streams")
def test_streams_have_counters_of_their_own() -> None:
    device = torch.device(DEVICE, torch.cuda.current_device())
    mine = counters.stream_tickets(1, device).data_ptr()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert counters.stream_tickets(1, device).data_ptr() != mine


def test_wrong_shapes_are_refused(experts: tuple[Planes, Planes, Planes]) -> None:
    gate, up, _ = experts
    with pytest.raises(ValueError, match="does not fit"):
        products.linear(tokens(2, 256), planes_of("Q8_0", 8, 512))
    with pytest.raises(ValueError, match="do not fit each other"):
        routed_experts.moe(tokens(1, 512), gate, up, up, *routing(1, 2, 5))


def test_no_tokens() -> None:
    assert products.linear(tokens(0, 512), planes_of("Q8_0", 8, 512)).shape == (0, 8)
