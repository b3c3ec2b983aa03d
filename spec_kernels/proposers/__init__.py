"""Where drafts come from."""

from spec_kernels.proposers.base import DecodingState, Proposer, Session
from spec_kernels.proposers.best_first import BestFirst
from spec_kernels.proposers.draft_model import DraftModelProposer
from spec_kernels.proposers.early_exit import EarlyExitProposer
from spec_kernels.proposers.heads import HeadsProposer
from spec_kernels.proposers.mtp import MTPProposer
from spec_kernels.proposers.ngram import NgramProposer, ngram_lookup
from spec_kernels.proposers.template import TreeTemplate

__all__ = [
    "BestFirst",
    "DecodingState",
    "DraftModelProposer",
    "EarlyExitProposer",
    "HeadsProposer",
    "MTPProposer",
    "NgramProposer",
    "Proposer",
    "Session",
    "TreeTemplate",
    "ngram_lookup",
]
