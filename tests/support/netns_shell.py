"""Network namespaces as machines: made and removed by root, and a stand-in for ssh that runs a line in one of them.

As a script it takes what ssh takes: ``netns_shell.py NAME COMMAND-LINE``; NAME is a namespace or its address.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

#: read before a test's environment is cleaned
_REQUIRED = bool(os.environ.get("GLM5DEPLOY_REQUIRE_NAMESPACES"))


@dataclass(frozen=True)
class Machine:
    namespace: str
    address: str
    interface: str

    def run(self, *command: str) -> list[str]:
        """``command`` as it runs on this machine."""
        return ["ip", "netns", "exec", self.namespace, *command]


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two namespaces with a cable between them and no other way out.

    Where that is impossible the test is skipped, with the reason; with ``GLM5DEPLOY_REQUIRE_NAMESPACES`` set, as in
    CI, it fails instead.
    """
    why = "" if os.geteuid() == 0 else "making network namespaces needs root"
    why = why or ("" if shutil.which("ip") else "ip is not installed (apt-get install iproute2)")
    if why:
        import pytest

        (pytest.fail if _REQUIRED else pytest.skip)(why)
    tag = f"g5d{os.getpid() % 100_000}"
    machines = tuple(
        Machine(f"{tag}{side}", f"10.219.{os.getpid() % 250}.{number}", f"cable{number}")
        for number, side in ((1, "a"), (2, "b"))
    )
    first, second = machines
    try:
        for machine in machines:
            _ip("netns", "add", machine.namespace)
        _ip(
            *("link", "add", first.interface, "netns", first.namespace, "type", "veth"),
            *("peer", "name", second.interface, "netns", second.namespace),
        )
        for machine in machines:
            inside = ("-n", machine.namespace)
            _ip(*inside, "addr", "add", f"{machine.address}/24", "dev", machine.interface)
            _ip(*inside, "link", "set", machine.interface, "up")
            _ip(*inside, "link", "set", "lo", "up")
        yield first, second
    finally:
        for machine in machines:
            subprocess.run(["ip", "netns", "del", machine.namespace], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def main() -> None:
    name, line = sys.argv[1], " ".join(sys.argv[2:])
    known = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split("\n")
    names = [entry.split()[0] for entry in known if entry]
    for candidate in names:
        shown = subprocess.run(
            ["ip", "-n", candidate, "-4", "-br", "addr"], capture_output=True, text=True, check=True
        ).stdout
        if candidate == name or f" {name}/" in shown:
            os.execvp("ip", ["ip", "netns", "exec", candidate, "sh", "-c", line])
    sys.exit(f"netns_shell: no machine called {name}")


if __name__ == "__main__":
    main()
