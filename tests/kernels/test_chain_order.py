"""Whatever breaks the order of chained launches is found in a kernel's PTX, and nothing else is."""

from __future__ import annotations

import json
import re

from tests.support.compiling import compiling

# By kernel: what the instructions begin with that may run before the wait.
EARLY = {
    "in_order": [],
    "never_waits": ["st.global"],
    "stores": ["st.global"],
    "counts": ["atom.global"],
    "lets_next_begin": ["griddepcontrol.launch_dependents"],
    "reads": ["ld.global"],
    "reads_either": ["ld.global"],
    "waits_in_one_branch": ["st.global"],
    "waits_in_a_loop": ["st.global"],
    "ends_early": ["st.global"],
    "calls": ["call.uni"],
}


def test_what_comes_before_the_wait_is_found() -> None:
    found = json.loads(compiling("-m", "tests.kernels.chained_kernels")[-1])
    names = re.compile(r"(?:@!?%p\d+ )?([a-z]+\.\w+)")
    assert {kernel: [names.match(line)[1] for line in lines] for kernel, lines in found.items()} == EARLY
