"""A small step of a batch, with the arguments of every operation."""

from __future__ import annotations

from typing import Any

import torch

from spec_kernels import Acceptance, Draft, SamplingParams, accept, coins, row_law

BATCH, NODES, VOCAB, DRAFT_VOCAB = 3, 4, 70, 67
ROWS = BATCH * NODES


class Step:
    """One step of a batch: a sampled and greedy mix, with a request that is absent."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.params = SamplingParams.make([0.8, 0.0, 1.3], top_k=[0, 3, 20], top_p=0.9, min_p=0.01)
        self.request = torch.arange(BATCH, dtype=torch.int32).repeat_interleave(NODES)
        self.logits = torch.randn(ROWS, VOCAB, generator=generator)
        self.draft_logits = torch.randn(ROWS, DRAFT_VOCAB, generator=generator)
        self.law = row_law(self.logits, self.params, self.request)
        self.draft_law = row_law(self.draft_logits, self.params, self.request)
        self.row = torch.arange(ROWS, dtype=torch.int32).view(BATCH, NODES)
        self.seeds, self.positions = torch.tensor([3, 5, 8]), torch.tensor([10, 20, 30])
        self.draft = Draft(
            torch.randint(DRAFT_VOCAB, (BATCH, NODES), generator=generator),
            torch.tensor([4, 0, 3], dtype=torch.int32),
            None,
            self.draft_logits,
            self.draft_law,
            self.row,
        )
        self.tree = self.draft._replace(
            parents=torch.tensor([[-1, 0, 0, 1]] * BATCH, dtype=torch.int32),
            # The siblings 1 and 2 share a row.
            row=torch.tensor([[-1, 0, 0, 1]] * BATCH, dtype=torch.int32),
        )
        self.accept_coins, self.final_coins = coins(self.seeds, self.positions, NODES)
        self.row_coins = torch.rand(ROWS, dtype=torch.float64, generator=generator)
        self.child_coins = torch.rand(ROWS, 3, dtype=torch.float64, generator=generator)
        self.excluded = torch.tensor([[1, -1]] * ROWS)
        self.noise = torch.arange(ROWS), torch.arange(ROWS) + 9
        self.id_map = torch.arange(VOCAB, dtype=torch.int32)
        self.id_map[DRAFT_VOCAB:] = -1
        self.tokens = torch.randint(VOCAB, (BATCH, NODES), generator=generator)
        words = (VOCAB + 31) // 32
        self.adjustments = {
            "allowed_words": torch.full((ROWS, words), -2, dtype=torch.int32),
            "bias_ids": torch.tensor([[1, -1], [2, 2], [90, 4]]),
            "bias_values": torch.ones(BATCH, 2),
            "output_counts": torch.ones(BATCH, VOCAB, dtype=torch.int32),
            "prompt_words": torch.full((BATCH, words), 5, dtype=torch.int32),
            "repetition_penalty": torch.full((BATCH,), 1.2),
            "presence_penalty": torch.full((BATCH,), 0.1),
            "frequency_penalty": torch.full((BATCH,), 0.2),
            "draft_tokens": self.draft.tokens,
            "row_node": torch.arange(NODES, dtype=torch.int32).repeat(BATCH),
        }

    def accept(self, **changes: Any) -> Acceptance:
        arguments = {
            "draft": self.draft,
            "target_logits": self.logits,
            "target_law": self.law,
            "target_row": self.row,
            "accept_coins": self.accept_coins,
            "final_coins": self.final_coins,
            "max_depth": NODES - 1,
        }
        return accept(**(arguments | changes))
