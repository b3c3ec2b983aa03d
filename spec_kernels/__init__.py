"""Exact, fast verification of speculative decoding.

The operations run on the device of their tensors: PyTorch on a CPU, Triton on a GPU. Importing this
package imports torch and nothing else that is heavy.
"""

from spec_kernels.nn import Verifier
from spec_kernels.ops import (
    accept,
    adjust_logits_,
    coins,
    draft_coins,
    match,
    overlap,
    row_law,
    sample,
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
    Draft,
    Law,
    SamplingParams,
    invert_id_map,
)

__version__ = "0.1.0"

__all__ = [
    "Acceptance",
    "BAD_TREE",
    "Draft",
    "GREEDY_TEMPERATURE",
    "INVALID_DRAFT",
    "INVALID_TARGET",
    "Law",
    "MAX_TEMPERATURE",
    "OK",
    "PAD_TOKEN",
    "SamplingParams",
    "TOP_P_SLACK",
    "Verifier",
    "ZERO_Q",
    "accept",
    "adjust_logits_",
    "coins",
    "draft_coins",
    "invert_id_map",
    "match",
    "overlap",
    "row_law",
    "sample",
]
