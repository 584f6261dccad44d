"""One server over several machines, by vLLM's own multi-node mode: what each of them has to run.

Every machine runs the same command with its own rank; the first one has the API, the others run headless and join the
first one's process group. Ranks are dealt out in order, so a stage's tensor-parallel ranks stay on one machine when
``tp`` divides the ranks of a machine. (vLLM 0.32 and 0.33: ``--nnodes``, ``--node-rank``, ``--master-addr``,
``--master-port``, ``--headless``; ``VLLM_HOST_IP`` is the address that a machine's message queues use.)
"""

from __future__ import annotations

import ipaddress
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from glm5deploy.errors import DeployError, UsageError
from glm5deploy.server.command import ServeCommand

MASTER_PORT = 29501
_HEADLESS_MODULE = "glm5deploy.vllm_plugin.headless"  # where `vllm serve` itself does not start, as with the CPU wheel
_HOST = re.compile(r"(?:(?P<user>[a-z_][a-z0-9_-]{0,31})@)?(?P<host>[A-Za-z0-9](?:[A-Za-z0-9.:-]{0,252}[A-Za-z0-9])?)")


@dataclass(frozen=True, slots=True)
class Node:
    """``login`` is what ssh gets (``user@host``), ``address`` the IP address at which the other machines reach it,
    ``interface`` its network device with that address, "" where nobody knows it: then the system chooses."""

    rank: int
    login: str
    address: str
    interface: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines in rank order; ``local_ranks`` is how many ranks each of them runs."""

    nodes: tuple[Node, ...]
    local_ranks: int
    master_port: int = MASTER_PORT

    def command(self, node: Node, base: ServeCommand) -> ServeCommand:
        """``base`` as ``node`` has to run it."""
        flags = [
            *("--nnodes", str(len(self.nodes))),
            *("--node-rank", str(node.rank)),
            *("--master-addr", self.nodes[0].address),
            *("--master-port", str(self.master_port)),
            *("--distributed-executor-backend", "mp"),
        ]
        reasons = {
            "--nnodes": "machines that share the model",
            "--node-rank": "which of them this is",
            "--master-addr": "the first machine, where the others report",
            "--master-port": "its port for that",
            "--distributed-executor-backend": "vLLM's own processes; no Ray is needed",
            "VLLM_HOST_IP": "the address at which the other machines reach this one",
        }
        start = base.argv
        if node.rank:
            flags.append("--headless")
            reasons["--headless"] = "only the first machine has the API"
            launcher = base.launcher if base.launcher[-1] == "serve" else (base.launcher[0], "-m", _HEADLESS_MODULE)
            start = (*launcher, *base.vllm_arguments)
            base = replace(base, launcher=launcher)
        env = {**base.env, "VLLM_HOST_IP": node.address}
        if node.interface:
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                env[name] = node.interface
                reasons[name] = "the network device between the machines"
        return replace(base, argv=(*start, *flags), env=env, reasons={**base.reasons, **reasons})


def make_cluster(
    hosts: Sequence[str], tp: int, pp: int, *, master_port: int = MASTER_PORT, interface: str = ""
) -> Cluster:
    """Check names and sizes, and look the addresses up. Raises UsageError or DeployError."""
    logins = [_checked(host) for host in hosts]
    if len(logins) < 2:
        raise UsageError("--nodes needs at least two machines", hint="--nodes HOST1,HOST2; leave it out for one")
    world = tp * pp
    if world % len(logins):
        raise UsageError(
            f"TP {tp} × PP {pp} is {world} ranks, which {len(logins)} machines cannot share evenly",
            hint=f"for example --tp {tp} --pp {len(logins)}",
        )
    if not 1024 <= master_port <= 65535:
        raise UsageError(f"master port {master_port}: a port lies between 1024 and 65535")
    if interface and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@:-]{0,30}", interface):
        raise UsageError(f"network device {interface!r} is no name of one")
    nodes = tuple(Node(rank, login, look_up(login.rpartition("@")[2]), interface) for rank, login in enumerate(logins))
    addresses = [node.address for node in nodes]
    if len(set(addresses)) < len(addresses):
        raise UsageError(f"two of the machines have the same address: {', '.join(addresses)}")
    return Cluster(nodes, world // len(nodes), master_port)


def crosses_machines(cluster: Cluster, tp: int) -> bool:
    """Whether tensor-parallel ranks talk over the network in every layer: slow on anything but InfiniBand."""
    return cluster.local_ranks % tp != 0


def look_up(host: str) -> str:
    """The address of ``host``; loopback addresses are refused, for no other machine could use them."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise DeployError(
            f"{host} has no address: {error.strerror}",
            hint="name the machines by IP address, or add them to /etc/hosts",
        ) from None
    address = str(found[0][4][0])
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise DeployError(
            f"{host} stands for {address} here, which only this machine can reach",
            hint="name this machine by its address in the network between the machines",
        )
    return address


def is_here(address: str) -> bool:
    """Whether this machine has that address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def shell_line(command: ServeCommand, environment: Mapping[str, str] | None = None) -> str:
    """A command as one line for a shell of another machine, variables first."""
    variables = {**command.env, **(environment or {})}
    return shlex.join(["env", *(f"{key}={value}" for key, value in variables.items()), *command.argv])


def _checked(host: str) -> str:
    """A name goes to ssh as an argument: nothing that it or a shell could take for something else."""
    if not _HOST.fullmatch(host):
        raise UsageError(f"--nodes: {host!r} is no host name or address", hint="--nodes HOST1,HOST2 or user@HOST")
    return host
