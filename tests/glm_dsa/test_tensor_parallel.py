"""Legal tensor-parallel sizes of the real shapes, per type of block."""

from __future__ import annotations

import pytest

from glm5deploy.errors import UsageError
from glm5deploy.glm_dsa.hparams import read_hparams
from glm5deploy.glm_dsa.tensor_parallel import illegal_cuts, require_legal_tensor_parallel
from tests.support.glm_catalogue import real_metadata, real_tensors

DOWN = ("ffn_down_exps", "ffn_down_shexp")


def model(types=None):
    tensors = real_tensors(types=types)
    return tensors, read_hparams(real_metadata(), {t.name for t in tensors})


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_powers_of_two_to_eight_are_legal(tp):
    require_legal_tensor_parallel(*model(), tp)


def test_sixteen_cuts_super_blocks_and_the_error_says_where():
    with pytest.raises(UsageError) as caught:
        require_legal_tensor_parallel(*model(), 16)
    message = caught.value.message
    assert "blk.{3-78}.ffn_down_exps.weight (Q5_K: rows of 2048, 128 per rank, blocks of 256)" in message
    assert "blk.{3-78}.ffn_down_shexp.weight (Q6_K" in message
    assert "attn_output" not in message
    # Expert parallelism alone leaves the shared experts cut.
    assert caught.value.hint == "Use TP 8 with pipeline parallelism 2 on the same 16 GPUs."


def test_expert_parallelism_is_offered_where_it_suffices():
    tensors, hparams = model({"ffn_down_shexp": "Q8_0"})
    with pytest.raises(UsageError, match="ffn_down_exps") as caught:
        require_legal_tensor_parallel(tensors, hparams, 16)
    assert "TP 16 with expert parallelism (--ep), or TP 8 with" in caught.value.hint
    require_legal_tensor_parallel(tensors, hparams, 16, expert_parallel=True)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4", "BF16", "F16", "F32"])
def test_sixteen_is_legal_for_small_blocks_and_dense_types(kind):
    require_legal_tensor_parallel(*model(dict.fromkeys(DOWN, kind)), 16)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ2_XXS", "IQ3_XXS", "IQ4_XS"])
def test_sixteen_is_illegal_for_super_blocks(kind):
    tensors, hparams = model({"ffn_down_exps": kind, "ffn_down_shexp": "BF16"})
    cuts = illegal_cuts(tensors, hparams, 16)
    assert len(cuts) == 76
    assert {(c.type, c.columns, c.block_elements) for c in cuts} == {(kind, 2048, 256)}


def test_one_odd_tensor_among_many_is_found():
    tensors, hparams = model(dict.fromkeys(DOWN, "Q8_0"))
    odd = real_tensors(types={"ffn_down_exps": "IQ2_S"})
    tensors = [b if a.name == "blk.41.ffn_down_exps.weight" else a for a, b in zip(tensors, odd, strict=True)]
    with pytest.raises(UsageError, match=r"blk\.41\.ffn_down_exps\.weight \(IQ2_S"):
        require_legal_tensor_parallel(tensors, hparams, 16)


def test_dequantised_weights_need_divisibility_only():
    require_legal_tensor_parallel(*model(), 16, dequantised=True)
    with pytest.raises(UsageError, match="64 attention heads"):
        require_legal_tensor_parallel(*model(), 24, dequantised=True)


@pytest.mark.parametrize(("tp", "hint"), [(3, "TP 1 with pipeline parallelism 3"), (6, "TP 2 with pipeline")])
def test_heads_must_divide_and_a_way_out_is_named(tp, hint):
    with pytest.raises(UsageError, match=f"size {tp} does not divide the model's 64 attention heads") as caught:
        require_legal_tensor_parallel(*model(), tp)
    assert hint in caught.value.hint


def test_six_gpus_may_leave_two_idle():
    with pytest.raises(UsageError) as caught:
        require_legal_tensor_parallel(*model(), 6)
    assert caught.value.hint == "Use TP 2 with pipeline parallelism 3 on the same 6 GPUs, or TP 4 on fewer GPUs."


@pytest.mark.parametrize("tp", [0, -2])
def test_nonsense_is_refused(tp):
    with pytest.raises(UsageError, match="not a positive number"):
        require_legal_tensor_parallel(*model(), tp)
