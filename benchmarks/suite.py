"""The benchmarks of operations by name, and how all of them run within a time.

python -m benchmarks           # every CPU benchmark, `make bench`
python -m benchmarks --write   # the same, and the records go to results/
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

from benchmarks import harness

OPERATIONS = ("accept", "tree_accept", "law", "sample", "match", "cache", "attention", "mla")
OTHERS = ("dispatch", "scaling")
PROGRAMS = {
    "generate": (
        "--dtypes",
        "float32",
        "--kinds",
        "copy",
        "--max-new-tokens",
        "32",
        "--repeats",
        "1",
    ),
    "trees": ("--prompts", "2", "--max-new-tokens", "8"),
    "decoder": ("--max-new-tokens", "16", "--budget", "200"),
    "mtp": ("--prompts", "1", "--max-new-tokens", "8"),
    "traffic": ("row_law",),
}
"""Benchmarks with tables of their own, and arguments with which they take a minute or two; the
decoder takes four."""

SHARE: Final = 45.0
"""Seconds that every one of `PROGRAMS` is left at least."""


def load(name: str) -> ModuleType:
    """Return a benchmark: it has `METRIC` and `cases`."""
    return importlib.import_module(f"benchmarks.bench_{name}")


def run_all(
    names: Sequence[str], options: harness.Options, seconds: float
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run benchmarks one after the other, each within an equal part of the time that is left.

    Returns:
        The records, and why the others have none.
    """
    records, failed, end = [], {}, time.monotonic() + seconds
    for place, name in enumerate(names):
        budget = (end - time.monotonic()) / (len(names) - place)
        print(f"\n== {name} (at most about {max(budget, 0):.0f} s)", flush=True)
        if budget <= 0:
            failed[name] = "no time was left"
            continue
        try:
            module = load(name)
            record = harness.run(name, module.METRIC, module.cases, options, budget=budget)
        except Exception as error:  # a wrong variant, or a library that is missing: name it, go on
            failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            traceback.print_exc()
            continue
        records.append(record)
    return records, failed


def run_programs(seconds: float) -> dict[str, str]:
    """Run the benchmarks of `PROGRAMS`, within `seconds`; return why some have no result. Each may
    take what is left beside `SHARE` for every later one."""
    failed, end = {}, time.monotonic() + seconds
    for place, (name, arguments) in enumerate(PROGRAMS.items(), start=1):
        left = end - time.monotonic() - SHARE * (len(PROGRAMS) - place)
        print(f"\n== {name} (at most {max(left, 0):.0f} s)", flush=True)
        command = [sys.executable, "-m", f"benchmarks.bench_{name}", *arguments]
        try:
            done = subprocess.run(command, check=False, timeout=max(left, 0.0))
        except subprocess.TimeoutExpired:
            failed[name] = f"stopped after {left:.0f} s"
            continue
        if done.returncode:
            failed[name] = f"ended with status {done.returncode}: {' '.join(command)}"
    return failed
