"""Write `docs/performance.md` and its plots from the records in `benchmarks/results/`.

    python -m benchmarks.report            # write them
    python -m benchmarks.report --check    # exit with 1 if they are not what the records give

Nothing on that page is written by hand but the sentences in this file.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _svg, harness

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs/performance.md")
PLOTS = Path("docs/plots")
HEAD = ("benchmark", "device", "metric", "command")

INTRODUCTION = """\
# Performance

Measured, never guessed: this page is generated from the records in `benchmarks/results/` by
`python -m benchmarks.report`. Every section names the command that made its numbers and the machine
they are from. Variants of a row were checked against the float64 reference first, then ran in
turns; times are medians, with the 20th and 80th percentile in brackets.

- *GB/s* counts the bytes that the operation has to move, whatever a variant really moves.
- *of read* compares with a plain read of the same bytes, measured in the same turns: the roof.
- *ours is* says how many times as fast our first variant is.

`make bench` runs all of it on a CPU, `make gpu` on a machine with a GPU (correctness first), and
`make bench-compare BASE=<git ref>` compares two checkouts. No GPU has been measured yet: of the
kernels, the [budgets](evidence.md) of registers, instructions and bytes are known.
"""

TITLES = {
    "accept": "Acceptance of chains",
    "tree_accept": "Acceptance of trees",
    "law": "Laws",
    "sample": "Draws",
    "match": "Greedy verification",
    "cache": "Rollback of KV caches",
    "attention": "Attention of drafts over a long cache",
    "mla": "Latent attention",
    "dispatch": "What a call costs the host",
    "scaling": "How cost grows",
    "decoder": "Decoding, end to end",
    "mtp-float32": "Multi-token prediction, float32",
    "mtp-bfloat16": "Multi-token prediction, bfloat16",
    "generate": "The demo model beside transformers",
    "trees": "Tokens per round",
}
REMARKS = {
    "accept": "Drafts are drawn from laws at 0.3 total variation from the target's. The peers know "
    "the token rule only. The native floors are C++, `csrc_bench/accept.cpp`; the one of "
    "the block rule reads every pair of rows twice, ours only as far as the coins ask for.",
    "attention": "Heads, KV heads and columns, dtype, draft, requests and their context. *Ours is* "
    "and *paged is* say how many times as fast as the better peer on the same cache. The dense "
    "mask is made once and untimed. Memory is that of one call beside caches and queries, the mask "
    "included.",
    "dispatch": "The layer's function is replaced by one that returns a finished result: what is "
    "left is checks and dispatch.",
    "decoder": "*predicted* is the practical model, from v, c, o and alpha that were measured "
    "apart from the run. From few tokens it rests on little.",
    "scaling": "One size changes at a time. The *exponent* is the slope between the smallest and "
    "the largest size in logarithms: 1 is growth in proportion, below 1 a fixed cost is spread. "
    "*Fixed* and *each more* are a straight line through the points, and *off the line* is the "
    "largest relative error of that: growth is linear where it is small. Every request keeps half "
    "of its drafts: with coins drawn anew at each size the number of rows that are read would "
    "change too. Calls and requests cost something whatever their size: on a CPU many small steps.",
}


def load(folder: Path = harness.RESULTS) -> list[dict[str, Any]]:
    """Return the records, in the order of `TITLES`, then by name of file.

    Raises:
        ValueError: a record lacks a key that every record has to have.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        if missing := missing_keys(record):
            raise ValueError(f"{path.name} does not name {', '.join(missing)}")
        records.append({**record, "file": path.name})
    order = {name: place for place, name in enumerate(TITLES)}
    return sorted(records, key=lambda record: order.get(record["benchmark"], len(order)))


def missing_keys(record: Mapping[str, Any]) -> list[str]:
    """Return what a record lacks: in its head, or in a row what the head does not name."""
    missing = [key for key in HEAD if not record.get(key)]
    rows = record.get("rows") or [{}]
    for key in harness.REQUIRED:
        if key not in record and any(key not in row for row in rows):
            missing.append(key)
    return missing


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [columns, ["---", *["---:"] * (len(columns) - 1)], *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _short(seconds: float) -> str:
    """Return microseconds to three digits."""
    us = seconds * 1e6
    return f"{us:,.0f}" if us >= 100 else f"{us:.3g}"


def _named(row: Mapping[str, Any], hidden: Sequence[str] = ()) -> str:
    """Return the settings of a row in words."""
    skipped = {"times", "absent", "bytes", "repeats", "peak_bytes", *hidden}
    shown = {k: v for k, v in row.items() if k not in skipped and v is not None}
    return ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in shown.items())


def timed_row(row: Mapping[str, Any]) -> str:
    """Return the table of a row with times."""
    times = {name: harness.Times(**t) for name, t in row["times"].items()}
    ours, read = next(iter(times.values())), times.get("read")
    lines = []
    for name, t in times.items():
        rate = f"{t.gigabytes_per_second(row['bytes']):.2f}"
        roof = f"{100 * t.ratio_to(read):.1f} %" if read else "-"
        spread = f"{_short(t.p50)} [{_short(t.p20)} {_short(t.p80)}]"
        lines.append([name, spread, rate, roof, f"{ours.ratio_to(t):.2f}x"])
    table = _table(["", "us", "GB/s", "of read", "ours is"], lines)
    absent = "".join(f"\n- {name}: not run, {why}" for name, why in row["absent"].items())
    return f"**{_named(row)}**\n\n{table}" + (f"{absent}\n" if absent else "")


def timed(record: Mapping[str, Any]) -> str:
    """Return the tables of a record of `Case`s."""
    return "\n".join(timed_row(row) for row in record["rows"])


def accept(record: Mapping[str, Any]) -> str:
    """Return both rules beside peer, floor and read, then the tables."""
    peer = "softmax + multinomial (token)"
    floors = {"token": "native, early stop (token)", "block": "native, full read (block)"}
    lines = []
    for row in record["rows"]:
        p50 = {name: t["p50"] for name, t in row["times"].items()}
        for rule, floor in floors.items():
            ours = p50[f"ours ({rule})"]
            bare = f"{ours / p50[floor]:.2f}x" if floor in p50 else "-"
            cells = [f"{p50[peer] / ours:.2f}x", bare, f"{ours / p50['read']:.1f}x"]
            lines.append([f"{row['workload']}, batch {row['batch']}, {rule}", *cells])
    columns = ["", "as fast as softmax + multinomial", "time of the native floor", "time of a read"]
    return _table(columns, lines) + "\n" + timed(record)


def attention(record: Mapping[str, Any]) -> str:
    """Return a line per row: times, ratios to the better peer, and memory where it was taken."""
    names = ("ours", "sdpa", "flex, compiled", "ours, paged", "sdpa, gathered")
    lines, memory = [], []
    for row in record["rows"]:
        p50 = {name: t["p50"] for name, t in row["times"].items()}
        better = min(p50[name] for name in names[1:3] if name in p50)
        paged = [p50[name] for name in names[3:] if name in p50]
        ratios = [f"{better / p50[names[0]]:.2f}x", f"{paged[1] / paged[0]:.2f}x" if paged else "-"]
        heads = f"{row['heads']}/{row['kv_heads']} x {row['dim']}, {row['dtype']}"
        draft = f"{'tree' if row['is_tree'] else 'chain'} of {row['nodes']}"
        place = f"{heads}, {draft}, {row['batch']} x {row['context']}"
        cells = [f"{1e3 * p50[n]:.2f}" if n in p50 else "-" for n in names]
        lines.append([place, *cells, *ratios])
        if peaks := row.get("peak_bytes"):
            memory.append(
                [place, *(f"{peaks[n] / 2**20:.1f}" if n in peaks else "-" for n in names)]
            )
    times = _table(["", *names, "ours is", "paged is"], lines)
    absent = {why for row in record["rows"] for n, why in row["absent"].items() if n in names}
    missing = "".join(f"- flex, compiled: not run, {why}\n" for why in sorted(absent))
    missing += f"- left out: {record['left_out']}\n" if record["left_out"] else ""
    head = "Medians, in milliseconds:\n\n"
    return f"{head}{times}\n{missing}\nPeak memory, in MiB:\n\n{_table(['', *names], memory)}"


def decoder(record: Mapping[str, Any]) -> str:
    """Return how much text each proposer decoded, and the table."""
    tokens = (f"{found['tokens']} with {name}" for name, found in record["inputs"].items())
    return f"Tokens of the text: {', '.join(tokens)}.\n\n{plain(record)}"


def dispatch(record: Mapping[str, Any]) -> str:
    """Return a line per operation."""
    lines = [
        [f"`{row['operation']}`", *(f"{t['ours'][q] * 1e6:.1f}" for q in ("p50", "p20", "p80"))]
        for row in record["rows"]
        for t in [row["times"]]
    ]
    first = record["rows"][0]
    settings = _named(first, ("operation", "context"))
    return f"**{settings}**\n\n" + _table(["operation", "us p50", "p20", "p80"], lines)


def _sweeps(record: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in record["rows"]:
        found.setdefault(row["sweep"], []).append(row)
    return found


def _line(rows: Sequence[Mapping[str, Any]], sweep: str, variant: str) -> list[tuple[float, float]]:
    return [(row[sweep], row["times"][variant]["p50"] * 1e6) for row in rows]


def _straight(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the line `fixed + more * x` with the least squares of relative errors, and the largest
    of these."""
    x, y = np.array(points).T
    scaled = np.stack([np.ones_like(x), x]) / y
    line = np.linalg.lstsq(scaled.T, np.ones_like(y), rcond=None)[0]
    return float(line[0]), float(line[1]), float(abs(line @ scaled - 1.0).max())


def scaling(record: Mapping[str, Any]) -> str:
    """Return a plot and the growth of each variant per sweep."""
    parts = []
    for sweep, rows in _sweeps(record).items():
        lines = []
        for variant in rows[0]["times"]:
            points = _line(rows, sweep, variant)
            (x, first), (wide, last) = points[0], points[-1]
            slope = math.log(last / first) / math.log(wide / x)
            fixed, more, error = _straight(points)
            cells = [f"{x:g}: {first:,.0f}", f"{wide:g}: {last:,.0f}", f"{slope:.2f}"]
            cells += [f"{fixed:,.0f}", f"{more:.3g}", f"{error:.0%}"]
            lines.append([variant, *cells])
        follows = ("gamma",) if sweep == "nodes" else ()  # of a chain: nodes - 1
        others = _named(rows[0], ("sweep", sweep, *follows))
        columns = ["", "smallest: us", "largest: us", "exponent"]
        table = _table([*columns, "fixed: us", "each more: us", "off the line"], lines)
        picture = f"![{sweep}](plots/scaling-{sweep}.svg)"
        parts.append(f"### Over {sweep}\n\n**{others}**\n\n{picture}\n\n{table}")
    return "\n".join(parts)


def plots(record: Mapping[str, Any]) -> dict[Path, str]:
    """Return the pictures of a record of sweeps."""
    found = {}
    for sweep, rows in _sweeps(record).items():
        lines = {variant: _line(rows, sweep, variant) for variant in rows[0]["times"]}
        picture = _svg.plot(f"Cost over {sweep}, {record['device']}", sweep, "us", lines)
        found[PLOTS / f"scaling-{sweep}.svg"] = picture
    return found


def plain(record: Mapping[str, Any]) -> str:
    """Return a table of records whose results are numbers by name, or rows of numbers."""
    results = record.get("results")
    if isinstance(results, dict):
        rows = {k: v for k, v in results.items() if isinstance(v, dict)}
    else:
        rows = {str(i + 1): row for i, row in enumerate(record["rows"])}
    columns = [
        k for k, v in next(iter(rows.values())).items() if isinstance(v, int | float | str | list)
    ]
    lines = [[name, *(_cell(row.get(key)) for key in columns)] for name, row in rows.items()]
    return _table(["", *(key.replace("_", " ") for key in columns)], lines)


def _cell(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    return f"{value:.3g}" if isinstance(value, float) else "-" if value is None else str(value)


def section(record: Mapping[str, Any]) -> str:
    """Return the section of a record: what it is, the command, the machine, its tables."""
    name = record["benchmark"]
    own = {
        "accept": accept,
        "attention": attention,
        "decoder": decoder,
        "dispatch": dispatch,
        "scaling": scaling,
    }
    if name in own:
        body = own[name](record)
    else:
        rows = record.get("rows") or [{}]
        body = timed(record) if "times" in rows[0] else plain(record)
    shown = ("batch", "context", "gamma", "sampling", "threads", "commit", "date")
    facts = "; ".join(f"{k} {record[k]}" for k in shown if record.get(k) is not None)
    remark = f"{REMARKS[name]}\n\n" if name in REMARKS else ""
    title = TITLES.get(name, name.replace("_", " ").capitalize())
    return (
        f"## {title}\n\n{remark}`{record['command']}` on {record['device']}: "
        f"{record['metric']}; {facts} ([record](../benchmarks/results/{record['file']})).\n\n{body}"
    )


def make(records: Sequence[Mapping[str, Any]]) -> dict[Path, str]:
    """Return every generated file, by its path in the repository."""
    page = INTRODUCTION + "".join(f"\n{section(record)}" for record in records)
    files = {PAGE: page}
    for record in records:
        if record["benchmark"] == "scaling":
            files |= plots(record)
    return files


def stale(files: Mapping[Path, str], root: Path = ROOT) -> list[Path]:
    """Return the generated files that are not what they should be, and those that should not be."""
    kept = {p.relative_to(root) for p in (root / PLOTS).glob("scaling-*.svg")}
    wrong = [p for p, t in files.items() if not (root / p).exists() or (root / p).read_text() != t]
    return sorted([*wrong, *(kept - set(files))])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    chosen = parser.parse_args(arguments)
    files = make(load())
    wrong = stale(files)
    for path in wrong:
        print(f"{'stale' if chosen.check else 'wrote'}: {path}")
        if chosen.check:
            continue
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        if path in files:
            (ROOT / path).write_text(files[path])
        else:
            (ROOT / path).unlink()
    return 1 if chosen.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
