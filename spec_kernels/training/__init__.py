"""Train what drafts: losses and loop for multi-token prediction modules on a frozen target."""

from spec_kernels.training.corpus import Corpus, draft_vocabulary
from spec_kernels.training.losses import (
    Acceptance,
    backward,
    kl_loss,
    measure_acceptance,
    next_tokens_loss,
    overlap_loss,
)
from spec_kernels.training.mtp import Training, start_from_trunk, train
from spec_kernels.training.passages import Passage, read, write

__all__ = [
    "Acceptance",
    "Corpus",
    "Passage",
    "Training",
    "backward",
    "draft_vocabulary",
    "kl_loss",
    "measure_acceptance",
    "next_tokens_loss",
    "overlap_loss",
    "read",
    "start_from_trunk",
    "train",
    "write",
]
