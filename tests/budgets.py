"""Print what the kernels use against `budgets.toml`, or write the table anew.

python -m tests.budgets [--write] [target ...]
"""

from __future__ import annotations

import math
import sys
import tomllib
from pathlib import Path
from typing import Any

from spec_kernels.testing import TARGETS
from spec_kernels.testing import static_report as static

PATH = Path(__file__).parent / "budgets.toml"
FIELDS = ("launches", "registers", "spill_bytes", "shared_bytes", "load_bits")


def to_toml(row: static.Row) -> str:
    """Return a row as it stands in the file."""
    lines = [f'kernel = "{row.kernel}"', f'target = "{row.target}"']
    lines.append(f'configuration = "{row.configuration}"')
    lines += [f"{name} = {getattr(row, name)}" for name in FIELDS]
    if row.instructions_per_element is not None:
        limit = math.ceil(10 * row.instructions_per_element) / 10
        lines.append(f"instructions_per_element = {limit}")
    return "\n".join(["[[row]]", *lines, f'mma = "{row.mma}"', ""])


def compare(row: static.Row, limits: list[dict[str, Any]]) -> list[str]:
    """Return what changed against the row's budget."""
    key = {"kernel": row.kernel, "target": row.target, "configuration": row.configuration}
    limit = next((x for x in limits if key.items() <= x.items()), None)
    if limit is None:
        return ["no budget yet"]
    names = [*FIELDS, "instructions_per_element", "mma"]
    pairs = [(name, limit.get(name), getattr(row, name)) for name in names]
    return [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]


def _others(limits: list[dict[str, Any]], targets: list[str]) -> list[str]:
    """Return the rows of the file that were not measured now, unchanged."""
    kept = [x for x in limits if x["target"] not in targets]
    return [
        to_toml(static.Row(**{"instructions_per_element": None, **x, "bound": {}})) for x in kept
    ]


def main(arguments: list[str]) -> int:
    """Compile everything, print or write; return 1 if a budget is exceeded."""
    write = "--write" in arguments
    targets = [x for x in arguments if not x.startswith("-")] or list(TARGETS)
    limits: list[dict[str, Any]] = []
    if PATH.exists():
        limits = tomllib.loads(PATH.read_text())["row"]
    found = [row for target in targets for row in static.rows(target)]
    sys.stdout.write(static.to_table(found) + "\n")
    exceeded = 0
    for row in found:
        for change in compare(row, limits):
            sys.stdout.write(f"{row.kernel} {row.target} {row.configuration}: {change}\n")
        key = {"kernel": row.kernel, "target": row.target, "configuration": row.configuration}
        limit = next((x for x in limits if key.items() <= x.items()), None)
        exceeded += bool(limit and static.over_budget(row, limit))
    if write:
        PATH.write_text("\n".join([*map(to_toml, found), *_others(limits, targets)]))
    return int(exceeded > 0 and not write)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
