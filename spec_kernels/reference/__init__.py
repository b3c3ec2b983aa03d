"""The executable specification: every operation in float64, one request and one node at a time.

Only tests, benchmarks and the conformance kit import it.
"""

from spec_kernels.reference.accept import accept, match
from spec_kernels.reference.attention import merge_attention, verify_attention
from spec_kernels.reference.cache import append_cache, compact_cache, compact_hidden, select_state
from spec_kernels.reference.law import adjust_logits_, overlap, row_law
from spec_kernels.reference.mla import verify_attention_mla
from spec_kernels.reference.random import coins, draft_coins
from spec_kernels.reference.sample import sample

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
