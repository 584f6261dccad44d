"""Whether the installed vLLM understands a command: ``python -m glm5deploy.vllm_plugin.serve_check < REQUEST``.

REQUEST is a JSON list of the arguments of ``vllm serve``. Prints one JSON object: ``ok``, ``error`` (what vLLM's own
parser says, or which parser name its registries lack), and ``values``, what vLLM takes the arguments to mean.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from typing import Any

VALUES = (
    "model_tag",
    "host",
    "port",
    "uds",
    "served_model_name",
    "tensor_parallel_size",
    "load_format",
    "trust_remote_code",
    "api_key",
    "reasoning_parser",
    "tool_call_parser",
    "max_model_len",
)
_CLI_MODULES = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.common.cli_args")  # 0.32, 0.33


def check_arguments(arguments: list[str]) -> dict[str, Any]:
    """The report for ``arguments`` (see the module's head)."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli = _cli_module()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser = cli.make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
            parsed = parser.parse_args(arguments)
            cli.validate_parsed_serve_args(parsed)
    except SystemExit:
        return {"ok": False, "error": _last_line(said.getvalue()), "values": {}}
    except (TypeError, ValueError, KeyError) as error:
        return {"ok": False, "error": str(error), "values": {}}
    values = {name: getattr(parsed, name, None) for name in VALUES}
    unknown = _unknown_parser("reasoning parser", values["reasoning_parser"], _reasoning_parsers())
    unknown = unknown or _unknown_parser("tool parser", values["tool_call_parser"], _tool_parsers())
    return {"ok": not unknown, "error": unknown, "values": values}


def _cli_module() -> Any:
    for name in _CLI_MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    raise ModuleNotFoundError(f"vLLM has none of {', '.join(_CLI_MODULES)}", name=_CLI_MODULES[-1])


def _reasoning_parsers() -> list[str]:
    from vllm.reasoning import ReasoningParserManager

    return list(ReasoningParserManager.list_registered())


def _tool_parsers() -> list[str]:
    from vllm.tool_parsers import ToolParserManager

    return list(ToolParserManager.list_registered())


def _unknown_parser(what: str, name: str | None, known: list[str]) -> str:
    if not name or name in known:
        return ""
    return f"this vLLM has no {what} {name!r}; it knows {', '.join(sorted(known))}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]
    return (errors or lines or ["the arguments were refused without a word"])[-1]


if __name__ == "__main__":
    request = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # libraries greet on stdout
        report = check_arguments(request)
    json.dump(report, sys.stdout, default=str)
