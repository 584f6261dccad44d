"""A real vLLM server over a model folder, with what the comparisons ask it for."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from glm5deploy.server.command import ServeCommand, vllm_launcher
from glm5deploy.server.nodes import Cluster, Node
from glm5deploy.server.process import end_guarded, start_guarded
from tests.support.serving import free_port

START_SECONDS = 300.0
GRACE_SECONDS = 20
NAME = "tiny"


@dataclass(frozen=True)
class Answer:
    """``top``: position -> {id: logprob} of the token after it; ``ids`` the continuation, ``logprobs`` its tokens'."""

    top: dict[int, dict[int, float]]
    ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Engine:
    url: str
    log: Path
    trace: Path
    status: Path
    compile_log: Path

    def complete(
        self, ids: Sequence[int], *, tokens: int = 24, prompt_logprobs: bool = True, salt: str | None = None
    ) -> Answer:
        """Greedy continuation of ``ids`` with log-probabilities, and with those of the whole prompt if asked for.

        Prompts of different ``salt`` share nothing in the prefix cache; with log-probabilities of the prompt, nothing
        is taken from it.
        """
        request: dict[str, Any] = {
            "model": NAME,
            "prompt": list(ids),
            "max_tokens": tokens,
            "temperature": 0,
            "logprobs": 20,
            "return_tokens_as_token_ids": True,
            **({"prompt_logprobs": 20} if prompt_logprobs else {}),
            **({"cache_salt": salt} if salt else {}),
        }
        response = httpx.post(f"{self.url}/v1/completions", json=request, timeout=180)
        assert response.status_code == 200, f"{response.status_code}: {response.text}\n{self.tail()}"
        choice = response.json()["choices"][0]
        steps = [{_id(token): value for token, value in step.items()} for step in choice["logprobs"]["top_logprobs"]]
        top = {len(ids) - 1 + i: step for i, step in enumerate(steps)}
        for position, entry in enumerate((choice.get("prompt_logprobs") or [])[1:]):
            top[position] = {int(token): value["logprob"] for token, value in entry.items()}
        return Answer(top, [_id(t) for t in choice["logprobs"]["tokens"]], choice["logprobs"]["token_logprobs"])

    def clear_trace(self) -> None:
        for file in self.trace.glob("*.npz"):
            file.unlink()

    def selections(
        self, rank: int = 0, positions: Collection[int] | None = None
    ) -> dict[tuple[int, int], frozenset[int]]:
        """(layer, position) -> selected positions, of the one request that ran since the trace was cleared.

        Of all positions, or of the ``positions`` named.
        """
        found: dict[tuple[int, int], frozenset[int]] = {}
        for file in sorted(self.trace.glob(f"rank{rank}-*.npz")):
            with np.load(file, allow_pickle=False) as record:
                layer, selected = int(record["layer"]), record["selected"]
                for row, position in enumerate(record["position"].tolist()):
                    if positions is None or position in positions:
                        found[layer, position] = frozenset(selected[row][selected[row] >= 0].tolist())
        return found

    def counter(self, name: str) -> dict[str, float]:
        """A counter of vLLM's, ``name`` without its prefix and "_total": its values by their labels, as printed."""
        found = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=10).text.split("\n"):
            label, _, value = line.rpartition(" ")
            if label.split("{", 1)[0] == f"vllm:{name}_total":
                found[label.partition("{")[2].rstrip("}")] = float(value)
        return found

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@contextmanager
def engine(
    model_folder: Path,
    work: Path,
    *,
    tp: int = 1,
    dtype: str = "float32",
    flags: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    start_seconds: float = START_SECONDS,
    nodes: Sequence[Mapping[str, str]] = (),
) -> Iterator[Engine]:
    """Start vLLM's own server as a user would, and stop its whole process group at the end.

    ``variables`` are added to the environment; an empty one is taken out of it. ``nodes`` divide the ranks among that
    many machines, all of them this one, each with these variables besides; the second one's log is ``node1.log``.
    """
    port = free_port()
    files = (work / "serve.log", work / "trace", work / "status", work / "compile.jsonl")
    served = Engine(f"http://127.0.0.1:{port}", *files)
    served.trace.mkdir(parents=True)
    served.status.mkdir()
    command = [*vllm_launcher(), str(model_folder), "--load-format", "glm5_gguf", "--dtype", dtype]
    command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048"]
    command += ["--tensor-parallel-size", str(tp), *flags]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # A thread a rank on no core in particular: vLLM would put every server's first rank on the same core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "GLM5DEPLOY_TRACE_DIR": str(served.trace),
        "GLM5DEPLOY_STATUS_DIR": str(served.status),
        "GLM5DEPLOY_COMPILE_LOG": str(served.compile_log),
        **(variables or {}),
    }
    parts = node_commands(command, tp, nodes) if nodes else [(command, {})]
    logs = [served.log, *(work / f"node{number}.log" for number in range(1, len(parts)))]
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as opened:
        try:
            for (words, added), log in zip(parts, logs, strict=True):
                output = opened.enter_context(log.open("wb"))
                whole = {name: value for name, value in {**environment, **added}.items() if value}
                processes.append(start_guarded(words, GRACE_SECONDS, output, whole))  # survives no killed test
            _wait_until_healthy(served, processes, start_seconds)
            yield served
        finally:
            with ThreadPoolExecutor(len(parts)) as pool:
                list(pool.map(lambda process: end_guarded(process, GRACE_SECONDS), processes))


def node_commands(
    command: Sequence[str], tp: int, nodes: Sequence[Mapping[str, str]]
) -> list[tuple[Sequence[str], dict[str, str]]]:
    """What each machine runs, with which variables, as `serve --nodes` has it; they meet on the loopback device."""
    machines = tuple(Node(number, "", "127.0.0.1", "lo") for number in range(len(nodes)))
    cluster = Cluster(machines, tp // len(nodes), free_port())
    made = [cluster.command(machine, ServeCommand(vllm_launcher(), tuple(command), {}, {})) for machine in machines]
    return [(part.argv, {**part.env, **added}) for part, added in zip(made, nodes, strict=True)]


def _wait_until_healthy(served: Engine, processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for number, process in enumerate(processes):
            where = f" on machine {number}" if number else ""
            assert process.poll() is None, f"vLLM stopped with {process.returncode}{where}\n{served.tail()}"
        try:
            if httpx.get(f"{served.url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise AssertionError(f"vLLM was not ready within {seconds:.0f} s\n{served.tail()}")


def _id(token: str) -> int:
    return int(token.removeprefix("token_id:"))
