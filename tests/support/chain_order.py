"""Whether a kernel keeps the order that chained launches need (`glm5deploy/kernels/chain.py`), from its PTX."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

# Arguments that nobody writes while a model runs: they may be read before the launch ahead has ended.
WEIGHTS = frozenset({"weight", "q_weight", "kv_weight"})
# Also a call of a function that is not inlined: it may read and write anything.
_ACCESS = re.compile(r"\b(ld|st|atom|red)\b\S*\.global|\bcp\.(async|reduce)\S*\.global|\bcp\.async\.bulk|\bcall\b")
_LOAD = re.compile(r"\bld\b\S*\.global.*\[\s*(%\w+)")
_JUMP = re.compile(r"(?:@!?%\w+ )?(bra|ret|exit)\b(?:\.uni)?(?:\s+(\$\w+))?")
_DEFINED = re.compile(r"(?:@!?%\w+ )?\S+\s+(\{[^}]*\}|%\w+(?:\|%\w+)?)\s*,\s*(.*)")
WAIT, NEXT = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def out_of_order(ptx: str, signature: Mapping[str, str], weights: Iterable[str] = WEIGHTS) -> list[str]:
    """Instructions that may run before the wait: the next launch's beginning, calls, reads and writes of memory.

    But for reads of ``weights``. ``signature``: types of the kernel's arguments, in order, as Triton takes them.
    """
    lines = [line.strip() for line in ptx[ptx.index(".entry") :].splitlines()]
    arguments = [(name, kind) for name, kind in signature.items() if kind != "constexpr"]
    pointers = {i: name for i, (name, kind) in enumerate(arguments) if kind.startswith("*")}
    blocks, early = _blocks(lines), []
    for label, waited in _waited(blocks).items():
        for line in blocks[label]:
            waited = waited or WAIT in line
            if waited or not (NEXT in line or _ACCESS.search(line)):
                continue
            load = _LOAD.search(line)
            read = {pointers[i] for i in _parameters(load[1], lines) if i in pointers} if load else set()
            if not read or not read <= set(weights):
                early.append(line)
    return early


def _blocks(lines: list[str]) -> dict[str, list[str]]:
    """Basic blocks by label, in order; a jump ends one."""
    label, blocks = "entry", dict[str, list[str]]({"entry": []})
    for line in lines:
        if re.fullmatch(r"\$\w+:(\s*//.*)?", line):
            label = line.split(":")[0]
            blocks[label] = []
            continue
        blocks[label].append(line)
        if _JUMP.match(line):
            label += "+"
            blocks[label] = []
    return blocks


def _waited(blocks: dict[str, list[str]]) -> dict[str, bool]:
    """Of each block that can be reached: whether every way to its beginning has come past the wait."""
    order, state, todo = list(blocks), {"entry": False}, ["entry"]
    while todo:
        label = todo.pop()
        after = state[label] or any(WAIT in line for line in blocks[label])
        for target in _targets(label, blocks[label], order):
            if target not in state or (state[target] and not after):
                state[target] = after
                todo.append(target)
    return state


def _targets(label: str, block: list[str], order: list[str]) -> Iterator[str]:
    jump = _JUMP.match(block[-1]) if block else None
    if jump and jump[2]:
        yield jump[2]
    following = order.index(label) + 1
    if following < len(order) and not (jump and not block[-1].startswith("@")):
        yield order[following]


def _parameters(register: str, lines: list[str]) -> set[int]:
    """Indices of the parameters that a register is computed from."""
    sources: dict[str, list[str]] = {}
    for line in lines:
        defined = _DEFINED.match(line)
        for name in re.findall(r"%\w+", defined[1]) if defined else ():
            sources.setdefault(name, []).append(defined[2] if defined else "")
    todo, seen, found = [register], {register}, set[int]()
    while todo:
        for source in sources.get(todo.pop(), ()):
            found |= {int(index) for index in re.findall(r"_param_(\d+)", source)}
            new = set(re.findall(r"%\w+", source)) - seen
            seen |= new
            todo += new
    return found
