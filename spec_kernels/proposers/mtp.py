"""Draft with sequential MTP modules: each depth reads the token that the depth before drafted.

Module k takes in a token t, of the text or drafted, together with the state that module k - 1 gave
for the token in front of it (module 0 is the target: its last hidden state), and predicts the token
behind t. So its entry for the token at position n stands at position n - k:

    S_k(t) = module k (S_(k-1)(token in front of t), Emb(t))      depth k is drawn from S_k

A round, r being the position of the root. The tokens committed by the last round are new to all
modules, the root the last of them; the states in front of them are known.

1. module 1 takes in the new tokens; depth 1 is drawn from S_1(root);
2. module 2 takes in the new tokens and the drafts of depth 1, depth 2 is drawn from these; and so
   on: module k sees the whole way to every draft that it continues, as it does in training;
3. after the verification every module keeps the new tokens and forgets the drafts, whether they
   were accepted or not: the next round takes the accepted ones in again, with true states.

So between rounds the cache of module k holds what a fresh prefill of the tokens before the last
round's would leave, and no number in it comes from a draft.

Source: DeepSeek-V3 technical report 2024 (section 2.2); Li et al. 2024 (EAGLE) where one module
serves every depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spec_kernels._check import require
from spec_kernels.nn import ContiguousKVCache, KVShape
from spec_kernels.nn.mtp import SequentialMTP
from spec_kernels.proposers.base import DecodingState, needed_width, root_draft
from spec_kernels.proposers.best_first import BestFirst
from spec_kernels.proposers.heads import fit_hidden
from spec_kernels.proposers.levels import Grower, Growing, Shown, num_nodes_of
from spec_kernels.targets import Nodes, make_room
from spec_kernels.types import PAD_TOKEN, Acceptance, Draft


class MTPProposer:
    """Propose with `SequentialMTP` modules over the target's last hidden states.

    Args:
        mtp: trained for the target, on its device. A reduced draft vocabulary brings its ids along:
            tokens outside it are never drafted.
        depth: deepest draft; by default one per module. A shared module may serve more depths.
        temperature: of the drafts of sampling requests; None = each request's own.
        tree: children of each node by depth, the parents of a tree, or `BestFirst`; None = a chain.
        children: how siblings are chosen, as of `DraftModelProposer`.

    Raises:
        ValueError: depth is below 1, or above the number of modules that share nothing; the
            temperature is out of range, the tree is none or too deep, or children is unknown; when
            a batch runs: the hidden states or the vocabulary do not fit.

    Note:
        Every round feeds all `depth` modules, whatever it drafts. A request with fewer tokens than
        depths drafts as many as it has in front of its root.
    """

    def __init__(
        self,
        mtp: SequentialMTP,
        *,
        depth: int | None = None,
        temperature: float | None = None,
        tree: Sequence[int] | BestFirst | None = None,
        children: str = "sampled",
    ) -> None:
        most = mtp.config.depth
        self.depth = most if depth is None else depth
        require(self.depth >= 1, f"depth must be at least 1, got {depth}")
        require(
            self.depth <= most or mtp.config.is_shared,
            f"depth must be at most the number of modules, {most}, got {depth}",
        )
        self.mtp, self.draft_to_target = mtp, mtp.draft_to_target
        self.growing = Growing(tree, children, temperature, mtp.draft_to_target, self.depth)
        self.replacement = self.growing.replacement

    def open(self, state: DecodingState, capacity: int) -> MTPSession:
        """Open a cache for every depth."""
        return MTPSession(self, state, capacity)


class _Memory(NamedTuple):
    """What a session remembers between rounds. Tensors are replaced, never written.

    Attributes:
        start: `[batch] int64`, position of the first token that is new to the modules.
        width: most new tokens of a request, a bound on the host.
        hidden: `[batch, width, size]`, the target's state in front of each new token.
        carried: for each module the state in front of the first new token, `[batch, size]`.
    """

    start: Tensor
    width: int
    hidden: Tensor
    carried: list[Tensor]


class _Line(NamedTuple):
    """What a module takes in: the new tokens of each request, and behind them its drafts.

    Attributes:
        tokens: `[batch, width] int64`; the root is the last new token, drafts hang on it.
        parents: `[batch, width] int64`, -1 for the first.
        length: `[batch] int64`.
        is_tree: whether any of them has siblings.
    """

    tokens: Tensor
    parents: Tensor
    length: Tensor
    is_tree: bool


class MTPSession:
    """The modules at work on one batch.

    Attributes:
        caches: of each depth, the first first. With n tokens before those of the last round, the
            cache of depth k holds n - k entries, or none.
    """

    wants_hidden = True

    def __init__(self, proposer: MTPProposer, state: DecodingState, capacity: int) -> None:
        self._mtp, self._depth = proposer.mtp, proposer.depth
        self._grower = Grower(proposer.growing, state)
        config, like = self._mtp.config, self._mtp.unembedding
        shape = KVShape(config.kv_heads, config.head_dim, config.head_dim)
        batch = len(state.lens)
        self.caches = [
            ContiguousKVCache(
                [shape], batch, max_length=capacity, dtype=like.dtype, device=like.device
            )
            for _ in range(self._depth)
        ]
        empty = like.new_zeros(batch, config.hidden_size)
        start = torch.zeros(batch, dtype=torch.int64, device=like.device)
        self._memory = _Memory(start, 1, empty[:, None], [empty] * self._depth)
        self._before = (self._memory, [cache.context_lens for cache in self.caches])
        self._count = start  # new tokens of this round
        self._states: list[Tensor] = []  # of this round, by module, in the places of its line

    @torch.no_grad()
    def prefill(
        self, state: DecodingState, row: int, tokens: Sequence[int], hidden: Tensor | None
    ) -> None:
        """Take the prompt but its last token in, module by module."""
        start, width, first, carried = self._memory
        start, first, carried = start.clone(), first.clone(), [x.clone() for x in carried]
        start[row] = len(tokens)
        device = start.device
        ids = torch.tensor([list(tokens)], dtype=torch.int64, device=device)
        states = first[row, :0] if hidden is None else fit_hidden(hidden, first)
        if len(states):
            first[row, 0] = states[-1]
        for depth, cache in enumerate(self.caches, 1):
            cache.free(row)
            length = len(tokens) - depth
            if length <= 0:
                continue
            counts = [length if b == row else 0 for b in range(len(start))]
            num_nodes = torch.tensor(counts, dtype=torch.int32, device=device)
            if make_room(cache, num_nodes, length, is_tree=False) is None:
                cache.reserve(counts)
            new = Nodes(cache, num_nodes, length, counts, contained=False)
            states = self._run(depth, states[:length], ids[0, depth:], new)
            cache.advance(counts)
            carried[depth - 1][row] = states[-1]
        self._memory = _Memory(start, width, first, carried)

    @torch.no_grad()
    def propose(self, state: DecodingState, limits: Tensor, gamma: int) -> Draft:
        """Draw drafts up to `limits[b]` deep, and feed every module what is new to it."""
        self._before = (self._memory, [cache.context_lens for cache in self.caches])
        draft = root_draft(state, limits)
        self._count = torch.where(limits >= 0, state.lens - self._memory.start, 0)
        self._states, self._new = [], self._new_tokens(state)
        alone = Shown(draft.tokens, None, 0, 0, [0], limits >= 0)
        logits = self._feed(alone)
        if gamma > 0:
            in_front = state.root_positions.to(torch.int32)
            limits = limits.minimum(in_front)
            draft = self._grower.grow(state, draft.tokens, logits, limits, gamma, self._feed)
        while len(self._states) < self._depth:
            self._take_in(alone)
        return draft

    def commit(self, state: DecodingState, result: Acceptance, hidden: Tensor | None) -> None:
        """Keep the new tokens in every cache; the kept nodes' states come before the next ones."""
        assert hidden is not None
        start, _, first, carried = self._memory
        is_present = result.path[:, :1] >= 0
        states = _pick(fit_hidden(hidden, first), result.path.clamp(min=0).long())
        root = (self._count[:, None] - 1).clamp(min=0)
        for depth, cache in enumerate(self.caches, 1):
            kept = self._count - (depth - start).clamp(min=0)
            place = torch.arange(self._new.shape[1], device=kept.device)
            rows = torch.where(place < kept[:, None], place, -1).to(torch.int32)
            cache.holds_tree = False  # what is kept lies in front
            cache.keep(rows, (kept - 1).clamp(min=0))
        carried = [
            torch.where(is_present, _pick(found, root)[:, 0], old)
            for found, old in zip(self._states, carried, strict=True)
        ]
        start = torch.where(is_present[:, 0], state.lens.long(), start)
        self._memory = _Memory(start, states.shape[1], states, carried)

    def rollback(self, state: DecodingState) -> None:
        """Return to what was there before the round."""
        self._memory, lens = self._before
        for cache, length in zip(self.caches, lens, strict=True):
            cache.truncate(length)

    def _new_tokens(self, state: DecodingState) -> Tensor:
        """Return the committed tokens that the modules have not seen, `[batch, width]`."""
        width = max(needed_width(self._count, self._memory.width), 1)
        offset = torch.arange(width, device=self._count.device)
        columns = (self._memory.start[:, None] + offset).clamp(max=state.tokens.shape[1] - 1)
        tokens = state.tokens.gather(1, columns)
        return torch.where(offset < self._count[:, None], tokens, PAD_TOKEN)

    def _feed(self, shown: Shown) -> Tensor:
        """Feed the next module, and return its logits behind the nodes wanted."""
        self._take_in(shown)
        nodes = torch.tensor(shown.nodes, device=self._count.device)
        states = self._states[-1]
        place = (self._count[:, None] - 1 + nodes).clamp(0, states.shape[1] - 1)
        return self._mtp.logits(_pick(states, place), len(self._states))

    def _take_in(self, shown: Shown) -> None:
        """Let the next module take in the new tokens and the drafts so far; note its states."""
        depth, memory = len(self._states) + 1, self._memory
        line = self._line(shown)
        width = line.tokens.shape[1]
        # Module k has no entry for the first k tokens of a text: leave them out.
        skip = (depth - memory.start).clamp(min=0)[:, None]
        place = torch.arange(width, device=skip.device)
        taken = (place + skip).clamp(max=width - 1)
        tokens, above = line.tokens.gather(1, taken), line.parents.gather(1, taken)
        if depth == 1:  # no draft among them
            inputs = _pick(memory.hidden, taken)
        else:
            states, carried = self._states[-1], memory.carried[depth - 2]
            found = _pick(states, above.clamp(min=0))
            inputs = torch.where((above >= 0)[..., None], found, carried[:, None])
        num_nodes = (line.length - skip[:, 0]).clamp(min=0).to(torch.int32)
        parents = (above - skip).clamp(min=-1).to(torch.int32) if line.is_tree else None
        cache = self.caches[depth - 1]
        counts = make_room(cache, num_nodes, width, is_tree=line.is_tree)
        new = Nodes(cache, num_nodes, width, counts, parents=parents)
        chosen = new.pick(torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape))
        given = (depth, inputs.flatten(0, 1)[chosen], tokens.flatten()[chosen], new)
        out = self._run(*given)
        if new.is_spoiled(out):
            out = self._run(*given)
        if not len(out):
            out = inputs.new_zeros(1, inputs.shape[2])
        back = new.row.clamp(min=0).long().gather(1, (place - skip).clamp(min=0))
        self._states.append(out[back])

    def _line(self, shown: Shown) -> _Line:
        """Put the drafts behind the new tokens of each request."""
        drafts = shown.tokens.shape[1] - 1 if shown.depth else 0
        place = torch.arange(self._new.shape[1] + drafts, device=self._new.device)
        place = place.expand(len(self._new), -1)
        root = self._count[:, None] - 1
        if not drafts:
            return _Line(self._new, place - 1, self._count, is_tree=False)
        nodes = num_nodes_of(shown.tokens)
        nodes = torch.where(shown.is_wanted, nodes, nodes.clamp(max=1))
        length = torch.where(self._count > 0, self._count - 1 + nodes, 0)
        node = (place - root).clamp(0, drafts)
        is_new = place <= root
        old = self._new.gather(1, place.clamp(max=self._new.shape[1] - 1))
        tokens = torch.where(is_new, old, shown.tokens.gather(1, node))
        above = place - 1
        if shown.parents is not None:
            hung = root + shown.parents.long().gather(1, node)
            above = torch.where(is_new, above, hung)
        return _Line(tokens, above, length, is_tree=shown.parents is not None)

    def _run(self, depth: int, hidden: Tensor, tokens: Tensor, new: Nodes) -> Tensor:
        """Return the states of one module at new nodes, `[tokens, size]`."""

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return new.attend(0, query[0], key[0], value[0])[None]

        ids = tokens.clamp(min=0)[None]
        return self._mtp.state(hidden[None], ids, new.positions[None], attend, depth)[0]


def _pick(states: Tensor, place: Tensor) -> Tensor:
    """Return `states[b, place[b, i]]`, `[batch, n, size]`, of `states [batch, nodes, size]`."""
    return states[torch.arange(len(states), device=states.device)[:, None], place]
