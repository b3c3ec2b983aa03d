"""Thin `torch.nn` modules over the operations, and the KV caches: no logic that `ops` lacks."""

from spec_kernels.nn.attention import AttentionStep, VerifyAttention
from spec_kernels.nn.cache import ContiguousKVCache, KVShape, PagedKVCache, SlidingWindowKVCache
from spec_kernels.nn.verifier import Verifier

__all__ = [
    "AttentionStep",
    "ContiguousKVCache",
    "KVShape",
    "PagedKVCache",
    "SlidingWindowKVCache",
    "Verifier",
    "VerifyAttention",
]
