"""``serve``: a server that has answered before it is called ready."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from glm5deploy.cli.options import DEFAULT_WORKDIR, ConfigOpt, DryRunOpt, JsonOpt, WorkdirOpt
from glm5deploy.cli.serve_elsewhere import detach_server, print_deployment
from glm5deploy.cli.session import Session

if TYPE_CHECKING:
    from glm5deploy.stages.serve import ServerInfo


def serve(
    extra: Annotated[
        list[str] | None, typer.Argument(metavar="-- VLLM FLAGS", help="Handed to vLLM after the generated flags.")
    ] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="GPUs that share every layer.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", min=1, help="Groups of layers one after the other.")] = None,
    ep: Annotated[bool | None, typer.Option("--ep", help="Spread whole experts over the ranks.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: this machine only.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="The name that clients ask for.")] = None,
    context: Annotated[int | None, typer.Option(min=0, help="Tokens of prompt and answer; 0: what fits.")] = None,
    kv_dtype: Annotated[Literal["auto", "bfloat16", "fp8_ds_mla"] | None, typer.Option(help="KV cache type.")] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"] | None, typer.Option(help="Type of the activations.")
    ] = None,
    weights: Annotated[
        Literal["auto", "dense", "quantised"] | None, typer.Option(help="How weights are kept in memory.")
    ] = None,
    max_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences that run at the same time.")] = None,
    mtp: Annotated[int | None, typer.Option(min=0, help="Draft tokens a step by the model's MTP block.")] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help='A parser of vLLM, "auto" or "none".')] = None,
    tool_parser: Annotated[str | None, typer.Option(help='A parser of vLLM, "auto" or "none".')] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that clients must send; or set GLM5DEPLOY_API_KEY.")
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option("--nodes", metavar="HOST,HOST", help="Machines that share the model, this one first."),
    ] = None,
    interface: Annotated[
        str | None, typer.Option("--interface", metavar="DEVICE", help="Network device between the machines.")
    ] = None,
    remote_shell: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help='What reaches another machine. Default: ssh; "none": by hand.'),
    ] = None,
    gpu_memory: Annotated[float | None, typer.Option(min=0, max=1, help="Share of each GPU's memory.")] = None,
    ready_timeout: Annotated[float | None, typer.Option(min=0, help="Seconds to wait for READY; 0: computed.")] = None,
    stall_seconds: Annotated[
        float | None, typer.Option(min=1, help="Requests run and nothing is produced for so long: it hangs.")
    ] = None,
    restarts: Annotated[int | None, typer.Option(min=0, help="How often in a row it is started again.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Go on in the background once it is ready.")] = False,
    print_unit: Annotated[bool, typer.Option("--print-unit", help="Print a systemd unit for this command.")] = False,
    print_compose: Annotated[bool, typer.Option("--print-compose", help="Print a compose file for it.")] = False,
    workdir: WorkdirOpt = DEFAULT_WORKDIR,
    config: ConfigOpt = None,
    json_mode: JsonOpt = False,
    dry_run: DryRunOpt = False,
) -> None:
    """Start vLLM, wait until it has answered, keep it until Ctrl-C, stop all of its processes."""
    flags = {
        "serve.tp": tp,
        "serve.pp": pp,
        "serve.ep": ep,
        "serve.host": host,
        "serve.port": port,
        "serve.name": name,
        "serve.context": context,
        "serve.kv_dtype": kv_dtype,
        "serve.dtype": dtype,
        "serve.weights": weights,
        "serve.max_num_seqs": max_seqs,
        "serve.mtp": mtp,
        "serve.reasoning_parser": reasoning_parser,
        "serve.tool_parser": tool_parser,
        "serve.api_key_file": api_key_file,
        "serve.nodes": tuple(filter(None, nodes.split(","))) if nodes else None,
        "serve.interface": interface,
        "serve.remote_shell": tuple(shlex.split(remote_shell)) if remote_shell else None,
        "serve.gpu_memory": gpu_memory,
        "serve.ready_timeout": ready_timeout,
        "serve.stall_seconds": stall_seconds,
        "serve.restarts": restarts,
        "serve.extra": tuple(extra) if extra else None,
    }
    session = Session.open(workdir=workdir, config=config, json_mode=json_mode, flags=flags)
    if dry_run:
        session.execute("serve", "serve", dry_run=True)
    elif print_unit or print_compose:
        print_deployment(session, "compose" if print_compose else "unit", config)
    elif detach:
        detach_server(session)
    else:
        _run(session)


def _run(session: Session) -> None:
    """The result is printed when the server is ready, so that a script can go on then."""
    from glm5deploy.server.endpoint import curl_example
    from glm5deploy.stages.serve import ServeStage

    announced: list[str] = []  # a restarted server is the same to whoever reads the result

    def ready(server: ServerInfo) -> None:
        curl = curl_example(server.settings, server.key)
        value = {
            "url": f"{server.base_url}/v1",
            "model": server.model,
            "log": str(server.process.log),
            "curl": curl,
            "report": server.report.as_json(),
        }
        if not announced:
            session.output.result(value, f"{value['url']}\n{curl}")
            session.output.note("Ctrl-C stops the server")
            announced.append(server.base_url)
        server.wait()

    session.pipeline(ServeStage(on_ready=ready)).run("serve", "serve", force=True)
