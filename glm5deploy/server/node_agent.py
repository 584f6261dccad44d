"""The far end of a machine's part in a cluster: run there by ssh, so that nothing is left behind when ssh ends.

``python -m glm5deploy.server.node_agent GRACE COMMAND…`` makes a session of its own and hands over to the guard, whose
standard input is the ssh connection: when that closes, for whatever reason, COMMAND and its workers are stopped. Output
goes where ssh carries it. Standard library only.
"""

from __future__ import annotations

import os
import sys

from glm5deploy.server.guard import main as guard


def main(arguments: list[str]) -> int:
    """Run the guard as the leader of a session, as a child where this process cannot become one."""
    if os.getsid(0) == os.getpid():
        return guard(arguments)
    child = os.fork()
    if child == 0:
        os.setsid()
        os._exit(guard(arguments))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
