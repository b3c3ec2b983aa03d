"""Print what the kernels use, what changed against the budgets, and which limits are passed.

python -m tests.budgets [--write] [column ...] [target ...]
"""

from __future__ import annotations

import sys

from spec_kernels.testing import TARGETS
from spec_kernels.testing import static_report as static
from spec_kernels.testing.hot import COLUMNS
from tests import budgets


def main(arguments: list[str]) -> int:
    """Compile, print, perhaps write; return 1 if a budget or a limit is passed."""
    names = [x for x in arguments if x != "--write"]
    unknown = set(names) - {*COLUMNS, *TARGETS}
    if unknown:
        known = ", ".join([*COLUMNS, *TARGETS])
        sys.stderr.write(f"unknown: {', '.join(sorted(unknown))}; known are {known}\n")
        return 2
    targets = [x for x in TARGETS if x in names] or list(TARGETS)
    exceeded = 0
    for column in [x for x in COLUMNS if x in names] or COLUMNS:
        found = [row for target in targets for row in static.rows(target, COLUMNS[column])]
        sys.stdout.write(static.to_table(found) + "\n")
        known_rows = budgets.recorded(column)
        changed = [text for row in found for text in budgets.changes(row, known_rows)]
        sys.stdout.write("".join(f"{text}\n" for text in changed))
        if "--write" in arguments:
            budgets.write(column, found, targets)
        over = [text for row in found for text in budgets.complaints(column, row)]
        sys.stdout.write("".join(f"OVER {text}\n" for text in over))
        exceeded += len(over)
    return int(exceeded > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
