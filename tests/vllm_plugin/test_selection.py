"""The indexer's operation and the attention backend on caches like the engine's, against float64 arithmetic."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from glm5deploy.errors import DeployError
from glm5deploy.kernels.reference import quantise_fp8, store_index_keys
from glm5deploy.vllm_plugin import host, numerics, selection
from glm5deploy.vllm_plugin.attention import Glm5SparseImpl

CPU = torch.device("cpu")


def test_figures_of_this_machine() -> None:
    figures = numerics.check()
    assert figures["rows"] == sum(numerics.MIXED) + sum(map(sum, numerics.DECODES)) == 88
    assert figures["selection errors"] == 0


def test_the_figures_cover_both_ways_that_a_gpu_scores() -> None:
    """Chunks of gathered keys, and the paged cache with one token a request and with several."""
    planned = [numerics.make_case(CPU, torch.float32, q).metadata for q in (numerics.MIXED, *numerics.DECODES)]
    assert [(m.scored_decodes, m.scored_rows) for m in planned] == [(0, 0), (3, 3), (3, 9)]
    assert [any(p.chunk.scored for p in m.chunks) for m in planned] == [True, False, False]
    assert all(m.max_seq_len > numerics.TOPK for m in planned)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_causal_limit_off_by_one_is_found(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original = selection.select

    def shifted(q, weights, cache, metadata, selected, topk):  # type: ignore[no-untyped-def]
        wrong = dataclasses.replace(metadata, lengths=metadata.lengths + shift)
        original(q, weights, cache, wrong, selected, topk)

    monkeypatch.setattr(selection, "select", shifted)
    with pytest.raises(DeployError, match="selection differs"):
        numerics.check()


def test_a_wrong_attention_scale_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Glm5SparseImpl.forward_mqa

    def scaled(self, q, *rest):  # type: ignore[no-untyped-def]
        return original(self, tuple(1.001 * part for part in q), *rest)

    monkeypatch.setattr(Glm5SparseImpl, "forward_mqa", scaled)
    with pytest.raises(DeployError, match="attention is off by"):
        numerics.check()


def test_chunks_of_queries_do_not_change_the_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = select_all()
    monkeypatch.setattr(host, "_MOST_SCORES", 1000)
    assert torch.equal(select_all(), whole)


def select_all() -> torch.Tensor:
    case = numerics.make_case(CPU, torch.float32)
    store_index_keys(case.index_cache, case.keys, case.slots)
    values, scale = quantise_fp8(case.q_index)
    selected = torch.full((len(case.q), numerics.TOPK), -1, dtype=torch.int32)
    selection.select(values, case.weights * scale, case.index_cache, case.metadata, selected, numerics.TOPK)
    return selected


def test_padding_slots_write_nothing() -> None:
    case = numerics.make_case(CPU, torch.float32)
    impl = Glm5SparseImpl(4, 576, 1.0, 1, None, None, "auto", None, "decoder", None, None, None, kv_lora_rank=512)
    slots = torch.full_like(case.slots, -1)
    slots[3] = case.slots[3]
    latent, rope = case.latent.split([512, 64], dim=-1)
    impl.do_kv_cache_update(latent, rope.unsqueeze(1), case.latent_cache, slots, "auto", torch.ones(()), False)
    written = ~case.latent_cache.isnan().all(dim=-1)
    assert written.nonzero().tolist() == [[int(slots[3]) // 64, int(slots[3]) % 64]]
    assert torch.equal(case.latent_cache[written][0], case.latent[3])


@pytest.mark.parametrize("wanted", [{"alibi_slopes": [1.0]}, {"sliding_window": 128}, {"logits_soft_cap": 30.0}])
def test_variants_of_attention_that_are_not_there_are_refused(wanted: dict[str, object]) -> None:
    arguments = {"alibi_slopes": None, "sliding_window": None, "logits_soft_cap": None, **wanted}
    with pytest.raises(ValueError, match="GLM5_TRITON_SPARSE does not support"):
        Glm5SparseImpl(
            num_heads=4,
            head_size=576,
            scale=1.0,
            num_kv_heads=1,
            kv_cache_dtype="auto",
            attn_type="decoder",
            kv_sharing_target_layer_name=None,
            kv_lora_rank=512,
            **arguments,
        )
