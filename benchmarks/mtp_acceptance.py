"""Acceptance by depth of the MTP weights in the package, and what two models make of it.

Reads the records beside the weights, so it takes no time and needs no model: how often each depth
was right on held-out text, sequence by sequence. Intervals hold 95 % of 2,000 bootstrap samples of
whole sequences.

    python -m benchmarks.mtp_acceptance

Last line of stdout: one JSON object.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from spec_kernels.cost_model import conditional_acceptance, expected_tokens, survival
from spec_kernels.integrations.smollm2_mtp import Kind, weights_folder

SAMPLES = 2000

Rows = Sequence[Sequence[int]]
"""Per sequence: places, then places where the first 1, 2, ... depths were right."""


def survivors(rows: Rows) -> list[float]:
    """Return the share of places where the first k depths were right, k = 1, 2, ..."""
    places, *right = (sum(column) for column in zip(*rows, strict=True))
    return [count / places for count in right]


def interval(
    rows: Rows, value: Callable[[Rows], float], samples: int = 2000
) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a value of the rows."""
    rng = random.Random(0)
    drawn = sorted(value(rng.choices(rows, k=len(rows))) for _ in range(samples))
    return drawn[samples // 40], drawn[-1 - samples // 40]


def tokens(rows: Rows) -> float:
    """Return the tokens per round that were measured."""
    return 1.0 + sum(survivors(rows))


def alike_excess(rows: Rows, depth: int) -> float:
    """Return by how much one alpha, that of depth 1, overstates the survival to a depth."""
    found = survivors(rows)
    return survival(found[0], depth)[-1] - found[depth - 1]


def pooled(rows: Rows) -> float:
    """Return the tokens per round that one alpha predicts: accepted drafts / drafts."""
    found = survivors(rows)
    return expected_tokens(sum(found) / len(found), len(found))


def by_position(rows: Rows) -> float:
    """Return tokens of every second sequence less what the alphas of the others predict."""
    alphas = conditional_acceptance(survivors(rows[0::2]))
    return tokens(rows[1::2]) - expected_tokens(alphas, len(alphas))


def judge(held_out: dict[str, Any]) -> dict[str, Any]:
    """Return everything that is said of a record."""
    rows: Rows = held_out["by_sequence"]
    found = survivors(rows)
    return {
        "top1": held_out["top1"],
        "survival": found,
        "alphas": conditional_acceptance(found),
        "tokens": tokens(rows),
        "tokens_interval": interval(rows, tokens),
        "one_alpha": expected_tokens(found[0], len(found)),
        "excess_at_depth_2": alike_excess(rows, 2),
        "excess_interval": interval(rows, lambda sample: alike_excess(sample, 2)),
        "pooled_alpha": pooled(rows),
        "other_half": by_position(rows),
        "by_chance": interval(rows, by_position),  # of halves that were drawn alike
    }


def words(value: Any) -> str:
    """Return numbers with three digits."""
    numbers = value if isinstance(value, list | tuple) else [value]
    return " ".join(f"{number:.3f}" for number in numbers)


def main() -> None:
    """Print the kinds that the package has."""
    kinds: tuple[Kind, ...] = ("sequential", "parallel")
    found = {}
    for kind in kinds:
        file = weights_folder(kind) / "record.json"
        if not file.exists():
            continue
        record = json.loads(file.read_text())
        found[kind] = judge(record["held_out"])
        print(f"{kind}, {record['training_tokens']} training tokens")
        for name, value in found[kind].items():
            print(f"    {name:20} {words(value)}")
    print(json.dumps({"benchmark": "mtp-acceptance", "kinds": found}))


if __name__ == "__main__":
    main()
