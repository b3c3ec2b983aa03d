"""Decode one request plainly and speculatively, under the same load, and say where they differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from spec_kernels.decoder import Chunk, Decoder, Generation, Request, Run
from spec_kernels.targets import Target


@dataclass
class TimedRun:
    """One request being decoded, with the wall-clock time of its rounds and its text so far."""

    run: Run
    seconds: float = 0.0
    text: str = ""
    generation: Generation | None = None

    @staticmethod
    def start(decoder: Decoder, request: Request) -> TimedRun:
        """Fill the caches."""
        return TimedRun(decoder.start([request]))

    def step(self) -> list[Chunk]:
        """Run one round."""
        began = time.perf_counter()
        chunks = self.run.step()
        self.seconds += time.perf_counter() - began
        for chunk in chunks:
            self.text += chunk.text
            self.generation = chunk.generation or self.generation
        return chunks

    @property
    def is_done(self) -> bool:
        """Whether the output is complete."""
        return self.run.is_done

    @property
    def result(self) -> Generation:
        """The finished output."""
        assert self.generation is not None
        return self.generation

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over the time of the rounds; the prompt's prefill is left out."""
        return len(self.result.tokens) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Comparison:
    """Plain and speculative decoding of one request, both finished.

    Attributes:
        plain: without drafts.
        speculative: with drafts.
        position: index of the first token that differs; None if the outputs agree.
        logit_gap: distance of the two tokens' logits there, as the target computes them afresh;
            None if the outputs agree or one of them had ended.
    """

    plain: TimedRun
    speculative: TimedRun
    position: int | None
    logit_gap: float | None

    @property
    def speedup(self) -> float:
        """Ratio of tokens per second."""
        plain = self.plain.tokens_per_second
        return self.speculative.tokens_per_second / plain if plain else 1.0


def compare(
    plain: Decoder,
    speculative: Decoder,
    request: Request,
    *,
    show: Callable[[TimedRun, TimedRun], None] = lambda plain, speculative: None,
) -> Comparison:
    """Decode a request both ways, taking turns so that both meet the same load.

    Each round goes to the run that has used less time so far, until both are done. A short warm-up
    of both comes first.

    Args:
        plain: the decoder without a proposer.
        speculative: the decoder with one, on the same target.
        request: what to generate.
        show: called after every round.
    """
    warm_up = replace(request, max_new_tokens=min(request.max_new_tokens, speculative.gamma + 4))
    for decoder in (plain, speculative):
        decoder.generate([warm_up])
    runs = (TimedRun.start(plain, request), TimedRun.start(speculative, request))
    while waiting := [timed for timed in runs if not timed.is_done]:
        min(waiting, key=lambda timed: timed.seconds).step()
        show(*runs)
    tokens = (runs[0].result.tokens, runs[1].result.tokens)
    position = first_difference(*tokens)
    gap = None
    if position is not None and position < min(map(len, tokens)):
        pair = (tokens[0][position], tokens[1][position])
        gap = abs(logit_gap(plain.target, [*request.prompt, *tokens[0][:position]], *pair))
    return Comparison(*runs, position, gap)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index where two sequences part, None if they are equal.

    Example:
        >>> first_difference([1, 2, 3], [1, 2, 4]), first_difference([1, 2], [1, 2, 3])
        (2, 2)
    """
    if list(one) == list(other):
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def logit_gap(target: Target, context: Sequence[int], one: int, other: int) -> float:
    """Return the logit of token `one` less that of `other` behind `context`, computed afresh.

    Near 0 the two are tied: rounding, which depends on the width of the forward, decides.
    """
    cache = target.open(1, len(context))
    target.prefill(cache, 0, context[:-1])
    root = torch.tensor([context[-1:]], device=target.device)
    num_nodes = torch.ones(1, dtype=torch.int32, device=target.device)
    logits = target.forward(root, num_nodes, cache).logits[0].float()
    return float(logits[one] - logits[other])
