"""Hot calls of `accept` and `match`: the step of a batch of chains, from sampling parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import torch

from spec_kernels.kernels import accept, match
from spec_kernels.kernels._residual import draw_final, sum_runs, sum_weights
from spec_kernels.kernels.accept import residual_mass_kernel
from spec_kernels.types import Draft

from ..dry_run import CompiledLaunch
from ._call import HotCall, HotPath, line_of, tile_path
from ._rows import full, law_of, params_of, rows_of


class Configuration(NamedTuple):
    """One way to call the chain step.

    Attributes:
        name: in tables and in the budgets.
        vocab, stride: ids per row, and elements from row to row.
        dtype: of both rows of logits.
        rule: "block" or "token".
        drafts: "dense" (laws given) or "fixed".
        filters: with top-k, top-p and min-p.
        batch, gamma: requests, drafts each.
    """

    name: str
    vocab: int = 128256
    stride: int = 128256
    dtype: torch.dtype = torch.bfloat16
    rule: str = "block"
    drafts: str = "dense"
    filters: bool = False
    batch: int = 32
    gamma: int = 4


CONFIGURATIONS: Final = {
    c.name: c
    for c in (
        Configuration("bf16"),
        Configuration("f32", dtype=torch.float32),
        Configuration("bf16-token", rule="token"),
        Configuration("bf16-fixed", drafts="fixed", rule="token"),
        Configuration("bf16-filters", filters=True),
        Configuration("f32-filters", dtype=torch.float32, filters=True),
        Configuration("bf16-padded", vocab=50257, stride=50304),
        Configuration("bf16-odd", vocab=50257, stride=50257),
        Configuration("f32-odd", vocab=32001, stride=32001, dtype=torch.float32),
        Configuration("bf16-152k", vocab=151936, stride=151936),
    )
}
"""The hot configurations: vocabulary sizes divisible by 16 and not, row starts aligned and not."""


def make_step(
    c: Configuration, device: str = "meta", sharpness: float = 2.0
) -> Callable[[], object]:
    """Prepare a call of `kernels.accept` from sampling parameters, as the decoder makes it.

    Args:
        c: what to call it with.
        device: "meta" inside `dry_run`; "cpu" inside `watch`, with random rows, and drafts that
            the target rejects at once, so that every residual is needed.
        sharpness: standard deviation of random logits.

    Returns:
        A function that launches the step.
    """
    nodes, batch = c.gamma + 1, c.batch

    target = rows_of(batch * nodes, c.vocab, c.stride, c.dtype, device, sharpness)
    own = rows_of(batch * nodes, c.vocab, c.stride, c.dtype, device, sharpness)
    place = torch.arange(batch * nodes, dtype=torch.int32, device=device).view(batch, nodes)
    ids = place.long() * 37 % c.vocab
    law = None
    if c.drafts == "dense":
        if device != "meta":
            own.scatter_(1, ids.roll(-1, 1).view(-1, 1), 20.0)  # drafts that the target rejects
        law = law_of(own)
    draft = Draft(
        ids,
        full(batch, nodes, torch.int32, device),
        None,
        own if law is not None else None,
        law,
        place.roll(1, 1) if law is not None else None,
    )
    return partial(
        accept,
        draft,
        target,
        params_of(batch, device, filters=c.filters),
        place,
        torch.full((batch, nodes), 0.5, dtype=torch.float64, device=device),
        full(batch, 0.5, torch.float64, device),
        rule=c.rule,
        max_depth=c.gamma,
    )


def make_match(batch: int, nodes: int, device: str) -> Callable[[], object]:
    """Prepare a call of `kernels.match` with drafts that all match."""
    tokens = torch.zeros(batch, nodes, dtype=torch.int64, device=device)
    present = full(batch, nodes, torch.int32, device)
    draft = Draft(tokens, present, None, None, None, None)
    return partial(match, draft, tokens, max_depth=nodes - 1)


def _mass_paths(launch: CompiledLaunch) -> tuple[HotPath, ...]:
    """The pair of rows; and where a program finds the first argmax of a greedy request's row."""
    x = launch.arguments
    tile = math.prod(x["SHAPE"])
    through: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    if x["SOURCE"] == "slots" and x["inputs"].draft_row is not None:
        through = (line_of(residual_mass_kernel, "sum_tiles("),)
        avoid = (line_of(sum_weights, "HAS_Q, False, True)"),)  # masked tiles
    pairs = HotPath(x["step"] * tile, through=through, avoid=avoid, repeats=x["step"])
    if x["SOURCE"] != "tiles":
        return (pairs,)
    greedy = (line_of(residual_mass_kernel, "store_argmax("),)
    return pairs, HotPath(tile, "greedy", through=greedy)


def _decide_paths(launch: CompiledLaunch) -> tuple[HotPath, ...]:
    """The draw from the tile that holds the coin, whose pairs are weighed again.

    The compiler merges what the draws with and without q share, and names either of the two lines.
    """
    x = launch.arguments
    has_q = x["inputs"].draft_row is not None
    both = tuple(line_of(draw_final, f"SOURCE, {flag}, SHAPE") for flag in (True, False))
    avoid = (line_of(sum_runs, "HAS_Q, False, True)"),)
    fast = line_of(sum_runs, "HAS_Q, True, CUT)")
    through = (both[0] if has_q else both[1], fast)
    return (HotPath(math.prod(x["SHAPE"]), "draw", through=through, avoid=avoid, within=both),)


def _counts(c: Configuration) -> dict[str, int]:
    """Rows that must be read: every target row, and a pair per draft (block rule) or per rejecting
    request (token rule)."""
    pairs = 0
    if c.drafts == "dense":
        pairs = c.batch * (c.gamma if c.rule == "block" else 1)
    return {
        "batch": c.batch,
        "nodes": c.gamma + 1,
        "slots": c.batch * (c.gamma + 1),
        "pairs": pairs,
        "vocab": c.vocab,
        "itemsize": c.dtype.itemsize,
    }


def _prepare(c: Configuration, device: str) -> Callable[[], object]:
    return make_step(c if device == "meta" else c._replace(batch=1), device)


CALLS: Final = (
    *(
        HotCall(
            "accept",
            c.name,
            partial(_prepare, c),
            launches=4 if c.filters else 3,
            paths={
                "tile_stats_kernel": tile_path,
                "residual_mass_kernel": _mass_paths,
                "decide_kernel": _decide_paths,
            },
            counts=_counts(c._replace(batch=1)),
        )
        for c in CONFIGURATIONS.values()
    ),
    HotCall(
        "match", "int64", partial(make_match, 32, 5), launches=1, counts={"batch": 32, "nodes": 5}
    ),
)
