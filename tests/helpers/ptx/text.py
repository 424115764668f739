"""The instructions of a kernel from the text of a PTX file."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple


class Instruction(NamedTuple):
    guard: str  # a register, "!" in front of it where its negation counts; empty: none
    name: tuple[str, ...]
    operands: tuple[str, ...]
    text: str

    @property
    def form(self) -> str:
        return ".".join(self.name)


class Kernel(NamedTuple):
    """`parameters` and `bits`: in order, the bytes of each parameter; the type of each declared register or family of
    registers, such as "%rd" or "first"."""

    instructions: list[Instruction]
    labels: dict[str, int]
    parameters: dict[str, int]
    bits: dict[str, str]


_PARAMETER = re.compile(r"\.param\s+\.\w(\d+)[^,)]*?(\w+_param_\d+)")
_DECLARED = re.compile(r"\.reg\s+\.(\w+)\s+([^;]*);")
_LABEL = re.compile(r"(?m)^\s*(\$?[\w$]+):(?!:)")


@cache
def parse(text: str) -> Kernel:
    """The instructions of the only kernel of a PTX file, or of lines that are instructions."""
    text = re.sub(r"//.*|/\*.*?\*/|\.loc\s.*", "", text)
    parameters = {name: int(bits) // 8 for bits, name in _PARAMETER.findall(text)}
    body = text[text.index("{") :].split("$L__func_end")[0] if ".entry" in text else text
    declared = {
        name.partition("<")[0].strip(): kind for kind, names in _DECLARED.findall(body) for name in names.split(",")
    }
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    body = _LABEL.sub(r"\1:;", body)
    for line in (re.sub(r"\s+", " ", part).strip() for part in body.split(";")):
        line = line.lstrip("{} ")
        if line.endswith(":"):
            labels[line[:-1]] = len(instructions)
        elif line and not line.startswith("."):
            guard, name, operands = re.fullmatch(r"(?:@(\S+) )?(\S+) ?(.*)", line).groups()
            parts = tuple(p.strip(" ") for p in re.findall(r"\[[^]]*\]|\{[^}]*\}|[^,\s][^,]*", operands))
            instructions.append(Instruction(guard or "", tuple(re.split(r"\.|::", name)), parts, line))
    return Kernel(instructions, labels, parameters, declared)
