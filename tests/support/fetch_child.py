"""A fetch in a process of its own: ``python -m tests.support.fetch_child ENDPOINT REPO QUANT DEST [OPTIONS-JSON]``.

Prints one JSON object: the shards, the peak resident set in bytes before and after. A test may kill it at any moment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from glm5deploy.hub.client import Hub
from glm5deploy.hub.download import Download
from glm5deploy.hub.faults import Policy
from glm5deploy.hub.plan import make_plan, write_plan


def peak_bytes() -> int:
    """VmHWM of this process: unlike ``ru_maxrss`` it does not start at the peak of the process that forked it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    endpoint, repo, quant, destination, options = (*sys.argv[1:], "{}")[:5]
    policy = Policy(**{"transport": "https", "backoff": 0.01, **json.loads(options)})
    hub, folder = Hub(endpoint=endpoint), Path(destination)
    before = peak_bytes()
    plan = make_plan(hub, repo, quant, folder).plan
    write_plan(plan, folder)
    paths = Download(hub, plan, folder, policy).run()
    print(json.dumps({"paths": [str(path) for path in paths], "before": before, "peak": peak_bytes()}))


if __name__ == "__main__":
    main()
