"""The operations in Triton, for CUDA and ROCm; on CPU tensors inside `testing.interpreted`."""

from spec_kernels.kernels.accept import accept, match
from spec_kernels.kernels.law import row_law
from spec_kernels.kernels.random import coins, draft_coins, exponential
from spec_kernels.kernels.sample import sample

__all__ = ["accept", "coins", "draft_coins", "exponential", "match", "row_law", "sample"]
