"""``plan``: does it fit, how is it cut, what does it need; from headers alone."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from glm5deploy.cli.options import DEFAULT_WORKDIR, ConfigOpt, JsonOpt, WorkdirOpt
from glm5deploy.cli.session import Session
from glm5deploy.errors import UsageError


def plan(
    model: Annotated[
        str | None,
        typer.Argument(metavar="REPO[:QUANT]|PATH", help="A repository's quantisation, a GGUF file, shard or folder."),
    ] = None,
    gpus: Annotated[
        str, typer.Option("--gpus", metavar='"8x NAME"', help="GPUs to plan for; auto: those of this machine.")
    ] = "auto",
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="GPUs that share every layer.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", min=1, help="Groups of layers one after the other.")] = None,
    ep: Annotated[bool | None, typer.Option("--ep", help="Spread whole experts over the ranks.")] = None,
    context: Annotated[int | None, typer.Option(min=0, help="Tokens of prompt and answer; 0: what fits.")] = None,
    kv_dtype: Annotated[Literal["auto", "bfloat16", "fp8_ds_mla"] | None, typer.Option(help="KV cache type.")] = None,
    mtp: Annotated[int | None, typer.Option(min=0, help="Draft tokens a step by the model's MTP block.")] = None,
    max_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences that run at the same time.")] = None,
    indexer_schedule: Annotated[
        str | None, typer.Option("--indexer-schedule", metavar="FSS…", help="Where the file does not say it.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the repository.")] = None,
    network: Annotated[float, typer.Option("--network", min=1, metavar="MB/S", help="For the time to fetch.")] = 110,
    disk: Annotated[
        float, typer.Option("--disk", min=1, metavar="MB/S", help="For the times to merge and load.")
    ] = 1500,
    workdir: WorkdirOpt = DEFAULT_WORKDIR,
    config: ConfigOpt = None,
    json_mode: JsonOpt = False,
) -> None:
    """Work out memory, layouts, disk, times and commands without downloading the model. Exit code 1: does not fit."""
    flags = {
        "serve.tp": tp,
        "serve.pp": pp,
        "serve.ep": ep,
        "serve.context": context,
        "serve.kv_dtype": kv_dtype,
        "serve.mtp": mtp,
        "serve.max_num_seqs": max_seqs,
        "patch.indexer_schedule": indexer_schedule,
        "model.revision": revision,
    }
    session = Session.open(workdir=workdir, config=config, json_mode=json_mode, flags=flags)
    wanted = session.config.model
    target = model or (f"{wanted.repo}:{wanted.quant}".rstrip(":") if wanted.repo else None)
    if target is None:
        raise UsageError("plan needs a model", hint="glm5deploy plan unsloth/GLM-5.2-GGUF:UD-Q4_K_XL")
    from glm5deploy.hardware.gpus import detect_gpus, parse_gpus
    from glm5deploy.stages.model_headers import open_headers
    from glm5deploy.stages.plan_words import Rates
    from glm5deploy.stages.planning import make_deployment_plan

    group = detect_gpus() if gpus == "auto" else parse_gpus(gpus)
    found = open_headers(target, wanted.revision)
    rates = Rates(network * 1e6, disk * 1e6)
    value = make_deployment_plan(found, group, session.config, session.workdir, rates, config)
    session.output.result(value if json_mode else {key: item for key, item in value.items() if key != "notes"})
    for note in value["notes"]:
        session.output.note(f"note: {note}")
    if not value["fits"]:
        raise typer.Exit(1)
