"""Draft with parallel heads: every depth from the one hidden state that the last round left.

    q_k = law of head k at z_(r-1)            r = position of the root; the k-th draft is x_(r+k)

No head sees the drafts before it, so all nodes of a level share one law: a chain draws its k-th
token from q_k, a tree draws the children of every node of depth k - 1 from q_k, and the draft holds
one row per depth. There is no cache; what a rejected draft leaves is nothing.

With greedy requests and a chain this is blockwise parallel decoding: the heads propose a block, the
target's own argmax keeps the longest prefix that it agrees with, and one token more.

Source: Stern et al. 2018, "Blockwise parallel decoding for deep autoregressive models"; Cai et al.
2024 (Medusa); Gloeckle et al. 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_kernels._check import require
from spec_kernels.nn.mtp import ParallelHeads
from spec_kernels.proposers.base import DecodingState, root_draft
from spec_kernels.proposers.best_first import BestFirst
from spec_kernels.proposers.levels import Grower, Growing, Shown
from spec_kernels.types import Acceptance, Draft


class HeadsProposer:
    """Propose with `ParallelHeads` over the target's last hidden state.

    Args:
        heads: trained for the target, on its device. A reduced draft vocabulary brings its ids
            along: tokens outside it are never drafted.
        temperature: of the drafts of sampling requests; None = each request's own.
        tree: children of each node by depth, the parents of a tree, or `BestFirst`; at most as deep
            as there are heads; None = a chain.
        children: how siblings are chosen, as of `DraftModelProposer`.

    Raises:
        ValueError: the temperature is out of range, the tree is none or too deep, or children is
            unknown; when a batch runs: the hidden states or the vocabulary do not fit.

    Note:
        A prompt of one token has no hidden state before its root: its first round has no drafts.
    """

    def __init__(
        self,
        heads: ParallelHeads,
        *,
        temperature: float | None = None,
        tree: Sequence[int] | BestFirst | None = None,
        children: str = "sampled",
    ) -> None:
        self.heads, self.draft_to_target = heads, heads.draft_to_target
        ids, depth = heads.draft_to_target, heads.config.depth
        self.growing = Growing(tree, children, temperature, ids, depth)
        self.replacement = self.growing.replacement

    def open(self, state: DecodingState, capacity: int) -> HeadsSession:
        """Start on a batch; nothing depends on its length."""
        return HeadsSession(self, state)


class HeadsSession:
    """The heads at work on one batch.

    Attributes:
        hidden: `[batch, size]`, the target's last hidden state in front of each root.
    """

    wants_hidden = True

    def __init__(self, proposer: HeadsProposer, state: DecodingState) -> None:
        self._heads = proposer.heads
        self._grower = Grower(proposer.growing, state)
        size = self._heads.config.hidden_size
        self.hidden = self._heads.unembedding.new_zeros(len(state.lens), size)
        self._before = self.hidden

    def prefill(
        self, state: DecodingState, row: int, tokens: Sequence[int], hidden: Tensor | None
    ) -> None:
        """Remember the state at the last token of the prompt but one."""
        if hidden is not None and len(hidden):
            self.hidden = self.hidden.clone()
            self.hidden[row] = fit_hidden(hidden, self.hidden)[-1]

    @torch.no_grad()
    def propose(self, state: DecodingState, limits: Tensor, gamma: int) -> Draft:
        """Draw drafts up to `limits[b]` deep, each level from one head."""
        self._before = self.hidden
        draft = root_draft(state, limits)
        if gamma == 0:
            return draft
        limits = torch.where(state.lens > 1, limits, limits.clamp(max=0))
        return self._grower.grow(state, draft.tokens, self._logits(1), limits, gamma, self._feed)

    def commit(self, state: DecodingState, result: Acceptance, hidden: Tensor | None) -> None:
        """Take the state at the last accepted node: it stands in front of the next root."""
        assert hidden is not None
        last = result.path.gather(1, result.accepted_lens[:, None].long())
        index = last.clamp(min=0).long()[..., None].expand(-1, -1, hidden.shape[2])
        states = fit_hidden(hidden, self.hidden).gather(1, index)[:, 0]
        self.hidden = torch.where(last >= 0, states, self.hidden)

    def rollback(self, state: DecodingState) -> None:
        """Return to the states before the round."""
        self.hidden = self._before

    def _feed(self, shown: Shown) -> Tensor:
        return self._logits(shown.depth + 1)

    def _logits(self, depth: int) -> Tensor:
        """Return the row of one head for each request, `[batch, 1, vocab]`."""
        return self._heads.logits(self._heads.state(self.hidden, depth), depth)[:, None]


def fit_hidden(hidden: Tensor, like: Tensor) -> Tensor:
    """Return the target's hidden states in the dtype of the modules, `like [..., size]`.

    Raises:
        ValueError: they have another size.
    """
    size, have = like.shape[-1], hidden.shape[-1]
    require(have == size, f"the modules need hidden states of size {size}, the target has {have}")
    return hidden.to(like.dtype)
