"""How every benchmark measures: in turns, medians, the machine and the commit in the record.

    row = measure({"ours": call, "peer": other}, repeats=20)
    row["ours"].p50, row["ours"].ratio_to(row["peer"])

The variants of a row run one after the other, over and over, the first turn discarded, so that a
machine that drifts drifts for all of them. On a GPU events time the calls, after the L2 cache was
flushed; on a CPU `time.perf_counter` does.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

Call = Callable[[], object]


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
    variants: Mapping[str, Call],
    *,
    repeats: int,
    device: torch.device | str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:
    """Run every variant `repeats` times, in turns, after one turn that does not count.

    Args:
        variants: name to call; outputs are dropped.
        repeats: turns that count, at least 1.
        device: "cpu" or a CUDA device.
        clock: of the CPU; `time.process_time` where other work shares the cores.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    once = _gpu_seconds if torch.device(device).type == "cuda" else _cpu_seconds
    found: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(repeats + 1):
        for name, call in variants.items():
            seconds = once(call, clock)
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
