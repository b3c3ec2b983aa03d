"""Watch interpreted kernels: bounds, races between programs, their order, and the bytes they move.

Bounds are exact: every pointer remembers the argument that it was made from, and may touch only the
elements of that tensor, the gaps of a strided view excluded. A race is two programs of one launch
touching the same byte, at least one writing (atomics count as writes against plain accesses).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch

from ._formats import Array
from ._intervals import Touch, first_meeting, join, runs, total
from .errors import OutOfBoundsError, RaceError, source_line
from .interpreter import Program, interpreted, set_observer

Order = Literal["natural", "reverse", "shuffle"]


@dataclass
class LineUse:
    """What one source line moved in a launch.

    Attributes:
        argument: the tensor argument, or "?" for an address read from memory.
        bytes: bytes of active lanes.
        active, lanes: lanes with a true mask, and all lanes.
    """

    argument: str
    bytes: int = 0
    active: int = 0
    lanes: int = 0


@dataclass
class Launch:
    """One launch as it was watched.

    Attributes:
        kernel, grid, docstring: name of the kernel, its grid, and what it says of itself.
        lines: use by `(file.py:line, "load" | "store" | "atomic", argument)`.
        distinct: different bytes loaded of each argument; what a perfect cache would fetch.
    """

    kernel: str
    grid: Program
    docstring: str | None = None
    lines: dict[tuple[str, str, str], LineUse] = field(default_factory=dict)
    distinct: dict[str, int] = field(default_factory=dict)

    def bytes(self, kind: str, argument: str | None = None) -> int:
        """Return the bytes moved by accesses of this kind, for all arguments or one."""
        return sum(
            use.bytes
            for (_, k, name), use in self.lines.items()
            if k == kind and argument in (None, name)
        )

    @property
    def load_bytes(self) -> int:
        """Bytes loaded, repeated loads counted each time."""
        return self.bytes("load")

    @property
    def distinct_load_bytes(self) -> int:
        """Different bytes loaded, of all arguments."""
        return sum(self.distinct.values())

    @property
    def store_bytes(self) -> int:
        """Bytes stored."""
        return self.bytes("store")


class _Region:
    """The bytes that one tensor argument owns; a bitmap over the extent if it has gaps."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.low, self.item = name, tensor.data_ptr(), tensor.element_size()
        extent = 0
        if tensor.numel():
            pairs = zip(tensor.shape, tensor.stride(), strict=True)
            extent = 1 + sum((n - 1) * s for n, s in pairs)
        self.extent, self.high = extent, self.low + extent * self.item
        self.owned: Array | None = None
        if extent != tensor.numel():
            self.owned = np.zeros(extent, bool)
            view = np.lib.stride_tricks.as_strided(
                self.owned, tuple(tensor.shape), tuple(tensor.stride())
            )
            view[...] = True

    def holds(self, addresses: Array, nbytes: int) -> Array:
        inside = (addresses >= self.low) & (addresses + np.uint64(nbytes) <= self.high)
        if self.owned is not None and inside.any():
            offset = addresses[inside] - np.uint64(self.low)
            inside[inside] = self.owned[(offset // np.uint64(self.item)).astype(np.int64)]
        return inside


@dataclass
class Watch:
    """Sees every launch inside `watch()`; `launches` holds what it saw."""

    order: Order = "natural"
    seed: int = 0
    bounds: bool = True
    races: bool = True
    reachable: Sequence[torch.Tensor] = ()
    launches: list[Launch] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise ValueError(f"order must be one of {get_args(Order)}, got {self.order!r}")
        self._random = random.Random(self.seed)

    # ------------------------------------------------------------------ the observer's side

    def begin(
        self,
        kernel: Callable[..., Any],
        tensors: list[tuple[str, torch.Tensor]],
        grid: Program,
    ) -> Sequence[Program]:
        """Start of a launch; return its programs in the order to run them."""
        self._current = Launch(kernel.__name__, grid, kernel.__doc__)
        self.launches.append(self._current)
        more = [(f"reachable[{i}]", t) for i, t in enumerate(self.reachable)]
        self._regions = [_Region(name, t) for name, t in [*tensors, *more]]
        self._touched: dict[str, list[tuple[Array, Array, int, int]]] = {
            "load": [],
            "store": [],
            "atomic": [],
        }
        self._line_numbers: dict[str, int] = {}
        x, y, z = grid
        programs = [(i, j, k) for i in range(x) for j in range(y) for k in range(z)]
        if self.order == "reverse":
            programs.reverse()
        elif self.order == "shuffle":
            self._random.shuffle(programs)
        self._programs, self._index = programs, -1
        return programs

    def program(self, index: Program) -> None:
        """The next program starts."""
        self._index += 1

    def access(
        self,
        kind: str,
        pointers: Array,
        nbytes: int,
        mask: Array | None,
        origin: frozenset[str] | None,
    ) -> None:
        """Check and note one access before it happens."""
        lanes = pointers.size
        if mask is None:
            addresses = pointers.reshape(-1)
        else:
            addresses = pointers[np.broadcast_to(mask, pointers.shape)]
        where = source_line()
        name = " or ".join(sorted(origin)) if origin else "?"
        use = self._current.lines.setdefault((where, kind, name), LineUse(name))
        use.bytes += addresses.size * nbytes
        use.active += addresses.size
        use.lanes += lanes
        if addresses.size == 0:
            return
        if self.bounds:
            self._check_bounds(kind, addresses, nbytes, origin, where)
        low, high = runs(addresses, nbytes)
        line = self._line_numbers.setdefault(where, len(self._line_numbers))
        self._touched[kind].append((low, high, self._index, line))

    def end(self) -> None:
        """All programs ran: look for races."""
        loads, stores, atomics = (join(self._touched[k]) for k in ("load", "store", "atomic"))
        if loads is not None:
            for region in self._regions:
                inside = (loads.low >= region.low) & (loads.low < region.high)
                distinct = total(loads.low[inside], loads.high[inside])
                self._current.distinct[region.name] = distinct
        if self.races:
            for what, writes, others in (
                ("store/store", stores, stores),
                ("store/load", stores, loads),
                ("store/atomic", stores, atomics),
                ("atomic/load", atomics, loads),
            ):
                self._check_race(what, writes, others)
        self._touched.clear()

    # ------------------------------------------------------------------ checks

    def _check_bounds(
        self,
        kind: str,
        addresses: Array,
        nbytes: int,
        origin: frozenset[str] | None,
        where: str,
    ) -> None:
        regions = [r for r in self._regions if not origin or r.name in origin] or self._regions
        good = np.zeros(addresses.shape, bool)
        for region in regions:
            good |= region.holds(addresses, nbytes)
            if good.all():
                return
        bad = int(addresses[~good][0])
        near = min(regions, key=lambda r: min(abs(bad - r.low), abs(bad - r.high)))
        element = (bad - near.low) // near.item
        gap = " (a gap of the view)" if 0 <= element < near.extent else ""
        raise OutOfBoundsError(
            f"{self._current.kernel}, {where}, program {self._programs[self._index]}: {kind} of "
            f"{near.name} out of bounds in {int((~good).sum())} lanes, first at element "
            f"{element} of {near.extent}{gap}"
        )

    def _check_race(self, what: str, writes: Touch | None, others: Touch | None) -> None:
        meeting = first_meeting(writes, others)
        if meeting is None:
            return
        names = {number: where for where, number in self._line_numbers.items()}
        region = next((r for r in self._regions if r.low <= meeting.address < r.high), None)
        place = hex(meeting.address)
        if region is not None:
            place = f"{region.name}, element {(meeting.address - region.low) // region.item}"
        (first, second), (line, other_line) = meeting.programs, meeting.lines
        raise RaceError(
            f"{self._current.kernel}: {what} race on {place}: program {self._programs[first]} at "
            f"{names[line]} and program {self._programs[second]} at {names[other_line]}"
        )

    def table(self) -> str:
        """Return the launches and their lines as text: bytes, and the share of active lanes."""
        out = []
        for launch in self.launches:
            out.append(
                f"{launch.kernel} {launch.grid}: loaded {launch.load_bytes} B "
                f"({launch.distinct_load_bytes} distinct), stored {launch.store_bytes} B"
            )
            for (where, kind, name), use in sorted(launch.lines.items()):
                share = 100 * use.active / max(use.lanes, 1)
                out.append(f"    {where:24} {kind:6} {name:24} {use.bytes:12} B {share:6.1f} %")
        return "\n".join(out)


@contextlib.contextmanager
def watch(
    order: Order = "natural",
    *,
    seed: int = 0,
    bounds: bool = True,
    races: bool = True,
    reachable: Sequence[torch.Tensor] = (),
) -> Iterator[Watch]:
    """Interpret the launches inside this context and check every access of theirs.

    Args:
        order: order of the programs of a launch: "natural", "reverse" or "shuffle".
        seed: of the shuffle.
        bounds: check that accesses stay inside the argument that the pointer came from.
        races: check that programs do not meet.
        reachable: tensors that kernels reach through addresses in memory (pointer tables).

    Raises:
        OutOfBoundsError: at the access.
        RaceError: at the end of the launch.

    Example:
        >>> with watch(order="reverse") as seen:
        ...     pass  # kernel[grid](...)
        >>> seen.launches
        []
    """
    observer = Watch(order, seed, bounds, races, reachable)
    with interpreted():
        before = set_observer(observer)
        try:
            yield observer
        finally:
            set_observer(before)
