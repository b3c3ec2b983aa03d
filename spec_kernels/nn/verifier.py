"""The module that a decoder or an engine calls once per step to verify its drafts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from spec_kernels import ops
from spec_kernels._check import check, require
from spec_kernels.ops._arguments import check_draft, check_logits, check_params
from spec_kernels.tree import depths
from spec_kernels.types import (
    GREEDY_TEMPERATURE,
    PAD_TOKEN,
    Acceptance,
    Draft,
    SamplingParams,
    invert_id_map,
)

RULES = ("block", "token", "coupled")


class Verifier(torch.nn.Module):
    """Verify a step's drafts under one rule, with random numbers addressed by seed and position.

        block, token    coins -> accept                  drafts drawn with `draft_coins`
        coupled         row_law -> sample -> match       drafts drawn with the same noise

    The output follows the target's law under each rule, on chains and on trees. "coupled" besides
    gives the very text that plain decoding gives under the same seed, whatever the drafter; its
    noise is that of position root + depth + 1 at every node.

    Args:
        rule: "block", "token" or "coupled".
        replacement: whether sampled siblings of a tree were drawn with replacement; "coupled"
            does not ask.
        draft_to_target: `[draft_vocab] int64`, the target id of each column of the draft logits,
            for a draft model with its own vocabulary; None where the ids are the target's.
        vocab: size of the target's vocabulary; given iff draft_to_target is.

    Raises:
        ValueError: rule is unknown; only one of draft_to_target and vocab is given; or the map is
            invalid (`invert_id_map`).

    Example:
        >>> verifier = Verifier("token")
        >>> draft = Draft(torch.tensor([[5, 1, 2]]), torch.tensor([3], dtype=torch.int32))
        >>> logits = torch.tensor([[0.0, 9.0, 0.0], [0.0, 9.0, 0.0], [9.0, 0.0, 0.0]])
        >>> seeds, positions = torch.tensor([1]), torch.tensor([40])
        >>> verifier(draft, logits, SamplingParams.make(0.0), seeds, positions).output_tokens
        tensor([[ 1,  1, -1]])
    """

    target_to_draft: Tensor | None

    def __init__(
        self,
        rule: str = "block",
        *,
        replacement: bool = False,
        draft_to_target: Tensor | None = None,
        vocab: int | None = None,
    ) -> None:
        super().__init__()
        require(rule in RULES, f'rule must be "block", "token" or "coupled", got {rule!r}')
        require(
            (draft_to_target is None) == (vocab is None),
            "draft_to_target and vocab must be given together, got "
            + ("vocab" if draft_to_target is None else "draft_to_target"),
        )
        self.rule, self.replacement = rule, replacement
        target_to_draft = None
        if draft_to_target is not None and vocab is not None:
            target_to_draft = invert_id_map(draft_to_target, vocab)
        self.register_buffer("target_to_draft", target_to_draft, persistent=False)

    def forward(
        self,
        draft: Draft,
        target_logits: Tensor,
        params: SamplingParams,
        seeds: Tensor,
        root_positions: Tensor,
        *,
        target_row: Tensor | None = None,
        max_depth: int | None = None,
    ) -> Acceptance:
        """Keep a path of each draft, then emit one recovered or bonus token.

        Args:
            draft: `Draft` of chains or trees.
            target_logits: `[rows, vocab] float32/float16/bfloat16`, raw.
            params: `SamplingParams`, one entry per request.
            seeds: `[batch] int64`.
            root_positions: `[batch] int64`, position of each request's last committed token.
            target_row: `[batch, nodes] int32`, the row of target_logits computed at each node;
                by default row `b * nodes + i`, the padded layout. Under "coupled" no two nodes
                may share a row.
            max_depth: most drafts to keep; by default nodes - 1, which any tree fits in. The
                results are as wide: give a tree's depth where it is known.

        Returns:
            `Acceptance` with max_depth + 1 columns.

        Raises:
            TypeError: an argument has another dtype or type.
            ValueError: shapes or devices do not fit.
        """
        batch, nodes, device = check_draft(draft)
        check_logits("target_logits", target_logits, device)
        check_params("params", params, device, batch)
        check("seeds", seeds, (batch,), torch.int64, device)
        check("root_positions", root_positions, (batch,), torch.int64, device)
        if target_row is None:
            check("target_logits", target_logits, (batch * nodes, "vocab"), target_logits.dtype)
            target_row = torch.arange(batch * nodes, dtype=torch.int32, device=device)
            target_row = target_row.view(batch, nodes)
        if max_depth is None:
            max_depth = nodes - 1
        if self.rule == "coupled":
            tokens = self._target_tokens(
                draft, target_logits, params, seeds, root_positions, target_row
            )
            return ops.match(draft, tokens, max_depth=max_depth)
        if _is_decided(params):
            accept_coins = torch.zeros(batch, nodes, dtype=torch.float64)
            final_coins = accept_coins[:, 0]
        else:
            accept_coins, final_coins = ops.coins(seeds, root_positions, nodes)
        return ops.accept(
            draft,
            target_logits,
            params,
            target_row,
            accept_coins,
            final_coins,
            rule=self.rule,
            replacement=self.replacement,
            max_depth=max_depth,
            target_to_draft=self.target_to_draft,
        )

    def extra_repr(self) -> str:
        """Name the rule when the module is printed."""
        return f"rule={self.rule!r}" + (", replacement=True" if self.replacement else "")

    def _target_tokens(
        self,
        draft: Draft,
        target_logits: Tensor,
        params: SamplingParams,
        seeds: Tensor,
        root_positions: Tensor,
        target_row: Tensor,
    ) -> Tensor:
        """Draw the target's own token after each node, `[batch, nodes]`."""
        rows, device = target_logits.shape[0], target_logits.device
        batch, nodes = draft.tokens.shape
        check("target_row", target_row, (batch, nodes), torch.int32, device)
        node = torch.arange(nodes, device=device)
        used = (node < draft.num_nodes[:, None]) & (target_row >= 0) & (target_row < rows)
        # A spare row behind the last takes the nodes that have none.
        slot = torch.where(used, target_row, rows).long()

        def to_rows(values: Tensor) -> Tensor:
            column = values.new_full((rows + 1,), -1)
            column[slot] = values.expand(batch, nodes)
            return column[:rows]

        request = to_rows(torch.arange(batch, dtype=torch.int32, device=device)[:, None])
        depth = node if draft.parents is None else depths(draft.parents, draft.num_nodes)
        positions = to_rows(root_positions[:, None] + depth + 1)
        law = ops.row_law(target_logits, params, request)
        drawn = ops.sample(target_logits, law, noise=(to_rows(seeds[:, None]), positions))
        return torch.cat([drawn.flatten(), drawn.new_full((1,), PAD_TOKEN)])[slot]


def _is_decided(params: SamplingParams) -> bool:
    """Tell, where the host may read it, that all requests are greedy: no coin changes a result."""
    temperature = params.temperature
    is_readable = type(temperature) is Tensor and temperature.is_cpu and not is_compiling()
    return is_readable and bool((temperature < GREEDY_TEMPERATURE).all())
