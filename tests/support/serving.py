"""Settings, model facts and commands for tests of the server package."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

from glm5deploy.server.command import ServeCommand
from glm5deploy.server.model_facts import ModelFacts
from glm5deploy.server.settings import ServeSettings
from tests.support import http_child

GLM_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


_kept: list[socket.socket] = []


def free_port() -> int:
    """A port for a server that is still to start: held until this process ends.

    While it is held the kernel gives the port to nobody who asks for any; a server that names it gets it all the same,
    for servers set SO_REUSEADDR, and this socket does not listen.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _kept.append(holder)
    return int(holder.getsockname()[1])


def settings(**changes: Any) -> ServeSettings:
    values: dict[str, Any] = {"model_folder": Path("/models/glm"), "device": "cpu", "name": "tiny", **changes}
    return ServeSettings(**values)


def facts(**changes: Any) -> ModelFacts:
    values: dict[str, Any] = {
        "index_topk": 2048,
        "context": 202752,
        "heads": 64,
        "hidden_size": 6144,
        "mtp_layers": 1,
        "special_tokens": frozenset(GLM_TOKENS),
        "weight_files": ((Path("/models/glm.gguf"), 430 * 10**9),),
        **changes,
    }
    return ModelFacts(**values)


def child_command(port: int, mode: str) -> ServeCommand:
    launcher = (sys.executable,)
    words = (str(http_child.__file__), str(port), mode, *(() if mode == "toolless" else ("--tool-call-parser", "x")))
    return ServeCommand(launcher, (*launcher, *words), {}, {})


def write_model_folder(folder: Path, *, weights: Path, config: dict[str, Any] | None = None) -> Path:
    """A model folder with as much in it as the server package reads."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "model_type": "glm_moe_dsa",
        "index_topk": 64,
        "max_position_embeddings": 202752,
        "num_attention_heads": 4,
        "hidden_size": 256,
        "num_nextn_predict_layers": 1,
        **(config or {}),
    }
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"content": t} for t in GLM_TOKENS]}))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    weights.write_bytes(b"GGUF" + bytes(96))
    (folder / "glm5_gguf.json").write_text(json.dumps({"version": 1, "files": [str(weights)], "sizes": [100]}))
    return folder
