"""The MTP modules against a literal reading of their formulas, and their files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from spec_kernels.nn.mtp import (
    MTPConfig,
    ParallelHeads,
    SequentialMTP,
    load_mtp,
    save_mtp,
)
from spec_kernels.targets import speed_up_linear_
from spec_kernels.targets.few_rows import FewRowsLinear

SIZE, VOCAB = 16, 23
SEQUENTIAL = MTPConfig(
    "sequential", SIZE, 3, heads=4, kv_heads=2, head_dim=6, intermediate_size=20, rope_theta=100.0
)


PARALLEL = MTPConfig("parallel", SIZE, 2)


def matrices() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(VOCAB, SIZE), torch.randn(VOCAB, SIZE)


def sequential(**changes: object) -> SequentialMTP:
    config = MTPConfig(**(vars(SEQUENTIAL) | changes))  # type: ignore[arg-type]
    mtp = SequentialMTP(config, *matrices()).double()
    for parameter in mtp.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return mtp


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turn(x: Tensor, position: int) -> Tensor:
    """Rotate pairs (j, j + half) of one head by position * theta^(-j / half)."""
    half = x.numel() // 2
    angle = position * 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag])


def literal_state(mtp: SequentialMTP, depth: int, previous: Tensor, tokens: Tensor) -> Tensor:
    """Return the states of one depth for one sequence, written out position by position."""
    assert mtp.embedding is not None
    layer, config = mtp.module(depth), mtp.config
    weights = {name: value.detach() for name, value in layer.named_parameters()}
    group, merged = config.heads // config.kv_heads, []
    for i in range(len(tokens) - depth):
        embedding = mtp.embedding[tokens[i + depth]]
        parts = [
            rms(previous[i], weights["hidden_norm.weight"]),
            rms(embedding, weights["embedding_norm.weight"]),
        ]
        if config.embedding_first:
            parts.reverse()
        merged.append(weights["projection.weight"] @ torch.cat(parts))
    keys, values, out = [], [], []
    for i, x in enumerate(merged):
        normed = rms(x, weights["block.input_layernorm.weight"])
        q, k, v = (
            (weights[f"block.self_attn.{name}_proj.weight"] @ normed).view(-1, config.head_dim)
            for name in "qkv"
        )
        keys.append(torch.stack([turn(head, i) for head in k]))
        values.append(v)
        heads = []
        for h in range(config.heads):
            query = turn(q[h], i)
            scores = torch.stack([query @ key[h // group] for key in keys]) / config.head_dim**0.5
            shares = torch.softmax(scores, 0)
            heads.append(sum(w * past[h // group] for w, past in zip(shares, values, strict=True)))
        y = x + weights["block.self_attn.o_proj.weight"] @ torch.cat(heads)
        normed = rms(y, weights["block.post_attention_layernorm.weight"])
        gate, up = (weights[f"block.mlp.{name}_proj.weight"] @ normed for name in ("gate", "up"))
        out.append(y + weights["block.mlp.down_proj.weight"] @ (F.silu(gate) * up))
    return torch.stack(out)


@pytest.mark.parametrize("changes", [{}, {"is_shared": True}, {"embedding_first": True}])
@torch.no_grad()
def test_sequential_modules_equal_a_literal_reading(changes: dict[str, bool]) -> None:
    mtp = sequential(**changes)
    hidden = torch.randn(2, 7, SIZE, dtype=torch.float64)
    tokens = torch.randint(VOCAB, (2, 7))
    states = mtp(hidden, tokens)
    for row in range(2):
        previous = hidden[row]
        for depth, state in enumerate(states, 1):
            previous = literal_state(mtp, depth, previous, tokens[row])
            torch.testing.assert_close(state[row], previous, rtol=1e-10, atol=1e-10)
            final = rms(previous, mtp.module(depth).norm.weight) @ mtp.unembedding.T
            torch.testing.assert_close(mtp.logits(state[row], depth), final, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_sequential_state_sees_no_later_token() -> None:
    mtp = sequential()
    hidden = torch.randn(1, 8, SIZE, dtype=torch.float64)
    tokens = torch.randint(VOCAB, (1, 8))
    before = mtp(hidden, tokens)
    other = tokens.clone()
    other[0, 5] = (other[0, 5] + 1) % VOCAB
    for depth, (one, two) in enumerate(zip(before, mtp(hidden, other), strict=True), 1):
        same = (one == two).all(-1)[0]
        assert same[: 5 - depth].all()
        assert not same[5 - depth]


@torch.no_grad()
def test_parallel_heads_equal_their_formula() -> None:
    _, unembedding = matrices()
    heads = ParallelHeads(PARALLEL, unembedding)
    z = torch.randn(5, SIZE)
    states = heads(z)
    for depth in (1, 2):
        linear = heads.heads[depth - 1]
        y = z @ linear.weight.T + linear.bias
        torch.testing.assert_close(states[:, depth - 1], z + y * torch.sigmoid(y))
        logits = rms(states[:, depth - 1], heads.norms[depth - 1].weight) @ unembedding.T
        torch.testing.assert_close(heads.logits(states[:, depth - 1], depth), logits)


@torch.no_grad()
def test_untied_heads_use_their_own_matrix() -> None:
    _, unembedding = matrices()
    heads = ParallelHeads(MTPConfig("parallel", SIZE, 2, is_tied=False), unembedding)
    state = torch.randn(3, SIZE)
    logits = heads.logits(state, 2)
    heads.outputs[1].weight.mul_(2.0)
    torch.testing.assert_close(heads.logits(state, 2), 2.0 * logits)


@torch.no_grad()
def test_the_shared_matrix_is_one_tensor_in_a_layer_that_speeds_up() -> None:
    if shutil.which("c++") is None:
        pytest.skip("the fast product needs a C++ compiler")
    embedding, unembedding = matrices()
    for mtp in (
        SequentialMTP(SEQUENTIAL, embedding, unembedding),
        ParallelHeads(PARALLEL, unembedding),
    ):
        assert mtp.unembedding.data_ptr() == unembedding.data_ptr()
        assert all(weight.data_ptr() != unembedding.data_ptr() for weight in mtp.parameters())
        state = torch.randn(3, SIZE)
        logits = mtp.logits(state, 1)
        speed_up_linear_(mtp)
        assert isinstance(mtp.unembed, FewRowsLinear)
        assert mtp.unembedding.data_ptr() == unembedding.data_ptr()
        torch.testing.assert_close(mtp.logits(state, 1), logits)


@pytest.mark.parametrize("kind", ["parallel", "untied", "sequential"])
@torch.no_grad()
def test_saved_modules_load_equal(kind: str, tmp_path: Path) -> None:
    embedding, unembedding = matrices()
    ids = torch.tensor([4, 0, 19, 7])
    if kind == "sequential":
        saved = SequentialMTP(SEQUENTIAL, embedding, unembedding, draft_to_target=ids)
    else:
        config = MTPConfig("parallel", SIZE, 2, is_tied=kind == "parallel")
        saved = ParallelHeads(config, unembedding, draft_to_target=ids)
    save_mtp(saved, tmp_path / "new" / "folder")
    loaded = load_mtp(tmp_path / "new" / "folder", embedding, unembedding)
    state = torch.randn(3, SIZE)
    assert torch.equal(loaded.logits(state, 1), saved.logits(state, 1))
    assert loaded.config == saved.config
    assert loaded.draft_vocab == 4
    assert torch.equal(loaded.draft_to_target, ids)
    names = loaded.state_dict()
    assert names.keys().isdisjoint({"embedding", "unembedding", "unembed.weight"})


def test_unreadable_modules_are_refused(tmp_path: Path) -> None:
    embedding, unembedding = matrices()
    with pytest.raises(ValueError, match="cannot read MTP modules"):
        load_mtp(tmp_path, embedding, unembedding)
    heads = ParallelHeads(
        MTPConfig("parallel", SIZE, 2), unembedding, draft_to_target=torch.tensor([VOCAB - 1])
    )
    save_mtp(heads, tmp_path)
    with pytest.raises(ValueError, match="outside the target's vocabulary"):
        load_mtp(tmp_path, embedding, unembedding[:-1])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"depth": 3}))
    with pytest.raises(ValueError, match="do not fit"):
        load_mtp(tmp_path, embedding, unembedding)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "serial"}, "kind must be"),
        ({"depth": 0}, "depth must be >= 1"),
        ({"kv_heads": 3}, "multiple of kv_heads"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"is_tied": False}, "is_tied"),
    ],
)
def test_impossible_configs_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MTPConfig(**(vars(SEQUENTIAL) | fields))  # type: ignore[arg-type]


def test_matrices_of_another_width_are_refused() -> None:
    embedding, unembedding = matrices()
    with pytest.raises(ValueError, match=r"unembedding must be \[vocab, 16\]"):
        ParallelHeads(MTPConfig("parallel", SIZE, 1), unembedding[:, 1:])
    with pytest.raises(ValueError, match=r"embedding must be \[vocab, 16\]"):
        SequentialMTP(SEQUENTIAL, embedding[:, 1:], unembedding)
    with pytest.raises(ValueError, match="blocks must hold 3"):
        SequentialMTP(SEQUENTIAL, embedding, unembedding, blocks=[])
