"""What types take on a GPU: the planner's table against the kernels' formats."""

from __future__ import annotations

import pytest

from glm5deploy.gguf_files.ggml_types import TYPES_BY_NAME
from glm5deploy.glm_dsa.memory import BYTES_ON_GPU, gpu_nbytes
from glm5deploy.quants.formats import FORMATS, SUPER
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
