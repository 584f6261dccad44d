"""One server from start to stop: started, proved to answer, handed out, stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from glm5deploy.progress import ProgressSink
from glm5deploy.server.api_key import ApiKey
from glm5deploy.server.client import Client, RequestFailed
from glm5deploy.server.command import ServeCommand
from glm5deploy.server.diagnosis import bare, read_tail
from glm5deploy.server.evidence import STATUS_VARIABLE, IndexerCount, clear_counts, read_indexer_counts, read_running
from glm5deploy.server.flags import TRITON_BACKEND
from glm5deploy.server.model_facts import ModelFacts
from glm5deploy.server.process import ServerProcess
from glm5deploy.server.readiness import CheckResult, NoAnswer, NotReady, prove_answers, wait_for_health
from glm5deploy.server.running import Places, ReadyReport, RunningServer, no_gpus
from glm5deploy.server.settings import ServeSettings
from glm5deploy.server.state import ServerState, remove_state, start_time, write_state

_WHOLE_LOG = 16 << 20  # bytes; a start writes far less
_LAST_WORDS = 5.0  # seconds for a server whose engine died to end as well
_COUNTER_INTERVAL = 0.5  # seconds; a worker writes its counters five times a second at most


@contextmanager
def serving(
    command: ServeCommand,
    settings: ServeSettings,
    model: ModelFacts,
    places: Places,
    key: ApiKey | None,
    progress: ProgressSink,
    *,
    beside: Callable[[], None] = lambda: None,
    gpu_state: Callable[[], str] = no_gpus,
) -> Iterator[RunningServer]:
    """Start the server, wait until it has answered, yield it, stop it.

    ``beside`` is called every now and then and may raise for what must run beside the server, as other machines' parts;
    ``gpu_state`` is asked for a text about the GPUs when the server hangs or dies.
    Raises ServerExited or NotReady; whatever happens, no process of the server is left.
    """
    clear_counts(places.counters)
    counted = replace(command, env={**command.env, STATUS_VARIABLE: str(places.counters)})
    try:
        with ServerProcess(
            counted, places.log, secrets=key.variables if key else None, grace=settings.stop_grace
        ) as process:
            process.beside = beside
            state = _state(process, settings, key)
            write_state(places.state, state)
            report = _prove(process, command, settings, model, places, key, progress)
            write_state(places.state, replace(state, phase="ready"))
            yield RunningServer(settings, key, process, report, places.incidents, gpu_state)
    finally:
        remove_state(places.state)


def _prove(
    process: ServerProcess,
    command: ServeCommand,
    settings: ServeSettings,
    model: ModelFacts,
    places: Places,
    key: ApiKey | None,
    progress: ProgressSink,
) -> ReadyReport:
    def last_line() -> str:
        lines = [line for line in map(bare, read_tail(places.log, 4096)) if line]
        return lines[-1][:160] if lines else "nothing yet"

    with Client(settings.base_url, settings.name, key.value if key else None) as client:
        seconds = wait_for_health(client, settings.ready_timeout, process.check, progress, last_line)
        running = read_running(read_tail(places.log, _WHOLE_LOG))
        try:
            context = client.model_lengths().get(settings.name) or settings.context or model.context
            checks = prove_answers(client, model, context=context, tools="--tool-call-parser" in command.argv)
            counts = _counted(client, places.counters, context > model.index_topk)
        except (NoAnswer, RequestFailed):
            process.check(_LAST_WORDS)  # an engine that died of the question says more than the question's failure
            raise
    if settings.attention == "triton":
        _require_sparse(counts, settings, model, checks)
    return ReadyReport(
        seconds=round(seconds, 1),
        backend=running.backend or (TRITON_BACKEND if counts.ranks else "not stated in the log"),
        kv_dtype=running.kv_dtype or settings.kv_dtype,
        kv_tokens=running.kv_tokens,
        context=context,
        indexer=counts,
        checks=tuple(checks),
    )


def _counted(client: Client, folder: Path, expect_sparse: bool) -> IndexerCount:
    """The counters, after one more request when the last ones may not be written yet."""
    counts = read_indexer_counts(folder)
    if counts.calls == 0 or (expect_sparse and counts.sparse_rows == 0):
        time.sleep(_COUNTER_INTERVAL)
        client.chat([{"role": "user", "content": "Hello"}], max_tokens=1)
        counts = read_indexer_counts(folder)
    return counts


def _require_sparse(
    counts: IndexerCount, settings: ServeSettings, model: ModelFacts, checks: list[CheckResult]
) -> None:
    """Dense attention answers as fluently as sparse attention: only the counters tell that DSA is active."""
    here = settings.local_ranks  # ranks of other machines count there
    if counts.ranks < here:
        raise NotReady(
            f"the indexer ran on {counts.ranks} of {here} ranks: attention is not sparse",
            hint="glm5deploy install checks that vLLM resolves the sparse backend",
        )
    if checks[1].outcome != "skipped" and counts.sparse_rows == 0:
        raise NotReady(
            f"{counts.rows} tokens went through the indexer and none was cut to {model.index_topk} positions",
            hint="glm5deploy install checks the backend; glm5deploy patch --force rebuilds the model folder",
        )


def _state(process: ServerProcess, settings: ServeSettings, key: ApiKey | None) -> ServerState:
    return ServerState(
        phase="starting",
        supervisor=os.getpid(),
        supervisor_started=start_time(os.getpid()),
        guard=process.session,
        guard_started=start_time(process.session),
        url=settings.base_url,
        name=settings.name,
        log=str(process.log),
        key_source=key.source if key else "",
    )
