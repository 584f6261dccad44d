"""The order of the rules that decide the indexer schedule, and what contradicts a decision."""

from __future__ import annotations

import pytest

from glm5deploy.errors import DeployError, FileFormatError, UsageError
from glm5deploy.glm_dsa.hparams import read_hparams
from glm5deploy.glm_dsa.indexer_schedule import glm_5_2_pattern, resolve_schedule
from tests.support.glm_catalogue import GLM_5_2_FULL, real_metadata, real_tensors

ALL = frozenset(tensor.name for tensor in real_tensors("all"))
FULL = frozenset(tensor.name for tensor in real_tensors("full"))
# As published with the model.
GLM_5_2 = "FFFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSS"


def resolve(version="5.2", names=ALL, override=None, **changes):
    metadata = real_metadata(version, **changes)
    return resolve_schedule(read_hparams(metadata, names), names, override=override)


def small(pattern_names, override=None, types=None, context=1048576):
    """A model of four layers with indexer tensors on the layers named."""
    names = {"blk.0.attn_norm.weight"} | {f"blk.{layer}.indexer.attn_k.weight" for layer in pattern_names}
    metadata = real_metadata(
        block_count=4, nextn_predict_layers=None, context_length=context, attention__indexer__types=types
    )
    return resolve_schedule(read_hparams(metadata, names), names, override=override)


def test_table_is_the_published_pattern():
    assert glm_5_2_pattern() == GLM_5_2
    assert tuple(layer for layer, letter in enumerate(GLM_5_2) if letter == "F") == GLM_5_2_FULL


def test_rule_1_the_files_key():
    types = [letter == "F" for letter in GLM_5_2]
    schedule = resolve(attention__indexer__types=types)
    assert (schedule.pattern, schedule.source, schedule.warning) == (GLM_5_2, "file", None)
    assert schedule.full_layers == GLM_5_2_FULL
    assert resolve(attention__indexer__types=types, override=GLM_5_2).source == "file"
    with pytest.raises(UsageError, match="contradicts the file"):
        resolve(attention__indexer__types=types, override="F" * 78)


def test_rule_2_the_users_override_beats_table_and_context():
    pattern = "FS" * 39
    assert (resolve(override=pattern).pattern, resolve(override=pattern).source) == (pattern, "option")
    assert resolve("5", override=pattern.lower()).pattern == pattern


def test_rule_3_the_table_comes_with_a_warning():
    schedule = resolve()
    assert (schedule.pattern, schedule.source) == (GLM_5_2, "table")
    assert schedule.warning is not None
    assert "--indexer-schedule" in schedule.warning


def test_rule_4_short_contexts_share_nothing():
    schedule = resolve("5")
    assert (schedule.pattern, schedule.source, schedule.warning) == ("F" * 78, "context length", None)


def test_rule_5_refuse_with_reason_and_option():
    with pytest.raises(DeployError, match="does not say which of its 4 layers") as caught:
        small(range(4))
    assert "--indexer-schedule FSFS…" in caught.value.hint
    assert "tensors exist" not in caught.value.hint  # duplicates on all layers prove nothing


def test_refusal_shows_what_a_faithful_files_tensors_suggest():
    with pytest.raises(DeployError) as caught:
        small([0, 2])
    assert "FSFS; use it only if" in caught.value.hint


def test_both_layouts_give_the_same_schedule():
    assert resolve(names=ALL) == resolve(names=FULL)


def test_mtp_blocks_are_always_full():
    schedule = resolve()
    assert schedule.is_full(78)
    assert not schedule.is_full(77)


@pytest.mark.parametrize(
    "override", ["", "FFF", "FSFX", "SFFF", "FSFSF", "F" * 5000], ids=["empty", "short", "letter", "S", "long", "huge"]
)
def test_malformed_overrides_are_usage_errors(override):
    with pytest.raises(UsageError, match="--indexer-schedule") as caught:
        small(range(4), override=override)
    assert len(caught.value.message) < 250


def test_full_layers_without_tensors_are_refused_whoever_decided():
    with pytest.raises(DeployError, match="layers 1, 3, but the file has no indexer tensors there"):
        small([0, 2], override="FFFF")
    with pytest.raises(DeployError, match="layers 1, but"):
        small([0, 2], types=[True, True, False, False])
    with pytest.raises(DeployError, match="layers 1, 3, but"):
        small([0, 2], context=202752)


def test_a_faithful_files_tensors_must_equal_the_schedule():
    assert small([0, 2], override="FSFS").pattern == "FSFS"
    with pytest.raises(DeployError, match=r"shares layers 2, but the file has an indexer there and on 2 of 4"):
        small([0, 2], override="FSSS")


def test_key_that_shares_the_first_layer_is_refused():
    with pytest.raises(FileFormatError, match="first layer as shared"):
        small(range(4), types=[False, True, True, True])
