"""What each machine of a cluster has to run, and what must be the same on all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from glm5deploy.errors import DeployError, UsageError
from glm5deploy.server.command import ServeCommand, build_command
from glm5deploy.server.node_report import NodeReport, collect, differences, parse_report
from glm5deploy.server.nodes import Cluster, Node, crosses_machines, is_here, look_up, make_cluster, shell_line
from glm5deploy.server.process import ServerExited
from glm5deploy.server.remote import RemoteShell, Workers
from tests.support.serving import facts, settings, write_model_folder

PATTERN = "FFFSSSFSSS"


def cluster() -> Cluster:
    return Cluster((Node(0, "ops@a", "10.0.0.1"), Node(1, "b", "10.0.0.2")), 8)


def base() -> ServeCommand:
    model = facts(index_topk_pattern=PATTERN)
    return build_command(settings(device="cuda", tp=8, pp=2), model, launcher=("vllm", "serve"))


def test_the_first_machine_has_the_api_and_the_second_joins_headless() -> None:
    first, second = (cluster().command(replace(node, interface="ib0"), base()) for node in cluster().nodes)
    shared = ("--nnodes", "2", "--master-addr", "10.0.0.1", "--master-port", "29501")
    shared += ("--distributed-executor-backend", "mp")
    common = base().argv
    assert first.argv == (*common, "--nnodes", "2", "--node-rank", "0", *shared[2:])
    assert second.argv == (*common, "--nnodes", "2", "--node-rank", "1", *shared[2:], "--headless")
    for command, address in ((first, "10.0.0.1"), (second, "10.0.0.2")):
        assert command.env["VLLM_HOST_IP"] == address
        assert command.env["GLOO_SOCKET_IFNAME"] == command.env["NCCL_SOCKET_IFNAME"] == "ib0"
        assert command.env["VLLM_PP_LAYER_PARTITION"] == "6,4"
        flags = {word for word in command.argv if word.startswith("--")}
        assert set(command.reasons) == flags | set(command.env)
    assert "GLOO_SOCKET_IFNAME" not in cluster().command(cluster().nodes[1], base()).env


def test_a_wheel_without_vllm_serve_joins_through_our_module() -> None:
    model = facts(hidden_size=256)
    command = build_command(settings(), model, launcher=("python", "-m", "vllm.server", "--model"))
    first, second = (cluster().command(node, command) for node in cluster().nodes)
    assert first.argv[:5] == ("python", "-m", "vllm.server", "--model", "/models/glm")
    assert second.argv[:4] == ("python", "-m", "glm5deploy.vllm_plugin.headless", "/models/glm")
    assert second.vllm_arguments[0] == "/models/glm"


def test_a_line_for_another_machines_shell_survives_it(tmp_path: Path) -> None:
    echo = ("printf", "%s|", "a b", "$HOME", '{"x": 1}')
    line = shell_line(ServeCommand((), echo, {"KEY": "c 'd'"}, {}))
    done = subprocess.run(["sh", "-c", line + "; env"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith('a b|$HOME|{"x": 1}|')


@pytest.mark.parametrize(
    ("hosts", "tp", "pp", "words"),
    [
        (["10.0.0.1"], 8, 2, "at least two machines"),
        (["10.0.0.1", "10.0.0.2", "10.0.0.3"], 8, 2, "16 ranks, which 3 machines cannot share"),
        (["10.0.0.1", "-oProxyCommand=x"], 8, 2, "no host name"),
        (["10.0.0.1", "a;b"], 8, 2, "no host name"),
        (["10.0.0.1", "10.0.0.1"], 8, 2, "same address"),
        (["10.0.0.1", ""], 8, 2, "no host name"),
    ],
)
def test_impossible_clusters_are_refused(hosts: list[str], tp: int, pp: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_cluster(hosts, tp, pp)


def test_a_loopback_name_is_refused() -> None:
    with pytest.raises(DeployError, match="which only this machine can reach"):
        look_up("localhost")
    with pytest.raises(DeployError, match="has no address"):
        look_up("no-such-host.invalid")


def test_names_and_ranks() -> None:
    made = make_cluster(["ops@10.0.0.1", "10.0.0.2"], 8, 2, master_port=30000)
    assert [(node.rank, node.login, node.address) for node in made.nodes] == [
        (0, "ops@10.0.0.1", "10.0.0.1"),
        (1, "10.0.0.2", "10.0.0.2"),
    ]
    assert (made.local_ranks, made.master_port) == (8, 30000)
    assert not crosses_machines(made, 8)
    assert crosses_machines(make_cluster(["10.0.0.1", "10.0.0.2"], 16, 1), 16)
    with pytest.raises(UsageError, match="a port lies between"):
        make_cluster(["10.0.0.1", "10.0.0.2"], 8, 2, master_port=80)
    with pytest.raises(UsageError, match="no name of one"):
        make_cluster(["10.0.0.1", "10.0.0.2"], 8, 2, interface="ib0; true")


def test_only_own_addresses_are_here() -> None:
    assert is_here("127.0.0.1")
    assert not is_here("192.0.2.1")


TABLE = Path("/no/such/kernel-table.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model", weights=tmp_path / "w.gguf")


def test_a_machine_equals_itself(folder: Path) -> None:
    here = parse_report(json.dumps(collect(folder, TABLE)))
    assert here.weights == {str(folder.parent / "w.gguf"): 100}
    assert set(here.model) == {path.name for path in folder.iterdir()}
    assert here.versions["glm5deploy"]
    assert here.devices["127.0.0.1"] == "lo"
    assert differences(here, here, 1, gpus=False) == []


def test_every_difference_is_named(folder: Path) -> None:
    here = parse_report(json.dumps(collect(folder, TABLE)))
    weights = str(folder.parent / "w.gguf")
    there = NodeReport(
        "3.12.1", {**here.versions, "torch": "1.0"}, {**here.model, "config.json": "0"}, {weights: 99}, 4, {}, False
    )
    found = differences(here, there, 8, gpus=True)
    assert len(found) == 5
    for words in ("torch is 1.0, here it is", "Python is 3.12.1", "differs in config.json", "has 99 bytes, not 100"):
        assert any(words in difference for difference in found), words
    assert "it has 4 GPUs, 8 ranks are to run there" in found
    bare = NodeReport(here.python, here.versions, {}, {}, 8, {}, False)
    assert differences(here, bare, 8, gpus=True) == ["the model folder is not there", f"{weights} is missing"]


@pytest.mark.parametrize("text", ["", "hello", "[1]", "{}", '{"python": 1, "versions": 3}'])
def test_other_answers_are_no_reports(text: str) -> None:
    with pytest.raises(ValueError, match=r"report|Expecting"):
        parse_report(text)


def shell_here(tmp_path: Path) -> RemoteShell:
    script = tmp_path / "ssh"
    script.write_text('#!/bin/sh\nlogin=$1; shift\nexec sh -c "$*"\n')
    script.chmod(0o755)
    return RemoteShell((str(script),))


def test_a_machine_is_asked_through_the_shell(folder: Path, tmp_path: Path) -> None:
    report = shell_here(tmp_path).report(Node(1, "b", "10.0.0.2"), folder, TABLE)
    assert report == parse_report(json.dumps(collect(folder, TABLE)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("false",), r"b cannot be asked \(status 1\)"),
        (("echo",), "b answered something unexpected"),
        (("/no/such/ssh",), "cannot run /no/such/ssh"),
    ],
)
def test_a_machine_that_cannot_be_asked(words: tuple[str, ...], message: str, folder: Path) -> None:
    with pytest.raises(DeployError, match=message) as caught:
        RemoteShell(words).report(Node(1, "b", "10.0.0.2"), folder, TABLE)
    assert "glm5deploy.server.node_report" in str(caught.value.hint)


SLEEPER = "import subprocess, sys, time; subprocess.Popen(['sleep', '1000']); print('up', flush=True); time.sleep(1000)"


def started(tmp_path: Path, code: str) -> Workers:
    command = ServeCommand((sys.executable,), (sys.executable, "-c", code), {"MARK": str(tmp_path)}, {})
    return Workers(shell_here(tmp_path), [(Node(1, "b", "10.0.0.2"), command, tmp_path / "b.log")], grace=2)


def until(condition: object, limit: float = 20.0) -> None:
    end = time.monotonic() + limit
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


def marked(tmp_path: Path) -> list[psutil.Process]:
    """Living processes that were started with this test's variable."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == str(tmp_path) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_parts_are_stopped_with_their_children(tmp_path: Path) -> None:
    with started(tmp_path, SLEEPER) as workers:
        until(lambda: "up" in (tmp_path / "b.log").read_text())
        assert len(marked(tmp_path)) >= 3
        workers.check()
    until(lambda: not marked(tmp_path))


def test_nothing_is_left_when_this_side_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tests.server.test_nodes import started, SLEEPER\n"
        "with started(Path(sys.argv[1]), SLEEPER): time.sleep(1000)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[2])
    until(lambda: (tmp_path / "b.log").exists() and "up" in (tmp_path / "b.log").read_text())
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    until(lambda: not marked(tmp_path))


def test_a_part_that_ends_by_itself_is_reported_with_its_log(tmp_path: Path) -> None:
    ended: list[bool] = []
    command = ServeCommand((), (sys.executable, "-c", "raise RuntimeError('no NVLink')"), {}, {})
    parts = [(Node(1, "b", "10.0.0.2"), command, tmp_path / "b.log")]
    with Workers(shell_here(tmp_path), parts, grace=2, on_end=lambda: ended.append(True)) as workers:
        until(lambda: ended)
        with pytest.raises(ServerExited, match=r"(?s)the part on b ended with exit status 1.*no NVLink"):
            workers.check()
