"""Warm-up on a GPU, then steps of any size: ``python -m tests.kernels.storm [--packed] [--seconds N]``.

Prints JSON: ``steps``, the ``rows`` measured that the process found, how many variants warm-up ``prepared``, and those
that were prepared ``late``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

import torch

from glm5deploy.kernels import tuning
from glm5deploy.kernels.compile_counter import Prepared, serving_begins
from glm5deploy.kernels.prepare import prepare
from glm5deploy.kernels.warmup import Serving, launches
from tests.kernels.launch_keys import BLOCK, FUSED, LONG, step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--seconds", type=float, default=10.0)
    chosen = parser.parse_args()
    device = torch.device("cuda", 0)
    serving = Serving(8, 32, 2048, 2048, LONG, BLOCK, packed=chosen.packed, max_next_n=3, **FUSED)
    found = prepare(launches(serving, device), device)
    late: list[Prepared] = []
    serving_begins(late.append)
    torch.set_default_device(device)
    random.seed(7)
    steps, end = 0, time.monotonic() + chosen.seconds
    while time.monotonic() < end:
        tokens = random.choice((random.randint(1, 64), random.randint(1, serving.max_tokens)))
        width = random.choice((random.randint(serving.topk + 1, 9000), random.randint(serving.topk + 1, LONG)))
        step(serving, tokens, width, random.randint(1, serving.max_next_n))
        steps += 1
    torch.cuda.synchronize()
    rows = len(tuning.measured(tuning.gpu(device)).rows)
    words = [f"{variant.kernel} {variant.variant}" for variant in late]
    json.dump({"steps": steps, "rows": rows, "prepared": len(found), "late": words}, sys.stdout)


if __name__ == "__main__":
    main()
