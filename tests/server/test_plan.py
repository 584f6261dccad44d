"""Planning arithmetic: budgets add up, layouts are ranked, and what is legal is what loading allows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from glm5deploy.glm_dsa.hparams import read_hparams
from glm5deploy.glm_dsa.indexer_schedule import resolve_schedule
from glm5deploy.glm_dsa.memory import ParallelLayout, cache_bytes_per_token
from glm5deploy.glm_dsa.tensor_names import plan_tensors
from glm5deploy.hardware.gpus import parse_gpus
from glm5deploy.server.model_table import ModelTable, candidate_layouts, obstacles
from glm5deploy.server.plan import Wishes, best_layout, decode_limit, plan_layout
from glm5deploy.server.workspace import activation_bytes, batch_defaults
from tests.support.glm_catalogue import real_metadata, real_tensors

GIB = 1 << 30


def table(version: str = "5.2", *, use_mtp: bool = False) -> ModelTable:
    tensors = real_tensors()
    names = {tensor.name for tensor in tensors}
    hparams = read_hparams(real_metadata(version), names)
    schedule = resolve_schedule(hparams, names)
    plan = plan_tensors(tensors, hparams, schedule, use_mtp=use_mtp)
    return ModelTable(hparams, schedule, plan, {tensor.name: tensor for tensor in tensors})


MODEL = table()
GPU = parse_gpus("RTX PRO 6000").gpu


@pytest.mark.parametrize("use_mtp", [False, True])
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_stages_together_hold_the_whole_cache_and_all_layers(pp: int, use_mtp: bool) -> None:
    model = table(use_mtp=use_mtp)
    stages = plan_layout(model, GPU, ParallelLayout(2, pp), Wishes(use_mtp=use_mtp)).stages
    whole = cache_bytes_per_token(model.hparams, model.schedule, use_mtp=use_mtp)
    assert sum(stage.token_bytes for stage in stages) == whole
    assert sum(stage.layers for stage in stages) == 78


def test_tokens_are_those_of_the_stage_with_least_room() -> None:
    plan = plan_layout(MODEL, GPU, ParallelLayout(4, 2), Wishes())
    assert plan.tokens == min(stage.free // stage.token_bytes for stage in plan.stages)
    assert plan.fullest.tokens == plan.tokens


def test_a_smaller_share_of_memory_leaves_less_for_the_cache() -> None:
    full, less = (plan_layout(MODEL, GPU, ParallelLayout(8), Wishes(memory_share=share)) for share in (0.92, 0.82))
    assert full.fullest.free - less.fullest.free == pytest.approx(0.1 * GPU.memory_bytes, abs=2)


def test_every_candidate_uses_every_gpu() -> None:
    assert [(c.tp, c.pp, c.expert_parallel) for c in candidate_layouts(4)] == [
        (4, 1, False),
        (4, 1, True),
        (2, 2, False),
        (2, 2, True),
        (1, 4, False),
    ]
    assert candidate_layouts(1) == (ParallelLayout(),)


def test_the_recommended_layout_has_the_fewest_stages_that_hold_the_context() -> None:
    plans = [plan_layout(MODEL, GPU, layout, Wishes()) for layout in candidate_layouts(8)]
    assert best_layout(plans, 0) is plans[0]
    longer = best_layout(plans, 500_000)
    assert longer is not None
    assert (longer.layout.tp, longer.layout.pp) == (4, 2)
    assert best_layout([plan_layout(MODEL, GPU, ParallelLayout(2), Wishes())], 0) is None


def test_tensor_parallel_ranks_stay_on_one_machine() -> None:
    big = parse_gpus("B200").gpu
    plans = [plan_layout(MODEL, big, layout, Wishes(dense=True)) for layout in candidate_layouts(16)]
    assert plans[0].layout.tp == 16
    assert plans[0].fits
    chosen = best_layout(plans, 0)
    assert chosen is not None
    assert (chosen.layout.tp, chosen.layout.pp) == (8, 2)


def test_dense_weights_may_be_cut_anywhere_but_take_more() -> None:
    assert obstacles(MODEL, ParallelLayout(16), dense=False)
    assert obstacles(MODEL, ParallelLayout(16), dense=True) == ()
    dense = plan_layout(MODEL, GPU, ParallelLayout(8), Wishes(dense=True))
    assert dense.fullest.weights == pytest.approx(753e9 * 2 / 8, rel=0.03)
    assert not dense.fits


def test_more_stages_than_indexers_are_impossible() -> None:
    (reason,) = obstacles(MODEL, ParallelLayout(1, 24), dense=False)
    assert "24 stages, but only 21 layers with an indexer" in reason
    assert obstacles(table("5"), ParallelLayout(1, 24), dense=False) == ()


def test_work_space_grows_with_the_batch_and_shrinks_with_ranks() -> None:
    h = MODEL.hparams
    none, small, large = (activation_bytes(h, ParallelLayout(8), tokens, 256) for tokens in (0, 2048, 8192))
    assert none == (512 << 20) + 2 * 4 * 256 * 154_880
    assert large - none == 4 * (small - none)
    assert activation_bytes(h, ParallelLayout(1), 8192, 256) > large
    assert 1 * GIB < large < 4 * GIB


def test_batches_are_vllms_defaults() -> None:
    assert batch_defaults(141 * GIB, "9.0", "H200") == (8192, 1024)
    assert batch_defaults(80 * GIB, "8.0", "A100 80 GB SXM") == (2048, 256)
    assert batch_defaults(180 * GIB, "10.0", "B200") == (16384, 1024)
    assert batch_defaults(119 * GIB, "12.1", "GB10") == (2048, 256)


def test_decoding_is_bound_by_the_bytes_of_a_token() -> None:
    """40 B active weights at 4.9 bits are 24.5 GB a token, over 8 GPUs of 1.8 TB/s 1.7 ms; what is not cut adds."""
    limit = decode_limit(MODEL, GPU, ParallelLayout(8))
    assert limit is not None
    assert 300 < limit < 600
    assert decode_limit(MODEL, replace(GPU, bandwidth=None), ParallelLayout(8)) is None
