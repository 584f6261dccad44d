"""Every kernel, every configuration, every GPU: compiled here, measured against the GPU's limits."""

from __future__ import annotations

import json
import pkgutil
from importlib import import_module

import pytest

import glm5deploy.kernels
from glm5deploy.kernels.tuning import SHARED_LIMIT
from tests.support.compiling import compiling


def kernels() -> set[str]:
    """Every kernel of the package, by the name that all of them end with."""
    found = set()
    for module in pkgutil.iter_modules(glm5deploy.kernels.__path__):
        members = vars(import_module(f"glm5deploy.kernels.{module.name}"))
        found |= {name for name, value in members.items() if name.endswith("_kernel") and hasattr(value, "fn")}
    return found


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_configuration_fits_every_gpu() -> None:
    results = [json.loads(line) for line in compiling("-m", "tests.kernels.compile_all")]
    assert {r["arch"] for r in results} == set(SHARED_LIMIT)
    assert {r["kernel"] for r in results} == kernels()
    too_large = [r for r in results if r["shared"] > SHARED_LIMIT[r["arch"]]]
    spilling = [r for r in results if r["stack"] > r["spill_limit"]]
    chained = [r for r in results if r.get("CHAINED")]
    assert not too_large
    assert not spilling
    assert chained
    assert all(r["waits"] for r in chained)
    assert {r["kernel"]: r["early"] for r in chained if r["early"]} == {}
