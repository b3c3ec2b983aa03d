"""What the public operations refuse: the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spec_kernels import (
    Draft,
    Law,
    SamplingParams,
    adjust_logits_,
    coins,
    draft_coins,
    match,
    overlap,
    row_law,
    sample,
)
from tests.steps import ROWS, VOCAB, Step


@pytest.fixture
def step() -> Step:
    return Step()


def wrong(**changes: Any) -> Callable[[Step], Any]:
    return lambda step: step.accept(**{name: change(step) for name, change in changes.items()})


REFUSED: dict[str, tuple[Callable[[Step], Any], type[Exception], str]] = {
    "parents": (
        wrong(draft=lambda s: s.draft._replace(parents=s.row[:, :3])),
        ValueError,
        "draft.parents must be [3, 4] int32, got [3, 3] int32",
    ),
    "parents-match": (
        lambda s: match(s.draft._replace(parents=s.row.long()), s.tokens, max_depth=1),
        TypeError,
        "draft.parents must be [3, 4] int32, got [3, 4] int64",
    ),
    "parents-wide": (
        lambda s: match(
            Draft(wide := s.tokens[:, :1].expand(3, 1025), s.draft.num_nodes, wide.int()),
            wide,
            max_depth=1,
        ),
        ValueError,
        "draft.parents must have at most 1024 columns, got 1025",
    ),
    "rule": (
        wrong(rule=lambda s: "fast"),
        ValueError,
        'rule must be "block" or "token", got \'fast\'',
    ),
    "max_depth": (wrong(max_depth=lambda s: -1), ValueError, "max_depth must be at least 0"),
    "draft-type": (wrong(draft=lambda s: s.tokens), TypeError, "draft must be a Draft, got Tensor"),
    "tokens-shape": (
        wrong(draft=lambda s: Draft(s.tokens[0], s.draft.num_nodes)),
        ValueError,
        "draft.tokens must be [batch, nodes] int64/int32, got [4] int64",
    ),
    "tokens-dtype": (
        wrong(draft=lambda s: Draft(s.tokens.float(), s.draft.num_nodes)),
        TypeError,
        "draft.tokens must be [batch, nodes] int64/int32, got [3, 4] float32",
    ),
    "no-root": (
        wrong(draft=lambda s: Draft(s.tokens[:, :0], s.draft.num_nodes)),
        ValueError,
        "draft.tokens must have a column for the root, got [3, 0]",
    ),
    "num_nodes": (
        wrong(draft=lambda s: Draft(s.tokens, s.draft.num_nodes[:2])),
        ValueError,
        "draft.num_nodes must be [3] int32, got [2] int32",
    ),
    "draft-row": (
        wrong(draft=lambda s: s.draft._replace(row=s.row.long())),
        TypeError,
        "draft.row must be [3, 4] int32, got [3, 4] int64",
    ),
    "draft-logits": (
        wrong(draft=lambda s: s.draft._replace(logits=s.draft_logits.double())),
        TypeError,
        "draft.logits must be [rows, vocab] float32/float16/bfloat16, got [12, 67] float64",
    ),
    "law-without-logits": (
        wrong(draft=lambda s: s.draft._replace(logits=None)),
        ValueError,
        "draft.law must be None where draft.logits is None",
    ),
    "draft-law": (
        wrong(draft=lambda s: s.draft._replace(law=Law(*(t[:5] for t in s.law)))),
        ValueError,
        "draft.law.inv_temperature must be [12] float32, got [5] float32",
    ),
    "law-type": (
        wrong(target_law=lambda s: tuple(s.law)),
        TypeError,
        "target_law must be a Law or None, got tuple",
    ),
    "law-dtype": (
        wrong(target_law=lambda s: s.law._replace(argmax=s.law.argmax.int())),
        TypeError,
        "target_law.argmax must be [12] int64, got [12] int32",
    ),
    "params-batch": (
        wrong(target_law=lambda s: SamplingParams.make(1.0, batch=2)),
        ValueError,
        "target_law.temperature must be [3] float32, got [2] float32",
    ),
    "params-top_k": (
        wrong(target_law=lambda s: s.params._replace(top_k=s.params.top_k.long())),
        TypeError,
        "target_law.top_k must be [3] int32, got [3] int64",
    ),
    "target-device": (
        wrong(target_logits=lambda s: s.logits.to("meta")),
        ValueError,
        "target_logits must be [rows, vocab] float32/float16/bfloat16 on cpu, got [12, 70] float32",
    ),
    "target-empty": (
        wrong(target_logits=lambda s: s.logits[:, :0]),
        ValueError,
        "target_logits must have at least one column, got [12, 0]",
    ),
    "target_row": (
        wrong(target_row=lambda s: s.row[:, :3]),
        ValueError,
        "target_row must be [3, 4] int32, got [3, 3] int32",
    ),
    "accept_coins": (
        wrong(accept_coins=lambda s: s.accept_coins.float()),
        TypeError,
        "accept_coins must be [3, 4] float64, got [3, 4] float32",
    ),
    "final_coins": (
        wrong(final_coins=lambda s: s.accept_coins),
        ValueError,
        "final_coins must be [3] float64, got [3, 4] float64",
    ),
    "id-map": (
        wrong(target_to_draft=lambda s: s.id_map[:67]),
        ValueError,
        "target_to_draft must be [70] int32, got [67] int32",
    ),
    "target_tokens": (
        lambda s: match(s.draft, s.tokens[:2], max_depth=1),
        ValueError,
        "target_tokens must be [3, 4] int64/int32, got [2, 4] int64",
    ),
    "child-coins": (
        lambda s: sample(s.logits, s.law, coins=s.row_coins, k=2),
        ValueError,
        "coins must be [12, 2] float64, got [12] float64",
    ),
    "coins": (
        lambda s: sample(s.logits, s.law, coins=s.child_coins),
        ValueError,
        "coins must be [12, 1] float64, got [12, 3] float64",
    ),
    "excluded": (
        lambda s: sample(s.logits, s.law, coins=s.row_coins, excluded=s.row),
        ValueError,
        "excluded must be [12, ids] int64, got [3, 4] int32",
    ),
    "k-zero": (
        lambda s: sample(s.logits, s.law, coins=s.row_coins, k=0),
        ValueError,
        "k must be at least 1, got 0",
    ),
    "sample-replacement": (
        lambda s: sample(s.logits, s.law, noise=s.noise, k=2, replacement=True),
        ValueError,
        "replacement must be False with noise and k > 1, got True",
    ),
    "neither": (
        lambda s: sample(s.logits, s.law),
        ValueError,
        "exactly one of coins and noise must be given, got neither",
    ),
    "both": (
        lambda s: sample(s.logits, s.law, coins=s.row_coins, noise=s.noise),
        ValueError,
        "exactly one of coins and noise must be given, got both",
    ),
    "noise": (
        lambda s: sample(s.logits, s.law, noise=(s.seeds, s.positions)),
        ValueError,
        "noise seeds must be [12] int64, got [3] int64",
    ),
    "nodes": (
        lambda s: coins(s.seeds, s.positions, 0),
        ValueError,
        "nodes must be at least 1, got 0",
    ),
    "seeds": (
        lambda s: coins(s.seeds.int(), s.positions, 2),
        TypeError,
        "seeds must be [batch] int64, got [3] int32",
    ),
    "positions": (
        lambda s: draft_coins(s.seeds, s.positions[:1], 2),
        ValueError,
        "root_positions must be [3] int64, got [1] int64",
    ),
    "lanes": (
        lambda s: draft_coins(s.seeds, s.positions, 2, 0),
        ValueError,
        "lanes must be in [1, 16777216), got 0",
    ),
    "params-type": (
        lambda s: row_law(s.logits, (1.0,), s.request),
        TypeError,
        "params must be SamplingParams, got tuple",
    ),
    "no-tensor": (
        lambda s: row_law([[1.0]], s.params, s.request),
        TypeError,
        "logits must be [rows, vocab] float32/float16/bfloat16, got list",
    ),
    "row_request": (
        lambda s: row_law(s.logits, s.params, s.request.long()),
        TypeError,
        "row_request must be [12] int32, got [12] int64",
    ),
    "overlap-rows": (
        lambda s: overlap(s.logits, s.law, s.draft_logits[:5], None),
        ValueError,
        "draft_logits must be [12, draft_vocab] float32, got [5, 67] float32",
    ),
    "adjust-grad": (
        lambda s: adjust_logits_(s.logits.requires_grad_(), s.request),
        ValueError,
        "logits must not require grad",
    ),
    "adjust-overlapping": (
        lambda s: adjust_logits_(s.logits[:1].expand(ROWS, -1), s.request),
        ValueError,
        "logits must not have overlapping rows or columns, got strides [0, 1]",
    ),
    "adjust-overlapping-columns": (
        lambda s: adjust_logits_(s.logits[:, :1].expand(-1, VOCAB), s.request),
        ValueError,
        "logits must not have overlapping rows or columns, got strides [70, 0]",
    ),
    "adjust-mask": (
        lambda s: adjust_logits_(s.logits, s.request, allowed_words=s.id_map[None]),
        ValueError,
        "allowed_words must be [12, 3] int32, got [1, 70] int32",
    ),
    "adjust-bias": (
        lambda s: adjust_logits_(s.logits, s.request, bias_ids=s.tokens),
        ValueError,
        "bias_values must be given with bias_ids, got None",
    ),
    "adjust-batch": (
        lambda s: adjust_logits_(
            s.logits, s.request, presence_penalty=torch.ones(3), frequency_penalty=torch.ones(2)
        ),
        ValueError,
        "frequency_penalty must be [3] float32, got [2] float32",
    ),
    "adjust-node": (
        lambda s: adjust_logits_(s.logits, s.request, row_node=s.request),
        ValueError,
        "draft_tokens must be given with row_node, got None",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_by_name(case: str, step: Step) -> None:
    call, error, message = REFUSED[case]
    before = step.logits.clone()
    with pytest.raises(error) as caught:
        call(step)
    assert message in str(caught.value)
    assert torch.equal(step.logits, before)
