"""What types take on a GPU: the planner's table against the kernels' formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5deploy.gguf_files.ggml_types import TYPES_BY_NAME
from glm5deploy.glm_dsa.memory import BYTES_ON_GPU, gpu_nbytes
from glm5deploy.quants.formats import FORMATS, SUPER
from glm5deploy.stages.inspection import inspect_model
from tests.support.gguf_factory import Layout, Model, Tensor, encode, merged_bytes
from tests.support.glm_catalogue import CatalogueTensor

WEIGHTS = sorted(name for name in TYPES_BY_NAME if name not in ("I8", "I16", "I32", "I64", "F64", "F32"))


@pytest.mark.parametrize("name", WEIGHTS)
def test_planned_bytes_are_those_of_the_planes(name: str) -> None:
    kind = TYPES_BY_NAME[name]
    rows = 3
    tensor = CatalogueTensor("w", (2 * SUPER, rows), kind)
    planes = FORMATS.get(name, FORMATS["BF16"])
    assert gpu_nbytes(tensor) == rows * 2 * planes.plane_bytes
    assert (name in BYTES_ON_GPU) == (planes.plane_bytes > kind.nbytes(SUPER))


def test_inspect_says_what_grows(tmp_path: Path) -> None:
    model = Model(tensors=(Tensor("a.weight", "Q4_K", (256, 2)), Tensor("b.weight", "Q8_0", (256, 66))))
    path = tmp_path / "m.gguf"
    path.write_bytes(merged_bytes(model))
    assert "on_a_gpu" not in inspect_model(str(path))
    # 66 rows of Q8_0 have the bytes of IQ2_XXS rows: 256 weights take 272 and 66.
    layout = Layout(types={"b.weight": 16}, dimensions={"b.weight": (256, 272)})
    path.write_bytes(encode(model.pairs, model.tensors, 32, layout))
    assert inspect_model(str(path))["on_a_gpu"] == "IQ2_XXS takes 1.54 times its bytes in the file"
