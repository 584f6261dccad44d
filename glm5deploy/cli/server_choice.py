"""Which running server a client command means: the one named, the work folder's own, or the configured address."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from glm5deploy.cli.session import Session
from glm5deploy.errors import DeployError

UrlOpt = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Server to ask. Default: the one this work folder has running."),
]
ModelNameOpt = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="Model to ask for. Default: the server's first.")
]
KeyFileOpt = Annotated[
    Path | None,
    typer.Option("--api-key-file", metavar="FILE", help="File with the server's key; else GLM5DEPLOY_API_KEY."),
]


@dataclass(frozen=True, slots=True)
class ChosenServer:
    """``key`` is None where none was given."""

    url: str
    model: str
    key: str | None


def choose_server(session: Session, url: str | None, model: str | None) -> ChosenServer:
    """Find the server and ask it for its models; raises DeployError when none answers or has the model."""
    from glm5deploy.server.api_key import find_api_key
    from glm5deploy.server.client import Client
    from glm5deploy.server.state import read_state, state_path

    serve = session.config.serve
    running = read_state(state_path(session.workdir)) if url is None else None
    if running is not None and running.alive:
        url = running.url
    base = (url or f"http://{_reachable(serve.host)}:{serve.port}").rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise DeployError(f"--url {base}: not an HTTP address", hint="for example http://127.0.0.1:8000")
    found = find_api_key(serve.api_key_file, os.environ)
    key = found.value if found else None
    with Client(base, model or "", key, timeout=30.0) as client:
        try:
            offered = client.models()
        except DeployError as error:
            hint = error.hint or "start it with glm5deploy serve, or name another with --url"
            raise DeployError(f"no server at {base}: {error.message}", hint=hint) from None
    if not offered or (model is not None and model not in offered):
        raise DeployError(
            f"the server at {base} offers {', '.join(offered) or 'no model'}" + (f", not {model}" if model else ""),
            hint="name one of them with --model" if offered else "point --url at an OpenAI-compatible server",
        )
    return ChosenServer(base, model or offered[0], key)


def _reachable(host: str) -> str:
    """Where a server that listens on ``host`` is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
