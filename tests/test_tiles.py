"""Sums over tiles of the vocabulary: as exact as float32 is, and the same at any address."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spec_kernels import kernels
from spec_kernels.testing import emulated, interpreted
from spec_kernels.types import Law, SamplingParams


def spread_rows(dtype: torch.dtype, size: float, vocab: int = 700) -> Tensor:
    """Logits of a size in the hundreds or in the billions, apart from each other or neighbours."""
    wide = torch.randn(vocab) * size / 3
    near = size * (0.9 + torch.arange(vocab) % 64 * 2.0**-23)
    few = torch.full((vocab,), -torch.inf)
    few[[7, vocab - 1]] = size
    limit = torch.finfo(dtype).max
    return torch.stack([wide, near, -near, few]).clamp(min=-limit, max=limit).to(dtype)


@pytest.mark.parametrize("size", [1.0, 1e2, 1e4, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_laws_keep_their_digits_at_any_size_of_logits(dtype: torch.dtype, size: float) -> None:
    """At T = 1e-5 exponents pass 2^30, where one step of float32 is 64 and more."""
    if dtype == torch.float16:
        size = min(size, 6e4)
    temperatures = torch.tensor([1e-5, 1e-3, 0.1, 1.0, 1e4])
    rows = spread_rows(dtype, size)
    logits = rows.repeat(len(temperatures), 1)
    request = torch.arange(len(temperatures), dtype=torch.int32).repeat_interleave(len(rows))
    with interpreted():
        law = kernels.row_law(logits, SamplingParams(temperatures), request)
    exact = logits.double()
    top = exact.max(1).values
    assert torch.equal(law.row_max.double(), top)
    assert (law.status == 0).all()
    weights = torch.exp((exact - top[:, None]) * law.inv_temperature.double()[:, None])
    expected = weights.sum(1).log()
    error = (law.log_sum.double() - expected).abs()
    assert (error <= 2.0**-22 * (1 + expected)).all()


def at_address(rows: Tensor, skipped: int) -> Tensor:
    """Copy rows to strides that allow wide loads, behind some elements of their memory."""
    width = -(-(rows.shape[1] + skipped) // 16) * 16
    moved = torch.zeros(rows.shape[0], width, dtype=rows.dtype)[:, skipped:][:, : rows.shape[1]]
    return moved.copy_(rows)


@pytest.mark.parametrize(
    ("context", "count"),
    [
        pytest.param(interpreted, 24, id="interpreter"),
        pytest.param(emulated, 6, id="ptx", marks=pytest.mark.slow),
    ],
)
def test_a_rows_result_does_not_depend_on_its_address(context: Any, count: int) -> None:
    """Equal in the last bit. Many rows: the order of a sum shows in one of four."""
    rows = torch.randn(count, 1000).bfloat16()
    params = SamplingParams.make([0.7])
    request = torch.zeros(count, dtype=torch.int32)
    results = []
    for skipped in (0, 1):
        logits = at_address(rows, skipped)
        assert (logits.data_ptr() % 16 == 0) == (skipped == 0)
        with context():
            law = kernels.row_law(logits, params, request)
            other = Law(*(field.flip(0) for field in law))
            results.append([*law, kernels.overlap(logits, law, logits, other)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
