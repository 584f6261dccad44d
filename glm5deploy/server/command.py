"""The ``vllm serve`` command that follows from settings and model: a pure value with a reason for every flag."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glm5deploy.errors import UsageError
from glm5deploy.glm_dsa.pipeline_parallel import VARIABLE as PARTITION
from glm5deploy.glm_dsa.pipeline_parallel import check_partition
from glm5deploy.server.flags import generated_flags
from glm5deploy.server.model_facts import ModelFacts
from glm5deploy.server.settings import ServeSettings, flag_name
from glm5deploy.server.variables import generated_variables

# Both wheels have this module, and it takes the arguments of `vllm serve` with the model as a flag. The `vllm` script
# of the CPU wheel asks the package metadata for "vllm", which that wheel does not provide, and fails at once.
_SERVER_MODULE = "vllm.entrypoints.launchers.api_server.entry"
_KEPT = "already set in the environment"
# Other spellings under which vLLM knows a flag that is generated here.
_ALIASES = {"-cc": "--compilation-config", "-sc": "--speculative-config", "-pp": "--pipeline-parallel-size"}


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """``argv`` is whole (it begins with ``launcher``), ``env`` only what is added to the caller's environment;
    ``reasons`` holds one for every flag and variable.

    No secret is in it: the API key is handed to the process apart from this value.
    """

    launcher: tuple[str, ...]
    argv: tuple[str, ...]
    env: Mapping[str, str]
    reasons: Mapping[str, str]

    @property
    def vllm_arguments(self) -> tuple[str, ...]:
        """What vLLM's own argument parser sees: the model folder and the flags."""
        return self.argv[len(self.launcher) :]

    def shell(self) -> str:
        """One line that can be pasted into a shell."""
        return " ".join([*(f"{key}={shlex.quote(value)}" for key, value in self.env.items()), shlex.join(self.argv)])


def build_command(
    settings: ServeSettings,
    model: ModelFacts,
    weights: str = "auto",
    *,
    environment: Mapping[str, str] | None = None,
    launcher: Sequence[str] | None = None,
) -> ServeCommand:
    """The command for ``settings``. ``weights`` is "auto", "dense" or "quantised", as the loader knows it.
    ``launcher`` is what precedes the model folder; by default what the installed wheel needs.

    Flags after ``--`` replace generated ones of the same name, and a variable that ``environment`` has already stays as
    it is. Raises UsageError for a combination that cannot work.
    """
    context = settings.context
    if context is not None and context > model.context:
        raise UsageError(f"--context {context}: the model was made for at most {model.context} tokens")
    if not model.has_chat_template and not any(flag_name(word) == "--chat-template" for word in settings.extra):
        raise UsageError(
            "the GGUF file has no chat template, so the server could not answer a chat",
            hint="give one as a file: glm5deploy serve … -- --chat-template FILE",
        )
    if settings.mtp and not model.mtp_layers:
        raise UsageError("--mtp asks for draft tokens, but the GGUF file has no MTP block", hint="leave --mtp out")
    given = {_ALIASES.get(flag, flag) for flag in map(flag_name, settings.extra) if flag}
    reasons: dict[str, str] = {}
    words: list[str] = []
    for flag in generated_flags(settings, model, weights):
        name = flag.words[0]
        if name in given or name.replace("--no-", "--") in given or f"--no-{name[2:]}" in given:
            reasons[name] = "replaced by what stands after --"
            continue
        words += flag.words
        reasons[name] = flag.reason
    variables = generated_variables(settings, model)
    check_partition((environment or {}).get(PARTITION), model.index_topk_pattern, settings.pp)
    present = variables.keys() & (environment or {}).keys()
    reasons.update({name: _KEPT if name in present else reason for name, (_, reason) in variables.items()})
    prefix = tuple(vllm_launcher() if launcher is None else launcher)
    return ServeCommand(
        launcher=prefix,
        argv=(*prefix, str(settings.model_folder), *words, *settings.extra),
        env={name: value for name, (value, _) in variables.items() if name not in present},
        reasons=reasons,
    )


def vllm_launcher() -> tuple[str, ...]:
    """How this interpreter's vLLM is started as a server; the model folder comes next."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return (sys.executable, "-m", _SERVER_MODULE, "--model")
    return (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
