"""The process between us and vLLM: whatever ends, nothing of the server is left over.

Run as ``python -m glm5deploy.server.guard GRACE COMMAND…`` in a session of its own, with a pipe as its standard input
that its parent keeps open. It starts COMMAND and ends with COMMAND's exit code. When the pipe closes (the parent is
gone, even by SIGKILL) or on SIGTERM or SIGINT it sends SIGTERM to COMMAND, and after GRACE seconds SIGKILL to every
process of the session. Workers that outlive COMMAND are killed as well. Standard library only, so it is ready at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_STRAGGLERS_GRACE = 2.0  # seconds for workers to end by themselves once the server's main process is gone
_KILL_LIMIT = 5.0


def session_members(session: int) -> list[int]:
    """Ids of the living processes of a session (zombies do not count)."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # After the last ")": state, parent, process group, session (proc(5)); the name may contain anything.
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # ended while we looked
        if int(fields[3]) == session and fields[0] not in "ZX":
            members.append(int(entry.name))
    return members


def kill_members(session: int, spare: int) -> None:
    """SIGKILL every process of ``session`` but ``spare``, until none is left (they may be forking meanwhile).

    A process in uninterruptible sleep (a GPU driver that hangs) is given up after _KILL_LIMIT seconds.
    """
    end = time.monotonic() + _KILL_LIMIT
    while (victims := [pid for pid in session_members(session) if pid != spare]) and time.monotonic() < end:
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def main(arguments: list[str]) -> int:
    grace, command = float(arguments[0]), arguments[1:]
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    session = os.getsid(0)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    deadline: float | None = None
    while child.poll() is None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if left == 0.0:
            kill_members(session, os.getpid())
            child.wait()
            break
        watched = [wake_read] if deadline is not None else [wake_read, sys.stdin.fileno()]
        readable = select.select(watched, [], [], left)[0]
        stop = sys.stdin.fileno() in readable and not os.read(sys.stdin.fileno(), 64)
        if wake_read in readable:
            stop = stop or any(number in (signal.SIGTERM, signal.SIGINT) for number in os.read(wake_read, 64))
        if stop and deadline is None:
            child.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + grace
    end = time.monotonic() + _STRAGGLERS_GRACE
    while len(session_members(session)) > 1 and time.monotonic() < end:
        time.sleep(0.05)
    kill_members(session, os.getpid())
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
