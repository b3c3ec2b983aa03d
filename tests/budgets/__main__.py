"""Print what the kernels use, what changed against the budgets, and which limits are passed.

Names are columns, operations, calls ("accept-bf16") and targets; without names all are compiled.
--write records; --fast takes only what the default suite compiles.
"""

from __future__ import annotations

import argparse
import sys

from spec_kernels.testing import TARGETS
from spec_kernels.testing import static_report as static
from tests import budgets


def main(arguments: list[str]) -> int:
    """Compile, print, perhaps record; return 1 if a budget or a limit is passed."""
    parser = argparse.ArgumentParser(
        "python -m tests.budgets", None, __doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--fast", action="store_true")
    options = parser.parse_args(arguments)
    names = {*options.names}
    targets = names & {*TARGETS} or {*TARGETS}
    calls = names - {*TARGETS}
    known = {x for column, call, *_ in budgets.PAIRS for x in (column, call.operation, str(call))}
    if unknown := calls - known:
        sys.stderr.write(f"unknown: {', '.join(sorted(unknown))}\n")
        return 2
    exceeded = 0
    for column, call, target, is_fast in budgets.PAIRS:
        is_meant = not calls or calls & {column, call.operation, str(call)}
        if not is_meant or target not in targets or (options.fast and not is_fast):
            continue
        found = static.rows(target, [call])
        sys.stdout.write(static.to_table(found) + "\n")
        for row in found:
            for text in budgets.changes(row, budgets.recorded(column)):
                sys.stdout.write(f"{text}\n")
        if options.write:
            budgets.write(column, found)
        over = [text for row in found for text in budgets.complaints(column, row)]
        sys.stdout.write("".join(f"OVER {text}\n" for text in over))
        sys.stdout.flush()
        exceeded += len(over)
    return int(exceeded > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
