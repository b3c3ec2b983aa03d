"""Compare two states of the library: `make bench-compare BASE=<git ref>`.

    python -m benchmarks.compare BASE [benchmark ...]

BASE is checked out into a worktree of its own. One process imports the library from there and one
from here; both run the benchmarks of *this* checkout, and take turns row by row and turn by turn,
so that a machine that drifts drifts for both. A ratio above 1 means that this checkout is faster.

Last line of stdout: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness, suite

ROOT = Path(__file__).resolve().parents[1]
WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
import spec_kernels
assert spec_kernels.__file__.startswith(sys.argv[1]), spec_kernels.__file__
sys.path.insert(0, sys.argv[2])
from benchmarks import compare
compare.serve(sys.argv[3:])
"""


def serve(arguments: Sequence[str]) -> None:
    """Answer each line on stdin with one turn of the row it asks for, as a line of JSON.

    Lines: "next" prepares the next row and answers its settings, or null behind the last one;
    "turn" answers the seconds of each variant of ours.
    """
    import torch

    torch.set_num_threads(1)
    device, names = arguments[0], arguments[1:]
    answer, sys.stdout = sys.stdout, sys.stderr
    options = harness.Options(device)
    rows = (
        (name, case) for name in names for case in harness.each(suite.load(name).cases(options))
    )
    calls: dict[str, Any] = {}
    for line in sys.stdin:
        if line.strip() == "next":
            found = next(rows, None)
            result: Any = None
            if found is not None:
                name, case = found
                calls = {n: c for n, c in case.variants.items() if is_ours(n, c)}
                result = {"benchmark": name, **case.settings}
        else:
            clocked = "cpu" if case.on_host else device
            times = harness.measure(calls, repeats=1, device=clocked)
            result = {name: t.p50 / case.calls for name, t in times.items()}
        print(json.dumps(result), file=answer, flush=True)


def is_ours(name: str, call: object) -> bool:
    """Tell the library's own variants from peers and floors."""
    return callable(call) and name.startswith(("ours", "eager", "accept", "verify_attention"))


class Side:
    """A process that has imported one state of the library.

    Args:
        library: the checkout whose `spec_kernels` it imports.
    """

    def __init__(self, library: Path, device: str, names: Sequence[str]) -> None:
        command = [sys.executable, "-c", WORKER, str(library), str(ROOT), device, *names]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=library
        )

    def ask(self, line: str) -> Any:
        """Send a line and return the answer.

        Raises:
            RuntimeError: the process ended; what it wrote to stderr says why.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the benchmarks do not run on this state: {self._process.args[3]}")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def compare(base: Side, here: Side, repeats: int) -> list[dict[str, Any]]:
    """Return the rows: medians of both sides and their ratio for each variant."""
    rows = []
    while (settings := here.ask("next")) is not None:
        assert base.ask("next") == settings
        seconds: dict[str, dict[str, list[float]]] = {}
        for _ in range(repeats):
            for side, process in (("base", base), ("here", here)):
                for variant, time in process.ask("turn").items():
                    seconds.setdefault(variant, {}).setdefault(side, []).append(time)
        medians = {
            variant: {side: statistics.median(times) for side, times in sides.items()}
            for variant, sides in seconds.items()
        }
        rows.append({**settings, "repeats": repeats, "variants": medians})
        print("\n" + "  ".join(f"{k} {v}" for k, v in settings.items() if v is not None))
        for variant, found in medians.items():
            found["ratio"] = found["base"] / found["here"]
            print(
                f"{variant:24}{found['base'] * 1e6:12.1f} us -> {found['here'] * 1e6:12.1f} us"
                f"{found['ratio']:8.2f}x",
                flush=True,
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Check out BASE, run both sides in turns, print the ratios and the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="any git ref")
    parser.add_argument("names", nargs="*", default=[], help="by default accept, law and sample")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args(arguments)
    names = chosen.names or ["accept", "law", "sample"]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), chosen.base], check=True)
        sides: list[Side] = []
        try:
            sides = [Side(library, chosen.device, names) for library in (tree, ROOT)]
            rows = compare(*sides, chosen.repeats)
        finally:
            for side in sides:
                side.close()
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    command = " ".join(["python -m benchmarks.compare", chosen.base, *chosen.names])
    head = harness.header(command=command, base=chosen.base, metric="seconds of one call")
    print(json.dumps({"benchmark": "compare", **head, "rows": rows}))


if __name__ == "__main__":
    main()
