"""PTX of a kernel as a list of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Instruction:
    """``name`` in its parts, operands, and the predicate that decides who takes part ('' for everyone)."""

    guard: str
    unless: bool
    name: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def meeting(self) -> int:
        """Threads that come to it together: 0 for all of a program."""
        if self.name[0] in ("bar", "barrier") and self.name[1] != "warp":
            return 0
        return 32 if self.name[0] in ("bar", "barrier", "shfl", "redux", "ldmatrix", "stmatrix", "mma") else 1


@lru_cache(maxsize=4096)
def registers_of(operand: str) -> tuple[str, ...]:
    """Names inside braces, or the one without any."""
    return tuple(re.findall(r"[^{},\s]+", operand))


def parse(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a kernel's text, and where its labels are.

    Registers of a block in braces get names of their own: what another block of the same text left in them is not seen.
    """
    body = re.sub(r"//.*", "", text[text.index("\n{") :])
    labels: dict[str, int] = {}
    code: list[Instruction] = []
    scopes: list[dict[str, str]] = []
    blocks = 0
    for statement in re.split(r"[;\n]", body):
        line = statement.strip()
        while line.startswith(("{", "}")):
            if line[0] == "{":
                scopes.append({})
                blocks += 1
            else:
                scopes.pop()
            line = line[1:].strip()
        if match := re.match(r"(\$\w+):$", line):
            labels[match[1]] = len(code)
        elif line.startswith(".reg") and len(scopes) > 1:
            scopes[-1].update((name, f"{name}@{blocks}") for name in re.split(r"[,\s]+", line)[2:])
        elif line and not line.startswith("."):
            for scope in scopes[1:]:
                for name, own in scope.items():
                    line = re.sub(rf"(?<![\w%$.]){name}(?![\w.@])", own, line)
            code.append(_instruction(line))
    return code, labels


def _instruction(line: str) -> Instruction:
    match = re.match(r"(?:@(!?)([%\w@]+)\s+)?(\S+)\s*(.*)", line)
    assert match, line
    unless, guard, name, rest = match.groups()
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
    return Instruction(guard or "", bool(unless), tuple(name.split(".")), tuple(operands))
