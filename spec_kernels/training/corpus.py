"""Training text: token sequences with the hidden states that the frozen target has on them.

The states are computed once, so training never runs the target. They are kept in bfloat16: 1.2 kB
a token at 576 channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_kernels._check import require
from spec_kernels.decoder import Decoder, Request
from spec_kernels.targets import Target
from spec_kernels.types import PAD_TOKEN

Progress = Callable[[int, int], None]
"""Called with (done, total) while something long runs."""


def _silent(done: int, total: int) -> None:
    del done, total


@dataclass(frozen=True)
class Corpus:
    """Sequences and the target's last hidden states on them.

    Attributes:
        tokens: `[sequences, length] int64`, `PAD_TOKEN` behind the end of a sequence.
        hidden: `[sequences, length, size] bfloat16`; arbitrary behind the end.
    """

    tokens: Tensor
    hidden: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int((self.tokens != PAD_TOKEN).sum())

    @staticmethod
    def make(
        target: Target,
        sequences: Iterable[Sequence[int]],
        *,
        length: int,
        progress: Progress = _silent,
    ) -> Corpus:
        """Cut sequences to at most `length` tokens and compute their hidden states.

        Args:
            target: the frozen model.
            sequences: token ids; longer ones are cut into several, pieces of one token dropped.
            length: most tokens of a piece.
            progress: called after each piece.

        Raises:
            ValueError: length is below 2, or no piece of two tokens is left.

        Example:
            >>> from spec_kernels.targets import TableTarget
            >>> corpus = Corpus.make(TableTarget(torch.eye(5)), [[0, 1, 2, 3], [4, 0]], length=3)
            >>> corpus.tokens
            tensor([[ 0,  1,  2],
                    [ 4,  0, -1]])
        """
        require(length >= 2, f"length must be at least 2, got {length}")
        pieces = [
            list(ids[start : start + length])
            for ids in sequences
            for start in range(0, len(ids), length)
        ]
        pieces = [piece for piece in pieces if len(piece) >= 2]
        require(bool(pieces), "the training text must hold at least two tokens")
        tokens = torch.full((len(pieces), length), PAD_TOKEN, dtype=torch.int64)
        states = []
        for row, piece in enumerate(pieces):
            tokens[row, : len(piece)] = torch.tensor(piece)
            found = target.prefill(target.open(1, len(piece)), 0, piece, hidden=True)
            assert found is not None
            states.append(found.to("cpu", torch.bfloat16))
            progress(row + 1, len(pieces))
        hidden = torch.zeros(len(pieces), length, states[0].shape[1], dtype=torch.bfloat16)
        for row, state in enumerate(states):
            hidden[row, : state.shape[0]] = state
        return Corpus(tokens, hidden)

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
            Corpus(self.tokens[:kept], self.hidden[:kept]),
            Corpus(self.tokens[kept:], self.hidden[kept:]),
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


def self_generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    eos_ids: Sequence[int] = (),
    batch: int = 32,
    progress: Progress = _silent,
) -> list[list[int]]:
    """Let the target write its own training text; returns prompts with their answers.

    Drafts are judged on what the target itself would say, so this is the text that matters.

    Args:
        target: the frozen model.
        prompts: token ids of each prompt.
        max_new_tokens: most tokens of an answer.
        temperature: of the answers; 0 = greedy.
        seed: answer i uses seed + i, so the text depends on nothing else.
        eos_ids: ids that end an answer.
        batch: prompts decoded together; does not change the text of a float32 target beyond
            rounding.
        progress: called after each batch with prompts done.
    """
    decoder, texts = Decoder(target, eos_ids=eos_ids), []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        requests = [
            Request(
                list(prompt),
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed + start + index,
            )
            for index, prompt in enumerate(part)
        ]
        answers = decoder.generate(requests)
        texts += [[*p, *answer.tokens] for p, answer in zip(part, answers, strict=True)]
        progress(len(texts), len(prompts))
    return texts
