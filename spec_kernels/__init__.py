"""Exact, fast verification of speculative decoding.

The operations run on the device of their tensors: PyTorch on a CPU, Triton on a GPU. Importing this
package imports torch and nothing else that is heavy.
"""

from spec_kernels.nn import (
    ContiguousKVCache,
    KVShape,
    PagedKVCache,
    SlidingWindowKVCache,
    Verifier,
)
from spec_kernels.ops import (
    accept,
    adjust_logits_,
    append_cache,
    coins,
    compact_cache,
    compact_hidden,
    draft_coins,
    match,
    overlap,
    row_law,
    sample,
    select_state,
)
from spec_kernels.types import (
    BAD_TREE,
    GREEDY_TEMPERATURE,
    INVALID_DRAFT,
    INVALID_TARGET,
    MAX_TEMPERATURE,
    OK,
    PAD_TOKEN,
    TOP_P_SLACK,
    ZERO_Q,
    Acceptance,
    CacheTensors,
    Draft,
    Law,
    OutOfBlocks,
    SamplingParams,
    invert_id_map,
)

__version__ = "0.1.0"

__all__ = [
    "Acceptance",
    "BAD_TREE",
    "CacheTensors",
    "ContiguousKVCache",
    "Draft",
    "GREEDY_TEMPERATURE",
    "INVALID_DRAFT",
    "INVALID_TARGET",
    "KVShape",
    "Law",
    "MAX_TEMPERATURE",
    "OK",
    "OutOfBlocks",
    "PAD_TOKEN",
    "PagedKVCache",
    "SamplingParams",
    "SlidingWindowKVCache",
    "TOP_P_SLACK",
    "Verifier",
    "ZERO_Q",
    "accept",
    "adjust_logits_",
    "append_cache",
    "coins",
    "compact_cache",
    "compact_hidden",
    "draft_coins",
    "invert_id_map",
    "match",
    "overlap",
    "row_law",
    "sample",
    "select_state",
]
