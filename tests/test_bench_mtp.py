"""The table of multi-token prediction, on a target that is a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import bench_mtp
from benchmarks.bench_decoder import Lane, take_turns
from spec_kernels.nn.mtp import MTPConfig, ParallelHeads, SequentialMTP
from spec_kernels.targets import TableTarget

VOCAB, TOKENS = 8, 12


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    eye = torch.eye(VOCAB)
    block = MTPConfig(
        "sequential", VOCAB, 3, is_shared=True, heads=2, kv_heads=1, head_dim=4, intermediate_size=8
    )
    modules = {
        "sequential": SequentialMTP(block, eye, eye),
        "parallel": ParallelHeads(MTPConfig("parallel", VOCAB, 3), eye),
    }
    decoders = bench_mtp.make_decoders(TableTarget(5 * eye.roll(1, dims=1)), modules, VOCAB)
    prompts = ([0, 1, 2, 3], [5, 6, 7, 0])
    lanes = {name: [Lane(one, p, TOKENS) for p in prompts] for name, (one, _) in decoders.items()}
    take_turns([lane for each in lanes.values() for lane in each])
    return {
        name: bench_mtp.row_of(name, depth, lanes[name], lanes["plain"])
        for name, (_, depth) in decoders.items()
    }


def test_every_form_has_the_plain_text(rows: dict[str, dict[str, Any]]) -> None:
    assert {name: row["same_text"] for name, row in rows.items()} == dict.fromkeys(
        bench_mtp.FORMS, 2
    )


def test_times_are_in_units_of_a_plain_round(rows: dict[str, dict[str, Any]]) -> None:
    plain = rows["plain"]
    assert plain["speedup"] == pytest.approx(1)
    for row in rows.values():
        costs = row["v"] + row["c"] + row["o"]
        assert row["speedup"] == pytest.approx(row["tokens_per_round"] / costs)


def test_every_depth_has_an_acceptance(rows: dict[str, dict[str, Any]]) -> None:
    depths = {name: depth for name, (_, depth, _) in bench_mtp.FORMS.items()}
    assert {name: len(row["alpha"]) for name, row in rows.items()} == depths
    for row in rows.values():
        alpha = torch.tensor(row["alpha"], dtype=torch.float64)
        survived = alpha.cumprod(0).sum().item()
        assert row["tokens_per_round"] == pytest.approx(1 + survived, abs=0.35)  # the last is cut
