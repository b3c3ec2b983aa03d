"""Types on the host: sampling parameters from numbers, id maps, and the checking helper."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_kernels import MAX_TEMPERATURE, SamplingParams, invert_id_map
from spec_kernels._check import FLOATS, check


def test_numbers_spread_over_the_batch() -> None:
    params = SamplingParams.make([0.5, 0.0, 2], top_k=7, top_p=(1.0, 0.5, 0.25))
    assert params.temperature.tolist() == [0.5, 0.0, 2.0]
    assert params.top_k is not None
    assert params.top_k.tolist() == [7, 7, 7]
    assert params.top_k.dtype == torch.int32
    assert params.top_p is not None
    assert params.top_p.tolist() == [1.0, 0.5, 0.25]
    assert params.min_p is None


def test_batch_follows_the_argument_or_the_first_sequence() -> None:
    assert SamplingParams.make(1.0).temperature.shape == (1,)
    assert SamplingParams.make(1.0, batch=4).temperature.shape == (4,)
    assert SamplingParams.make(1.0, min_p=[0.1, 0.2]).temperature.shape == (2,)
    assert SamplingParams.make([], batch=0).temperature.shape == (0,)


def test_a_tiny_top_p_stays_positive_in_float32() -> None:
    top_p = SamplingParams.make(1.0, top_p=1e-60).top_p
    assert top_p is not None
    assert float(top_p) > 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"temperature": -0.1}, ValueError, "temperature must be in [0, 1e+30], got -0.1"),
        ({"temperature": math.nan}, ValueError, "temperature must be in [0, 1e+30], got nan"),
        ({"temperature": math.inf}, ValueError, "temperature must be in [0, 1e+30], got inf"),
        ({"temperature": None}, TypeError, "temperature must be a number, got NoneType"),
        ({"temperature": True}, TypeError, "temperature must be a number, got bool"),
        ({"top_k": -1}, ValueError, "top_k must be in [0, 2.14748e+09], got -1"),
        ({"top_k": 2.0}, TypeError, "top_k must be an int, got float"),
        ({"top_k": 2**31}, ValueError, "top_k must be in"),
        ({"top_p": 0.0}, ValueError, "top_p must be in (0, 1], got 0.0"),
        ({"top_p": 1.01}, ValueError, "top_p must be in (0, 1], got 1.01"),
        ({"min_p": -0.5}, ValueError, "min_p must be in [0, 1], got -0.5"),
        ({"min_p": math.nan}, ValueError, "min_p must be in [0, 1], got nan"),
        ({"min_p": [0.1, 0.2], "batch": 3}, ValueError, "min_p must have 3 values"),
        ({"top_k": [1, 2], "top_p": [0.5]}, ValueError, "top_p must have 2 values"),
    ],
)
def test_bad_numbers_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        SamplingParams.make(**({"temperature": 1.0} | arguments))
    assert message in str(caught.value)


def test_the_largest_temperature_is_allowed_and_has_an_inverse() -> None:
    temperature = SamplingParams.make(MAX_TEMPERATURE).temperature
    assert float(1 / temperature) > 0


@given(st.data())
def test_inverted_map_leads_back(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 50))
    size = data.draw(st.integers(0, vocab))
    forward = torch.tensor(data.draw(st.permutations(range(vocab)))[:size], dtype=torch.int64)
    inverse = invert_id_map(forward, vocab)
    assert inverse.dtype == torch.int32
    assert inverse[forward].tolist() == list(range(size))
    assert int((inverse >= 0).sum()) == size


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([0, 5], ValueError, "draft_to_target must hold ids in [0, 5), got 5"),
        ([0, -1], ValueError, "draft_to_target must hold ids in [0, 5), got -1"),
        ([3, 1, 3], ValueError, "draft_to_target must name each target id once, got 3"),
        ([[0, 1]], ValueError, "draft_to_target must be [draft_vocab] int64, got [1, 2] int64"),
        ([0.0], TypeError, "draft_to_target must be [draft_vocab] int64, got [1] float32"),
    ],
)
def test_bad_maps_are_refused(ids: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        invert_id_map(torch.tensor(ids), vocab=5)
    assert message in str(caught.value)


def test_check_names_the_tensor_what_was_expected_and_what_came() -> None:
    good = torch.zeros(40, 7)
    check("draft_logits", good, (40, "vocab"), FLOATS)
    check("draft_logits", good, [40, 7], torch.float32, good.device)
    cases: list[tuple[Any, Any, Any, type[Exception], str]] = [
        (good, (40, 8), FLOATS, ValueError, "[40, 8] float32/float16/bfloat16, got [40, 7] flo"),
        (good, ("rows",), torch.float32, ValueError, "[rows] float32, got [40, 7] float32"),
        (good, (40, 7), torch.int64, TypeError, "[40, 7] int64, got [40, 7] float32"),
        (good.to("meta"), (40, 7), torch.float32, ValueError, "[40, 7] float32 on cpu, got"),
        ("x", (40, 7), torch.float32, TypeError, "[40, 7] float32, got str"),
    ]
    for tensor, shape, dtypes, error, message in cases:
        with pytest.raises(error) as caught:
            check("draft_logits", tensor, shape, dtypes, torch.device("cpu"))
        assert f"draft_logits must be {message}" in str(caught.value)
