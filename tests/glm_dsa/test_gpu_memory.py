"""What types take on a GPU: the planner's table against the kernels' formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5deploy.errors import FileFormatError
from glm5deploy.gguf_files.ggml_types import TYPES_BY_NAME
from glm5deploy.glm_dsa.weight_types import BYTES_ON_GPU, REFUSED, cost_by_type, gpu_nbytes, require_readable
from glm5deploy.quants.formats import FORMATS, SUPER
from glm5deploy.stages.inspection import inspect_model
from tests.support.gguf_factory import Layout, Model, Tensor, encode, merged_bytes
from tests.support.glm_catalogue import CatalogueTensor

NO_WEIGHTS = {"I8", "I16", "I32", "I64", "F64", "F32", *REFUSED}
WEIGHTS = sorted(set(TYPES_BY_NAME) - NO_WEIGHTS)


@pytest.mark.parametrize("name", WEIGHTS)
def test_planned_bytes_are_those_of_the_planes(name: str) -> None:
    kind = TYPES_BY_NAME[name]
    rows = 3
    tensor = CatalogueTensor("w", (2 * SUPER, rows), kind)
    planes = FORMATS.get(name, FORMATS["BF16"])
    assert gpu_nbytes(tensor) == rows * 2 * planes.plane_bytes
    assert (name in BYTES_ON_GPU) == (planes.plane_bytes > kind.nbytes(SUPER))


def test_every_way_is_named_and_counted() -> None:
    def tensor(name: str, kind: str) -> CatalogueTensor:
        return CatalogueTensor(name, (SUPER, 10), TYPES_BY_NAME[kind])

    kinds = {"a": "Q4_K", "b": "Q4_K", "c": "IQ2_XXS", "d": "IQ1_S", "e": "F32"}
    costs = cost_by_type([tensor(name, kind) for name, kind in kinds.items()], {"b"})
    assert {(cost.type, cost.way): (cost.tensors, cost.file_bytes, cost.gpu_bytes) for cost in costs} == {
        ("Q4_K", "as in the file"): (1, 1440, 1440),
        ("Q4_K", "16 bits, vLLM needs it"): (1, 1440, 5120),
        ("IQ2_XXS", "signs and magnitudes"): (1, 660, 1020),
        ("IQ1_S", "16 bits, no kernel reads the type"): (1, 500, 5120),
    }
    assert [cost.more for cost in costs] == [4620, 3680, 360, 0]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_types_that_nothing_reads_are_refused_by_name(name: str) -> None:
    assert name not in FORMATS
    tensors = [CatalogueTensor(f"blk.{n}.ffn_up.weight", (SUPER, 2), TYPES_BY_NAME[name]) for n in (3, 4)]
    with pytest.raises(FileFormatError, match=rf"{name} \(.*\): blk\.{{3-4}}\.ffn_up\.weight") as caught:
        require_readable(tensors)
    assert "choose another quantisation" in str(caught.value.hint)


def test_inspect_says_what_grows_and_what_cannot_be_served(tmp_path: Path) -> None:
    model = Model(tensors=(Tensor("a.weight", "Q4_K", (256, 2)), Tensor("b.weight", "Q8_0", (256, 66))))
    path = tmp_path / "m.gguf"
    path.write_bytes(merged_bytes(model))
    assert str(inspect_model(str(path))["on_a_gpu"]).endswith(", as in the file")
    # 66 rows of Q8_0 have the bytes of IQ2_XXS rows: 256 weights take 272 and 66.
    layout = Layout(types={"b.weight": 16}, dimensions={"b.weight": (256, 272)})
    path.write_bytes(encode(model.pairs, model.tensors, 32, layout))
    facts = inspect_model(str(path))
    assert facts["gpu_weights"][0] == {  # type: ignore[index]
        "type": "IQ2_XXS",
        "tensors": 1,
        "how": "signs and magnitudes",
        "file_bytes": 66 * 272,
        "gpu_bytes": 102 * 272,
        "more_bytes": 36 * 272,
    }
    assert "refused" not in facts
    layout = Layout(types={"b.weight": 35}, dimensions={"b.weight": (256, 272)})  # TQ2_0, of the same size
    path.write_bytes(encode(model.pairs, model.tensors, 32, layout))
    assert "TQ2_0 (a type for ternary models): b.weight" in str(inspect_model(str(path))["refused"])
