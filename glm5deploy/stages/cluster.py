"""serve over several machines: the same start as on one, with the other machines' parts beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from glm5deploy.checks import Check
from glm5deploy.config import Config
from glm5deploy.errors import DeployError, UsageError
from glm5deploy.server.command import ServeCommand
from glm5deploy.server.node_report import NodeReport, collect, differences, parse_report
from glm5deploy.server.nodes import Cluster, Node, crosses_machines, is_here, make_cluster, shell_line
from glm5deploy.server.remote import SSH, RemoteShell, Workers
from glm5deploy.server.variables import TABLE_REASON, TABLE_VARIABLE
from glm5deploy.stages.kernel_table import NAME
from glm5deploy.stages.serve_plan import ServePlan

BY_HAND = ("none",)


@dataclass(frozen=True, slots=True)
class ClusterStart:
    """``head`` replaces the command of a single machine; ``parts`` are the other machines' with the logs of their
    output here. Without ``shell`` people start those parts themselves."""

    cluster: Cluster
    head: ServeCommand
    parts: tuple[tuple[Node, ServeCommand, Path], ...]
    shell: RemoteShell | None
    here: NodeReport
    reports: tuple[NodeReport | DeployError, ...]
    """What the other machines say of themselves, or why they could not be asked; empty without ``shell``."""

    def words(self) -> list[dict[str, object]]:
        """What every machine runs, for people."""
        lines = [(self.cluster.nodes[0], self.head.shell())]
        lines += [(node, shell_line(command)) for node, command, _ in self.parts]
        return [{"machine": node.login, "runs": line} for node, line in lines]

    @contextmanager
    def running(self, grace: float) -> Iterator[Callable[[], None]]:
        """Start the other machines' parts, yield what raises when one has ended, and stop them."""
        if self.shell is None:
            yield lambda: None
            return
        with Workers(self.shell, self.parts, grace=grace) as workers:
            yield workers.check


def plan_cluster(plan: ServePlan, config: Config) -> ClusterStart | None:
    """The start over ``serve.nodes``, None where there are none. Raises UsageError when it cannot be meant."""
    serve, settings = config.serve, plan.settings
    if not serve.nodes:
        return None
    cluster = make_cluster(
        serve.nodes, settings.tp, settings.pp, master_port=serve.master_port, interface=serve.interface
    )
    first = cluster.nodes[0]
    if not is_here(first.address):
        raise UsageError(
            f"the first machine of --nodes is {first.login} ({first.address}), which is not this one",
            hint="run this command on the first machine, or name this one first",
        )
    shell = None if serve.remote_shell == BY_HAND else RemoteShell(serve.remote_shell or SSH)
    where = (settings.model_folder, table_of(plan))
    here = parse_report(json.dumps(collect(*where)))
    reports = tuple(_asked(shell, node, *where) for node in cluster.nodes[1:]) if shell else ()
    nodes = [_with_interface(node, report) for node, report in zip(cluster.nodes, (here, *reports), strict=False)]
    cluster = replace(cluster, nodes=(*nodes, *cluster.nodes[len(nodes) :]))
    logs = plan.places.log.parent
    head, *others = cluster.nodes
    parts = []
    for node, report in zip_longest(others, reports):
        command = with_own_table(plan, report) if isinstance(report, NodeReport) else plan.command
        parts.append((node, cluster.command(node, command), logs / f"node{node.rank}.log"))
    return ClusterStart(cluster, cluster.command(head, plan.command), tuple(parts), shell, here, reports)


def table_of(plan: ServePlan) -> Path:
    """Where install keeps measured launch parameters, under the same path on every machine."""
    return plan.memo.with_name(NAME)


def with_own_table(plan: ServePlan, report: NodeReport) -> ServeCommand:
    """The command for another machine: with the launch parameters that were measured there, or with none."""
    env = {name: value for name, value in plan.command.env.items() if name != TABLE_VARIABLE}
    reasons = dict(plan.command.reasons)
    if _measurable(plan) and report.kernel_table:
        env[TABLE_VARIABLE], reasons[TABLE_VARIABLE] = str(table_of(plan)), TABLE_REASON
    return replace(plan.command, env=env, reasons=reasons)


def _measurable(plan: ServePlan) -> bool:
    return plan.settings.device == "cuda" and plan.settings.attention == "triton"


def _asked(shell: RemoteShell, node: Node, folder: Path, table: Path) -> NodeReport | DeployError:
    try:
        return shell.report(node, folder, table)
    except DeployError as error:
        return error


def _with_interface(node: Node, report: NodeReport | DeployError) -> Node:
    """The device that has the node's address: without it Gloo and NCCL take the one that the host name stands for,
    which on many systems is loopback."""
    if node.interface or isinstance(report, DeployError):
        return node
    return replace(node, interface=report.devices.get(node.address, ""))


def cluster_checks(start: ClusterStart, plan: ServePlan) -> list[Check]:
    """Whether every other machine has the same versions, model folder and weight files, and enough GPUs."""
    settings = plan.settings
    checks = []
    if crosses_machines(start.cluster, settings.tp):
        checks.append(
            Check(
                "layout",
                "warn",
                f"the {settings.tp} ranks that share a layer are on several machines",
                f"--tp {start.cluster.local_ranks} --pp {len(start.cluster.nodes)} keeps them on one",
            )
        )
    for (node, _, _), there in zip(start.parts, start.reports, strict=False):
        if isinstance(there, DeployError):
            remedy = f"{there.hint}; or --remote-shell none, and start its part yourself"
            checks.append(Check(f"machine {node.login}", "fail", there.message, remedy))
            continue
        wrong = differences(start.here, there, start.cluster.local_ranks, gpus=settings.device == "cuda")
        found = "; ".join(wrong) or "same versions, model folder and weight files"
        remedy = "install the same versions, and run fetch and patch there with the same --workdir" if wrong else ""
        checks.append(Check(f"machine {node.login}", "fail" if wrong else "ok", found, remedy))
        checks += table_checks(plan, node, there)
    return checks


def table_checks(plan: ServePlan, node: Node, there: NodeReport) -> list[Check]:
    """Which launch parameters another machine takes; nothing where none were measured on either."""
    name, table = f"kernel table {node.login}", table_of(plan)
    if _measurable(plan) and there.kernel_table:
        return [Check(name, "ok", f"its own {table}; each rank's log says whether it fits")]
    if plan.settings.kernel_table is None:
        return []
    found = f"there is no {table} on that machine: its ranks take the built-in parameters"
    return [Check(name, "warn", found, "glm5deploy install --tune on that machine, with the same --workdir")]
