"""Draft with the first layers of the target itself, and its own head behind them.

    q = head(layers 1..k)        p = head(all layers)

The K/V of the first layers are the same for both, so there is no second cache and nothing to catch
up: the exit reads the context that the target has left, and writes the K/V of its drafts behind it,
where the target writes them once more when it verifies. No draft survives that was not accepted,
since lengths are the target's matter alone.

Whether it pays is a matter of training. A target that was not trained to exit early puts little
into the head's terms before its last layers, and then few drafts are accepted.

Source: Elhoushi et al. 2024, "LayerSkip: enabling early exit inference and self-speculative
decoding".
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from spec_kernels._check import require
from spec_kernels.proposers.base import DecodingState, root_draft
from spec_kernels.proposers.best_first import BestFirst
from spec_kernels.proposers.levels import Grower, Growing, Shown
from spec_kernels.targets import ExitTarget, Target
from spec_kernels.types import Acceptance, Draft


class EarlyExitProposer:
    """Propose with the first layers of the target.

    Args:
        target: the decoder's own target.
        layers: how many of its layers draft.
        temperature: of the drafts of sampling requests; None = each request's own.
        tree: children of each node by depth, the parents of a tree, or `BestFirst`; None = a chain.
        children: how siblings are chosen, as of `DraftModelProposer`.

    Raises:
        NotImplementedError: the target cannot stop early.
        ValueError: layers is not in 1..number of layers, the temperature is out of range, the tree
            is none, or children is unknown.
    """

    draft_to_target = None

    def __init__(
        self,
        target: ExitTarget,
        layers: int,
        *,
        temperature: float | None = None,
        tree: Sequence[int] | BestFirst | None = None,
        children: str = "sampled",
    ) -> None:
        if not isinstance(target, ExitTarget):
            raise NotImplementedError(f"{type(target).__name__} cannot stop early")
        self.model = target.exit(layers)
        self.growing = Growing(tree, children, temperature)
        self.replacement = self.growing.replacement

    def open(self, state: DecodingState, capacity: int) -> EarlyExitSession:
        """Start on a batch of the same target."""
        require(state.cache is not None, "drafts of an early exit need the target's cache")
        return EarlyExitSession(self.model, Grower(self.growing, state))


class EarlyExitSession:
    """The first layers at work on one batch. All that is remembered is the target's."""

    wants_hidden = False

    def __init__(self, model: Target, grower: Grower) -> None:
        self._model, self._grower = model, grower
        self._state: DecodingState | None = None

    def prefill(
        self, state: DecodingState, row: int, tokens: Sequence[int], hidden: Tensor | None
    ) -> None:
        """Nothing to do: the target has filled the cache."""

    def propose(self, state: DecodingState, limits: Tensor, gamma: int) -> Draft:
        """Draw drafts up to `limits[b]` deep."""
        draft = root_draft(state, limits)
        if gamma == 0:
            return draft
        self._state = state
        root = Shown.make(draft.tokens, None, 0, 0, [0], limits)
        return self._grower.grow(state, draft.tokens, self._feed(root), limits, gamma, self._feed)

    def commit(self, state: DecodingState, result: Acceptance, hidden: Tensor | None) -> None:
        """Nothing to do: the target's cache has been rolled back."""

    def rollback(self, state: DecodingState) -> None:
        """Nothing to do."""

    def _feed(self, shown: Shown) -> Tensor:
        """Write the nodes of a level behind the context; return the logits behind some of them."""
        assert self._state is not None
        assert self._state.cache is not None
        output = self._model.forward(
            shown.tokens,
            shown.num_nodes,
            self._state.cache,
            parents=shown.parents,
            start=shown.start,
        )
        row = output.row[:, shown.nodes].clamp(min=0).long()
        if not len(output.logits):
            return output.logits.new_zeros(*row.shape, output.logits.shape[1])
        return output.logits[row]
