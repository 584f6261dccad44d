"""Two tensor-parallel ranks on the only GPU: how NCCL is brought to join them, and a trial of it ahead of any server.

NCCL refuses two ranks of one host on one GPU. NCCL_HOSTID says what host a rank is of, so ranks with different ones
talk as machines do, over sockets, here on loopback ("sockets"); NCCL 2.30 also takes two ranks of one host when told
to ("shared"). Collectives of the two processes take turns on the GPU: the numbers are NCCL's, the times are not.

``python -m tests.support.one_gpu RANK PORT`` is one rank of the trial: sums by all-reduce, eager and from a graph.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.data import REPOSITORY
from tests.support.serving import free_port

RANKS = 2
TRIAL_SECONDS = 75.0
SUM, REPLAYED = "sums are right", "sums from a graph are right"
_TURNS = 20
# Ring and Simple: the fewest turns a collective takes when its two kernels cannot run at the same time, and every
# connection is made by the first all-reduce, ahead of any graph.
_WAYS = {
    "sockets": {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
    "shared": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"},
}
_ALL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
_ALL |= {"NCCL_MNNVL_ENABLE": "0", "NCCL_GRAPH_REGISTER": "0"}
# Where a server fails: "shared" or "sockets" leaves the other out, "eager" captures no graphs; with a comma, both.
_asked = os.environ.get("GPU_SERVERS_ONE_GPU", "").split(",")
EAGER = "eager" in _asked


@dataclass(frozen=True)
class Joined:
    """The way that works, what the trial said, and each rank's variables."""

    way: str
    said: str

    @property
    def eager(self) -> bool:
        """No graphs: asked for, or none gave right sums in the trial."""
        return EAGER or not self.said.startswith(REPLAYED)

    def nodes(self) -> list[dict[str, str]]:
        return [variables(self.way, rank) for rank in range(RANKS)]


_lock = threading.Lock()
_tried: dict[str, str] = {}


def join_ranks(gpu: str, preferred: str, environment: Mapping[str, str]) -> Joined:
    """The preferred way if its trial gives right sums from a graph, else another; one without graphs if there is none.

    ``environment`` is added to the ranks' variables. AssertionError with NCCL's own words where no way works; each way
    is tried once.
    """
    ways = [way for way in _WAYS if way in _asked] or sorted(_WAYS, key=lambda way: way != preferred)
    with _lock:
        for way in ways:
            if way not in _tried:
                _tried[way] = _trial(way, {**environment, "CUDA_VISIBLE_DEVICES": gpu})
                print(f"two ranks on one GPU, {way}: {_tried[way]}", flush=True)
            if _tried[way].startswith(REPLAYED):
                return Joined(way, _tried[way])
        for way in ways:
            if _tried[way].startswith(SUM):
                return Joined(way, _tried[way])
        said = {way: _tried[way] for way in ways}
    raise AssertionError(f"NCCL does not join two ranks on one GPU (no server was started): {said}")


def variables(way: str, rank: int) -> dict[str, str]:
    host = {"NCCL_HOSTID": f"rank{rank}"} if way == "sockets" else {}
    return {**_ALL, **_WAYS[way], **host}


def nccl_log(folder: Path) -> dict[str, str]:
    """Variables that have every process write what NCCL says into ``folder``, to be read by :func:`nccl_said`."""
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
        "NCCL_DEBUG_FILE": str(folder / "nccl-%p.log"),
    }


def nccl_said(folder: Path) -> str:
    return "".join(file.read_text(errors="replace") for file in sorted(folder.glob("nccl-*.log")))


def _trial(way: str, environment: Mapping[str, str]) -> str:
    """SUM or REPLAYED and the time of an all-reduce; else what went wrong."""
    with TemporaryDirectory(prefix="one-gpu-") as name:
        folder, port = Path(name), free_port()
        logs = [folder / f"rank{rank}.txt" for rank in range(RANKS)]
        started = []
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", "tests.support.one_gpu", str(rank), str(port)]
            whole = {**os.environ, **environment, **variables(way, rank), **nccl_log(folder)}
            with log.open("wb") as output:
                files = {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT}
                # A group of its own, as the servers have: whoever ends those ends this as well.
                started.append(subprocess.Popen(command, cwd=REPOSITORY, env=whole, start_new_session=True, **files))

        def say(what: str) -> list[str]:
            lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
            return [line for line in lines if line.startswith(what)]

        end = time.monotonic() + TRIAL_SECONDS
        try:
            while len(say(REPLAYED)) < RANKS and all(p.poll() is None for p in started) and time.monotonic() < end:
                time.sleep(0.1)
            codes = [process.poll() for process in started]
        finally:
            for process in started:
                process.kill()
                process.communicate()
        if len(say(REPLAYED)) == RANKS:
            return say(REPLAYED)[0]
        warned = re.findall(r"NCCL WARN .*", nccl_said(folder))
        words = [*dict.fromkeys([*warned, *say("Error"), *(log.read_text(errors="replace")[-300:] for log in logs)])]
        fault = f"exit statuses {codes} (None: still running), {' | '.join(words[:8])}".replace("\n", " ")
        return f"{SUM}; then {fault}" if len(say(SUM)) == RANKS else fault


def _rank(rank: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    limit = timedelta(seconds=TRIAL_SECONDS)
    dist.init_process_group("nccl", f"tcp://127.0.0.1:{port}", world_size=RANKS, rank=rank, timeout=limit)
    count = torch.arange(1 << 16, device="cuda", dtype=torch.float32)
    given, expected = count * (rank + 1), count * sum(range(1, RANKS + 1))
    total = given.clone()
    dist.all_reduce(total)
    if not torch.equal(total, expected):
        sys.exit("Error: the sum is wrong")
    print(SUM, flush=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        total.copy_(given)
        dist.all_reduce(total)
    begun = time.perf_counter()
    for _ in range(_TURNS):
        graph.replay()
        given *= 2
    torch.cuda.synchronize()
    took = (time.perf_counter() - begun) / _TURNS
    if not torch.equal(total, expected * 2.0 ** (_TURNS - 1)):
        sys.exit("Error: the sum from a graph is wrong")
    print(f"{REPLAYED}, {took * 1000:.1f} ms each", flush=True)
    sys.stdin.read()  # the other rank may still need this one; who started both ends both


if __name__ == "__main__":
    _rank(int(sys.argv[1]), int(sys.argv[2]))
