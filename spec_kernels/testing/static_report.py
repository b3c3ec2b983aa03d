"""What this library's kernels use and move, known without a GPU.

`rows` compiles the hot calls at real sizes and reads their machine code; `with_traffic` interprets
them and counts their bytes. `tests/budgets/` holds the limits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple

from .dry_run import CompiledLaunch, dry_run
from .hot import COLUMNS, HotCall, HotPath
from .hot._call import floor_of
from .resources import Mix, Resources, measure
from .targets import CHIPS
from .timing import bound
from .watcher import watch


@dataclass(frozen=True)
class Row:
    """One path of one kernel of one hot call on one target.

    Attributes:
        operation, configuration, kernel, path, target: what was compiled; see `HotCall` and
            `HotPath`.
        launches: of the whole call.
        registers, spill_bytes, shared_bytes: per thread, per thread, per program.
        load_bits: width that carries most bytes on the path.
        instructions_per_element: a thread's instructions on the path, per element that it handles
            (vocabulary id, or pair of ids where two rows are read); None for kernels that stream
            nothing, and on AMD, where structured code hides which branches exclude each other.
        mma: matrix instructions.
        bound: what binds it by the model of `timing`, by chip.
        bytes: moved by a launch of the call on "cpu", as the watcher counts; None = not counted.
        floor_bytes: what that launch must move at the least; None if the kernel states no floor.
    """

    operation: str
    configuration: str
    kernel: str
    path: str
    target: str
    launches: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    load_bits: int
    instructions_per_element: float | None
    mma: str
    bound: dict[str, str]
    bytes: int | None = None
    floor_bytes: int | None = None

    @property
    def name(self) -> str:
        """Everything that identifies the row, for messages."""
        path = f"[{self.path}]" if self.path else ""
        return f"{self.operation} {self.configuration} {self.kernel}{path} {self.target}"


def first_calls() -> list[HotCall]:
    """Return the first hot call of every operation."""
    calls = [call for column in COLUMNS.values() for call in column]
    return list({call.operation: call for call in reversed(calls)}.values())[::-1]


def select(
    operations: Sequence[str] | None = None, configurations: Sequence[str] | None = None
) -> list[HotCall]:
    """Choose hot calls by name; without configurations the first of every operation.

    Raises:
        ValueError: a name fits no call.
    """
    calls = [call for column in COLUMNS.values() for call in column]
    known = [{call.operation: 0 for call in calls}, {call.configuration: 0 for call in calls}]
    for names, real in zip((operations, configurations), known, strict=True):
        if unknown := set(names or ()) - {*real}:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(real)}")
    chosen = [
        call
        for call in (calls if configurations else first_calls())
        if call.operation in (operations or known[0])
        and call.configuration in (configurations or known[1])
    ]
    if not chosen:
        raise ValueError("no call has such an operation and configuration")
    return chosen


def _count(path: HotPath, resources: Resources) -> tuple[Mix, float]:
    """Return the mix of a path, and its instructions per element."""
    mix = resources.path(path.through, path.avoid, repeats=path.repeats, within=path.within)
    return mix, mix.instructions * resources.threads / path.elements


def _rows_of(call: HotCall, launch: CompiledLaunch, launches: int) -> Iterable[Row]:
    resources = measure(launch.compiled, launch.target)
    chips = [name for name, chip in CHIPS.items() if chip.target == launch.target]
    paths: tuple[HotPath | None, ...] = (None,)
    if launch.kernel in call.paths:
        paths = call.paths[launch.kernel](launch)
    for path in paths:
        mix, per_element = (resources.path(), None) if path is None else _count(path, resources)
        is_counted = per_element is not None and not launch.target.startswith("gfx")
        yield Row(
            call.operation,
            call.configuration,
            launch.kernel,
            path.name if path is not None else "",
            launch.target,
            launches,
            resources.registers,
            resources.spill_bytes,
            resources.shared_bytes,
            mix.load_bits,
            round(per_element or 0.0, 2) if is_counted else None,
            " ".join(resources.mma),
            {chip: bound(resources, chip, mix) for chip in chips},
        )


def rows(target: str, calls: Iterable[HotCall]) -> list[Row]:
    """Compile hot calls for a target, and read what their kernels use.

    Args:
        target: one of `TARGETS`.
        calls: of `COLUMNS`.
    """
    out: list[Row] = []
    for call in calls:
        launch_all = call.prepare("meta")
        with dry_run(target) as launches:
            launch_all()
        for launch in launches:
            out += _rows_of(call, launch, len(launches))
    return out


class Traffic(NamedTuple):
    """Bytes that one launch moved, what its docstring says it must move, and what it stored."""

    kernel: str
    moved: int
    floor: int | None
    stored: int


def traffic(call: HotCall) -> list[Traffic]:
    """Interpret a hot call on the CPU and count the bytes of each launch."""
    launch_all = call.prepare("cpu")
    with watch(races=False, reachable=call.reachable(launch_all)) as seen:
        launch_all()
    return [
        Traffic(
            x.kernel,
            x.load_bytes + x.store_bytes,
            floor_of(x.docstring, call.counts),
            x.store_bytes,
        )
        for x in seen.launches
    ]


def with_traffic(found: Iterable[Row], calls: Iterable[HotCall]) -> list[Row]:
    """Interpret hot calls, and fill in `bytes` and `floor_bytes` of their rows."""
    counted = {
        (call.operation, call.configuration, one.kernel): one
        for call in calls
        for one in traffic(call)
    }
    out = []
    for row in found:
        one = counted[row.operation, row.configuration, row.kernel]
        out.append(replace(row, bytes=one.moved, floor_bytes=one.floor))
    return out


def to_json(found: Iterable[Row]) -> str:
    """Return rows as one JSON array."""
    return json.dumps([asdict(row) for row in found], indent=1)


def _ratio(row: Row) -> tuple[str, str, str]:
    """Return bytes, floor and their ratio as text."""
    if row.bytes is None:
        return "-", "-", "-"
    if not row.floor_bytes:
        return f"{row.bytes:,}", "-", "-"
    return f"{row.bytes:,}", f"{row.floor_bytes:,}", f"{row.bytes / row.floor_bytes:.3f}"


_HEAD: Final = (
    *("operation", "configuration", "kernel", "target", "launches", "regs", "spill", "shared"),
    *("load", "instr/elem", "bytes", "floor", "ratio", "bound (model)"),
)


def to_table(found: Iterable[Row]) -> str:
    """Return rows as aligned text."""
    lines = [list(_HEAD)]
    for r in found:
        kernel = f"{r.kernel}[{r.path}]" if r.path else r.kernel
        numbers = (r.launches, r.registers, r.spill_bytes, r.shared_bytes, r.load_bits)
        per_element = r.instructions_per_element
        count = "-" if per_element is None else f"{per_element:.1f}"
        bounds = " ".join(f"{chip}:{what}" for chip, what in r.bound.items())
        names = (r.operation, r.configuration, kernel, r.target)
        lines.append([*names, *map(str, numbers), count, *_ratio(r), bounds])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


AT_MOST: Final = (
    *("launches", "registers", "spill_bytes", "shared_bytes", "instructions_per_element"),
)


def over_budget(row: Row, limit: Mapping[str, Any]) -> list[str]:
    """Return what of a row is outside its budget, one text each.

    Args:
        row: as measured.
        limit: any of: largest launches, registers, spill_bytes, shared_bytes,
            instructions_per_element; smallest load_bits; mma as it must be.
    """
    found = []
    for name, bar in limit.items():
        value = getattr(row, name)
        if name in AT_MOST:
            is_over = value is not None and value > bar
        else:
            is_over = value < bar if name == "load_bits" else value != bar
        if is_over:
            found.append(f"{row.name}: {name} {value}, budget {bar}")
    return found
