"""What a decoder must offer to be decoded speculatively: the protocols, and what caches share.

A `Target` turns token ids into logits and keeps K/V in a cache that it opens itself. One forward
takes a whole draft: node 0 is the root (the last committed token, not yet in the cache), behind it
come the drafts, a chain or a tree. Node i stands at position `context_lens[b] + depth(i)`, and its
K/V are written to row `context_lens[b] + i`; it sees the context, its ancestors and itself. `keep`
then makes the accepted nodes permanent: their rows move to the front, the length follows, and the
others are overwritten by the next step.

The loop invariant: the cache holds K/V of every committed token but the last, so `context_lens[b]`
is also the position of the root of request b.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


class TargetOutput(NamedTuple):
    """What one forward over a draft computed.

    Attributes:
        logits: `[rows, vocab]` float, packed in any order. The caller may write into it.
        row: `[batch, nodes] int32`: row of `logits` that was computed at node i, so the law of the
            token *after* node i; -1 behind `num_nodes`.
        hidden: `[rows, size]` float, the last hidden states in the order of `logits`, or None if
            they were not asked for.
    """

    logits: Tensor
    row: Tensor
    hidden: Tensor | None = None

    def owners(self) -> tuple[Tensor, Tensor]:
        """Return the request, or -1, and the node of each row of logits, `[rows] int32` each.

        Example:
            >>> row = torch.tensor([[0, -1], [2, 1]], dtype=torch.int32)
            >>> TargetOutput(torch.zeros(4, 5), row).owners()
            (tensor([ 0,  1,  1, -1], dtype=torch.int32), tensor([0, 1, 0, 0], dtype=torch.int32))
        """
        (batch, nodes), rows, device = self.row.shape, len(self.logits), self.row.device
        index = torch.where(self.row >= 0, self.row, rows).long()
        request = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
        node = torch.arange(nodes, dtype=torch.int32, device=device)
        row_request = torch.full((rows + 1,), -1, dtype=torch.int32, device=device)
        row_node = torch.zeros_like(row_request)
        row_request[index] = request.expand(batch, nodes)
        row_node[index] = node.expand(batch, nodes)
        return row_request[:rows], row_node[:rows]

    def by_node(self) -> Tensor | None:
        """Return the hidden states by request and node, `[batch, nodes, size]`, if there are any;
        arbitrary behind `num_nodes`."""
        return None if self.hidden is None else self.hidden[self.row.clamp(min=0).long()]


class Cache(Protocol):
    """The K/V of a batch of requests: one row per request, each with its own length.

    The caches of `nn` are such caches. What is a host integer here costs no synchronisation.

    Attributes:
        context_lens: `[batch] int32`, committed rows of each request, on the target's device.
    """

    context_lens: Tensor

    def extend(self, nodes: int) -> None:
        """Make room for trees of so many nodes: they have more rows than positions."""
        ...

    def fill(self, *, required: bool = False) -> None:
        """Make all the room that requests may need, if there is enough.

        Args:
            required: raise `OutOfBlocks` if there is not; nothing changed.
        """
        ...

    def reserve(self, counts: Sequence[int]) -> None:
        """Make room for `counts[b]` nodes behind each context.

        Raises:
            OutOfBlocks: there is too little; nothing changed.
        """
        ...

    def keep(
        self, path: Tensor, accepted_lens: Tensor, *, lens: Sequence[int] | None = None
    ) -> None:
        """Make the root and the accepted nodes of the last forward permanent.

        Their K/V move to the front of the draft's rows: node `path[b, j]` to row
        `context_lens[b] + j`. A failure leaves the committed rows as they were.

        Args:
            path: `[batch, max_depth + 1] int32`: kept nodes, root first, each a child of the one
                before it, then -1. A row of -1 (absent request) keeps its length.
            accepted_lens: `[batch] int32`: accepted drafts; `context_lens` grows by this plus one.
            lens: the new lengths, where the caller has read them: what lies behind is released.
        """
        ...

    def truncate(self, lens: Tensor | Sequence[int]) -> None:
        """Set `context_lens` to `lens`, none of them above the present length; host integers
        release what lies behind."""
        ...

    def trim(self, bounds: Sequence[int]) -> None:
        """Release what lies behind `bounds[b]` rows, where no length reaches."""
        ...

    def free(self, request: int) -> None:
        """Empty a request that has ended."""
        ...


@runtime_checkable
class Target(Protocol):
    """A decoder model behind its cache. Draft models are driven through the same protocol.

    Attributes:
        vocab_size: width of the logits.
        max_length: most positions that the model can hold, or None without a limit.
        device: where the model computes.
    """

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    @property
    def max_length(self) -> int | None:
        """Most positions, or None."""
        ...

    @property
    def device(self) -> torch.device:
        """Where tokens and caches are."""
        ...

    def open(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache for `batch` requests of at most `capacity` positions each."""
        ...

    def prefill(
        self, cache: Cache, row: int, tokens: Sequence[int], *, hidden: bool = False
    ) -> Tensor | None:
        """Append `tokens` (possibly none) to request `row` and commit them, without logits.

        Returns:
            `[len(tokens), size]` last hidden states if `hidden` and there are tokens, else None.
        """
        ...

    def forward(
        self,
        tokens: Tensor,
        num_nodes: Tensor,
        cache: Cache,
        *,
        parents: Tensor | None = None,
        start: int = 0,
        hidden: bool = False,
    ) -> TargetOutput:
        """Compute the logits at every node and write their K/V behind `cache.context_lens`.

        On a CPU the rows are reserved here; elsewhere the caller does so before. Lengths are not
        changed: call `cache.keep` or forget the nodes. A failure leaves the cache
        as it was. A node whose K/V are NaN spoils itself and its descendants, nothing else.

        Args:
            tokens: `[batch, nodes] int64`. Ids below `vocab_size`, or `PAD_TOKEN` behind
                `num_nodes`.
            num_nodes: `[batch] int32`; 0 = absent request.
            cache: opened by this target.
            parents: `[batch, nodes] int32`, a tree per request as in `Draft`; None = chains.
            start: first node to compute, for a draft model that extends a tree level by level. The
                nodes before it were computed by earlier forwards since the last `keep`, and their
                K/V are still in place; they get no logits.
            hidden: also return the last hidden states.
        """
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings of `tokens`, `[...] int64`, as `[..., size]`."""
        ...


@runtime_checkable
class ExitTarget(Target, Protocol):
    """A target whose first layers can be run alone."""

    def exit(self, layers: int) -> Target:
        """Return the target that stops behind its first layers and applies its head there.

        It shares the weights, and is driven with the caches that *this* target opens: it writes and
        reads their first layers only, whose K/V are the same for both.

        Raises:
            ValueError: layers is not in 1..number of layers.
            NotImplementedError: the model cannot stop early.
        """
        ...


class ChainCache:
    """Lengths of a cache: all there is to keep where the accepted nodes already lie in place.

    Example:
        >>> cache = ChainCache(2, device="cpu")
        >>> cache.keep(torch.tensor([[0, 1, -1], [-1, -1, -1]]), torch.tensor([1, 0]))
        >>> cache.context_lens
        tensor([2, 0], dtype=torch.int32)
    """

    def __init__(self, batch: int, *, device: torch.device | str) -> None:
        self.context_lens = torch.zeros(batch, dtype=torch.int32, device=device)

    def extend(self, nodes: int) -> None:
        """Do nothing: there is always room."""

    def fill(self, *, required: bool = False) -> None:
        """Do nothing."""

    def reserve(self, counts: Sequence[int]) -> None:
        """Do nothing."""

    def keep(
        self, path: Tensor, accepted_lens: Tensor, *, lens: Sequence[int] | None = None
    ) -> None:
        """Advance by `accepted_lens + 1` where the request is present."""
        grown = self.context_lens + accepted_lens.to(torch.int32) + 1
        self.context_lens = torch.where(path[:, 0] >= 0, grown, self.context_lens)

    def truncate(self, lens: Tensor | Sequence[int]) -> None:
        """Set the lengths, each to at most its present value."""
        most = torch.as_tensor(lens, dtype=torch.int32, device=self.context_lens.device)
        self.context_lens = torch.minimum(self.context_lens, most)

    def trim(self, bounds: Sequence[int]) -> None:
        """Do nothing: there is nothing to release."""

    def free(self, request: int) -> None:
        """Set the length of a request to 0."""
        self.context_lens = self.context_lens.clone()
        self.context_lens[request] = 0


def can_read(tensor: Tensor) -> bool:
    """Tell that the host may read a tensor without waiting: on the CPU.

    Example:
        >>> can_read(torch.zeros(2))
        True
    """
    return tensor.device.type == "cpu"


def contain_faults(key: Tensor, value: Tensor, sees: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keep NaN and inf of a draft's K/V from nodes that must not see them: 0 * NaN is NaN.

    Args:
        key, value: `[tokens, heads, size]`, new rows.
        sees: `[tokens, tokens] bool`, what each node sees among them.

    Returns:
        key and value with 0 in the rows of faulty nodes, and `[tokens]` to be added to the output
        of each node: NaN where it sees one of them, else 0.

    Example:
        >>> rows = torch.tensor([1.0, torch.nan, 2.0]).view(3, 1, 1)
        >>> sees = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
        >>> key, _, poison = contain_faults(rows, rows, sees)
        >>> key.flatten(), poison
        (tensor([1., 0., 2.]), tensor([0., nan, 0.]))
    """
    total = key.sum((1, 2), dtype=torch.float32) + value.sum((1, 2), dtype=torch.float32)
    flaw = total * 0.0
    is_bad = (flaw != 0.0)[:, None, None]
    poison = torch.where(sees, flaw, 0.0).sum(1)
    return key.masked_fill(is_bad, 0.0), value.masked_fill(is_bad, 0.0), poison


def padded_rows(num_nodes: Tensor, batch: int, nodes: int, start: int) -> Tensor:
    """Number the nodes from `start` on in the padded layout, `[batch, nodes] int32`; -1 elsewhere.

    Example:
        >>> padded_rows(torch.tensor([3, 2]), batch=2, nodes=3, start=1)
        tensor([[-1,  0,  1],
                [-1,  2, -1]], dtype=torch.int32)
    """
    node = torch.arange(nodes, device=num_nodes.device)
    request = torch.arange(batch, device=num_nodes.device)[:, None]
    row = request * (nodes - start) + node - start
    real = (node >= start) & (node < num_nodes[:, None])
    return torch.where(real, row, -1).to(torch.int32)
