"""Run the command line and SIGKILL this very process when a given stage event is emitted.

    python -m tests.support.kill_at_event NUMBER LOG -- ARGUMENTS OF glm5deploy

Progress reports do not count: they carry nothing durable. Every event seen is appended to LOG, a line each.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from glm5deploy.cli.app import main
from glm5deploy.cli.output import Output
from glm5deploy.pipeline.events import Event


def arm(number: int, log: Path) -> None:
    seen = 0
    show = Output.event

    def event(self: Output, event: Event) -> None:
        nonlocal seen
        if event.kind != "progress":
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{event.stage} {event.kind} {event.message}\n")
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
        show(self, event)

    Output.event = event  # type: ignore[method-assign]


if __name__ == "__main__":
    arm(int(sys.argv[1]), Path(sys.argv[2]))
    sys.argv = ["glm5deploy", *sys.argv[4:]]
    main()
