"""What a compiled kernel uses: registers, spills, shared memory, load widths, instructions.

Read from the machine code that Triton's own assembler makes (`ptxas`, LLVM for AMD), so no GPU is
needed. A kernel may hold two branches of which a program runs one: `Resources.path` counts along
one path, by default the one that loads the most bytes in the fewest instructions (full tiles, not
the masked tail). Loops on the path count once; `loops` has them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ._machine_code import (
    Code,
    Instruction,
    best_path,
    blocks,
    disassemble,
    loop_blocks,
    parse_amd,
    parse_sass,
)

_SASS_BITS: Final = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
_AMD_BITS: Final = {
    "ubyte": 8, "sbyte": 8, "byte": 8, "ushort": 16, "sshort": 16, "short": 16, "dword": 32,
    "dwordx2": 64, "dwordx3": 96, "dwordx4": 128, "b8": 8, "u8": 8, "i8": 8, "b16": 16, "u16": 16,
    "i16": 16, "b32": 32, "b64": 64, "b96": 96, "b128": 128,
}  # fmt: skip
_SASS_ALU: Final = (
    *("FMNMX", "FSETP", "FSEL", "ISETP", "LOP3", "SHF", "IADD3", "SEL", "PRMT", "IMNMX", "VIMNMX"),
    *("LEA", "PLOP3", "IABS", "POPC", "FLO", "VIADD", "HSETP2", "HMNMX2", "I2FP", "F2FP", "MOV"),
)
_SASS_MMA: Final = (
    *("HMMA", "HGMMA", "IMMA", "IGMMA", "QMMA", "QGMMA", "DMMA", "OMMA", "UTCHMMA", "UTCQMMA"),
)
_SASS_KINDS: Final = {
    **dict.fromkeys(("LDG", "LD"), "load"),
    **dict.fromkeys(("STG", "ST"), "store"),
    **dict.fromkeys(("LDL", "STL"), "spill"),
    **dict.fromkeys(("LDS", "STS", "LDSM", "STSM"), "shared"),
    **dict.fromkeys(("SHFL", "REDUX", "CREDUX"), "shuffle"),
    **dict.fromkeys(("ATOMG", "ATOM", "RED", "REDG", "ATOMS"), "atomic"),
    **dict.fromkeys(("LDGSTS", "UBLKCP", "UTMALDG", "UTMASTG"), "copy"),
    **dict.fromkeys(("DADD", "DMUL", "DFMA", "DSETP"), "float64"),
    **dict.fromkeys(_SASS_ALU, "alu"),
    **dict.fromkeys(_SASS_MMA, "mma"),
    "MUFU": "special",
    "BAR": "barrier",
    "IMAD": "imad",
}


def kind_of(instruction: Instruction) -> str:
    """Name the pipe or purpose of an instruction.

    Example:
        >>> kind_of(Instruction("LDG.E.128")), kind_of(Instruction("v_exp_f32_e32"))
        ('load', 'special')
    """
    name = instruction.name
    if name.isupper():
        return _SASS_KINDS.get(name, "other")
    if memory := re.match(r"(?:global|buffer|flat)_(load|store|atomic)", name):
        return memory.group(1)
    for pattern, kind in (
        (r"scratch_", "spill"),
        (r"v_(mfma|wmma|smfmac)", "mma"),
        (r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_f", "special"),
        (r"ds_(bpermute|permute|swizzle)|v_permlane|.*_dpp", "shuffle"),
        (r"ds_", "shared"),
        (r"s_barrier", "barrier"),
        (r"v_\w+_f64", "float64"),
        (r"v_", "alu"),
    ):
        if re.match(pattern, name):
            return kind
    return "other"


def bits_of(instruction: Instruction) -> int:
    """Return the width of a memory access in bits, per lane.

    Example:
        >>> bits_of(Instruction("LDG.E.128")), bits_of(Instruction("global_load_dwordx4"))
        (128, 128)
    """
    if instruction.name.isupper():
        return next((_SASS_BITS[m] for m in instruction.opcode.split(".") if m in _SASS_BITS), 32)
    words = re.sub(r"_(d16|hi|short|format)\b|_d16|_hi", "", instruction.name).split("_")
    return next((_AMD_BITS[w] for w in reversed(words) if w in _AMD_BITS), 32)


@dataclass(frozen=True)
class Mix:
    """Instructions of a path or a loop.

    Attributes:
        instructions: how many a thread issues.
        kinds: how many by kind: load, alu, imad, special, shared, shuffle, mma, ...
        load_bytes, store_bytes: global memory, per thread, masks ignored.
        load_widths: bits -> number of global loads.
    """

    instructions: int
    kinds: Counter[str]
    load_bytes: int
    store_bytes: int
    load_widths: Counter[int]

    @staticmethod
    def of(instructions: Iterable[Instruction]) -> Mix:
        """Count instructions."""
        counted = [(x, kind_of(x)) for x in instructions]
        loads = [bits_of(x) for x, kind in counted if kind == "load" or x.name == "LDGSTS"]
        stores = [bits_of(x) for x, kind in counted if kind == "store"]
        kinds = Counter(kind for _, kind in counted)
        return Mix(len(counted), kinds, sum(loads) // 8, sum(stores) // 8, Counter(loads))

    @property
    def load_bits(self) -> int:
        """The width that carries most of the loaded bytes; 0 without loads."""
        return max(self.load_widths, key=lambda b: b * self.load_widths[b], default=0)


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel uses.

    Attributes:
        kernel, target, warps: what was compiled; threads are 32 (NVIDIA) or 64 (AMD) a warp.
        registers: per thread; on AMD vector registers, accumulation registers included.
        spill_bytes: local (scratch) memory per thread.
        shared_bytes: shared memory per program.
        program: the whole program.
        mma: kinds of matrix instructions, sorted.
        code: the instructions.
    """

    kernel: str
    target: str
    warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    program: Mix
    mma: tuple[str, ...]
    code: Code = field(repr=False, compare=False)

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return self.warps * (64 if self.target.startswith("gfx") else 32)

    def path(
        self,
        through: Sequence[str] = (),
        avoid: Sequence[str] = (),
        *,
        repeats: int = 1,
        within: Sequence[str] = (),
    ) -> Mix:
        """Count along one path from entry to end.

        Args:
            through, avoid: source lines ("law.py:138") that the path shall run, and not run, as
                far as possible; then loaded bytes, then few instructions decide. Structured code
                (AMD) often needs `avoid`: both branches lie one behind the other there.
            repeats: how often the innermost loops on the path that load memory run.
            within: source lines; only instructions that stand for one of them count.
        """
        wanted, unwanted = set(through), set(avoid)

        def weigh(block: Iterable[Instruction]) -> tuple[int, ...]:
            mix = Mix.of(block := list(block))
            visits = sum(bool(wanted & set(x.lines)) - bool(unwanted & set(x.lines)) for x in block)
            return visits, mix.load_bytes, -mix.instructions

        code = self.code.instructions
        path = best_path(self.code, weigh)
        inside = set().union(*(loop for loop, mix in self._inner() if mix.load_bytes))
        loop = [code[i] for i in path if i in inside]
        counted = [*(code[i] for i in path), *(repeats - 1) * loop]
        if within:
            counted = [x for x in counted if set(within) & set(x.lines)]
        return Mix.of(counted)

    def _inner(self) -> list[tuple[set[int], Mix]]:
        """The innermost loops: places of their instructions, and what is in them."""
        ranges, successors = blocks(self.code)
        loops = loop_blocks(successors)
        inner = [loop for loop in loops if not any(other < loop for other in loops)]
        places = [{i for b in loop for i in ranges[b]} for loop in inner]
        return [(p, Mix.of(self.code.instructions[i] for i in sorted(p))) for p in places]

    @property
    def loops(self) -> tuple[Mix, ...]:
        """What is in the innermost loops."""
        return tuple(mix for _, mix in self._inner())

    def instructions_per_element(
        self,
        elements: int,
        through: Sequence[str] = (),
        avoid: Sequence[str] = (),
        *,
        repeats: int = 1,
    ) -> float:
        """Instructions that a thread issues along the path, for each of its elements.

        Args:
            elements: elements that one program handles.
            through, avoid, repeats: as in `path`.
        """
        return self.path(through, avoid, repeats=repeats).instructions * self.threads / elements

    def load_bits_by_line(self) -> dict[str, Counter[int]]:
        """Widths of global loads for each outermost source line of the kernel."""
        found: dict[str, Counter[int]] = {}
        for x in self.code.instructions:
            if kind_of(x) == "load" and x.lines:
                found.setdefault(x.lines[-1], Counter())[bits_of(x)] += 1
        return found


def measure(compiled: Any, target: str) -> Resources:
    """Read the resources of a kernel from Triton's `CompiledKernel`.

    Args:
        compiled: as in `CompiledLaunch.compiled`.
        target: what it was compiled for.
    """
    metadata = compiled.metadata
    if "cubin" in compiled.asm:
        usage, text = disassemble(compiled.asm["cubin"])
        numbers = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        registers, spills = numbers["REG"], numbers["STACK"] + numbers["LOCAL"]
        code = parse_sass(text)
    else:
        text = compiled.asm["amdgcn"]
        numbers = {k: int(v) for k, v in re.findall(r"\.(\w+):\s+(\d+)\n", text)}
        registers = numbers.get("vgpr_count", 0)
        spills = numbers.get("private_segment_fixed_size", 0)
        code = parse_amd(text)
    return Resources(
        metadata.name,
        target,
        metadata.num_warps,
        registers,
        spills,
        metadata.shared,
        Mix.of(code.instructions),
        tuple(sorted({x.name for x in code.instructions if kind_of(x) == "mma"})),
        code,
    )
