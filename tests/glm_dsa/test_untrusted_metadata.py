"""Whatever a header says, building a model folder ends with a folder of finite size or with our own error."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm5deploy.errors import DeployError
from glm5deploy.gguf_files.shards import ShardSet
from glm5deploy.glm_dsa.model_folder import build_model_folder
from tests.support.data import SET_A

SHARDS = ShardSet.open(SET_A / "GLM-tiny-A-GGUF/UD-Q4_K_XL")
METADATA = dict(SHARDS.metadata)
FILES = [(path, 1) for path in SHARDS.paths]

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(-2, 1100),
    st.floats(),
    st.text(max_size=40),
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=8).map(tuple), SCALARS.map(lambda value: (value,) * 1024))


@dataclass(frozen=True)
class Shape:
    name: str
    shape: tuple[int, ...]


def build(metadata, tensors):
    try:
        size = sum(map(len, build_model_folder(metadata, tensors, FILES).files.values()))
    except DeployError as error:
        refused = error.message
        size = len(refused) if refused.isprintable() else 1_000_000
    assert size < 1_000_000


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.dictionaries(st.sampled_from(sorted(METADATA)), VALUES, min_size=1, max_size=3))
def test_changed_values(changes):
    build({key: value for key, value in {**METADATA, **changes}.items() if value is not None}, SHARDS.tensors)


NAMES = st.one_of(
    st.text(max_size=64),
    st.builds(
        "blk.{}.{}".format, st.integers(0, 10**6), st.sampled_from(["attn_norm.weight", "x", "ffn_up_exps.weight"])
    ),
    st.sampled_from([tensor.name for tensor in SHARDS.tensors]),
)
SHAPES = st.lists(st.integers(0, 2**63), max_size=4).map(tuple)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.builds(Shape, NAMES, SHAPES), max_size=5), st.integers(0, 112))
def test_changed_tensor_tables(extra, kept):
    build(METADATA, [*SHARDS.tensors[:kept], *extra])
