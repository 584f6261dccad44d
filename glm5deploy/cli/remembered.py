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


def read_remembered(workdir: Path, warn: Callable[[str], None]) -> dict[str, object]:
    """What earlier commands were told; nothing, with a warning, where the file cannot be read."""
    path = _path(workdir)
    try:
        kept = read_json(path) or {}
    except (OSError, ValueError) as error:
        warn(f"{path} cannot be read ({error}); flags of earlier commands are not taken into account")
        return {}
    return {name: value for name, value in kept.items() if name in REMEMBERED}


def remember(workdir: Path, flags: Mapping[str, object]) -> None:
    """Keep the flags that were given; a model of another repository or quantisation forgets what described the old."""
    given = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in flags.items()
        if name in REMEMBERED and value is not None
    }
    if not given:
        return
    kept = read_remembered(workdir, lambda _: None)
    changed = {name for name, value in given.items() if name in kept and kept[name] != value}
    if "model.repo" in changed:
        kept = {}
    elif "model.quant" in changed:
        kept = {name: value for name, value in kept.items() if name.startswith("model.")}
    if {**kept, **given} != kept:
        write_json(_path(workdir), {**kept, **given})


def _path(workdir: Path) -> Path:
    return workdir / ".glm5deploy" / "flags.json"
