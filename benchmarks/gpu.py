"""What a machine with a GPU shows: correctness of every compiled kernel, then all benchmarks.

    make gpu

Uses the machine's own Python, torch and Triton and installs nothing. Takes nine minutes at most;
what does not fit, or needs a package that is missing, is named. One JSON comes out, at `--out`
(into it, if it is a folder) and as the last line of stdout.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 540.0
SHARE = 0.45  # of the time, for the tests
SIDE_BY_SIDE = 4  # files of tests: most of their time goes into compiling


def missing() -> str:
    """Return why nothing can run here, "" if it can."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed for {sys.executable}"
    import torch

    return "" if torch.cuda.is_available() else "torch finds no GPU"


def run_tests(end: float) -> dict[str, Any]:
    """Run the tests that are marked `gpu`, a process per file, until `end` at most.

    Returns:
        For each file how many passed, failed and so on, or why it was not run.
    """
    absent = [p for p in ("pytest", "hypothesis") if importlib.util.find_spec(p) is None]
    if absent:
        return {"tests": {"not run": f"{' and '.join(absent)} not installed"}}
    files = [p for p in sorted((ROOT / "tests").glob("test_*.py")) if _may_be_marked(p)]
    with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        results = list(pool.map(lambda path: _run_file(path, end), files))
    return {path.name: found for path, found in zip(files, results, strict=True) if found}


def _may_be_marked(path: Path) -> bool:
    """Tell whether a file names the layers, one of which needs a GPU, or the mark itself."""
    return re.search(r"LAYERS|mark\.gpu|tests\.public", path.read_text()) is not None


def _run_file(path: Path, end: float) -> dict[str, Any]:
    left, began = end - time.monotonic(), time.monotonic()
    if left <= 0:
        return {"not run": "no time was left"}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", str(path)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=left, check=False
        )
    except subprocess.TimeoutExpired:
        return {"not run": f"stopped after {left:.0f} s"}
    counts = {
        word.rstrip("s") if word == "errors" else word: int(number)
        for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", done.stdout)
    }
    if done.returncode not in (0, 5):  # 5: nothing in it is marked
        print(done.stdout[-3000:], done.stderr[-1000:], sep="\n")
        return {**counts, "status": done.returncode}
    return {**counts, "seconds": round(time.monotonic() - began)} if counts else {}


def main() -> int:
    """Run all; return 0 if everything ran and nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of it")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu.json")
    chosen = parser.parse_args()
    if why := missing():
        print(f"make gpu: nothing can run here: {why}")
        return 2
    from benchmarks import harness, suite

    began = time.monotonic()
    print("== correctness of the compiled kernels", flush=True)
    tests = run_tests(began + SHARE * chosen.seconds)
    for name, found in tests.items():
        print(f"{name:32}{'  '.join(f'{k} {v}' for k, v in found.items())}")
    options = harness.Options("cuda", full=False, compiled=True)
    names = [*suite.OPERATIONS, *suite.OTHERS]
    # a row that has begun is finished: keep a little time for it
    left = chosen.seconds - (time.monotonic() - began) - 30.0
    records, not_run = suite.run_all(names, options, left)
    not_run |= {n: found["not run"] for n, found in tests.items() if "not run" in found}
    failed = [n for n, found in tests.items() if "status" in found]
    for name, why in not_run.items():
        print(f"not run: {name}: {why}")
    seconds = round(time.monotonic() - began)
    head = harness.header(command="make gpu", seconds=seconds, metric="seconds of one call")
    result = {"benchmark": "gpu", **head, "tests": tests, "failed": failed, "not_run": not_run}
    out = chosen.out / "gpu.json" if chosen.out.is_dir() else chosen.out
    out.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({**result, "records": records})
    out.write_text(line + "\n")
    print(line)
    return 1 if failed or not_run else 0


if __name__ == "__main__":
    sys.exit(main())
