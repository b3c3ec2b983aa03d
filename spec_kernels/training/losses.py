"""What MTP modules are trained for, and how often they are right.

    loss = sum_k weight_k * loss_k          loss_k over the states of depth k, k = 1..depth

loss_k is the cross entropy of the token k + 1 places on ("tokens"), or compares the module's law
with the target's own law there: Kullback-Leibler ("kl"), or `1 - sum_x min(p, q)` ("overlap"),
whose minimum is the maximum of acceptance. DeepSeek-V3's loss is `weight_k = lambda / depth`.

Memory holds the logits of one depth at a time: each depth goes backward to its states before the
next one's logits are made, and the states go backward once, together (Gloeckle et al. 2024,
section 2). The gradients are those of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_kernels._check import require
from spec_kernels.nn.mtp import MTP, SequentialMTP
from spec_kernels.training.corpus import Corpus
from spec_kernels.types import PAD_TOKEN

LossName = Literal["tokens", "kl", "overlap"]


def next_tokens_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy where there is a target.

    Args:
        logits: `[places, draft_vocab]` float.
        targets: `[places] int64`, draft columns; negative = none: padding, or a token outside the
            draft vocabulary.
    """
    total = F.cross_entropy(logits.float(), targets.clamp(min=-1), ignore_index=-1, reduction="sum")
    return total / (targets >= 0).sum().clamp(min=1)


def overlap_loss(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return the mean of `1 - sum_x min(p, q)`: the probability that a drawn draft is rejected.

    Args:
        logits: `[places, draft_vocab]`, the module's.
        target_logits: `[places, draft_vocab]`, the target's on the same ids.

    Source: Leviathan et al. 2023, section 3.2: beta = sum_x min(p, q).
    """
    p, q = target_logits.float().softmax(-1), logits.float().softmax(-1)
    return (1.0 - torch.minimum(p, q).sum(-1)).sum() / max(len(logits), 1)


def kl_loss(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return the mean of `sum_x p (log p - log q)`, the target's law against the module's.

    Args:
        logits: `[places, draft_vocab]`, the module's.
        target_logits: `[places, draft_vocab]`, the target's on the same ids.
    """
    log_p = target_logits.float().log_softmax(-1)
    log_q = logits.float().log_softmax(-1)
    return F.kl_div(log_q, log_p, reduction="sum", log_target=True) / max(len(logits), 1)


class _Places:
    """What the states of one depth are to predict: entry i the token after position i + depth.

    Attributes:
        following: `[batch, length - depth] int64`, that token; `PAD_TOKEN` where it is not there or
            does not count.
        is_judged: `[batch, length - depth] bool`, where the target's own law of it counts.
    """

    def __init__(self, tokens: Tensor, first: Tensor, depth: int) -> None:
        following = F.pad(tokens[:, depth + 1 :], (0, 1), value=PAD_TOKEN)
        index = torch.arange(following.shape[1], device=tokens.device) + depth + 1
        counts = index >= first[:, None]
        self.following = torch.where(counts, following, PAD_TOKEN)
        self.depth = depth
        self.is_judged = counts & (tokens[:, depth:] != PAD_TOKEN)


def draft_columns(module: MTP, tokens: Tensor, chosen: Tensor | None = None) -> Tensor:
    """Return the column of the draft logits of each token, -1 where there is none.

    Args:
        module: has the draft vocabulary.
        tokens: `[...] int64`, target ids; negative ones have no column.
        chosen: `[n] int64`, the only columns there are; None = all.
    """
    ids = module.draft_to_target
    if ids is None:
        ids = torch.arange(module.target_vocab, device=tokens.device)
    if chosen is not None:
        ids = ids[chosen]
    inverse = torch.full((module.target_vocab,), -1, dtype=torch.int64, device=tokens.device)
    inverse[ids] = torch.arange(len(ids), device=tokens.device)
    return torch.where(tokens >= 0, inverse[tokens.clamp(min=0)], -1)


def _states(module: MTP, hidden: Tensor, tokens: Tensor, depth: int) -> list[Tensor]:
    """Return states `[batch, length - k, size]` for k = 1..depth, as `SequentialMTP` does."""
    if isinstance(module, SequentialMTP):
        found: list[Tensor] = module(hidden, tokens.clamp(min=0), depth)
        return found
    return [module.state(hidden[:, : hidden.shape[1] - k], k) for k in range(1, depth + 1)]


def _loss(
    module: MTP,
    state: Tensor,
    hidden: Tensor,
    places: _Places,
    name: LossName,
    columns: Tensor | None,
) -> Tensor:
    """Return the loss of one depth; logits are made for the places that count, no others."""
    depth = places.depth
    if name == "tokens":
        wanted = places.following != PAD_TOKEN
        found = draft_columns(module, places.following[wanted], columns)
        return next_tokens_loss(module.logits(state[wanted], depth, columns), found)
    wanted = places.is_judged
    with torch.no_grad():
        output = module.unembedding if columns is None else module.unembedding[columns]
        own = F.linear(hidden[:, depth:][wanted], output)
    compare = kl_loss if name == "kl" else overlap_loss
    return compare(module.logits(state[wanted], depth, columns), own)


def backward(
    module: MTP,
    hidden: Tensor,
    tokens: Tensor,
    weights: Sequence[float],
    *,
    loss: LossName = "tokens",
    first: Tensor | None = None,
    columns: Tensor | None = None,
) -> list[float]:
    """Accumulate the gradients of `sum_k weights[k] * loss_k`, one depth's logits in memory.

    Args:
        module: parallel heads or sequential modules.
        hidden: `[batch, length, size]`, the target's last hidden states. If it requires grad, the
            gradient goes on into the target.
        tokens: `[batch, length] int64`, `PAD_TOKEN` behind the end.
        weights: one per depth; depths behind the last weight that is not 0 are left out.
        loss: "tokens", "kl" or "overlap".
        first: `[batch] int64`, index of the first token of each sequence that counts as predicted;
            None = all count.
        columns: `[n] int64`, the columns of the draft vocabulary that are compared; None = all.

    Returns:
        the loss of each depth that was computed, unweighted.

    Raises:
        ValueError: another number of weights than depths.

    Example:
        >>> from spec_kernels.nn.mtp import MTPConfig, ParallelHeads
        >>> heads = ParallelHeads(MTPConfig("parallel", 4, 2), torch.eye(6, 4))
        >>> losses = backward(heads, torch.ones(1, 5, 4), torch.arange(5)[None], [1, 1])
        >>> len(losses), heads.heads[0].weight.grad is not None
        (2, True)
    """
    depth = module.config.depth
    require(
        len(weights) == depth, f"weights must have {depth} values, one per depth, got {weights}"
    )
    if first is None:
        first = torch.zeros_like(tokens[:, 0])
    last = max((k for k, weight in enumerate(weights, 1) if weight), default=0)
    states = _states(module, hidden, tokens, last)
    losses, gradients = [], []
    for k, state in enumerate(states, 1):
        leaf = state.detach().requires_grad_()
        value = _loss(module, leaf, hidden, _Places(tokens, first, k), loss, columns)
        (weights[k - 1] * value).backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        gradients.append(leaf.grad)
        losses.append(value.item())
    torch.autograd.backward(states, gradients)
    return losses


@dataclass(frozen=True)
class Acceptance:
    """How often drafts would be right, on text that the target is asked about token by token.

    Attributes:
        tokens: places judged.
        top1: per depth, share of places where the module's first id is the target's.
        survival: per depth, share of places where this depth and all before are right: tokens per
            round are 1 + their sum.
        loss: per depth, mean `kl` loss.
        hits: `[tokens, depth] bool`, whether the first id was right, place by place.
        sequence: `[tokens] int64`, the sequence of each place.
    """

    tokens: int
    top1: list[float]
    survival: list[float]
    loss: list[float]
    hits: Tensor
    sequence: Tensor


@torch.no_grad()
def measure_acceptance(
    module: MTP, corpus: Corpus, unembedding: Tensor, *, batch: int = 8
) -> Acceptance:
    """Measure acceptance by depth on held-out text, as greedy decoding would judge it.

    A place is a round: its root is a committed token, all depths draft behind it, and at depth k
    the target's own argmax over its whole vocabulary is what counts.

    Args:
        module: what drafts.
        corpus: the text.
        unembedding: `[vocab, size]`, the target's.
        batch: sequences at a time.
    """
    depth = module.config.depth
    hits, sequences = [], []
    losses, count = torch.zeros(depth), torch.zeros(depth)
    for start in range(0, len(corpus.tokens), batch):
        rows = slice(start, start + batch)
        tokens = corpus.tokens[rows].to(unembedding.device)
        hidden = corpus.hidden[rows].to(unembedding.device, unembedding.dtype)
        first = corpus.first[rows].to(unembedding.device)
        own = F.linear(hidden, unembedding).argmax(-1)
        # all depths are judged at the places that the deepest one has: those of depth 1 there
        wanted = _Places(tokens, first, 1).is_judged[:, : tokens.shape[1] - depth]
        wanted = wanted & (tokens[:, depth:] != PAD_TOKEN)
        found = []
        for k, state in enumerate(_states(module, hidden, tokens, depth), 1):
            logits = module.logits(state[:, : wanted.shape[1]][wanted], k)
            drafted = logits.argmax(-1)
            if module.draft_to_target is not None:
                drafted = module.draft_to_target[drafted]
            after = slice(k, k + wanted.shape[1])
            found.append((drafted == own[:, after][wanted]).cpu())
            target_logits = F.linear(hidden[:, after][wanted], module.unembedding)
            losses[k - 1] += kl_loss(logits, target_logits).cpu() * len(logits)
            count[k - 1] += len(logits)
        hits.append(torch.stack(found, 1))
        sequences.append(wanted.nonzero()[:, 0].cpu() + start)
    right = torch.cat(hits)
    return Acceptance(
        tokens=len(right),
        top1=right.float().mean(0).tolist(),
        survival=right.cumprod(1).float().mean(0).tolist(),
        loss=(losses / count).tolist(),
        hits=right,
        sequence=torch.cat(sequences),
    )
