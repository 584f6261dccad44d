"""install --tune: measured in a real child process, recorded, used by serve as long as it is what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glm5deploy.config import load_config
from glm5deploy.errors import DeployError, UsageError
from glm5deploy.kernels import tuning
from glm5deploy.pipeline.stage import Context
from glm5deploy.server import variables
from glm5deploy.stages import kernel_table
from glm5deploy.stages.install import InstallStage, _summary
from glm5deploy.stages.serve_plan import make_plan
from tests.stages.serving import serve_context


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """A work folder after patch of set A, which has 4 attention heads."""
    return serve_context(tmp_path, {})


def configured(context: Context, **settings: object) -> Context:
    flags = {name.replace("__", "."): value for name, value in settings.items()}
    return replace(context, config=load_config(None, {}, flags))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that a child process launches run on the CPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.usefixtures("interpreted")
def test_what_was_measured_is_recorded_and_noticed_when_it_changes(context: Context) -> None:
    asked = configured(context, install__tune=True, serve__tp=2)
    folder = Path(str(context.outputs["patch"]["folder"]))
    shape = kernel_table.wanted_shape(asked.config, folder)
    assert shape.as_json() == {"heads": 2, "topk": 64, "packed": False, "index_heads": 32}
    recorded = kernel_table.measure(asked, shape)
    path = context.private / kernel_table.NAME
    assert recorded["path"] == str(path)
    assert recorded["request"] == shape.as_json() == json.loads(path.read_text())["request"]
    assert recorded["made_for"] == json.loads(path.read_text())["made_for"]
    install = {"kernel_table": recorded}
    assert InstallStage().stale_outputs(asked, install) == []
    assert InstallStage().stale_outputs(context, install) == []
    other = configured(context, install__tune=True, serve__tp=4)
    (reason,) = InstallStage().stale_outputs(other, install)
    assert reason == "launch parameters have not been measured for 1 heads, top 64, a 16-bit cache"
    found, (check,) = kernel_table.usable_table(install, heads=2, packed=False)
    assert (found, check.level) == (path, "ok")
    path.write_text(path.read_text() + " ")
    assert f"{path} has " in InstallStage().stale_outputs(context, install)[0]
    found, (check,) = kernel_table.usable_table(install, heads=2, packed=False)
    assert (found, check.level) == (None, "warn")
    assert "was changed since it was measured" in check.found
    path.unlink()
    found, (check,) = kernel_table.usable_table(install, heads=2, packed=False)
    assert found is None
    assert "is missing" in check.found


def test_heads_follow_the_settings(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(str(context.outputs["patch"]["folder"]))

    def shape(**settings: object) -> kernel_table.Shape:
        return kernel_table.wanted_shape(configured(context, **settings).config, folder)

    assert shape().heads == 4, "no GPU here: all heads on one"
    assert shape(serve__tp=4).heads == 1
    assert shape(install__heads=3, serve__tp=4).heads == 3
    assert shape(serve__kv_dtype="fp8_ds_mla").packed
    for settings, message in (
        ({"serve__tp": 3}, "4 attention heads cannot be dealt out to 3 GPUs"),
        ({"install__heads": 5}, "--heads 5: the model has 4"),
    ):
        with pytest.raises(UsageError, match=message):
            shape(**settings)
    (folder / "config.json").write_text('{"num_attention_heads": "4"}')
    with pytest.raises(DeployError, match=r"config\.json is damaged"):
        shape()


def test_without_a_gpu_tune_is_a_usage_error(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UsageError, match="measured on a CUDA GPU") as caught:
        InstallStage().run(configured(context, install__tune=True))
    assert "leave --tune out" in str(caught.value.hint)
    assert not (context.private / kernel_table.NAME).exists()


def test_tune_of_what_does_not_run_is_a_usage_error(context: Context) -> None:
    asked = configured(context, install__tune=True, install__attention="native")
    for call in (InstallStage().run, InstallStage().plan):
        with pytest.raises(UsageError, match="--attention native does not run them"):
            call(asked)
    (reason,) = InstallStage().stale_outputs(asked, context.outputs["install"])
    assert "--attention native does not run them" in reason


@pytest.mark.parametrize(
    ("kind", "native", "words"),
    [
        ("cpu", False, "GLM5_TRITON_SPARSE on X: loader, backend and numerics checked"),
        ("cuda", False, "GLM5_TRITON_SPARSE on X, its Triton kernels: loader, backend and numerics checked"),
        (
            "cuda",
            True,
            "loader checked on X; vLLM chooses its own attention backend there, and serve says which one",
        ),
    ],
)
def test_the_summary_says_what_was_checked(kind: str, native: bool, words: str) -> None:
    assert _summary("GLM5_TRITON_SPARSE", {"type": kind, "name": "X"}, None, native=native) == words


def test_asking_for_measured_parameters_makes_install_stale(context: Context) -> None:
    outputs = context.outputs["install"]
    assert InstallStage().stale_outputs(context, outputs) == []
    asked = configured(context, install__tune=True)
    assert InstallStage().stale_outputs(asked, outputs) == ["launch parameters have not been measured"]
    assert InstallStage().plan(asked)["would_measure"] == "launch parameters for 4 heads, top 64, a 16-bit cache"


@pytest.mark.usefixtures("interpreted")
def test_a_child_that_dies_is_one_clear_error(context: Context) -> None:
    shape = kernel_table.Shape(-1, 16, packed=False, index_heads=4)
    with pytest.raises(DeployError, match=r"measuring launch parameters failed: RuntimeError: .*negative") as caught:
        kernel_table.measure(context, shape)
    assert "built-in" in str(caught.value.hint)


def recorded_table(workdir: Path, request: Mapping[str, object]) -> dict[str, Any]:
    path = workdir / ".glm5deploy" / kernel_table.NAME
    path.write_text("{}")
    return {"path": str(path), "sha256": kernel_table._digest(path), "request": request, "made_for": {"name": "H200"}}


@pytest.mark.parametrize(
    ("heads", "packed", "level"),
    [(4, False, "ok"), (2, False, "warn"), (4, True, "warn")],
    ids=["fits", "heads", "cache"],
)
def test_a_server_is_given_the_table_and_told_where_it_does_not_fit(
    context: Context, heads: int, packed: bool, level: str
) -> None:
    request = {"heads": heads, "packed": packed}
    install = {**context.outputs["install"], "kernel_table": recorded_table(context.workdir, request)}
    folder = Path(str(context.outputs["patch"]["folder"]))
    cuda = {**install, "device": {"type": "cuda", "name": "NVIDIA H200"}}
    plan = make_plan(context.workdir, folder, context.config, cuda, {})
    (check,) = plan.table_checks
    assert check.level == level
    assert plan.command.env[variables.TABLE_VARIABLE] == str(context.workdir / ".glm5deploy" / kernel_table.NAME)
    assert "measured" in plan.command.reasons[variables.TABLE_VARIABLE]
    for without in (install, {**cuda, "attention": "native"}):
        plan = make_plan(context.workdir, folder, context.config, without, {})
        assert plan.table_checks == ()
        assert variables.TABLE_VARIABLE not in plan.command.env


def test_both_sides_mean_the_same_variable() -> None:
    assert variables.TABLE_VARIABLE == tuning.TABLE_VARIABLE
