"""Run every CPU benchmark within fifteen minutes: `python -m benchmarks`.

The last lines name what could not run; the exit status is 1 if there is any.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from benchmarks import harness, suite

SECONDS = 420.0
TOTAL = 840.0


def main() -> int:
    """Run the suite; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="all workloads and sizes")
    parser.add_argument("--compiled", action="store_true", help="also torch.compile")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="for all operations together"
    )
    parser.add_argument("--write", action="store_true", help="keep the records in results/")
    parser.add_argument("names", nargs="*", help="some benchmarks only")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    options = harness.Options("cpu", chosen.full, chosen.compiled)
    began = time.monotonic()
    names = chosen.names or [*suite.OPERATIONS, *suite.OTHERS]
    records, failed = suite.run_all(names, options, chosen.seconds)
    if chosen.write:
        for record in records:
            harness.write(record, "cpu")
    if not chosen.names:
        failed |= suite.run_programs(TOTAL - (time.monotonic() - began))
    for name, why in failed.items():
        print(f"not run: {name}: {why}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
