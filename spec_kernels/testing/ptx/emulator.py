"""Launch compiled PTX on CPU tensors, by hand or in place of every launch in a context."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ..dry_run import CompiledLaunch, compiled_launches
from ..interpreter import Program as ProgramId
from ..interpreter import named_tensors
from ..watcher import Order
from .machine import Code, Machine, Memory, Schedule
from .program import parse
from .values import UNSIGNED

TARGET = "sm_80"
"""Newer targets use instructions (wgmma, tcgen05) that the emulator does not know."""


@lru_cache(maxsize=256)
def _code(ptx: str) -> Code:
    return Code(parse(ptx))


def _parameter(value: Any, bits: int) -> np.generic:
    if isinstance(value, torch.Tensor):
        value = value.data_ptr()
    if isinstance(value, float):
        packed = (
            np.float32(value).view(np.uint32) if bits == 32 else np.float64(value).view(np.uint64)
        )
        value = int(packed)
    number: np.generic = UNSIGNED[bits](int(value) & ((1 << bits) - 1))
    return number


def _flatten(kind: Any, value: Any) -> Iterator[Any]:
    """Yield what the compiled entry takes for an argument; tuples are passed member by member."""
    if isinstance(kind, tuple):
        for part, item in zip(kind, value, strict=True):
            yield from _flatten(part, item)
    elif kind != "constexpr":
        yield value


def emulate(
    ptx: str,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    *,
    shared_bytes: int,
    schedule: Schedule = "lockstep",
    order: Order = "natural",
    seed: int = 0,
    late_copies: bool = True,
    races: bool = False,
    reachable: Sequence[torch.Tensor] = (),
) -> int:
    """Run compiled PTX on CPU tensors.

    Args:
        ptx: one entry, compiled for sm_80.
        grid: one to three sizes.
        arguments: tensors and numbers, in the order of the entry's parameters.
        shared_bytes: shared memory of a program, as the compiler says.
        schedule: "lockstep", or "warps": one warp at a time, in random order, to its next barrier.
        order: order of the programs.
        seed: of both random orders.
        late_copies: asynchronous copies happen at the wait that needs them; else at once.
        races: watch shared memory for accesses of two warps that lack a barrier, whatever the
            order; needs schedule "warps".
        reachable: tensors reached through addresses in memory.

    Returns:
        The number of instructions that were stepped.

    Raises:
        UnsupportedError: the PTX holds an instruction that the emulator does not know.
        OutOfBoundsError: an access outside the tensors.
        MisalignedError: an address that is not a multiple of the access width.
        RaceError: two warps use one byte of shared memory without a barrier, and one changes it.
    """
    code = _code(ptx)
    tensors = [(f"argument {n}", x) for n, x in enumerate(arguments) if isinstance(x, torch.Tensor)]
    memory = Memory([*tensors, *((f"reachable[{n}]", x) for n, x in enumerate(reachable))])
    values = [*arguments, *[0] * (len(code.program.parameters) - len(arguments))]
    parameters = {
        name: _parameter(value, bits)
        for (name, bits), value in zip(code.program.parameters, values, strict=True)
    }
    x, y, z = (*grid, 1, 1)[:3]
    programs = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    rng = random.Random(seed)
    if order == "reverse":
        programs.reverse()
    elif order == "shuffle":
        rng.shuffle(programs)
    machine = Machine(code, parameters, memory, shared_bytes, schedule, rng, late_copies, races)
    with np.errstate(all="ignore"):
        for program in programs:
            machine.run(program, (x, y, z))
    return machine.steps


@dataclass(frozen=True)
class Emulation:
    """One launch that was compiled and emulated.

    Attributes:
        kernel, grid: what was launched.
        steps: instructions stepped, over all programs.
        compiled: Triton's `CompiledKernel`.
    """

    kernel: str
    grid: ProgramId
    steps: int
    compiled: Any


@contextlib.contextmanager
def emulated(
    *,
    schedule: Schedule = "warps",
    order: Order = "natural",
    seed: int = 0,
    late_copies: bool = True,
    races: bool = False,
    reachable: Sequence[torch.Tensor] = (),
    edit: Callable[[str], str] = str,
) -> Iterator[list[Emulation]]:
    """Compile the launches inside this context for sm_80 and run their PTX on CPU tensors.

    The arguments are those of `emulate`. Launch code, specialisation and compilation are the real
    ones; only the chip is not. `edit` may change the PTX before it runs: to plant a fault.

    Yields:
        The launches, in order; filled while the context runs.

    Example:
        >>> with emulated(schedule="warps", seed=1) as launches:
        ...     pass  # kernel[grid](x, y, n, BLOCK=64, num_warps=4)
        >>> launches
        []
    """
    launches: list[Emulation] = []

    def run(launch: CompiledLaunch) -> None:
        for name, tensor in named_tensors(launch.arguments):
            if tensor.device.type != "cpu":
                raise TypeError(
                    f"{name} must be a CPU tensor inside emulated(), got {tensor.device}"
                )
        compiled = launch.compiled
        kinds = compiled.src.signature.items()
        steps = emulate(
            edit(compiled.asm["ptx"]),
            launch.grid,
            [x for name, kind in kinds for x in _flatten(kind, launch.arguments[name])],
            shared_bytes=compiled.metadata.shared,
            schedule=schedule,
            order=order,
            seed=seed,
            late_copies=late_copies,
            races=races,
            reachable=reachable,
        )
        launches.append(Emulation(launch.kernel, launch.grid, steps, compiled))

    with compiled_launches(TARGET, run):
        yield launches
