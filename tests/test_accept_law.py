"""The law of emitted tokens, measured: drafts, coins and verification of one layer together."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from spec_kernels.types import PAD_TOKEN, Draft
from tests.layers import FAST_LAYERS, layer


@pytest.mark.parametrize("name", FAST_LAYERS)
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("drafts", ["sampled", "fixed"])
def test_emitted_tokens_follow_the_target(name: str, rule: str, drafts: str) -> None:
    """Chi-square of the first two emitted tokens, jointly, over 4000 requests with the library's
    own coins; a request that emits one token draws the next from the target."""
    requests, vocab = 4000, 3
    p = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.1, 0.6, 0.3]])
    q = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.4, 0.2]])
    # Rows of the target: 0 at the root, then one per first token; of the draft: 0 and 1.
    after = torch.stack((p[1], p[2], p[0]))
    ops, seeds = layer(name), torch.arange(requests) + 17
    positions = torch.full((requests,), 3)
    accept_coins, final_coins = ops.coins(seeds, positions, 3)
    drawn = ops.draft_coins(seeds, positions, 2)[:, :, 0]
    tokens = torch.zeros(requests, 3, dtype=torch.int64)
    for depth in range(2):
        rows = q[depth].expand(requests, vocab)
        tokens[:, depth + 1] = ops.sample(rows, None, coins=drawn[:, depth])[:, 0]
    if drafts == "fixed":
        tokens[:, 1:] = torch.tensor([0, 2])
    target = torch.stack(
        (p[:1].expand(requests, vocab), after[tokens[:, 1]], p[:1].expand(requests, vocab)), 1
    )
    row = torch.tensor([[-1, 0, 1]], dtype=torch.int32).expand(requests, 3)
    result = ops.accept(
        Draft(
            tokens,
            torch.full((requests,), 3, dtype=torch.int32),
            None,
            q if drafts == "sampled" else None,
            None,
            row if drafts == "sampled" else None,
        ),
        target.reshape(-1, vocab),
        None,
        torch.arange(3 * requests, dtype=torch.int32).view(requests, 3),
        accept_coins,
        final_coins,
        rule=rule,
        max_depth=2,
    )
    first, second = result.output_tokens[:, 0], result.output_tokens[:, 1]
    later = ops.coins(seeds, positions + 1, 1)[1]
    completed = ops.sample(after[first], None, coins=later)[:, 0]
    second = torch.where(second == PAD_TOKEN, completed, second)
    counts = (first * vocab + second).bincount(minlength=vocab * vocab)
    expected = (p[0][:, None].double() * after.double()).flatten()
    expected /= expected.sum()
    assert chisquare(counts, (expected * requests).numpy()).pvalue > 1e-6
    assert 0.0 < float(result.accepted_lens.float().mean()) < 2.0
