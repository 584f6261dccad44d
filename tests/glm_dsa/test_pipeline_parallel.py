"""Every pipeline stage begins with a layer that selects tokens itself."""

from __future__ import annotations

from itertools import accumulate

import pytest

from glm5deploy.errors import UsageError
from glm5deploy.glm_dsa.indexer_schedule import glm_5_2_pattern
from glm5deploy.glm_dsa.memory import ParallelLayout
from glm5deploy.glm_dsa.pipeline_parallel import partition_variable, stage_layers, vllm_division, wrong_stages

GLM_5_2 = glm_5_2_pattern()


@pytest.mark.parametrize("pp", range(1, 22))
def test_stages_of_glm_5_2_begin_with_an_indexer(pp: int) -> None:
    sizes = stage_layers(GLM_5_2, pp)
    assert sum(sizes) == 78
    assert len(sizes) == pp
    assert all(GLM_5_2[start] == "F" for start in list(accumulate(sizes, initial=0))[:-1])
    assert wrong_stages(GLM_5_2, sizes) == ()


def test_even_division_of_glm_5_2_would_be_wrong() -> None:
    """Layer 39 shares the selection of layer 38, which would be on the other machine."""
    assert vllm_division(78, 2) == (39, 39)
    assert wrong_stages(GLM_5_2, (39, 39)) == (1,)
    assert stage_layers(GLM_5_2, 2) == (38, 40)
    assert partition_variable(GLM_5_2, 2) == "38,40"
    assert stage_layers(GLM_5_2, 4) == (18, 20, 20, 20)


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8, 78])
def test_without_sharing_vllm_divides_by_itself(pp: int) -> None:
    assert stage_layers("F" * 78, pp) == vllm_division(78, pp)
    assert partition_variable("F" * 78, pp) is None


def test_small_schedules() -> None:
    assert stage_layers("FSFS", 2) == (2, 2)
    assert partition_variable("FSFS", 2) is None
    assert stage_layers("FSSF", 2) == (3, 1)
    assert stage_layers("FFSS", 2) == (1, 3)


@pytest.mark.parametrize(("pattern", "pp"), [("FSSS", 2), (GLM_5_2, 22), ("FF", 3)])
def test_too_few_indexers_are_refused(pattern: str, pp: int) -> None:
    with pytest.raises(UsageError, match="pipeline stages"):
        stage_layers(pattern, pp)


def test_division_agrees_with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.utils import get_pp_indices

    for layers in (4, 78, 79):
        for pp in (1, 2, 3, 4, 8):
            if pp <= layers:
                spans = [get_pp_indices(layers, rank, pp) for rank in range(pp)]
                assert vllm_division(layers, pp) == tuple(end - first for first, end in spans), (layers, pp)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "38,40")
    assert [get_pp_indices(78, rank, 2) for rank in (0, 1)] == [(0, 38), (38, 78)]


def test_a_layout_counts_layers_by_its_partition() -> None:
    assert list(ParallelLayout(pp=2, partition=(1, 3)).stage_of_layers(4)) == [0, 1, 1, 1]
    assert list(ParallelLayout(pp=2).stage_of_layers(4)) == [0, 0, 1, 1]
