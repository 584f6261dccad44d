"""A pipeline stage that would read another process's selection is refused by the model itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from glm5deploy.glm_dsa.indexer_schedule import glm_5_2_pattern


def test_a_stage_must_begin_with_an_indexer() -> None:
    from glm5deploy.vllm_plugin.model import require_own_selection

    config = SimpleNamespace(index_topk_pattern=glm_5_2_pattern())
    require_own_selection(config, 0, 2)
    require_own_selection(config, 38, 2)
    with pytest.raises(ValueError, match=r"layer 39, which shares .* Set VLLM_PP_LAYER_PARTITION=38,40 on every node"):
        require_own_selection(config, 39, 2)
    with pytest.raises(ValueError, match=r"Unset VLLM_PP_LAYER_PARTITION$"):
        require_own_selection(SimpleNamespace(index_topk_pattern="FSFS"), 1, 2)


@pytest.mark.parametrize("pattern", [None, "", "F" * 78])
def test_models_without_sharing_may_be_cut_anywhere(pattern: str | None) -> None:
    from glm5deploy.vllm_plugin.model import require_own_selection

    require_own_selection(SimpleNamespace(index_topk_pattern=pattern), 39, 2)
    require_own_selection(SimpleNamespace(), 39, 2)
