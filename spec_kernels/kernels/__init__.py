"""The operations in Triton, for CUDA and ROCm; on CPU tensors inside `testing.interpreted`."""

from spec_kernels.kernels.accept import accept, match
from spec_kernels.kernels.attention import merge_attention, verify_attention
from spec_kernels.kernels.cache import append_cache, compact_cache, compact_hidden, select_state
from spec_kernels.kernels.law import adjust_logits_, overlap, row_law
from spec_kernels.kernels.mla import verify_attention_mla
from spec_kernels.kernels.random import coins, draft_coins
from spec_kernels.kernels.sample import sample

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
