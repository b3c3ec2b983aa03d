"""What a sequential MTP module takes in: new tokens of each request, and its drafts behind them.

On a CPU, where reading a tensor costs less than any step of torch, places are found in lists;
elsewhere by the same steps on tensors, without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spec_kernels.proposers.levels import Shown
from spec_kernels.targets.base import can_read
from spec_kernels.types import PAD_TOKEN


class Line(NamedTuple):
    """What a module takes in.

    Attributes:
        tokens: `[batch, width] int64`; the root is the last new token, drafts hang on it.
        num_nodes: `[batch] int32`; what stands behind is arbitrary.
        parents: `[batch, width] int32`, or None: chains.
        source: `[batch, width] int64`, where the state in front of each token is: among those that
            wait for the module, or behind these among those of the module above.
        place: `[batch, n] int64`, where the state of each new token and draft is among the computed
            ones; None = in order.
        num_new: `[batch] int64`, new tokens, the root the last of them; they count those at the
            beginning of a text that the module has no entry for.
        counts: the same on the host, or None.
    """

    tokens: Tensor
    num_nodes: Tensor
    parents: Tensor | None
    source: Tensor
    place: Tensor | None
    num_new: Tensor
    counts: list[int] | None


class Fed(NamedTuple):
    """What a module has taken in in this round.

    Attributes:
        start: `[batch] int64`, position of its first new token.
        line: what it took in.
        most: new tokens of a request, a bound on the host.
        states: `[batch, n, size]`, what it gave at new tokens and drafts.
    """

    start: Tensor
    line: Line
    most: int
    states: Tensor


def missing(depth: int, start: Tensor) -> Tensor:
    """Return how many of its new tokens a module has no entry for: a text's first `depth`."""
    return (depth - start).clamp(min=0)


def line_up(
    depth: int,
    text: Tensor,
    start: Tensor,
    ends: Tensor,
    shown: Shown,
    waiting: int,
    above: Fed | None,
    most: int,
) -> Line:
    """Line up what is new to a module.

    Args:
        depth: of the module.
        text: `[batch, capacity] int64`, committed tokens.
        start: `[batch] int64`, the first of them that is new.
        ends: `[batch] int64`, behind the last of them; 0 = absent.
        shown: the drafts, if its depth is not 0.
        waiting: states that wait for the module.
        above: what the module above has taken in.
        most: a bound of the new tokens.
    """
    if can_read(start):
        return _of_few(depth, text, start, ends, shown, waiting, above)
    return _of_many(depth, text, start, ends, shown, waiting, above, most)


def _of_few(
    depth: int,
    text: Tensor,
    start: Tensor,
    ends: Tensor,
    shown: Shown,
    waiting: int,
    above: Fed | None,
) -> Line:
    """Do as `line_up`, on the host."""
    starts, stops, nodes = start.tolist(), ends.tolist(), shown.num_nodes.tolist()
    first = min(starts)
    texts, drafts = text[:, first : max(*stops, first)].tolist(), shown.tokens.tolist()
    hung = None if shown.parents is None else shown.parents.tolist()
    ahead = starts if above is None else above.start.tolist()
    last = 0 if above is None else above.states.shape[1] - 1
    counts, tokens, parents, sources, places = [], [], [], [], []
    for b, (begin, stop, count) in enumerate(zip(starts, stops, nodes, strict=True)):
        new, skip = max(stop - begin, 0), max(depth - begin, 0)
        own = texts[b][begin - first :][:new]
        front = list(range(-1, new - 1))
        if new and shown.depth:
            own += drafts[b][1:count]
            over = range(count - 1) if hung is None else hung[b][1:count]
            front += [new - 1 + parent for parent in over]
        known = [parent - ahead[b] + begin for parent in front]
        found = [
            min(i, waiting - 1) if above is None or place < 0 else waiting + min(place, last)
            for i, place in enumerate(known)
        ]
        counts.append(new)
        tokens.append(own[skip:])
        parents.append([max(parent - skip, -1) for parent in front[skip:]])
        sources.append(found[skip:])
        places.append([max(i - skip, 0) for i in range(len(own))])
    width = max(1, *map(len, tokens))
    has_siblings = hung is not None and shown.depth > 0
    return Line(
        _padded(tokens, width, PAD_TOKEN),
        torch.tensor([len(row) for row in tokens], dtype=torch.int32),
        _padded(parents, width, -1).to(torch.int32) if has_siblings else None,
        _padded(sources, width, 0),
        None if min(starts) >= depth else _padded(places, max(1, *map(len, places)), 0),
        torch.tensor(counts),
        counts,
    )


def _padded(rows: Sequence[list[int]], width: int, value: int) -> Tensor:
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def _of_many(
    depth: int,
    text: Tensor,
    start: Tensor,
    ends: Tensor,
    shown: Shown,
    waiting: int,
    above: Fed | None,
    most: int,
) -> Line:
    """Do as `line_up`, on tensors that are as wide as they may have to be."""
    count, drafts = (ends - start).clamp(min=0), shown.tokens.shape[1] - 1 if shown.depth else 0
    root, limit = count[:, None] - 1, text.shape[1] - 1
    place = torch.arange(max(most, 1) + drafts, device=start.device).expand(len(start), -1)
    is_new = place <= root
    tokens = text.gather(1, (start[:, None] + place).clamp(max=limit))
    parents, num_nodes = place - 1, count
    if drafts:
        node = (place - root).clamp(0, drafts)
        tokens = torch.where(is_new, tokens, shown.tokens.gather(1, node))
        num_nodes = torch.where(count > 0, root[:, 0] + shown.num_nodes.clamp(min=1), 0)
        if shown.parents is not None:
            hung = root + shown.parents.long().gather(1, node)
            parents = torch.where(is_new, parents, hung)
    skip = missing(depth, start)[:, None]
    taken = (place + skip).clamp(max=place.shape[1] - 1)
    tokens, parents = tokens.gather(1, taken), parents.gather(1, taken)
    source = taken.clamp(max=waiting - 1)
    if above is not None:
        known = parents - (above.start - start)[:, None]
        behind = waiting + known.clamp(max=above.states.shape[1] - 1)
        source = torch.where(known >= 0, behind, source)
    return Line(
        tokens,
        (num_nodes - skip[:, 0]).clamp(min=0).to(torch.int32),
        (parents - skip).clamp(min=-1).to(torch.int32)
        if drafts and shown.parents is not None
        else None,
        source,
        (place - skip).clamp(min=0),
        count,
        None,
    )
