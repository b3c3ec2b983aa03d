"""The CPU path: torch operations on one row of logits at a time, in a buffer that is reused.

A `[rows, vocab]` tensor of probabilities is never written. A row is read when its law is asked
for: the token rule stops at the first rejection of a request and leaves the rows behind it unread.
"""

from spec_kernels.eager.accept import accept, match
from spec_kernels.eager.attention import merge_attention, verify_attention
from spec_kernels.eager.cache import append_cache, compact_cache, compact_hidden, select_state
from spec_kernels.eager.law import adjust_logits_, overlap, row_law
from spec_kernels.eager.mla import verify_attention_mla
from spec_kernels.eager.random import coins, draft_coins
from spec_kernels.eager.sample import sample

__all__ = [
    "accept",
    "adjust_logits_",
    "append_cache",
    "coins",
    "compact_cache",
    "compact_hidden",
    "draft_coins",
    "match",
    "merge_attention",
    "overlap",
    "row_law",
    "sample",
    "select_state",
    "verify_attention",
    "verify_attention_mla",
]
