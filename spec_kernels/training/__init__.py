"""Train what drafts: losses and loop for multi-token prediction modules on a frozen target."""

from spec_kernels.training.corpus import Corpus, draft_vocabulary, self_generate
from spec_kernels.training.mtp import (
    Acceptance,
    Training,
    backward,
    measure_acceptance,
    next_tokens_loss,
    overlap_loss,
    start_from_trunk,
    train,
)

__all__ = [
    "Acceptance",
    "Corpus",
    "Training",
    "backward",
    "draft_vocabulary",
    "measure_acceptance",
    "next_tokens_loss",
    "overlap_loss",
    "self_generate",
    "start_from_trunk",
    "train",
]
