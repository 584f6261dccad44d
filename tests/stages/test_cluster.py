"""serve over two machines: what is refused, what is shown, and (marked ``engine``) what two namespaces serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glm5deploy.errors import UsageError
from glm5deploy.server.node_report import collect, parse_report
from glm5deploy.server.nodes import Node
from glm5deploy.server.variables import TABLE_VARIABLE
from glm5deploy.stages.cluster import plan_cluster, table_checks, table_of, with_own_table
from glm5deploy.stages.serve import model_folder
from glm5deploy.stages.serve_plan import make_plan
from tests.stages.serving import serve_context
from tests.support import netns_shell
from tests.support.data import REPOSITORY
from tests.support.goldens import prompts, references
from tests.support.netns_shell import Machine, two_machines

SHELL = (sys.executable, netns_shell.__file__)


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as made:
        yield made


def planned(tmp_path: Path, **serve: Any) -> tuple[Any, Any]:
    context = serve_context(tmp_path, {f"serve.{key}": value for key, value in serve.items()})
    plan = make_plan(tmp_path, model_folder(context), context.config, context.outputs["install"], {})
    return plan, context.config


def test_one_machine_is_no_cluster(tmp_path: Path) -> None:
    assert plan_cluster(*planned(tmp_path)) is None


def test_the_first_machine_must_be_this_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the first machine of --nodes is 192\.0\.2\.1"):
        plan_cluster(*planned(tmp_path, nodes=("192.0.2.1", "192.0.2.2"), pp=2))


@pytest.mark.parametrize("there", [True, False], ids=["measured there", "not there"])
@pytest.mark.parametrize("here", [True, False], ids=["measured here", "not here"])
def test_each_machine_uses_its_own_launch_parameters(here: bool, there: bool, tmp_path: Path) -> None:
    plan, _ = planned(tmp_path)
    table = tmp_path / ".glm5deploy" / "kernel-table.json"
    if here:
        env = {**plan.command.env, TABLE_VARIABLE: str(table)}
        plan = replace(plan, command=replace(plan.command, env=env))
    plan = replace(plan, settings=replace(plan.settings, device="cuda", kernel_table=table if here else None))
    if there:
        table.touch()
    report = parse_report(json.dumps(collect(tmp_path / "model", table_of(plan))))
    assert with_own_table(plan, report).env.get(TABLE_VARIABLE) == (str(table) if there else None)
    checks = [(check.level, check.found) for check in table_checks(plan, Node(1, "b", "192.0.2.2"), report)]
    if there:
        assert checks == [("ok", f"its own {table}; each rank's log says whether it fits")]
    elif here:
        assert checks == [("warn", f"there is no {table} on that machine: its ranks take the built-in parameters")]
    else:
        assert checks == []


def on_first(machines: tuple[Machine, Machine], code: str, *args: str) -> str:
    """Run Python on the first machine; returns its stdout."""
    command = machines[0].run(sys.executable, "-c", code, *args)
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


CHECKS = """
import json, sys
from pathlib import Path
from tests.stages.test_cluster import planned
from glm5deploy.stages.cluster import cluster_checks, plan_cluster
plan, config = planned(Path(sys.argv[1]), nodes=tuple(sys.argv[2].split(",")), pp=2, **json.loads(sys.argv[3]))
start = plan_cluster(plan, config)
if len(sys.argv) > 4:
    Path(sys.argv[4]).unlink()
checks = cluster_checks(start, plan)
print(json.dumps({"words": start.words(), "checks": [[c.level, c.found, c.remedy] for c in checks]}))
"""


def test_the_second_machine_is_asked_and_told_what_to_run(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    hosts = ",".join(machine.address for machine in machines)
    told = json.loads(on_first(machines, CHECKS, str(tmp_path), hosts, json.dumps({"remote_shell": SHELL})))
    assert told["checks"] == [["ok", "same versions, model folder and weight files", ""]]
    first, second = told["words"]
    assert "--node-rank 0" in first["runs"]
    assert "--headless" not in first["runs"]
    assert second["machine"] == machines[1].address
    assert f"--node-rank 1 --master-addr {machines[0].address} " in second["runs"]
    assert second["runs"].endswith(" --headless")
    assert f"VLLM_HOST_IP={machines[1].address}" in second["runs"]
    for machine, words in zip(machines, told["words"], strict=True):
        assert f"GLOO_SOCKET_IFNAME={machine.interface} " in words["runs"]


def test_a_machine_that_does_not_answer_fails_its_check(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    hosts = f"{machines[0].address},192.0.2.9"
    told = json.loads(on_first(machines, CHECKS, str(tmp_path), hosts, json.dumps({"remote_shell": SHELL})))
    ((level, found, remedy),) = told["checks"]
    assert level == "fail"
    assert "no machine called 192.0.2.9" in found
    assert "--remote-shell none" in remedy


def test_by_hand_nobody_is_asked(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    hosts = ",".join(machine.address for machine in machines)
    told = json.loads(on_first(machines, CHECKS, str(tmp_path), hosts, json.dumps({"remote_shell": ["none"]})))
    assert told["checks"] == []
    assert len(told["words"]) == 2


def serve_on_both(machines: tuple[Machine, Machine], workdir: Path, ids: list[int], **flags: Any) -> dict[str, Any]:
    """The stage on the first machine, with the CPU engine; its result."""
    settings = {
        "serve.nodes": [machine.address for machine in machines],
        "serve.remote_shell": SHELL,
        "serve.dtype": "float32",
        "serve.context": 1024,
        **flags,
    }
    script = REPOSITORY / "tests" / "support" / "cluster_child.py"
    command = machines[0].run(sys.executable, str(script), str(workdir), json.dumps(settings), json.dumps(ids))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    logs = "".join(f"\n== {log}\n" + log.read_text()[-3000:] for log in sorted((workdir / "logs").glob("*.log")))
    assert done.stdout.strip(), done.stderr + logs
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.engine
@pytest.mark.slow
def test_two_machines_serve_one_model(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    """Each namespace loads half of the layers; greedy tokens are those of the reference."""
    reference = references("A")["p300"]
    result = serve_on_both(machines, tmp_path, prompts()["p300"].ids, **{"serve.pp": 2})
    assert result.get("ids") == reference.greedy[:8], result
    node = (tmp_path / "logs" / "node1.log").read_text()
    assert "headless" in node
