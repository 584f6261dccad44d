"""Settings: TOML file < ``GLM5DEPLOY_*`` variables < command-line flags, each value knowing where it came from.

Flags that decide what a work folder holds are remembered there and stand below all three.

A setting is addressed as ``section.key``. In a file it stands under ``[section]``; its variable is
``GLM5DEPLOY_SECTION_KEY``. Unknown sections and keys are refused with the nearest known name.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from glm5deploy.errors import UsageError

ENVIRONMENT_PREFIX = "GLM5DEPLOY_"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What is wanted: a quantisation of a hub repository at a revision."""

    repo: str = ""
    quant: str = ""
    revision: str = "main"


@dataclass(frozen=True, slots=True)
class FetchConfig:
    parallel: int = 4
    transport: Literal["auto", "xet", "https"] = "auto"
    stall_rate: int = 64 * 1024  # bytes per second below which a connection counts as stalled
    stall_seconds: float = 30.0
    retries: int = 8
    adopt: Path | None = None  # a folder whose shards are taken over when their hashes fit
    local_files_only: bool = False


@dataclass(frozen=True, slots=True)
class MergeConfig:
    mode: Literal["always", "auto", "never"] = "always"
    output: Path | None = None
    chunk_bytes: int = 0  # bytes a read or write; 0 chooses by the way of copying
    consume: bool = False
    verify: bool = False


@dataclass(frozen=True, slots=True)
class PatchConfig:
    indexer_schedule: str = ""  # "F"/"S" a layer; only where the file does not say


@dataclass(frozen=True, slots=True)
class InstallConfig:
    attention: Literal["triton", "native"] = "triton"
    tune: bool = False
    heads: int = 0  # attention heads of one GPU that launch parameters are measured for; 0: the model's over the GPUs


@dataclass(frozen=True, slots=True)
class ServeConfig:
    tp: int = 1
    pp: int = 1
    ep: bool = False
    name: str = ""  # what clients ask for; empty takes the repository's
    host: str = "127.0.0.1"
    port: int = 8000
    context: int = 0  # tokens; 0 takes what fits, at most the model's own limit
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    kv_dtype: Literal["auto", "bfloat16", "fp8_ds_mla"] = "auto"
    weights: Literal["auto", "dense", "quantised"] = "auto"
    max_num_seqs: int = 0
    mtp: int = 0  # draft tokens a step; 0 switches MTP off
    reasoning_parser: str = "auto"  # a name of vLLM's registry, "none", or by the tokenizer's tokens
    tool_parser: str = "auto"
    gpu_memory: float = 0.0  # share of each GPU; 0 leaves it to vLLM
    custom_all_reduce: Literal["auto", "on", "off"] = "auto"  # auto: off on more than two GPUs without NVLink
    api_key_file: Path | None = None
    ready_timeout: float = 0.0  # seconds; 0 computes one from the bytes to load
    stall_seconds: float = 300.0  # requests run and nothing is produced for so long: the server hangs
    restarts: int = 3  # how often in a row a server that hung or died is started again
    nodes: tuple[str, ...] = ()  # machines that share the model, this one first
    interface: str = ""  # network device between the machines; "" leaves it to the system
    master_port: int = 29501  # of the first machine, where the others report
    remote_shell: tuple[str, ...] = ()  # what reaches another machine; () is ssh, ("none",) prints what to run there
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Config:
    """All settings; ``origins["section.key"]`` says where a value that is not the default came from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    fetch: FetchConfig = field(default_factory=FetchConfig)
    merge: MergeConfig = field(default_factory=MergeConfig)
    patch: PatchConfig = field(default_factory=PatchConfig)
    install: InstallConfig = field(default_factory=InstallConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    origins: Mapping[str, str] = field(default_factory=dict)

    def origin(self, name: str) -> str:
        """Where ``section.key`` was set: "default", "earlier flag", "file …", "variable …" or "flag"."""
        return self.origins.get(name, "default")


SECTIONS = tuple(f.name for f in dataclasses.fields(Config) if f.name != "origins")


def load_config(
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[str, object],
    remembered: Mapping[str, object] | None = None,
) -> Config:
    """Merge the sources. ``flags`` maps ``section.key`` to a value; ``None`` means "not given".

    ``remembered`` are flags of an earlier command in the same work folder: everything else beats them.

    :raises UsageError: unreadable file, unknown name, or a value of the wrong type, naming its origin.
    """
    known = _known()
    values: dict[str, tuple[object, str]] = {
        name: (value, "earlier flag") for name, value in (remembered or {}).items() if name in known
    }
    if file is not None:
        values.update(_from_file(file))
    for name, type_ in known.items():
        variable = ENVIRONMENT_PREFIX + name.replace(".", "_").upper()
        if variable in environment:
            values[name] = (_parse(environment[variable], type_, f"variable {variable}"), f"variable {variable}")
    _refuse_unknown_variables(environment, known)
    for name, value in flags.items():
        if name not in known:
            raise KeyError(name)
        if value is not None:
            values[name] = (value, "flag")
    checked = {name: (_check(name, value, known[name], origin), origin) for name, (value, origin) in values.items()}
    sections: dict[str, Any] = {}
    for section, class_ in typing.get_type_hints(Config).items():
        if section in SECTIONS:
            own = {n.partition(".")[2]: v for n, (v, _) in checked.items() if n.startswith(section + ".")}
            sections[section] = class_(**own)
    return Config(**sections, origins={name: origin for name, (_, origin) in checked.items()})


def _known() -> dict[str, Any]:
    hints = typing.get_type_hints(Config)
    return {
        f"{section}.{key}": type_
        for section in SECTIONS
        for key, type_ in typing.get_type_hints(hints[section]).items()
    }


def _from_file(file: Path) -> dict[str, tuple[object, str]]:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read the configuration {file}: {error.strerror}", hint="name another file with --config"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not valid TOML: {error}") from error
    values: dict[str, tuple[object, str]] = {}
    for section, table in content.items():
        if section not in SECTIONS or not isinstance(table, dict):
            raise UsageError(f"{file}: unknown section [{section}]", hint=_nearest(section, SECTIONS))
        for key, value in table.items():
            name = f"{section}.{key}"
            if name not in _known():
                raise UsageError(f"{file}: unknown setting {name}", hint=_nearest(name, tuple(_known())))
            values[name] = (value, f"file {file}")
    return values


def _refuse_unknown_variables(environment: Mapping[str, str], known: Mapping[str, object]) -> None:
    """A misspelt setting must not be silently without effect; variables of other kinds have no section's name."""
    names = {ENVIRONMENT_PREFIX + name.replace(".", "_").upper(): name for name in known}
    sections = tuple(f"{ENVIRONMENT_PREFIX}{section.upper()}_" for section in SECTIONS)
    for variable in environment:
        if variable.startswith(sections) and variable not in names:
            raise UsageError(f"unknown setting in the variable {variable}", hint=_nearest(variable, tuple(names)))


def _nearest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"


def _unwrap(type_: Any) -> tuple[Any, bool]:
    """``X | None`` → (X, True); anything else → (itself, False)."""
    if isinstance(type_, types.UnionType):
        return next(t for t in typing.get_args(type_) if t is not type(None)), True
    return type_, False


def _parse(text: str, type_: Any, origin: str) -> object:
    """A variable's text as a value of ``type_``."""
    base, optional = _unwrap(type_)
    if optional and text == "":
        return None
    if base is bool:
        known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in known:
            raise UsageError(f"{origin} must be true or false, not {text!r}")
        return known[text.lower()]
    if base in (int, float):
        try:
            return base(text)
        except ValueError:
            raise UsageError(f"{origin} must be a number, not {text!r}") from None
    if typing.get_origin(base) is tuple:
        return tuple(text.split())
    return text


def _check(name: str, value: object, type_: Any, origin: str) -> object:
    base, optional = _unwrap(type_)
    if value is None and optional:
        return None
    if typing.get_origin(base) is Literal:
        choices = typing.get_args(base)
        if value not in choices:
            raise UsageError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r} ({origin})")
        return value
    if typing.get_origin(base) is tuple:
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise UsageError(f"{name} must be a list of strings ({origin})")
        return tuple(value)
    if base is Path and isinstance(value, (str, Path)):
        return Path(value).expanduser()
    if base is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, base) or (base is not bool and isinstance(value, bool)):
        raise UsageError(f"{name} must be a {base.__name__}, not {value!r} ({origin})")
    return value
