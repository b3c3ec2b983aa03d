"""Hot calls on trees: the step of a batch from sampling parameters, and the draw of children."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from spec_kernels.kernels import accept, sample
from spec_kernels.types import Draft

from ._call import HotCall
from ._rows import SHAPES, full, law_of, params_of, rows_of


class Configuration(NamedTuple):
    """One way to call the tree step.

    Attributes:
        name: in tables and in the budgets; begins with the shape of the rows.
        rule: "block" or "token".
        batch, nodes: requests, nodes each: a full binary tree of sampled children.
        launches: of the whole step.
    """

    name: str
    rule: str
    batch: int
    nodes: int
    launches: int


CONFIGURATIONS: Final = (
    Configuration("bf16-tree", "block", 4, 64, 13),
    Configuration("bf16-tree-token", "token", 4, 64, 7),
    Configuration("bf16-tree-1024", "block", 4, 1024, 13),
    Configuration("bf16-tree-1024-token", "token", 4, 1024, 7),
)


def make_tree_step(c: Configuration, device: str) -> Callable[[], object]:
    """Prepare a call of `kernels.accept` on trees; on "cpu" one small tree of each request."""
    vocab, stride, dtype = SHAPES[c.name.partition("-tree")[0]]
    batch, nodes = (c.batch, c.nodes) if device == "meta" else (1, 3)
    target = rows_of(batch * nodes, vocab, stride, dtype, device)
    own = rows_of(batch * nodes, vocab, stride, dtype, device)
    place = torch.arange(batch * nodes, dtype=torch.int32, device=device).view(batch, nodes)
    ids = place.long() * 37 % vocab
    parents = (torch.arange(nodes, dtype=torch.int32, device=device) - 1) // 2
    parents = parents.expand(batch, nodes).contiguous()
    row = torch.arange(batch, dtype=torch.int32, device=device)[:, None] * nodes + parents
    if device != "meta":
        row[:, 0] = -1
        own[row[0, 1:].long(), ids[0, 1:]] = 20.0  # drafts that the target rejects
    draft = Draft(ids, full(batch, nodes, torch.int32, device), parents, own, law_of(own), row)
    return partial(
        accept,
        draft,
        target,
        params_of(batch, device, filters=False),
        place,
        torch.full((batch, nodes), 0.5, dtype=torch.float64, device=device),
        full(batch, 0.5, torch.float64, device),
        rule=c.rule,
        max_depth=10,
    )


def make_children(noise: bool, device: str) -> Callable[[], object]:
    """Prepare the draw of four children per row, without replacement, beside two fixed ones."""
    rows, k = (32 if device == "meta" else 1), 4
    logits = rows_of(rows, *SHAPES["bf16"], device)
    place = torch.arange(rows, device=device)
    given: dict[str, Any] = {
        "coins": torch.full((rows, k), 0.5, dtype=torch.float64, device=device)
    }
    if noise:
        given = {"noise": (place, place)}
    fixed = torch.zeros(rows, 2, dtype=torch.int64, device=device)
    return partial(sample, logits, law_of(logits), k=k, excluded=fixed, **given)


def _counts(c: Configuration) -> dict[str, int]:
    """Of a root with two sampled children: one pass for each."""
    vocab, _, dtype = SHAPES[c.name.partition("-tree")[0]]
    return {
        "batch": 1,
        "nodes": 3,
        "slots": 3,
        "tiles": 16,
        "mixed": 0,
        "passes": 2,
        "rounds": 4 if c.rule == "block" else 2,
        "vocab": vocab,
        "draft_vocab": vocab,
        "itemsize": dtype.itemsize,
    }


CALLS: Final = (
    *(
        HotCall(
            "accept",
            c.name,
            partial(make_tree_step, c),
            launches=c.launches,
            counts=_counts(c),
        )
        for c in CONFIGURATIONS
    ),
    *(
        HotCall(
            "sample",
            name,
            partial(make_children, noise),
            launches=2,
            counts={"rows": 1, "vocab": SHAPES["bf16"][0], "itemsize": 2},
        )
        for name, noise in [("bf16-children", False), ("bf16-children-noise", True)]
    ),
)
