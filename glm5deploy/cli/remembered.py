"""Flags that decide what a work folder holds, kept there, so that `run` and `status` mean the same model later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from glm5deploy.files import read_json, write_json

REMEMBERED = frozenset(
    {
        "model.repo",
        "model.quant",
        "model.revision",
        "merge.mode",
        "merge.output",
        "patch.indexer_schedule",
        "install.attention",
    }
)


def read_remembered(workdir: Path, flags: Mapping[str, object], warn: Callable[[str], None]) -> dict[str, object]:
    """What earlier commands were told, as far as it still holds with the ``flags`` given now.

    A model of another repository or quantisation forgets what described the old one. Nothing, with a warning, where the
    file cannot be read.
    """
    path = _path(workdir)
    try:
        kept = read_json(path) or {}
    except (OSError, ValueError) as error:
        warn(f"{path} cannot be read ({error}); flags of earlier commands are not taken into account")
        return {}
    known = {name: value for name, value in kept.items() if name in REMEMBERED}
    if any(not isinstance(value, str) for value in known.values()):
        warn(f"{path} is damaged; flags of earlier commands are not taken into account")
        return {}
    changed = {name for name, value in _given(flags).items() if name in known and known[name] != value}
    if "model.repo" in changed:
        return {}
    if "model.quant" in changed:
        return {name: value for name, value in known.items() if name.startswith("model.")}
    return known


def remember(workdir: Path, flags: Mapping[str, object]) -> None:
    """Keep the flags that were given, beside those of before that still hold. The caller holds the folder's lock."""
    given = _given(flags)
    if given:
        kept = read_remembered(workdir, flags, lambda _: None)
        write_json(_path(workdir), {**kept, **given})


def _given(flags: Mapping[str, object]) -> dict[str, object]:
    return {
        name: str(value.expanduser().absolute()) if isinstance(value, Path) else value
        for name, value in flags.items()
        if name in REMEMBERED and value is not None
    }


def _path(workdir: Path) -> Path:
    return workdir / ".glm5deploy" / "flags.json"
