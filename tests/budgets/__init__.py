"""Budgets: what every kernel used when it was recorded, and limits that no record may pass.

`<column>.toml` is written by `python -m tests.budgets --write`: a row for each path of each kernel
of each hot call on each target. `limits/<column>.toml` is written by hand: patterns and bars, of
which the last one that matches a row counts; `limits/every.toml` comes first.
"""

from __future__ import annotations

import math
import tomllib
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from spec_kernels.testing import TARGETS
from spec_kernels.testing import static_report as static
from spec_kernels.testing.hot import COLUMNS, HotCall

FOLDER = Path(__file__).parent
KEY = ("operation", "configuration", "kernel", "path", "target")
MEASURED = ("launches", "registers", "spill_bytes", "shared_bytes", "load_bits")
ALL = (*MEASURED, "instructions_per_element", "mma")


def _parse(text: str, table: str = "row") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(text).get(table, [])
    return found


def _read(path: Path, table: str) -> list[dict[str, Any]]:
    return _parse(path.read_text(), table) if path.exists() else []


@cache
def recorded(column: str) -> list[dict[str, Any]]:
    """Return the recorded rows of a column."""
    return _read(FOLDER / f"{column}.toml", "row")


def _pairs() -> list[tuple[str, HotCall, str, bool]]:
    """Every hot call on every target, and whether the default suite compiles it: every call once,
    on the first target in turn that is recorded. So every dtype meets every option, and every
    target calls of many kinds; the columns start with different targets."""
    names, pairs = list(TARGETS), []
    for column, calls in COLUMNS.items():
        for n, call in enumerate(calls):
            first = (len(column) + n) % len(names)
            turn = names[first:] + names[:first]
            name = (call.operation, call.configuration)
            rows = recorded(column)
            known = {x["target"] for x in rows if (x["operation"], x["configuration"]) == name}
            chosen = next((target for target in turn if target in known), turn[0])
            pairs += [(column, call, target, target == chosen) for target in names]
    return pairs


PAIRS = _pairs()


@cache
def limits(column: str) -> list[dict[str, Any]]:
    """Return the limits that hold for a column, later ones above earlier ones."""
    folder = FOLDER / "limits"
    return [x for name in ("every", column) for x in _read(folder / f"{name}.toml", "limit")]


def traffic_of(column: str, call: HotCall) -> dict[str, float]:
    """Return the bars of a call's bytes in units of its floor: `moved`, `stored`; {}: none."""
    bars: dict[str, float] = {}
    for limit in _read(FOLDER / "limits" / f"{column}.toml", "traffic"):
        names = ("operation", "configuration")
        if all(fnmatchcase(getattr(call, name), limit.get(name, "*")) for name in names):
            bars |= {name: limit[name] for name in ("moved", "stored") if name in limit}
    return bars


def budget_of(row: static.Row, known: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return what was recorded for a row, without its key; None if nothing was."""
    key = {name: getattr(row, name) for name in KEY}
    found = next((x for x in known if key.items() <= x.items()), None)
    return found and {name: bar for name, bar in found.items() if name in ALL}


def limit_of(row: static.Row, known: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the bars of a row: of all limits whose patterns match, the last one of each field."""
    bars: dict[str, Any] = {}
    for limit in known:
        if all(fnmatchcase(getattr(row, k), limit.get(k, "*")) for k in KEY):
            bars |= {name: bar for name, bar in limit.items() if name in ALL}
    return bars


def complaints(column: str, row: static.Row) -> list[str]:
    """Return what of a row is outside its record, and what is outside the limits."""
    budget = budget_of(row, recorded(column))
    if budget is None:
        return [f"{row.name}: no budget; run: python -m tests.budgets --write {column}"]
    hard = [f"{x} (hard limit)" for x in static.over_budget(row, limit_of(row, limits(column)))]
    return static.over_budget(row, budget) + hard


def changes(row: static.Row, known: list[dict[str, Any]]) -> list[str]:
    """Return what a row would change in the record."""
    budget = budget_of(row, known)
    if budget is None:
        return [f"{row.name}: new"]
    (new,) = _parse(to_toml(row))
    pairs = [(name, budget.get(name), new.get(name)) for name in ALL]
    return [f"{row.name}: {name} {old} -> {now}" for name, old, now in pairs if old != now]


def to_toml(row: static.Row) -> str:
    """Return a row as it stands in the file."""
    lines = [f'{name} = "{getattr(row, name)}"' for name in KEY]
    lines += [f"{name} = {getattr(row, name)}" for name in MEASURED]
    if row.instructions_per_element is not None:
        bar = math.ceil(10 * row.instructions_per_element) / 10
        lines.append(f"instructions_per_element = {bar}")
    return "\n".join(["[[row]]", *lines, f'mma = "{row.mma}"', ""])


def write(column: str, found: list[static.Row]) -> None:
    """Record rows in place of those of the same calls on the same targets; sort all as in PAIRS."""
    order = {(x.operation, x.configuration, t): i for i, (_, x, t, _) in enumerate(PAIRS)}
    new = {(row.operation, row.configuration, row.target) for row in found}
    fields = {"instructions_per_element": None, "bound": {}}
    kept = [static.Row(**fields | x) for x in recorded(column)]
    rows = [r for r in kept if (r.operation, r.configuration, r.target) not in new] + found
    known = [r for r in rows if (r.operation, r.configuration, r.target) in order]
    known.sort(key=lambda r: order[r.operation, r.configuration, r.target])
    (FOLDER / f"{column}.toml").write_text("\n".join(to_toml(row) for row in known))
    recorded.cache_clear()
