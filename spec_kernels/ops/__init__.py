"""The public operations: documentation, checks, and dispatch by the tensors' device.

CPU tensors run `spec_kernels.eager`, CUDA and ROCm tensors run `spec_kernels.kernels`. Each
operation is registered as `torch.ops.spec_kernels.<name>` with flat arguments, so it works under
`torch.compile`, fake tensors and graph capture.
"""

from spec_kernels.ops.accept import accept, match
from spec_kernels.ops.attention import merge_attention, verify_attention
from spec_kernels.ops.cache import append_cache, compact_cache, compact_hidden, select_state
from spec_kernels.ops.law import adjust_logits_, overlap, row_law
from spec_kernels.ops.mla import verify_attention_mla
from spec_kernels.ops.random import coins, draft_coins
from spec_kernels.ops.sample import sample

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
