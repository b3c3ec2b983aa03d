"""Training text: token sequences with the hidden states that the frozen target has on them.

The states are computed once, so training never runs the target. They are kept in bfloat16: 1.2 kB
a token at 576 channels.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spec_kernels._check import require
from spec_kernels.training.passages import Passage
from spec_kernels.types import PAD_TOKEN


@dataclass(frozen=True)
class Corpus:
    """Sequences and the target's last hidden states on them.

    Attributes:
        tokens: `[sequences, length] int64`, `PAD_TOKEN` behind the end of a sequence.
        hidden: `[sequences, length, size] bfloat16`; 0 behind the end.
        first: `[sequences] int64`, index of the first token that counts as something to predict.
    """

    tokens: Tensor
    hidden: Tensor
    first: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens that count: without padding and prompts."""
        index = torch.arange(self.tokens.shape[1])
        return int(((self.tokens != PAD_TOKEN) & (index >= self.first[:, None])).sum())

    @staticmethod
    def pack(passages: Sequence[Passage]) -> Corpus:
        """Put passages side by side.

        Raises:
            ValueError: there is none.

        Example:
            >>> from spec_kernels.targets import TableTarget
            >>> from spec_kernels.training.passages import read
            >>> passages = list(read(TableTarget(torch.eye(5)), [[0, 1, 2], [4, 0]], length=3))
            >>> Corpus.pack(passages).tokens
            tensor([[ 0,  1,  2],
                    [ 4,  0, -1]])
        """
        require(len(passages) > 0, "the training text must hold at least two tokens")
        return Corpus(
            pad_sequence([p.tokens for p in passages], batch_first=True, padding_value=PAD_TOKEN),
            pad_sequence([p.hidden for p in passages], batch_first=True),
            torch.tensor([p.first for p in passages]),
        )

    def unpack(self) -> list[Passage]:
        """Return the passages."""
        lens = (self.tokens != PAD_TOKEN).sum(1).tolist()
        rows = zip(self.tokens, self.hidden, lens, self.first.tolist(), strict=True)
        return [Passage(tokens[:n], hidden[:n], first) for tokens, hidden, n, first in rows]

    def save(self, path: Path) -> None:
        """Write one safetensors file; a crash leaves none or all of it."""
        from safetensors.torch import save_file

        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        save_file(vars(self), partial)
        os.replace(partial, path)

    @staticmethod
    def load(path: Path) -> Corpus:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is unreadable.
        """
        from safetensors.torch import load_file

        try:
            return Corpus(**load_file(path))
        except Exception as error:  # safetensors and missing names have no common base
            raise ValueError(f"cannot read hidden states from {path}: {error}") from error

    def split(self, held_out: float) -> tuple[Corpus, Corpus]:
        """Return the first sequences and the last ones, a share `held_out` of them, at least one.

        Raises:
            ValueError: held_out is not in (0, 1), or fewer than two sequences are there.
        """
        require(0.0 < held_out < 1.0, f"held_out must be in (0, 1), got {held_out}")
        count = len(self.tokens)
        require(count >= 2, f"the training text must give at least two sequences, got {count}")
        kept = min(max(count - math.ceil(count * held_out), 1), count - 1)
        return (
            Corpus(self.tokens[:kept], self.hidden[:kept], self.first[:kept]),
            Corpus(self.tokens[kept:], self.hidden[kept:], self.first[kept:]),
        )


def draft_vocabulary(tokens: Tensor, size: int, vocab: int) -> Tensor:
    """Return the ids worth drafting: the most frequent ones, filled up with the lowest ids.

    Byte-pair encodings give low ids to common merges, so the filling is not arbitrary.

    Args:
        tokens: integer ids of any shape; negative ones are skipped.
        size: ids wanted.
        vocab: size of the target's vocabulary.

    Returns:
        `[size] int64`, ascending.

    Raises:
        ValueError: size is not in [1, vocab].

    Example:
        >>> draft_vocabulary(torch.tensor([7, 7, 3, -1]), 4, vocab=9)
        tensor([0, 1, 3, 7])
    """
    require(1 <= size <= vocab, f"the draft vocabulary must have 1 to {vocab} ids, got {size}")
    counts = torch.bincount(tokens[tokens >= 0].flatten(), minlength=vocab)
    # unseen ids rank behind all seen ones, the lowest first
    ranked = torch.sort(counts, descending=True, stable=True).indices
    return ranked[:size].sort().values
