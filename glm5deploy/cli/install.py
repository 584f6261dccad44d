"""``install``: the sparse backend, proved on this machine."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from glm5deploy.cli.options import DEFAULT_WORKDIR, ConfigOpt, DryRunOpt, ForceOpt, JsonOpt, WorkdirOpt
from glm5deploy.cli.session import Session


def install(
    attention: Annotated[
        Literal["triton", "native"] | None,
        typer.Option(help="Our Triton sparse backend, or whatever vLLM itself would choose."),
    ] = None,
    tune: Annotated[
        bool | None, typer.Option("--tune", help="Measure launch parameters on this GPU instead of the table's.")
    ] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="GPUs to measure for.")] = None,
    heads: Annotated[
        int | None,
        typer.Option(min=0, help="Attention heads of one GPU to measure for; 0: the model's, over --tp or all GPUs."),
    ] = None,
    kv_dtype: Annotated[
        Literal["auto", "bfloat16", "fp8_ds_mla"] | None, typer.Option(help="KV cache type to measure for.")
    ] = None,
    workdir: WorkdirOpt = DEFAULT_WORKDIR,
    config: ConfigOpt = None,
    json_mode: JsonOpt = False,
    force: ForceOpt = False,
    dry_run: DryRunOpt = False,
) -> None:
    """Prove that vLLM resolves our loader and sparse backend here and that the backend computes right.

    --tune takes a minute or more of an idle GPU and is kept: a server started from this work folder uses what was
    measured, on GPUs of the same kind.
    """
    flags = {
        "install.attention": attention,
        "install.tune": tune,
        "install.heads": heads,
        "serve.tp": tp,
        "serve.kv_dtype": kv_dtype,
    }
    session = Session.open(workdir=workdir, config=config, json_mode=json_mode, flags=flags)
    session.execute("install", "install", force=force, dry_run=dry_run)
