"""``demo``: all five stages against a tiny random model on a loopback hub, ending with one chat answer."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glm5deploy.cli.options import JsonOpt
from glm5deploy.cli.session import Session
from glm5deploy.errors import DeployError

if TYPE_CHECKING:
    from glm5deploy.stages.serve import ServerInfo

REPO = "demo/GLM-tiny-GGUF"
QUESTION = "What does a sparse attention indexer do?"
ANSWER_TOKENS = 32


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server running until Ctrl-C.")] = False,
    tp: Annotated[int, typer.Option("--tp", min=1, max=4, help="Ranks that share every layer.")] = 1,
    port: Annotated[int | None, typer.Option("--port", help="Port of the endpoint. Default: one that is free.")] = None,
    question: Annotated[str, typer.Option("--question", help="What to ask the model.")] = QUESTION,
    workdir: Annotated[
        Path | None, typer.Option("--workdir", help="Keep everything the demo makes here. Default: a temporary folder.")
    ] = None,
    json_mode: JsonOpt = False,
) -> None:
    """Write a tiny random GLM-5 model, publish it on a local hub, and take it through all five stages.

    The model is of GLM-5's architecture with random weights: the stages, the sparse attention and the endpoint are
    real, the answer is noise.
    """
    with _folder(workdir) as folder:
        _run(folder, question, keep=keep, tp=tp, port=port, json_mode=json_mode)


@contextmanager
def _folder(workdir: Path | None) -> Iterator[Path]:
    if workdir is not None:
        yield workdir.expanduser().absolute()
        return
    made = Path(tempfile.mkdtemp(prefix="glm5deploy-demo-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _own_environment(hub: str) -> None:
    """The demo's hub and endpoint are on loopback, whatever this shell has set for real ones."""
    for name in list(os.environ):
        if name.startswith(("GLM5DEPLOY_", "HF_")):
            del os.environ[name]
    os.environ["HF_ENDPOINT"] = hub
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(folder: Path, question: str, *, keep: bool, tp: int, port: int | None, json_mode: bool) -> None:
    from glm5deploy.demo.local_hub import LocalHub

    begun = time.monotonic()
    answers: list[str] = []

    def ask(server: ServerInfo) -> None:
        answers.append(_ask(server, question))
        if keep:
            session.output.note(f"answer: {answers[0]}")
            session.output.note(f"serving on {server.base_url} until Ctrl-C")
            server.wait()

    with LocalHub() as hub:
        _own_environment(hub.endpoint)
        # Only now: these import huggingface_hub, which reads its variables once.
        from glm5deploy.demo.tiny_model import QUANT, write_tiny_model
        from glm5deploy.stages.serve import ServeStage

        repository = folder / "hub" / REPO
        write_tiny_model(repository)
        hub.publish(REPO, repository)
        flags = {"model.repo": REPO, "model.quant": QUANT, "serve.tp": tp, "serve.port": port or _free_port()}
        session = Session.open(workdir=folder / "work", config=None, json_mode=json_mode, flags=flags)
        session.output.note(f"a tiny random GLM-5 model is on a hub at {hub.endpoint}")
        results = session.pipeline(ServeStage(on_ready=ask)).run()
    stages = [{"stage": r.name, "seconds": r.seconds, "what": str(r.outputs.get("summary", ""))} for r in results]
    session.output.result(
        {
            "question": question,
            "answer": answers[0],
            "stages": stages,
            "total_seconds": round(time.monotonic() - begun, 1),
        }
    )


def _ask(server: ServerInfo, question: str) -> str:
    """One chat answer over HTTP, as any client would ask for it."""
    import httpx

    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0.0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    response = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=120.0)
    if response.status_code != httpx.codes.OK:
        raise DeployError(f"the endpoint answered {response.status_code}: {response.text[:300]}")
    message = response.json()["choices"][0]["message"]
    return str(message.get("content") or message.get("reasoning_content") or message.get("reasoning") or "")
