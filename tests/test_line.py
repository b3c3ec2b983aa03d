"""What MTP modules take in: found in lists and found on tensors, it is the same."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from spec_kernels.proposers import _line
from spec_kernels.proposers._line import Fed, Line
from spec_kernels.proposers.levels import Shown
from spec_kernels.types import PAD_TOKEN

BATCH, CAPACITY = 4, 12


def both(
    rng: random.Random, depth: int, starts: list[int], ends: list[int], shown: Shown, above: bool
) -> tuple[Line, Line]:
    text = torch.arange(100, 100 + BATCH * CAPACITY).view(BATCH, CAPACITY)
    start, stop = torch.tensor(starts), torch.tensor(ends)
    most = max(1, *(e - s for s, e in zip(starts, ends, strict=True)))
    waiting, before = most + rng.randrange(3), None
    if above:
        ahead = torch.tensor([rng.choice([s, max(s - 2, 0), s + 1]) for s in starts])
        states = torch.zeros(BATCH, most + 6, 1)
        none = _line._of_many(1, text, ahead, stop, shown, waiting, None, most)
        before = Fed(ahead, none, most, states)
    arguments = (depth, text, start, stop, shown, waiting, before)
    return _line._of_few(*arguments), _line._of_many(*arguments, most)


def draft(rng: random.Random, *, is_tree: bool, is_root: bool) -> Shown:
    if is_root:
        nodes = torch.tensor([rng.randrange(2) for _ in range(BATCH)], dtype=torch.int32)
        return Shown(torch.full((BATCH, 1), 7), None, 0, 0, [0], nodes)
    tokens = torch.arange(BATCH * 5).view(BATCH, 5)
    num_nodes = torch.tensor([rng.choice([0, 1, 3, 5]) for _ in range(BATCH)], dtype=torch.int32)
    tokens[torch.arange(5) >= num_nodes[:, None]] = PAD_TOKEN
    parents = torch.tensor([[-1, 0, 0, 1, rng.choice([1, 2, 3])] for _ in range(BATCH)]).int()
    return Shown(tokens, parents if is_tree else None, 3, 2, [3, 4], num_nodes)


@pytest.mark.parametrize("seed", range(60))
def test_lists_say_what_tensors_say(seed: int) -> None:
    rng = random.Random(seed)
    depth, is_late = rng.choice([1, 2, 3]), seed % 3 > 0
    starts = [rng.randrange(depth if is_late else 0, 6) for _ in range(BATCH)]
    ends = [rng.choice([0, s, s + 1, s + 3]) for s in starts]
    shown = draft(rng, is_tree=seed % 2 > 0, is_root=seed % 5 == 0)
    one, two = both(rng, depth, starts, ends, shown, seed % 4 > 1)
    assert one.num_nodes.tolist() == two.num_nodes.tolist()
    assert one.num_new.tolist() == two.num_new.tolist() == one.counts
    assert (one.parents is None) == (two.parents is None)

    def rows(part: Tensor | None, lens: list[int]) -> list[list[int]]:
        assert part is not None
        return [row[:n] for row, n in zip(part.tolist(), lens, strict=True)]

    lens = one.num_nodes.tolist()
    for name in ("tokens", "source", *(["parents"] if one.parents is not None else [])):
        assert rows(getattr(one, name), lens) == rows(getattr(two, name), lens), name
    skipped = [max(depth - s, 0) for s in starts]
    whole = [n + skip if n else 0 for n, skip in zip(lens, skipped, strict=True)]
    order = [list(range(n)) for n in whole]
    assert rows(two.place, whole) == (order if one.place is None else rows(one.place, whole))
