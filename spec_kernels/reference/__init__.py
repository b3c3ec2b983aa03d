"""The executable specification: every operation in float64, one request and one node at a time.

Only tests, benchmarks and the conformance kit import it.
"""

from spec_kernels.reference.accept import accept, match
from spec_kernels.reference.law import adjust_logits_, overlap, row_law
from spec_kernels.reference.random import coins, draft_coins
from spec_kernels.reference.sample import sample

__all__ = [
    "accept",
    "adjust_logits_",
    "coins",
    "draft_coins",
    "match",
    "overlap",
    "row_law",
    "sample",
]
