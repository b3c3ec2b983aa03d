"""Calls of `accept` with wrong rows or wrong laws: what a verifier is handed, not what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spec_kernels import reference
from spec_kernels.types import Acceptance, Draft, Law, SamplingParams


class Call(NamedTuple):
    """The positional arguments of `accept`."""

    draft: Draft
    logits: Tensor
    law: Law | SamplingParams | None
    target_row: Tensor
    accept_coins: Tensor
    final_coins: Tensor


def bonus_from_last_draft_row(call: Call) -> Call:
    rows, last = call.target_row.clone(), int(call.draft.num_nodes[0]) - 1
    rows[0, last] = rows[0, max(last - 1, 0)]
    return call._replace(target_row=rows)


def shifted_rows(call: Call) -> Call:
    rows, last = call.target_row.clone(), int(call.draft.num_nodes[0]) - 1
    rows[0, :last] = call.target_row[0, 1 : last + 1]
    return call._replace(target_row=rows)


def law_of(logits: Tensor, temperature: float = 1.0) -> Law:
    owner = torch.zeros(len(logits), dtype=torch.int32)
    return reference.row_law(logits, SamplingParams.make(temperature), owner)


def with_draft_law(call: Call, law: Callable[[Tensor, Law], Law]) -> Call:
    draft = call.draft
    if draft.law is None:
        return call
    return call._replace(draft=draft._replace(law=law(draft.logits, draft.law)))


def raw_q(call: Call) -> Call:
    return with_draft_law(call, lambda logits, law: law_of(logits))


def softmax_of_greedy_draft(call: Call) -> Call:
    def law(logits: Tensor, law: Law) -> Law:
        return law_of(logits) if bool((law.inv_temperature == 0).any()) else law

    return with_draft_law(call, law)


def unnormalised_q(call: Call) -> Call:
    def law(logits: Tensor, law: Law) -> Law:
        everything = (logits.double() - law.row_max[:, None]) * law.inv_temperature[:, None]
        return law._replace(log_sum=everything.exp().sum(1).log())

    return with_draft_law(call, law)


def bf16_draft_logits(call: Call) -> Call:
    logits = call.draft.logits
    return call._replace(draft=call.draft._replace(logits=logits.bfloat16().to(logits.dtype)))


def softmax_of_fixed(call: Call) -> Call:
    row = call.draft.row.clone()
    row[0, 1:] = torch.where(row[0, 1:] < 0, call.target_row[0, :-1], row[0, 1:])
    return call._replace(draft=call.draft._replace(row=row))


def unfiltered_target(call: Call) -> Call:
    return call if call.law is None else call._replace(law=law_of(call.logits))


def filtered_bonus_only(call: Call) -> Call:
    if not isinstance(call.law, Law):
        return call
    plain = law_of(call.logits)
    bonus = int(call.target_row[0, int(call.draft.num_nodes[0]) - 1])
    for field, kept in zip(plain, call.law, strict=True):
        field[bonus] = kept[bonus]
    return call._replace(law=plain)


def last_argmax(call: Call) -> Call:
    if not isinstance(call.law, Law):
        return call
    argmax = call.logits.shape[1] - 1 - call.logits.flip(1).argmax(1)
    return call._replace(law=call.law._replace(argmax=argmax))


def drops_unlikely_drafts(call: Call) -> Call:
    """Cut the chain before a drawn token that the target finds unlikely."""
    draft, nodes = call.draft, 1
    while nodes < int(draft.num_nodes[0]):
        p = call.logits[call.target_row[0, nodes - 1]].softmax(0)
        token = int(draft.tokens[0, nodes])
        if token < p.numel() and p[token] < 0.2:
            break
        nodes += 1
    return call._replace(draft=draft._replace(num_nodes=torch.tensor([nodes])))


def ignores_the_map(*args: Any, **options: Any) -> Acceptance:
    return reference.accept(*args, **{**options, "target_to_draft": None})
