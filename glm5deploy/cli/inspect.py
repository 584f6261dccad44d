"""``inspect``: what a GGUF file, a set of shards or a remote quantisation consists of, from its headers."""

from __future__ import annotations

from typing import Annotated

import typer

from glm5deploy.cli.options import JsonOpt
from glm5deploy.cli.session import current_output


def inspect(
    target: Annotated[
        str, typer.Argument(metavar="FILE|SHARD|FOLDER|REPO:QUANT", help="Remote sets are read by byte ranges only.")
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="Add the table of all tensors.")] = False,
    key: Annotated[
        list[str] | None, typer.Option("--key", metavar="KEY", help="Show this metadata key whole; repeatable.")
    ] = None,
    indexer_schedule: Annotated[
        str | None, typer.Option("--indexer-schedule", metavar="FSS…", help="Try a schedule against the file.")
    ] = None,
    revision: Annotated[str, typer.Option(help="Branch, tag or commit of the repository.")] = "main",
    json_mode: JsonOpt = False,
) -> None:
    """Show metadata, the mix of types by role, the indexer schedule and whether a set is complete (exit 1: it is not).

    Nothing but headers is read: a few MB of a set of hundreds of GB, from the hub as well.
    """
    output = current_output(json_mode=json_mode)
    from glm5deploy.stages.inspection import inspect_model

    facts = inspect_model(target, revision=revision, schedule=indexer_schedule, tensors=tensors, keys=key or ())
    metadata = facts["metadata"]
    if not json_mode and isinstance(metadata, dict):
        facts["metadata"] = [{"key": name, "value": value} for name, value in metadata.items()]
    output.result(facts)
    if not facts["complete"]:
        raise typer.Exit(1)
