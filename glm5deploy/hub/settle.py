"""Before anything is fetched: prove what lies under a shard's name already, and adopt what can be found elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from glm5deploy.hub.adopt import find_copy, take_over
from glm5deploy.hub.choice import RemoteFile
from glm5deploy.hub.disk import explain_write_error
from glm5deploy.hub.meter import Meter
from glm5deploy.hub.plan import FetchPlan
from glm5deploy.hub.records import STATE_FOLDER
from glm5deploy.hub.verify import check_file, check_files, is_verified, record_verified

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settled:
    """``missing`` has to be fetched; ``asides`` says where a readable file that was not the listed content is now."""

    missing: tuple[RemoteFile, ...]
    asides: Mapping[str, Path]


def settle(
    plan: FetchPlan,
    destination: Path,
    adopt: Path | None,
    meter: Meter,
    note: Notify,
    proved: Callable[[RemoteFile], None],
) -> Settled:
    """Hash files that are in place without a record, all cores at work, and look for the others below ``adopt``."""
    open_ = [file for file in plan.files if not is_verified(destination, file)]
    there = [file for file in open_ if (destination / file.path).exists()]
    verdicts = check_files(plan, destination, there, report=lambda file, count: meter.report(file, count, "hashing"))
    asides: dict[str, Path] = {}
    for verdict in verdicts:
        if verdict.problem:
            aside = set_aside(destination, verdict.file)
            if verdict.problem != "unreadable":  # such a file cannot be compared with the new one either
                asides[verdict.file.path] = aside
            note(f"{verdict.detail}; moved to {aside}")
        else:
            proved(verdict.file)
    sound = {verdict.file.path for verdict in verdicts if not verdict.problem}
    missing = [file for file in open_ if file.path not in sound]
    if adopt is not None:
        adopted = set()
        for file in missing:
            if _adopt(plan, destination, file, adopt, meter, note):
                adopted.add(file.path)
                proved(file)
        missing = [file for file in missing if file.path not in adopted]
    return Settled(tuple(missing), asides)


def set_aside(destination: Path, file: RemoteFile) -> Path:
    """Move a file that is not the listed content out of the way; it may be the user's, so it is kept."""
    folder = destination / STATE_FOLDER / "aside"
    number = 1
    while (target := folder / f"{file.path}.{number}").exists():
        number += 1
    target.parent.mkdir(parents=True, exist_ok=True)
    (destination / file.path).replace(target)
    return target


def _adopt(plan: FetchPlan, destination: Path, file: RemoteFile, folder: Path, meter: Meter, note: Notify) -> bool:
    """Take a shard over from ``folder`` if a file with its content is there."""
    found = find_copy(file, folder, report=lambda count: meter.report(file, count, "hashing"), note=note)
    if found is None:
        return False
    source, prefixes = found
    try:
        how = take_over(source, destination / file.path, destination / STATE_FOLDER / f"{file.path}.adopted")
    except OSError as error:
        raise explain_write_error(error, destination, file.size) from error
    if how == "copy" and check_file(plan, destination, file).problem:
        note(f"{file.name}: the copy of {source} is damaged; moved to {set_aside(destination, file)}")
        return False
    record_verified(destination, file, plan.commit, prefixes)
    note(f"{file.name}: taken over from {source} ({how})")
    return True
