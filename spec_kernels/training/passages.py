"""Text with the hidden states that the frozen target has on it: written by the target, or read.

Drafts are judged on what the target itself would say, so its own answers are the text that matters.
Their states fall out of the decoding that writes them; given text costs one prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spec_kernels.ops import coins, row_law, sample
from spec_kernels.targets import Target
from spec_kernels.types import PAD_TOKEN, SamplingParams


class Passage(NamedTuple):
    """A sequence of tokens and the target's last hidden state at each.

    Attributes:
        tokens: `[length] int64`.
        hidden: `[length, size] bfloat16`, on the CPU.
        first: index of the first token that counts as something to predict; what stands before it
            is context only, as a prompt is.
    """

    tokens: Tensor
    hidden: Tensor
    first: int = 0


@torch.no_grad()
def read(target: Target, sequences: Sequence[Sequence[int]], *, length: int) -> Iterator[Passage]:
    """Yield given sequences, cut to at most `length` tokens, with the target's states.

    Args:
        target: the frozen model.
        sequences: token ids; longer ones are cut into several, pieces of one token dropped.
        length: most tokens of a piece.

    Example:
        >>> from spec_kernels.targets import TableTarget
        >>> passages = read(TableTarget(torch.eye(5)), [[0, 1, 2, 3], [4, 0, 1]], length=3)
        >>> [passage.tokens.tolist() for passage in passages]
        [[0, 1, 2], [4, 0, 1]]
    """
    for ids in sequences:
        for start in range(0, len(ids) - 1, length):
            piece = list(ids[start : start + length])
            if len(piece) >= 2:
                hidden = target.prefill(target.open(1, len(piece)), 0, piece, hidden=True)
                assert hidden is not None
                yield Passage(torch.tensor(piece), hidden.to("cpu", torch.bfloat16))


@torch.no_grad()
def write(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    seeds: Sequence[int],
    eos_ids: Sequence[int] = (),
    report: Callable[[int], None] = lambda tokens: None,
) -> list[Passage]:
    """Let the target answer prompts, all at once, and keep its states.

    The text of an answer is that of plain decoding with its seed, but for the last token, on which
    the target has no state yet.

    Args:
        target: the frozen model.
        prompts: token ids of each prompt, at least two.
        max_new_tokens: most tokens of an answer.
        temperature: of the answers; 0 = greedy.
        seeds: one per prompt; an answer depends on its prompt and seed alone, up to the rounding of
            the target.
        eos_ids: ids that end an answer.
        report: called after each step with the tokens that it wrote.

    Returns:
        one passage per prompt; `first` is the length of the prompt.

    Example:
        >>> from spec_kernels.targets import TableTarget
        >>> successor = torch.eye(5).roll(1, dims=1)
        >>> passage, = write(TableTarget(successor), [[3, 4]], max_new_tokens=4, temperature=0.0,
        ...                  seeds=[0])
        >>> passage.tokens.tolist(), passage.first
        ([3, 4, 0, 1, 2], 2)
    """
    batch, device = len(prompts), target.device
    capacity = max(map(len, prompts)) + max_new_tokens
    cache = target.open(batch, capacity)
    texts = [list(prompt) for prompt in prompts]
    states: list[list[Tensor]] = []
    for row, prompt in enumerate(prompts):
        hidden = target.prefill(cache, row, prompt[:-1], hidden=True)
        assert hidden is not None
        states.append([hidden.to("cpu", torch.bfloat16)])
    params = SamplingParams.make(temperature, batch=batch, device=device)
    seeds_of = torch.tensor(list(seeds), device=device)
    is_active = [True] * batch
    for _ in range(max_new_tokens):
        present = torch.tensor(is_active, device=device)
        roots = torch.tensor([[text[-1]] for text in texts], device=device)
        output = target.forward(roots, present.to(torch.int32), cache, hidden=True)
        request = present.nonzero()[:, 0].to(torch.int32)
        index = output.row[request.long(), 0].long()
        logits = output.logits[index]
        positions = cache.context_lens.long()[request.long()]
        final = coins(seeds_of[request.long()], positions, 1)[1]
        drawn = sample(logits, row_law(logits, params, request), coins=final)[:, 0].tolist()
        assert output.hidden is not None
        found = output.hidden[index].to("cpu", torch.bfloat16)
        path = torch.where(present, 0, -1).to(torch.int32)[:, None]
        cache.keep(path, torch.zeros_like(path[:, 0]))
        for place, (one, token) in enumerate(zip(request.tolist(), drawn, strict=True)):
            states[one].append(found[place : place + 1])
            texts[one].append(token)
            is_active[one] = token not in eos_ids and token != PAD_TOKEN
        report(len(drawn))
        if not any(is_active):
            break
    return [
        Passage(torch.tensor(text[:-1]), torch.cat(state), len(prompt))
        for text, state, prompt in zip(texts, states, prompts, strict=True)
    ]
