"""What this library's kernels use and move, known without a GPU.

`rows` compiles real launches at real sizes and reads their machine code; `with_traffic` interprets
one request and counts its bytes. `tests/budgets.toml` holds the limits.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from spec_kernels.kernels import accept, row_law
from spec_kernels.kernels.accept import residual_mass_kernel
from spec_kernels.types import Draft, Law, SamplingParams

from .dry_run import CompiledLaunch, dry_run
from .interpreter import interpreted
from .resources import Mix, Resources, measure
from .targets import CHIPS
from .timing import bound
from .watcher import watch


class Configuration(NamedTuple):
    """One way to call the chain step.

    Attributes:
        name: in tables and in the budgets.
        vocab, stride: ids per row, and elements from row to row.
        dtype: of both rows of logits.
        rule: "block" or "token".
        drafts: "dense" (laws given) or "fixed".
        filters: with top-k, top-p and min-p.
        batch, gamma: requests, drafts each.
    """

    name: str
    vocab: int = 128256
    stride: int = 128256
    dtype: torch.dtype = torch.bfloat16
    rule: str = "block"
    drafts: str = "dense"
    filters: bool = False
    batch: int = 32
    gamma: int = 4


CONFIGURATIONS: Final = {
    c.name: c
    for c in (
        Configuration("bf16"),
        Configuration("f32", dtype=torch.float32),
        Configuration("bf16-token", rule="token"),
        Configuration("bf16-fixed", drafts="fixed", rule="token"),
        Configuration("bf16-filters", filters=True),
        Configuration("f32-filters", dtype=torch.float32, filters=True),
        Configuration("bf16-padded", vocab=50257, stride=50304),
        Configuration("bf16-odd", vocab=50257, stride=50257),
        Configuration("f32-odd", vocab=32001, stride=32001, dtype=torch.float32),
        Configuration("bf16-152k", vocab=151936, stride=151936),
    )
}
"""The hot configurations: vocabulary sizes divisible by 16 and not, row starts aligned and not."""


def _rows(rows: int, c: Configuration, device: str, sharpness: float) -> Tensor:
    memory = torch.empty(rows, c.stride, dtype=c.dtype, device=device)
    if device != "meta":
        memory.copy_(torch.randn(memory.shape) * sharpness)
    return memory[:, : c.vocab]


def make_step(
    c: Configuration, device: str = "meta", sharpness: float = 2.0
) -> Callable[[], object]:
    """Prepare a call of `kernels.accept` from sampling parameters, as the decoder makes it.

    Args:
        c: what to call it with.
        device: "meta" inside `dry_run`; "cpu" inside `watch`, with random rows, and drafts that
            the target rejects at once, so that every residual is needed.
        sharpness: standard deviation of random logits.

    Returns:
        A function that launches the step.
    """
    nodes, batch = c.gamma + 1, c.batch

    def full(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    target = _rows(batch * nodes, c, device, sharpness)
    own = _rows(batch * nodes, c, device, sharpness)
    place = torch.arange(batch * nodes, dtype=torch.int32, device=device).view(batch, nodes)
    ids = place.long() * 37 % c.vocab
    filters: tuple[Tensor | None, ...] = (None, None, None)
    if c.filters:
        filters = (
            full((batch,), 50, torch.int32),
            full((batch,), 0.95, torch.float32),
            full((batch,), 0.01, torch.float32),
        )
    params = SamplingParams(full((batch,), 0.8, torch.float32), *filters)
    law = None
    if c.drafts == "dense":
        if device == "meta":
            floats = [full((batch * nodes,), 0, torch.float32) for _ in range(4)]
            ints = [full((batch * nodes,), 0, d) for d in (torch.int64, torch.int32)]
            law = Law(*floats, *ints)
        else:
            own.scatter_(1, ids.roll(-1, 1).view(-1, 1), 20.0)  # drafts that the target rejects
            with interpreted():
                law = row_law(own, params, (place // nodes).view(-1).int())
    draft = Draft(
        ids,
        full((batch,), nodes, torch.int32),
        None,
        own if law is not None else None,
        law,
        place.roll(1, 1) if law is not None else None,
    )
    return partial(
        accept,
        draft,
        target,
        params,
        place,
        full((batch, nodes), 0.5, torch.float64),
        full((batch,), 0.5, torch.float64),
        rule=c.rule,
        max_depth=c.gamma,
    )


@dataclass(frozen=True)
class Row:
    """One kernel of one configuration on one target.

    Attributes:
        kernel, target, configuration: what was compiled.
        launches: of the whole step.
        registers, spill_bytes, shared_bytes: per thread, per thread, per program.
        load_bits: width that carries most bytes on the hot path.
        instructions_per_element: a thread's instructions on the hot path, per vocabulary id of
            its tiles (per pair of ids where two rows are read); None for kernels that stream none,
            and on AMD, where structured code hides which branches exclude each other.
        mma: matrix instructions.
        bound: what binds it by the model of `timing`, by chip.
        bytes: moved by a launch for one request, as the watcher counts; None = not counted.
        floor_bytes: what a launch for one request must read at the least.
    """

    kernel: str
    target: str
    configuration: str
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


def _line(function: Any, text: str, occurrence: int) -> str:
    """Return "file.py:line" of the n-th line of a function that holds a text."""
    lines, first = inspect.getsourcelines(function.fn)
    found = [first + i for i, line in enumerate(lines) if text in line]
    return f"{function.fn.__code__.co_filename.rsplit('/', 1)[-1]}:{found[occurrence]}"


def _hot_path(launch: CompiledLaunch, resources: Resources) -> tuple[Mix, float | None]:
    """Return the mix of a program's hot path, and its instructions per id."""
    arguments = launch.arguments
    if launch.kernel == "tile_stats_kernel":
        path = resources.path()
        ids = arguments["CHUNKS"] * arguments["LANES"] * arguments["WIDTH"]
        return path, path.instructions * resources.threads / ids
    if launch.kernel != "residual_mass_kernel":
        return resources.path(), None
    through: Sequence[str] = ()
    if arguments["SOURCE"] == "slots" and arguments["inputs"].draft_row is not None:
        through = (_line(residual_mass_kernel, "sum_tiles(", 0),)
    chunks, lanes, width = arguments["SHAPE"]
    step = arguments["step"]
    path = resources.path(through, repeats=step)
    return path, path.instructions * resources.threads / (step * chunks * lanes * width)


def rows(target: str, names: Iterable[str] = tuple(CONFIGURATIONS)) -> list[Row]:
    """Compile the chain step in the named configurations for a target, and read what it uses.

    Args:
        target: one of `TARGETS`.
        names: of `CONFIGURATIONS`.
    """
    out = []
    chips = [name for name, chip in CHIPS.items() if chip.target == target]
    for name in names:
        step = make_step(CONFIGURATIONS[name])
        with dry_run(target) as launches:
            step()
        for launch in launches:
            resources = measure(launch.compiled, target)
            path, per_id = _hot_path(launch, resources)
            out.append(
                Row(
                    launch.kernel,
                    target,
                    name,
                    len(launches),
                    resources.registers,
                    resources.spill_bytes,
                    resources.shared_bytes,
                    path.load_bits,
                    None if per_id is None or target.startswith("gfx") else round(per_id, 2),
                    " ".join(resources.mma),
                    {chip: bound(resources, chip, path) for chip in chips},
                )
            )
    return out


def floors(c: Configuration) -> dict[str, int]:
    """Return the bytes that each kernel of the step must read: the statistics every target row
    once, the residual masses both rows of a pair per draft (block rule) or per rejecting request
    (token rule); the others only what those left."""
    row = c.vocab * c.dtype.itemsize
    pairs = 0
    if c.drafts == "dense":
        pairs = c.batch * (c.gamma if c.rule == "block" else 1)
    return {
        "tile_stats_kernel": row * c.batch * (c.gamma + 1),
        "residual_mass_kernel": row * 2 * pairs,
    }


def floor_bytes(c: Configuration) -> int:
    """Return the bytes that the chain step must read."""
    return sum(floors(c).values())


def with_traffic(found: Iterable[Row]) -> list[Row]:
    """Interpret one request of every configuration, and fill in `bytes` and `floor_bytes`."""
    counted: dict[str, tuple[dict[str, int], dict[str, int]]] = {}
    out = []
    for row in found:
        if row.configuration not in counted:
            c = CONFIGURATIONS[row.configuration]._replace(batch=1)
            step = make_step(c, "cpu")
            with watch(races=False) as seen:
                step()
            moved = {x.kernel: x.load_bytes + x.store_bytes for x in seen.launches}
            counted[row.configuration] = (moved, floors(c))
        moved, least = counted[row.configuration]
        out.append(replace(row, bytes=moved[row.kernel], floor_bytes=least.get(row.kernel, 0)))
    return out


def to_json(found: Iterable[Row]) -> str:
    """Return rows as one JSON array."""
    return json.dumps([asdict(row) for row in found], indent=1)


def _ratio(row: Row) -> tuple[str, str, str]:
    """Return bytes, floor and their ratio as text."""
    if row.bytes is None:
        return "-", "-", "-"
    ratio = f"{row.bytes / row.floor_bytes:.3f}" if row.floor_bytes else "-"
    return f"{row.bytes:,}", f"{row.floor_bytes or 0:,}", ratio


def to_table(found: Iterable[Row]) -> str:
    """Return rows as aligned text."""
    head = ["kernel", "target", "configuration", "launches", "regs", "spill", "shared", "load"]
    lines = [[*head, "instr/id", "bytes", "floor", "ratio", "bound (model)"]]
    for r in found:
        numbers = (r.launches, r.registers, r.spill_bytes, r.shared_bytes, r.load_bits)
        per_id = "-" if r.instructions_per_element is None else f"{r.instructions_per_element:.1f}"
        bounds = " ".join(f"{chip}:{what}" for chip, what in r.bound.items())
        lines.append(
            [r.kernel, r.target, r.configuration, *map(str, numbers), per_id, *_ratio(r), bounds]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


_AT_MOST: Final = ("launches", "registers", "spill_bytes", "shared_bytes")


def over_budget(row: Row, limit: Mapping[str, Any]) -> list[str]:
    """Return what of a row is outside its budget, one text each.

    Args:
        row: as measured.
        limit: largest launches, registers, spill_bytes, shared_bytes and (where it is given)
            instructions_per_element; smallest load_bits; mma as it must be.
    """
    found = [(name, getattr(row, name) > limit[name]) for name in _AT_MOST]
    found += [("load_bits", row.load_bits < limit["load_bits"]), ("mma", row.mma != limit["mma"])]
    if "instructions_per_element" in limit:
        per_id = row.instructions_per_element
        over = per_id is None or per_id > limit["instructions_per_element"]
        found.append(("instructions_per_element", over))
    return [
        f"{row.kernel} {row.target} {row.configuration}: {name} {getattr(row, name)}, "
        f"budget {limit[name]}"
        for name, is_over in found
        if is_over
    ]
