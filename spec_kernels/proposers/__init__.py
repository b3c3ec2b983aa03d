"""Where drafts come from."""

from spec_kernels.proposers.base import DecodingState, Proposer, Session
from spec_kernels.proposers.draft_model import DraftModelProposer
from spec_kernels.proposers.ngram import NgramProposer, ngram_lookup

__all__ = [
    "DecodingState",
    "DraftModelProposer",
    "NgramProposer",
    "Proposer",
    "Session",
    "ngram_lookup",
]
