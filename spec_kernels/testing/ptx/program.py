"""PTX text as data: parameters, instructions, labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

Operand = str | list[str]

_TYPE: Final = re.compile(r"([busf])(8|16|32|64)$")
_SPECIAL_TYPES: Final = {"pred": 1, "bf16": 16, "bf16x2": 32, "f16x2": 32, "tf32": 32}


class UnsupportedError(NotImplementedError):
    """The PTX holds something that the emulator does not know; it never guesses."""


@dataclass(frozen=True)
class Instruction:
    """One PTX instruction.

    Attributes:
        text: as written, for messages.
        op: the opcode split at its dots: ["ld", "global", "v4", "b32"].
        operands: registers, numbers, addresses "[%rd1+16]", or lists of registers.
        guard, negated: predicate register that lets it run, and whether it runs where it is false.
    """

    text: str
    op: list[str]
    operands: list[Operand]
    guard: str | None = None
    negated: bool = False

    @property
    def types(self) -> list[tuple[str, int]]:
        """Type modifiers in order, as (kind, bits): [("f", 32)], [("bf16", 16)]."""
        found = []
        for part in self.op[1:]:
            if match := _TYPE.match(part):
                found.append((match.group(1), int(match.group(2))))
            elif part in _SPECIAL_TYPES:
                found.append((part, _SPECIAL_TYPES[part]))
        return found

    @property
    def type(self) -> tuple[str, int]:
        """The last type modifier, as (kind, bits)."""
        if not self.types:
            raise UnsupportedError(f"no type in: {self.text}")
        return self.types[-1]

    def register(self, index: int) -> str:
        """Return an operand that must be a single word."""
        operand = self.operands[index]
        if isinstance(operand, list):
            raise UnsupportedError(f"a vector as operand {index}: {self.text}")
        return operand

    def vector(self, index: int) -> list[str]:
        """Return an operand as a list of registers."""
        operand = self.operands[index]
        return operand if isinstance(operand, list) else [operand]


@dataclass
class Program:
    """One compiled kernel.

    Attributes:
        name: of the entry.
        parameters: (name, bits) in order.
        threads: per program.
        instructions, labels: the body; a label is the index of an instruction.
        widths: bits of the registers by the prefix of their names: {"%r": 32, "%p": 1, ...}.
    """

    name: str
    parameters: list[tuple[str, int]]
    threads: int
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)

    def width(self, register: str) -> int:
        """Return the bits of a register by its name."""
        prefix = re.match(r"%[a-z]+", register)
        if prefix is None or prefix.group() not in self.widths:
            raise UnsupportedError(f"register {register} is not declared")
        return self.widths[prefix.group()]


def _split_operands(text: str) -> list[Operand]:
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    if current.strip():
        parts.append(current.strip())
    return [
        [x.strip() for x in part[1:-1].split(",")] if part.startswith("{") else part
        for part in parts
    ]


def _decode(text: str) -> Instruction:
    match = re.match(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)", text, re.S)
    if match is None:
        raise UnsupportedError(text)
    negated, guard, op, rest = match.groups()
    op = op.replace("shared::cta", "shared").replace("::", ".")
    return Instruction(text, op.split("."), _split_operands(rest), guard, bool(negated))


def parse(ptx: str) -> Program:
    """Read the one entry of a PTX module.

    Raises:
        UnsupportedError: it holds constructs outside the emulated subset.
    """
    head = re.search(
        r"\.entry\s+(\w+)\s*\((.*?)\)\s*(?:\.\w+[^\n{]*\n)*\s*\{(.*?)(?:\$L__func_end0|\Z)",
        ptx,
        re.S,
    )
    threads = re.search(r"\.(?:req|max)ntid\s+(\d+)", ptx)
    if head is None or threads is None:
        raise UnsupportedError("no entry with a fixed number of threads")
    if ".local" in head.group(3):
        raise UnsupportedError("local memory")
    parameters = []
    for parameter in head.group(2).split(","):
        if match := re.search(r"\.param\s+\.[busf](\d+)\s.*?(\w+)\s*$", parameter.strip()):
            parameters.append((match.group(2), int(match.group(1))))
    program = Program(head.group(1), parameters, int(threads.group(1)))
    body = re.sub(r"//[^\n]*", "", head.group(3))
    for name in re.findall(r"\.reg\s+\.\w+\s+(\w+);", body):  # inline assembly names its own
        body = re.sub(rf"(?<![%\w$.]){name}\b", f"%{name}", body)
    for name in set(re.findall(r"\.reg\s+\.\w+\s+([a-z]+)<", body)):  # the compiler has a %f1 too
        body = re.sub(rf"(?<![%\w$.]){name}(?=\d|<)", f"%own{name}", body)
    for line in body.split("\n"):
        for statement in _statements(line):
            _add(program, statement)
    return program


def _statements(line: str) -> Iterator[str]:
    """Split a line into labels ("name:") and instructions; scopes and directives disappear."""
    if re.match(r"\s*\.(?!reg)", line):  # .loc, .pragma, .file
        return
    for part in line.split(";"):
        rest = part.strip().lstrip("{}").strip()
        while label := re.match(r"(\$?[\w$]+):(?!:)\s*", rest):
            yield label.group(1) + ":"
            rest = rest[label.end() :].lstrip("{}").strip()
        if rest:
            yield rest


def _add(program: Program, statement: str) -> None:
    if statement.endswith(":"):
        program.labels[statement[:-1]] = len(program.instructions)
    elif declared := re.match(r"\.reg\s+\.(?:[busf](\d+)|pred)\s+(%[a-z]+)", statement):
        bits = int(declared.group(1) or 1)
        if program.widths.setdefault(declared.group(2), bits) != bits:
            raise UnsupportedError(statement)
    elif statement[0] == ".":
        raise UnsupportedError(statement)
    else:
        program.instructions.append(_decode(statement))
