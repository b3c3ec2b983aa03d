"""Shipped MTP modules: small checkpoints in each layout, against the formula written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_kernels.integrations.mtp_checkpoints import load_shipped_mtp
from spec_kernels.nn.mtp import MTPConfig

SIZE, VOCAB, LAYERS = 8, 11, 3
BLOCK = {
    "input_layernorm.weight": (SIZE,),
    "self_attn.q_proj.weight": (8, SIZE),
    "self_attn.k_proj.weight": (4, SIZE),
    "self_attn.v_proj.weight": (4, SIZE),
    "self_attn.o_proj.weight": (SIZE, 8),
    "post_attention_layernorm.weight": (SIZE,),
    "mlp.gate_proj.weight": (12, SIZE),
    "mlp.up_proj.weight": (12, SIZE),
    "mlp.down_proj.weight": (SIZE, 12),
}
DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")


class Plain(nn.Module):
    """A block without attention: what stands in for a model's own one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, hidden: Tensor, positions: Tensor, attend: object) -> Tensor:
        out: Tensor = hidden + self.experts(hidden)
        return out


def config(depth: int, **changes: object) -> MTPConfig:
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 4, "intermediate_size": 12}
    return MTPConfig("sequential", SIZE, depth, **(sizes | {"embedding_first": True} | changes))  # type: ignore[arg-type]


def parts(
    prefix: str, names: tuple[str, ...], block: str, shapes: dict[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    e, h, projection, norm = (f"{prefix}{name}.weight" for name in names)
    sizes = {e: (SIZE,), h: (SIZE,), norm: (SIZE,), projection: (SIZE, 2 * SIZE)}
    sizes |= {f"{prefix}{block}{name}": shape for name, shape in shapes.items()}
    return {name: torch.randn(*shape) for name, shape in sizes.items()}


def deepseek(depth: int, shapes: dict[str, tuple[int, ...]] = BLOCK) -> dict[str, Tensor]:
    tensors = {"model.layers.0.self_attn.q_proj.weight": torch.randn(8, SIZE)}
    for k in range(depth):
        tensors |= parts(f"model.layers.{LAYERS + k}.", DEEPSEEK, "", shapes)
    return tensors


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (SIZE,), weight, eps=1e-5)


def literal(
    tensors: dict[str, Tensor], prefix: str, names: tuple[str, ...], plus: float, block: str
) -> Tensor:
    """Merge and unembed one token, with `Plain` as the block."""
    e, h, projection, norm = (tensors[f"{prefix}{name}.weight"] for name in names)
    merged = projection @ torch.cat([rms(EMBEDDING[5], e + plus), rms(STATE, h + plus)])
    out = merged + tensors[f"{prefix}{block}experts.weight"] @ merged
    return HEAD @ rms(out, norm + plus)


torch.manual_seed(0)
EMBEDDING, HEAD, STATE = torch.randn(VOCAB, SIZE), torch.randn(VOCAB, SIZE), torch.randn(SIZE)
EXPERTS: dict[str, tuple[int, ...]] = {"experts.weight": (SIZE, SIZE)}


def logits(module: object, depth: int = 1) -> Tensor:
    token, zero = torch.tensor([[5]]), torch.zeros(1, 1, dtype=torch.int64)
    state = module.state(STATE[None, None], token, zero, lambda q, k, v: q, depth)  # type: ignore[attr-defined]
    found: Tensor = module.logits(state, depth)[0, 0]  # type: ignore[attr-defined]
    return found


@torch.no_grad()
def test_layers_behind_the_targets_own_become_depths() -> None:
    tensors = deepseek(2, EXPERTS)
    blocks = [Plain(), Plain()]
    module = load_shipped_mtp(tensors, config(2), EMBEDDING, HEAD, num_layers=LAYERS, blocks=blocks)
    for depth in (1, 2):
        expected = literal(tensors, f"model.layers.{LAYERS + depth - 1}.", DEEPSEEK, 0.0, "")
        torch.testing.assert_close(logits(module, depth), expected)


@torch.no_grad()
def test_norms_stored_less_one_are_restored() -> None:
    tensors = parts("mtp.", QWEN, "layers.0.", EXPERTS)
    module = load_shipped_mtp(
        tensors, config(1), EMBEDDING, HEAD, num_layers=LAYERS, blocks=[Plain()]
    )
    torch.testing.assert_close(logits(module), literal(tensors, "mtp.", QWEN, 1.0, "layers.0."))


@pytest.mark.parametrize("layout", ["deepseek", "qwen"])
def test_plain_blocks_need_no_module(layout: str) -> None:
    is_qwen = layout == "qwen"
    tensors = parts("mtp.", QWEN, "layers.0.", BLOCK) if is_qwen else deepseek(1)
    module = load_shipped_mtp(tensors, config(1), EMBEDDING, HEAD, num_layers=LAYERS)
    prefix = "mtp.layers.0." if is_qwen else f"model.layers.{LAYERS}."
    for name in BLOCK:
        stored = tensors[prefix + name] + (1.0 if is_qwen and "norm" in name else 0.0)
        assert torch.equal(module.layers[0].block.get_parameter(name), stored)


def test_matrices_repeated_in_the_checkpoint_must_be_the_targets() -> None:
    tensors = deepseek(1)
    prefix = f"model.layers.{LAYERS}."
    tensors |= {prefix + "embed_tokens.weight": EMBEDDING, prefix + "shared_head.head.weight": HEAD}
    load_shipped_mtp(tensors, config(1), EMBEDDING, HEAD, num_layers=LAYERS)
    tensors[prefix + "shared_head.head.weight"] = HEAD + 1
    with pytest.raises(ValueError, match=r"its own shared_head\.head"):
        load_shipped_mtp(tensors, config(1), EMBEDDING, HEAD, num_layers=LAYERS)


def test_checkpoints_that_do_not_fit_are_refused() -> None:
    def load(tensors: dict[str, Tensor], depth: int = 1, **changes: object) -> None:
        load_shipped_mtp(tensors, config(depth, **changes), EMBEDDING, HEAD, num_layers=LAYERS)

    with pytest.raises(ValueError, match="no MTP modules in a known layout"):
        load({"model.layers.0.mlp.weight": torch.ones(1)})
    with pytest.raises(ValueError, match="has 1 MTP modules, not 2"):
        load(deepseek(1), depth=2)
    with pytest.raises(ValueError, match="depth 1 do not fit"):
        load(deepseek(1, EXPERTS))
    with pytest.raises(ValueError, match="embedding_first"):
        load(deepseek(1), embedding_first=False)
