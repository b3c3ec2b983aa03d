"""Machine code as text: instructions with their source lines, blocks, and paths through them."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import triton

_NVIDIA_TOOLS: Final = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Attributes:
        opcode: as printed, e.g. "LDG.E.128" or "global_load_dwordx4".
        lines: source lines it stands for, innermost first: ("_device.py:151", "law.py:138").
        jump: label it may go to, or None.
        ends: the program, or the block, never goes on behind it.
        guarded: it may do nothing (predicate), so a jump or an end may fall through.
    """

    opcode: str
    lines: tuple[str, ...] = ()
    jump: str | None = None
    ends: bool = False
    guarded: bool = False

    @property
    def name(self) -> str:
        """Opcode without its modifiers."""
        return self.opcode.split(".")[0]


@dataclass
class Code:
    """A program: its instructions, and the places of its labels."""

    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def _run_tool(name: str, *arguments: str) -> str:
    command = [os.path.join(_NVIDIA_TOOLS, name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@lru_cache(maxsize=64)
def disassemble(cubin: bytes) -> tuple[str, str]:
    """Return what NVIDIA's tools say about a cubin: resource usage, and code with lines."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run_tool("cuobjdump", "-res-usage", file.name)
        return usage, _run_tool("nvdisasm", "-c", "-gi", file.name)


_SASS: Final = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
_SASS_LINE: Final = re.compile(r'"([^"]+)", line (\d+)')


def parse_sass(text: str) -> Code:
    """Read the output of `nvdisasm -c -gi`."""
    code, lines, fresh = Code(), [], False  # type: Code, list[str], bool
    for raw in text.splitlines():
        if "//##" in raw:
            if fresh:
                lines = []
            fresh = False
            found = [f"{os.path.basename(f)}:{n}" for f, n in _SASS_LINE.findall(raw)]
            lines += [x for x in found if x not in lines]
            continue
        if label := re.match(r"\s*(\.L_x_\d+):", raw):
            code.labels[label.group(1)] = len(code.instructions)
        if not (match := _SASS.match(raw)):
            continue
        fresh = True
        guard, opcode, rest = match.groups()
        name = opcode.split(".")[0]
        target = re.search(r"`\((\.L_x_\d+)\)", rest)
        diverges = opcode.startswith("BRA.DIV")  # left by a warp that has come apart: never here
        jumps = name in ("BRA", "BRX", "JMP") and target and not diverges
        code.instructions.append(
            Instruction(
                opcode,
                tuple(lines),
                target.group(1) if jumps and target else None,
                name in ("EXIT", "RET", "BRA", "JMP", "KILL") and not diverges,
                guard is not None or "UP" in rest.split(",")[0],
            )
        )
    while code.instructions and code.instructions[-1].name in ("NOP", "BRA"):
        code.instructions.pop()  # padding, and the trap loop behind the last EXIT
    return code


def parse_amd(text: str) -> Code:
    """Read AMD assembly as LLVM prints it."""
    code, lines = Code(), ()  # type: Code, tuple[str, ...]
    body = text.split("s_endpgm_")[0]
    for raw in body.splitlines():
        if label := re.match(r"(\.LBB\w+):", raw):
            code.labels[label.group(1)] = len(code.instructions)
            continue
        if raw.startswith("\t.loc"):
            found = re.findall(r"([\w.]+\.py):(\d+)", raw)
            lines = tuple(f"{f}:{n}" for f, n in found)
            continue
        match = re.match(r"\t((?:s|v|ds|global|buffer|flat|scratch)_\w+)\s*(.*)", raw)
        if not match:
            continue
        opcode, rest = match.groups()
        branch = opcode.startswith(("s_cbranch", "s_branch"))
        code.instructions.append(
            Instruction(
                opcode,
                lines,
                rest.split(";")[0].strip() if branch else None,
                opcode in ("s_endpgm", "s_branch") or branch,
                opcode.startswith("s_cbranch"),
            )
        )
    return code


# --------------------------------------------------------------------------- blocks and paths


def blocks(code: Code) -> tuple[list[range], list[list[int]]]:
    """Cut a program into basic blocks; return them, and the successors of each."""
    size = len(code.instructions)
    starts = {0, *(place for place in code.labels.values() if place < size)}
    starts |= {
        i + 1 for i, x in enumerate(code.instructions) if (x.jump or x.ends) and i + 1 < size
    }
    order = sorted(starts)
    number = {start: i for i, start in enumerate(order)}
    ranges = [range(a, b) for a, b in zip(order, [*order[1:], size], strict=True)]
    successors: list[list[int]] = []
    for i, span in enumerate(ranges):
        last = code.instructions[span[-1]]
        goes = []
        if last.jump is not None and code.labels.get(last.jump, size) < size:
            goes.append(number[code.labels[last.jump]])
        if (not last.ends or last.guarded) and i + 1 < len(ranges):
            goes.append(i + 1)
        successors.append(goes)
    return ranges, successors


def loop_blocks(successors: Sequence[Sequence[int]]) -> list[set[int]]:
    """Return the loops: the blocks between a backward jump and its target."""
    return [
        set(range(head, tail + 1))
        for tail, goes in enumerate(successors)
        for head in goes
        if head <= tail
    ]


def best_path(code: Code, weigh: Callable[[Iterable[Instruction]], tuple[int, ...]]) -> list[int]:
    """Return the path from entry to end with the largest weight, loops passed once, as places of
    instructions.

    Args:
        code: the program.
        weigh: weight of a block, a tuple that adds up along a path; compared in order. A path
            leaves at a guarded exit where the first weight of what follows is negative.
    """
    ranges, successors = blocks(code)
    content = [[code.instructions[i] for i in span] for span in ranges]
    weights = [weigh(block) for block in content]
    best: dict[int, tuple[tuple[int, ...], int | None]] = {}

    def visit(start: int) -> None:
        stack: list[tuple[int, Any]] = [(start, None)]
        open_blocks: set[int] = set()
        while stack:
            block, pending = stack[-1]
            if pending is None:
                open_blocks.add(block)
                pending = [s for s in successors[block] if s not in open_blocks]
                stack[-1] = (block, pending)
            following = next((s for s in pending if s not in best), None)
            if following is not None:
                stack.append((following, None))
                continue
            stack.pop()
            open_blocks.discard(block)
            total, after = weights[block], None
            if pending:
                rest, after = max((best[s][0], s) for s in pending)
                last = content[block][-1]
                if last.ends and last.jump is None and rest[0] < 0:
                    after = None  # a guarded exit, and what follows weighs less than nothing
                else:
                    total = tuple(a + b for a, b in zip(total, rest, strict=True))
            best[block] = (total, after)

    visit(0)
    path: list[int] = []
    block: int | None = 0
    while block is not None:
        path += ranges[block]
        block = best[block][1]
    return path
