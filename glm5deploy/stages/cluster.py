"""serve over several machines: the same start as on one, with the other machines' parts beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from glm5deploy.checks import Check
from glm5deploy.config import Config
from glm5deploy.errors import DeployError, UsageError
from glm5deploy.server.command import ServeCommand
from glm5deploy.server.node_report import NodeReport, collect, differences, parse_report
from glm5deploy.server.nodes import Cluster, Node, crosses_machines, is_here, make_cluster, shell_line
from glm5deploy.server.remote import SSH, RemoteShell, Workers
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
    here = parse_report(json.dumps(collect(settings.model_folder)))
    reports = tuple(_asked(shell, node, settings.model_folder) for node in cluster.nodes[1:]) if shell else ()
    nodes = [_with_interface(node, report) for node, report in zip(cluster.nodes, (here, *reports), strict=False)]
    cluster = replace(cluster, nodes=(*nodes, *cluster.nodes[len(nodes) :]))
    logs = plan.places.log.parent
    head, *others = [(node, cluster.command(node, plan.command)) for node in cluster.nodes]
    parts = tuple((node, command, logs / f"node{node.rank}.log") for node, command in others)
    return ClusterStart(cluster, head[1], parts, shell, here, reports)


def _asked(shell: RemoteShell, node: Node, folder: Path) -> NodeReport | DeployError:
    try:
        return shell.report(node, folder)
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
    return checks
