"""Bytes that the kernels of every operation move, against the floors that they state.

Interpreted on the CPU and counted access by access, one small hot call of each operation: not a
time, and the same on every machine.

    python -m benchmarks.bench_traffic [operation ...]

Last line of stdout: one JSON object.
"""

from __future__ import annotations

import json
import sys

from spec_kernels.testing import static_report


def main(operations: list[str] | None = None) -> None:
    """Print a row for each kernel, then all of them as JSON."""
    rows = []
    for call in static_report.select(operations):
        for one in static_report.traffic(call):
            ratio = one.moved / one.floor if one.floor else None
            rows.append({"operation": call.operation, "configuration": call.configuration})
            rows[-1] |= {"kernel": one.kernel, "bytes": one.moved, "floor_bytes": one.floor}
            rows[-1]["ratio"] = ratio and round(ratio, 4)
            shown = "-" if ratio is None else f"{ratio:.3f}"
            print(f"{call!s:28} {one.kernel:24} {one.moved:>14,} B  {shown:>7} of the floor")
    print(json.dumps({"benchmark": "traffic", "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
