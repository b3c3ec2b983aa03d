"""How every benchmark measures: in turns, medians, the machine and the commit in the record.

    row = measure({"ours": call, "peer": other}, repeats=20)
    row["ours"].p50, row["ours"].ratio_to(row["peer"])

The variants of a row run one after the other, over and over, the first turn discarded, so that a
machine that drifts drifts for all of them. On a GPU events time the calls, after the L2 cache was
flushed; on a CPU `time.perf_counter` does.

A benchmark of an operation is a function that yields `Case`s, checked against the reference;
`main` gives it a command line, prints its tables, and writes its record.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

K = TypeVar("K")
Call = Callable[[], object]

RESULTS = Path(__file__).parent / "results"
REQUIRED = ("batch", "context", "gamma", "sampling")
"""What every row names, None where it does not matter for the operation."""
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def load_demo_model(dtype: str) -> tuple[Any, Any]:
    """Load SmolLM2 and its tokenizer without words from transformers between the tables."""
    import transformers

    from spec_kernels.integrations import smollm2

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return smollm2.load(dtype=dtype)


@dataclass(frozen=True)
class Times:
    """Seconds of one variant.

    Attributes:
        p20, p50, p80: quantiles over the turns.
    """

    p20: float
    p50: float
    p80: float

    def gigabytes_per_second(self, moved: int) -> float:
        """Return the rate at which `moved` bytes went, at the median."""
        return moved / self.p50 / 1e9

    def ratio_to(self, other: Times) -> float:
        """Return how many times as fast as `other` this is, at the medians."""
        return other.p50 / self.p50


def measure(
    variants: Mapping[K, Call],
    *,
    repeats: int,
    device: torch.device | str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[K, Times]:
    """Run every variant `repeats` times, in turns, after one turn that does not count.

    Each turn has another order, so that none always finds the caches that a certain other left.

    Args:
        variants: name to call; outputs are dropped.
        repeats: turns that count, at least 1.
        device: "cpu" or a CUDA device.
        clock: of the CPU; `time.process_time` where other work shares the cores.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    once = _gpu_seconds if torch.device(device).type == "cuda" else _cpu_seconds
    found: dict[K, list[float]] = {name: [] for name in variants}
    names, order = [*variants], random.Random(0)
    for turn in range(repeats + 1):
        order.shuffle(names)
        for name in names:
            seconds = once(variants[name], clock)
            if turn:
                found[name].append(seconds)
    return {name: _quantiles(seconds) for name, seconds in found.items()}


def _quantiles(seconds: Sequence[float]) -> Times:
    if len(seconds) == 1:
        return Times(seconds[0], seconds[0], seconds[0])
    cuts = statistics.quantiles(seconds, n=10, method="inclusive")
    return Times(cuts[1], statistics.median(seconds), cuts[7])


def _cpu_seconds(call: Call, clock: Callable[[], float]) -> float:
    start = clock()
    call()
    return clock() - start


def _gpu_seconds(call: Call, clock: Callable[[], float]) -> float:
    del clock
    torch.empty(256 << 20, dtype=torch.int8, device="cuda").zero_()  # larger than any L2 cache
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000.0


def header(**settings: Any) -> dict[str, Any]:
    """Return what makes a record comparable: machine, versions, commit, and `settings`."""
    packages = ("torch", "triton", "transformers", "numpy")
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": device_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": versions,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        **settings,
    }


def device_name() -> str:
    """Return the GPU's name, else the CPU's with its vector instructions."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    found = torch.cpu.get_capabilities()
    wide = [name for name in ("avx2", "avx512_bf16", "amx_bf16") if found.get(name)]
    return f"{found.get('cpu_name') or platform.machine()} ({', '.join(wide)})"


def commit() -> str:
    """Return the commit of the sources, "+" behind it if they were changed; "" without git."""
    try:
        short = _git("rev-parse", "--short", "HEAD")
        return short + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def print_record(name: str, head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the record of a benchmark as one line of JSON, the last of its output."""
    plain = [
        {key: asdict(value) if isinstance(value, Times) else value for key, value in row.items()}
        for row in rows
    ]
    print(json.dumps({"benchmark": name, **head, "rows": plain}))


class Options(NamedTuple):
    """How a benchmark shall run.

    Attributes:
        device: "cpu" or "cuda".
        full: all workloads and sizes, not the few that fit into a minute.
        compiled: also time torch.compile, whose compiler takes a minute a row.
    """

    device: str = "cpu"
    full: bool = False
    compiled: bool = False


class Case(NamedTuple):
    """A row of a benchmark: calls that do the same work, checked before they are timed.

    Attributes:
        settings: what the row depends on, `REQUIRED` among it.
        variants: name to call, ours first; a str in place of a call says why it can't run here.
        moved: bytes that the operation has to move.
        calls: how often a variant calls the operation; times are of one.
        on_host: whether the host's time counts, whatever the device.
    """

    settings: Mapping[str, Any]
    variants: Mapping[str, Call | str]
    moved: int
    calls: int = 1
    on_host: bool = False


NOT_COMPILED = "asked for by --compiled"
Cases = Callable[[Options], Iterable[Case | list[Case]]]
"""Yields rows, and lists of rows that are timed in turns: the points of a sweep."""


def each(cases: Iterable[Case | list[Case]]) -> Iterator[Case]:
    """Yield rows one by one, those in lists too."""
    for case in cases:
        yield from case if isinstance(case, list) else [case]


def compiled(function: Callable[..., object], arguments: Sequence[Any], options: Options) -> Any:
    """Return a call of the compiled function, or why there is none."""
    if not options.compiled:
        return NOT_COMPILED
    call = torch.compile(function, dynamic=False)
    try:
        call(*arguments)
    except Exception as error:  # whatever a compiler or its tool chain raises
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
    return lambda: call(*arguments)


def time_cases(
    cases: Sequence[Case],
    device: str,
    *,
    seconds: float = 4.0,
    most: int = 40,
    repeats: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, Any]]:
    """Time the variants of all cases in turns and return a row for each case.

    Args:
        seconds: about how long the turns of a case may take, between 3 and `most` turns.
        repeats: the number of turns instead.
        clock: as in `measure`.
    """
    for case in cases:
        if missing := [key for key in REQUIRED if key not in case.settings]:
            raise ValueError(f"a row must name {missing}")
    device = "cpu" if cases[0].on_host else device
    calls = {
        (place, name): call
        for place, case in enumerate(cases)
        for name, call in case.variants.items()
        if not isinstance(call, str)
    }
    if not repeats:
        once = measure(calls, repeats=1, device=device, clock=clock)
        turn = sum(times.p50 for times in once.values())
        repeats = max(3, min(most, int(seconds * len(cases) / max(turn, 1e-9))))
    times = measure(calls, repeats=repeats, device=device, clock=clock)
    rows = []
    for place, case in enumerate(cases):
        quantiles = {
            name: {key: value / case.calls for key, value in asdict(times[place, name]).items()}
            for name in case.variants
            if (place, name) in times
        }
        absent = {name: why for name, why in case.variants.items() if isinstance(why, str)}
        row = {**case.settings, "bytes": case.moved, "repeats": repeats}
        rows.append({**row, "times": quantiles, "absent": absent})
    return rows


def print_row(row: Mapping[str, Any]) -> None:
    """Print a row as a table with a line per variant."""
    hidden = ("times", "absent", "bytes", "repeats")
    print("\n" + "  ".join(f"{k} {v}" for k, v in row.items() if k not in hidden and v is not None))
    times = {name: Times(**quantiles) for name, quantiles in row["times"].items()}
    ours, read = next(iter(times.values())), times.get("read")
    print(f"{'':34}{'us p50':>12} {'[p20':>11} {'p80]':>11}{'GB/s':>9}{'% read':>8}{'ours x':>8}")
    for name, t in times.items():
        roof = f"{100 * t.ratio_to(read):8.1f}" if read else f"{'-':>8}"
        print(
            f"{name:34}{t.p50 * 1e6:12.1f} {t.p20 * 1e6:11.1f} {t.p80 * 1e6:11.1f}"
            f"{t.gigabytes_per_second(row['bytes']):9.2f}{roof}{ours.ratio_to(t):8.2f}"
        )
    for name, why in row["absent"].items():
        print(f"{name:34}not run: {why}", flush=True)


def run(
    name: str,
    metric: str,
    cases: Cases,
    options: Options,
    *,
    budget: float = math.inf,
    repeats: int = 0,
    command: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Check and time the cases of a benchmark, print them, and return the record.

    Args:
        metric: what the times are of.
        budget: seconds after which no further case is begun; the record says so.
        command: what makes this record.
        clock: as in `measure`.
    """
    began, rows, left_out = time.monotonic(), [], ""
    seconds = 8.0 if options.full else 1.2
    for case in cases(options):
        group = case if isinstance(case, list) else [case]
        most = 400 if options.full else 40  # the median of 40 turns wanders by 2 %
        timed = time_cases(
            group, options.device, seconds=seconds, most=most, repeats=repeats, clock=clock
        )
        rows += timed
        for row in timed:
            print_row(row)
        if time.monotonic() - began > budget:
            left_out = f"stopped after {len(rows)} rows: its {budget:.0f} s were over"
            print(left_out)
            break
    head = header(command=command or f"python -m benchmarks.bench_{name}", metric=metric)
    return {"benchmark": name, **head, "left_out": left_out, "rows": rows}


def main(
    name: str, metric: str, cases: Cases, document: str, arguments: Sequence[str] | None = None
) -> None:
    """Run a benchmark from the command line; the last line of stdout is its record."""
    parser = argparse.ArgumentParser(description=document.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="all workloads and sizes")
    parser.add_argument("--quick", action="store_true", help="a few of them: the default")
    parser.add_argument("--compiled", action="store_true", help="also torch.compile")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=0, help="turns; by default, what fits")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for all rows")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: beside other work")
    parser.add_argument("--write", action="store_true", help="keep the record in results/")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    options = Options(chosen.device, chosen.full, chosen.compiled)
    flags = [f"--{flag}" for flag in ("full", "compiled") if getattr(chosen, flag)]
    flags += ["--threads", str(chosen.threads)] if chosen.threads != 1 else []
    flags += ["--repeats", str(chosen.repeats)] if chosen.repeats else []
    if chosen.clock == "cpu":
        flags, metric = [*flags, "--clock cpu"], f"CPU {metric}, while other work shared the cores"
    command = " ".join([f"python -m benchmarks.bench_{name}", *flags])
    record = run(
        name,
        metric,
        cases,
        options,
        budget=chosen.budget,
        repeats=chosen.repeats,
        command=command,
        clock=CLOCKS[chosen.clock],
    )
    if chosen.write:
        write(record, chosen.device)
    print(json.dumps(record))


def write(record: Mapping[str, Any], device: str) -> None:
    """Keep a record under `results/`."""
    path = RESULTS / f"{record['benchmark']}-{device}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
