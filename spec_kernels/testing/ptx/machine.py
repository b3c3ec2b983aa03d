"""The machine: threads of one program as numpy vectors, shared memory, and who runs when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
import torch

from .._formats import Array
from ..errors import KernelError, OutOfBoundsError, RaceError
from . import bits as _bits  # noqa: F401 - registers its operations
from . import memory as _memory  # noqa: F401 - registers its operations
from . import warp as _warp  # noqa: F401 - registers its operations
from .operations import build
from .program import Instruction, Program, UnsupportedError
from .values import UNSIGNED, Lanes, Step

Schedule = Literal["lockstep", "warps"]
_RUN, _WAIT, _DONE = 0, 1, 2
_NEVER: Final = 2**62


class MisalignedError(KernelError):
    """An access whose address is not a multiple of its width: a fault on the device."""


class Memory:
    """Global memory: the tensors of a launch, and nothing else."""

    def __init__(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._regions: list[tuple[int, int, int, Array, str]] = []
        for name, tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.numel() == 0:
                continue
            flat = torch.empty(0, dtype=torch.uint8)
            flat.set_(storage, 0, (storage.nbytes(),), (1,))
            pairs = zip(tensor.shape, tensor.stride(), strict=True)
            extent = 1 + sum((n - 1) * s for n, s in pairs)
            low = tensor.data_ptr()
            high = low + extent * tensor.element_size()
            base = storage.data_ptr()
            if base % 16:
                raise ValueError(f"{name} must lie in memory aligned to 16 bytes")
            self._regions.append((low, high, base, flat.numpy(), name))

    def _find(self, addresses: Array, nbytes: int, text: str) -> list[tuple[Array, Array, int]]:
        """Split addresses by region: (which, storage, base)."""
        found = []
        left = np.ones(addresses.size, bool)
        for low, high, base, storage, _ in self._regions:
            inside = left & (addresses >= low) & (addresses + np.uint64(nbytes) <= high)
            if inside.any():
                found.append((inside, storage, base))
                left &= ~inside
                if not left.any():
                    return found
        bad = int(addresses[left][0])
        near = min(self._regions, key=lambda r: min(abs(bad - r[0]), abs(bad - r[1])), default=None)
        place = f"{bad - near[0]} bytes behind the start of {near[4]}" if near else hex(bad)
        raise OutOfBoundsError(f"{int(left.sum())} lanes out of bounds, first {place}: {text}")

    def load(self, addresses: Array, width: int, count: int, text: str) -> Array:
        """Read `[lanes, count]` elements of `width` bytes."""
        out = np.empty((addresses.size, count), UNSIGNED[8 * width])
        for inside, storage, base in self._find(addresses, width * count, text):
            out[inside] = gather(storage, addresses[inside] - np.uint64(base), width, count)
        return out

    def store(self, addresses: Array, values: Array, text: str) -> None:
        """Write `[lanes, count]` elements."""
        width, count = values.dtype.itemsize, values.shape[1]
        for inside, storage, base in self._find(addresses, width * count, text):
            scatter(storage, addresses[inside] - np.uint64(base), values[inside])


def gather(storage: Array, offsets: Array, width: int, count: int) -> Array:
    """Read elements at byte offsets that are multiples of `width`."""
    typed = storage[: storage.size // width * width].view(UNSIGNED[8 * width])
    index = (offsets // np.uint64(width)).astype(np.int64)
    found: Array = typed[index[:, None] + np.arange(count)]
    return found


def scatter(storage: Array, offsets: Array, values: Array) -> None:
    """Write elements at byte offsets that are multiples of their width."""
    width, count = values.dtype.itemsize, values.shape[1]
    typed = storage[: storage.size // width * width].view(values.dtype)
    index = (offsets // np.uint64(width)).astype(np.int64)
    typed[index[:, None] + np.arange(count)] = values


def bytes_of(addresses: Array, nbytes: int) -> Array:
    """Return the places `[lanes, nbytes]` of all bytes of accesses."""
    return addresses.astype(np.int64)[:, None] + np.arange(nbytes)


class SharedRaces:
    """Which warps read and wrote each byte of shared memory since the last barrier: two that touch
    one byte, at least one of them changing it, need a barrier between them."""

    def __init__(self, size: int) -> None:
        self.readers, self.writers = np.zeros((2, size), np.uint32)

    def forget(self) -> None:
        """Start anew behind a barrier."""
        self.readers[:] = 0
        self.writers[:] = 0

    def read(self, warp: int, where: Array, text: str) -> None:
        """Note a read of bytes; one that the warp wrote too holds its own value."""
        bit, writers = np.uint32(1 << warp), self.writers[where]
        if ((writers != 0) & (writers & bit == 0)).any():
            raise RaceError(f"warp {warp} reads what another one wrote without a barrier: {text}")
        self.readers[where] |= bit

    def write(self, warp: int, where: Array, changed: Array, text: str) -> None:
        """Note a write of bytes, of which some change."""
        bit = np.uint32(1 << warp)
        touched = (self.readers[where] | self.writers[where]) & ~bit
        if (changed & (touched != 0)).any():
            raise RaceError(
                f"warp {warp} overwrites what another one uses without a barrier: {text}"
            )
        self.writers[where] |= bit


class Code:
    """A program with every instruction turned into a Python function."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.steps: list[Step | None] = []
        self.control: list[str] = []
        for instruction in program.instructions:
            kind = _control(instruction)
            self.control.append(kind)
            self.steps.append(None if kind else build(instruction))


def _control(instruction: Instruction) -> str:
    name = instruction.op[0]
    if name in ("bra", "ret", "exit"):
        return name
    if name in ("bar", "barrier") and instruction.op[1] != "warp":
        if instruction.operands != ["0"] and instruction.operands:
            raise UnsupportedError(instruction.text)
        return "bar"
    return ""


class Machine:
    """Runs one program (CTA) at a time."""

    def __init__(
        self,
        code: Code,
        parameters: dict[str, np.generic],
        memory: Memory,
        shared_bytes: int,
        schedule: Schedule,
        rng: random.Random,
        late_copies: bool,
        races: bool,
    ) -> None:
        self.code, self.parameters, self.memory = code, parameters, memory
        self.threads = code.program.threads
        self.schedule, self.rng, self.late_copies = schedule, rng, late_copies
        self.shared_size = max(shared_bytes, 16)
        if races and schedule != "warps":
            raise ValueError("races need schedule='warps'")
        self.races = SharedRaces(self.shared_size) if races else None
        self._warp = 0
        self.steps = 0
        self._all = np.arange(self.threads)

    # ------------------------------------------------------------------ what instructions use

    def register(self, name: str) -> Array:
        """Return a register of all threads; one never written holds garbage, as on a device."""
        found = self.registers.get(name)
        if found is None:
            dtype = UNSIGNED[self.code.program.width(name)]
            garbage = np.full(self.threads, 0xCDCDCDCDCDCDCDCD, np.uint64)
            found = self.registers[name] = garbage.astype(dtype)
        return found

    def count(self, lanes: Lanes) -> int:
        """Return the number of acting threads."""
        return len(self._all[lanes])

    def numbers(self, lanes: Lanes) -> Array:
        """Return the numbers of the acting threads."""
        return self._all[lanes]

    def whole_warps(self, lanes: Lanes, text: str) -> None:
        """Require that warps act as a whole."""
        warps, sizes = np.unique(self.numbers(lanes) // 32, return_counts=True)
        if (sizes != 32).any():
            raise KernelError(f"warp {warps[sizes != 32][0]} is divergent at: {text}")

    def load(self, space: str, addresses: Array, width: int, count: int, text: str) -> Array:
        """Read `[lanes, count]` elements of `width` bytes from global or shared memory."""
        self._check_alignment(addresses, width * count, text)
        if space == "shared":
            self._check_shared(addresses, width * count, text)
            if self.races:
                self.races.read(self._warp, bytes_of(addresses, width * count), text)
            return gather(self.shared, addresses, width, count)
        return self.memory.load(addresses, width, count, text)

    def store(self, space: str, addresses: Array, values: Array, text: str) -> None:
        """Write `[lanes, count]` elements to global or shared memory."""
        nbytes = values.dtype.itemsize * values.shape[1]
        self._check_alignment(addresses, nbytes, text)
        if space == "shared":
            self._check_shared(addresses, nbytes, text)
            if self.races:
                where = bytes_of(addresses, nbytes)
                changed = self.shared[where] != np.ascontiguousarray(values).view(np.uint8)
                self.races.write(self._warp, where, changed, text)
            scatter(self.shared, addresses, values)
        else:
            self.memory.store(addresses, values, text)

    def _check_alignment(self, addresses: Array, nbytes: int, text: str) -> None:
        if (addresses & np.uint64(nbytes - 1)).any():
            raise MisalignedError(f"misaligned access: {text}")

    def _check_shared(self, addresses: Array, nbytes: int, text: str) -> None:
        if addresses.size and int(addresses.max()) + nbytes > self.shared_size:
            raise OutOfBoundsError(f"shared memory out of bounds: {text}")

    # ------------------------------------------------------------------ running

    def run(self, program_id: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
        """Run one program of the grid from entry to end."""
        one = np.ones(self.threads, np.uint32)
        self.registers: dict[str, Array] = {
            "%tid.x": self._all.astype(np.uint32),
            "%tid.y": one * 0,
            "%tid.z": one * 0,
            "%ntid.x": one * np.uint32(self.threads),
            "%ntid.y": one,
            "%ntid.z": one,
            "%laneid": (self._all % 32).astype(np.uint32),
        }
        for axis, place, size in zip("xyz", program_id, grid, strict=True):
            self.registers[f"%ctaid.{axis}"] = one * np.uint32(place)
            self.registers[f"%nctaid.{axis}"] = one * np.uint32(size)
        self.shared = np.full(self.shared_size // 16 * 16 + 16, 0xCD, np.uint8)
        self.copies: dict[int, list[list[Step]]] = {}
        if self.races:
            self.races.forget()
        self._pc = np.zeros(self.threads, np.int64)
        self._state = np.zeros(self.threads, np.int8)
        while True:
            while (self._state == _RUN).any():
                self._run_to_barrier(self._choose())
            if not (self._state == _WAIT).any():
                return
            self._state[self._state == _WAIT] = _RUN  # everyone arrived
            if self.races:
                self.races.forget()

    def _choose(self) -> slice:
        """The threads whose turn it is: all, or one warp in random order."""
        if self.schedule == "lockstep":
            return slice(0, self.threads)
        warps = np.unique(self._all[self._state == _RUN] // 32)
        self._warp = int(self.rng.choice(list(warps)))
        return slice(32 * self._warp, 32 * self._warp + 32)

    def _run_to_barrier(self, unit: slice) -> None:
        """Run these threads until each waits or is done; diverged ones lowest place first."""
        while True:
            running = self._all[unit][self._state[unit] == _RUN]
            if running.size == 0:
                return
            places = self._pc[running]
            here = int(places.min())
            group = running[places == here]
            others = places[places != here]
            limit = int(others.min()) if others.size else _NEVER
            whole = group.size == unit.stop - unit.start
            self._run_group(unit if whole else group, here, limit)

    def _run_group(self, lanes: Lanes, place: int, limit: int) -> None:
        """Run converged threads until they diverge, wait, end, or reach others at `limit`."""
        code = self.code
        instructions, size = code.program.instructions, len(code.steps)
        while place < limit:
            if place >= size:
                self._state[lanes] = _DONE
                return
            instruction, kind, step = instructions[place], code.control[place], code.steps[place]
            self.steps += 1
            active = lanes
            if instruction.guard is not None:
                taken = self.register(instruction.guard)[lanes] != instruction.negated
                if not taken.any():
                    place += 1
                    continue
                if not taken.all():
                    active = self._all[lanes][taken]
            if step is not None:
                step(self, active)
                place += 1
            elif kind == "bra" and active is lanes:
                place = code.program.labels[instruction.register(0)]
            else:
                self._pc[lanes] = place + 1
                if kind == "bra":
                    self._pc[active] = code.program.labels[instruction.register(0)]
                else:
                    self._state[active] = _WAIT if kind == "bar" else _DONE
                return
        self._pc[lanes] = place
