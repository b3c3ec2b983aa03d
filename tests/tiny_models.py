"""Models small enough to be exact: a GPT in float64, Markov chains, and proposers of every kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_kernels.decoder import Decoder, Request
from spec_kernels.proposers import DecodingState
from spec_kernels.targets import Attend, Cache, ModuleTarget
from spec_kernels.types import PAD_TOKEN, Acceptance, Draft


class TinyGPT(nn.Module):
    """Two layers with grouped K/V heads and learned positions; logits in float32."""

    num_layers, num_kv_heads, num_heads, head_dim = 2, 1, 2, 8

    def __init__(self, vocab_size: int = 31, max_length: int = 96, seed: int = 0) -> None:
        super().__init__()
        self.vocab_size, self.max_length = vocab_size, max_length
        size, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        generator = torch.Generator().manual_seed(seed)

        def linear(outputs: int, inputs: int) -> nn.Parameter:
            scale = 1.5 * inputs**-0.5
            weight = torch.randn(outputs, inputs, dtype=torch.float64, generator=generator)
            return nn.Parameter(weight * scale, requires_grad=False)

        self.token, self.position = linear(vocab_size, size), linear(max_length, size)
        self.qkv = nn.ParameterList(linear(size + 2 * kv, size) for _ in range(self.num_layers))
        self.out = nn.ParameterList(linear(size, size) for _ in range(self.num_layers))
        self.up = nn.ParameterList(linear(2 * size, size) for _ in range(self.num_layers))
        self.down = nn.ParameterList(linear(size, 2 * size) for _ in range(self.num_layers))
        self.unembed = linear(vocab_size, size)

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.token)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = 4.0 * self.embed(tokens) + F.embedding(positions, self.position)
        size, dim = self.num_heads * self.head_dim, self.head_dim
        for layer in range(self.num_layers):
            joint = F.linear(F.layer_norm(x, (size,)), self.qkv[layer])
            query, key, value = (
                part.unflatten(-1, (-1, dim))
                for part in joint.split([size, *[self.num_kv_heads * dim] * 2], dim=-1)
            )
            x = x + F.linear(attend(layer, query, key, value).flatten(-2), self.out[layer])
            inner = F.gelu(F.linear(F.layer_norm(x, (size,)), self.up[layer]))
            x = x + F.linear(inner, self.down[layer])
        return F.layer_norm(x, (size,))

    def head(self, hidden: Tensor) -> Tensor:
        return 3.0 * F.linear(hidden, self.unembed).float()


def gpt(**arguments: int) -> ModuleTarget:
    """A tiny GPT behind the adaptor for plain torch.nn decoders."""
    return ModuleTarget(TinyGPT(**arguments).eval())


def fresh_cache(target: ModuleTarget, sequences: Sequence[Sequence[int]]) -> Cache:
    """A cache filled from nothing with these tokens."""
    cache = target.open(len(sequences), max(len(tokens) for tokens in sequences) or 1)
    for row, tokens in enumerate(sequences):
        target.prefill(cache, row, tokens)
    return cache


def assert_holds(target: ModuleTarget, cache: Cache, row: int, tokens: Sequence[int]) -> None:
    """Row `row` of the cache equals a fresh prefill of `tokens`, K and V of every layer."""
    assert cache.context_lens[row] == len(tokens)
    fresh = fresh_cache(target, [tokens])
    for ours, theirs in ((cache.keys, fresh.keys), (cache.values, fresh.values)):
        for a, b in zip(ours, theirs, strict=True):
            difference = (a[row, : len(tokens)] - b[0, : len(tokens)]).abs()
            assert difference.numel() == 0 or difference.max() < 1e-12


class FixedProposer:
    """Proposes fixed drafts that a function of (request, committed tokens, count) makes up."""

    wants_hidden = False

    def __init__(self, continue_: Callable[[int, list[int], int], Sequence[int]]) -> None:
        self.continue_ = continue_

    def open(self, state: DecodingState, capacity: int) -> FixedProposer:
        return self

    def prefill(
        self, state: DecodingState, row: int, tokens: Sequence[int], hidden: Tensor | None
    ) -> None: ...

    def propose(self, state: DecodingState, limits: Tensor, gamma: int) -> Draft:
        tokens = torch.full((len(limits), gamma + 1), PAD_TOKEN)
        num_nodes = (limits + 1).clamp(max=1)
        for row, limit in enumerate(limits.tolist()):
            if limit < 0:
                continue
            committed = state.tokens[row, : state.lens[row]].tolist()
            drafts = list(self.continue_(row, committed, limit))
            tokens[row, : len(drafts) + 1] = torch.tensor([committed[-1], *drafts])
            num_nodes[row] = len(drafts) + 1
        return Draft(tokens, num_nodes)

    def commit(self, state: DecodingState, result: Acceptance, hidden: Tensor | None) -> None: ...

    def rollback(self, state: DecodingState) -> None: ...


def random_proposer(vocab: int) -> FixedProposer:
    """Drafts that have nothing to do with the target."""
    return FixedProposer(lambda row, committed, count: torch.randint(vocab, (count,)).tolist())


def oracle_proposer(outputs: Sequence[Sequence[int]]) -> FixedProposer:
    """Drafts the known full sequences, so every draft is accepted."""
    return FixedProposer(
        lambda row, committed, count: outputs[row][len(committed) : len(committed) + count]
    )


def plain(target: ModuleTarget, requests: Sequence[Request], **arguments: object) -> list:
    """Outputs without speculation."""
    return Decoder(target, **arguments).generate(requests)


def greedy_by_hand(target: ModuleTarget, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy decoding that prefills everything again for each token; shares no loop with ours."""
    tokens = list(prompt)
    for _ in range(count):
        cache = fresh_cache(target, [tokens[:-1]])
        root, one = torch.tensor([[tokens[-1]]]), torch.ones(1, dtype=torch.int32)
        wide = target.open(1, len(tokens))
        target.prefill(wide, 0, tokens[:-1])
        assert torch.equal(cache.context_lens, wide.context_lens)
        tokens.append(int(target.forward(root, one, wide).logits[0].argmax()))
    return tokens[len(prompt) :]
