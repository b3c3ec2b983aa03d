"""Read the MTP modules that models ship into `SequentialMTP`.

    layout                       names of depth k
    DeepSeek-V3, GLM-4-MoE       model.layers.(num_layers + k - 1).{enorm, hnorm, eh_proj, ...}
    Qwen3-Next                   mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm, layers.0}

Both concatenate [embedding; state], the embedding first. DeepSeek-V3's report writes it the other
way round; swapped halves of the projection still run, and draft nonsense. Qwen3-Next's norms store
their weight less one.

What is left of a depth's names is its decoder block, which differs by model: latent attention,
gated attention, experts. Give such blocks as modules with the parameter names of the checkpoint; a
plain block (grouped heads, SwiGLU, no biases) needs none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from spec_kernels._check import require
from spec_kernels.nn._decoder_block import MTPConfig
from spec_kernels.nn.mtp import SequentialMTP

_DEEPSEEK: Final = {
    "enorm.weight": "embedding_norm.weight",
    "hnorm.weight": "hidden_norm.weight",
    "eh_proj.weight": "projection.weight",
    "shared_head.norm.weight": "norm.weight",
}
_QWEN: Final = {
    "pre_fc_norm_embedding.weight": "embedding_norm.weight",
    "pre_fc_norm_hidden.weight": "hidden_norm.weight",
    "fc.weight": "projection.weight",
    "norm.weight": "norm.weight",
}


def load_shipped_mtp(
    tensors: Mapping[str, Tensor],
    config: MTPConfig,
    embedding: Tensor,
    unembedding: Tensor,
    *,
    num_layers: int,
    blocks: list[nn.Module] | None = None,
) -> SequentialMTP:
    """Make sequential modules from the tensors of a model's checkpoint.

    Args:
        tensors: the checkpoint by name; tensors of other layers are skipped.
        config: of kind "sequential" with `embedding_first`.
        embedding: `[vocab, hidden_size]`, the target's input matrix.
        unembedding: `[vocab, hidden_size]`, the target's output matrix.
        num_layers: decoder layers of the target itself.
        blocks: decoder blocks, one per depth, with the checkpoint's parameter names.

    Raises:
        ValueError: no known layout, a depth is missing, its tensors do not fit, or a depth has an
            embedding or a head of its own.

    Example:
        >>> config = MTPConfig("sequential", 4, 1, heads=1, kv_heads=1, head_dim=4,
        ...                    intermediate_size=4, embedding_first=True)
        >>> load_shipped_mtp({}, config, torch.eye(4), torch.eye(4), num_layers=2)
        Traceback (most recent call last):
        ValueError: the checkpoint has no MTP modules in a known layout
    """
    require(config.embedding_first, "config.embedding_first must be True: all layouts have it so")
    parts = _split_qwen(tensors) if "mtp.fc.weight" in tensors else _split(tensors, num_layers)
    module = SequentialMTP(config, embedding, unembedding, blocks=blocks)
    count = len(module.layers)
    require(len(parts) > 0, "the checkpoint has no MTP modules in a known layout")
    require(len(parts) >= count, f"the checkpoint has {len(parts)} MTP modules, not {count}")
    shared = {"embed_tokens.weight": embedding, "shared_head.head.weight": unembedding}
    for depth, (layer, part) in enumerate(zip(module.layers, parts, strict=False), 1):
        for name, matrix in shared.items():
            own = part.pop(name, None)
            same = own is None or torch.equal(own, matrix.to(own.device, own.dtype))
            require(same, f"depth {depth} has its own {name}, not the target's")
        try:
            layer.load_state_dict(part)
        except RuntimeError as error:
            raise ValueError(f"the tensors of depth {depth} do not fit: {error}") from error
    return module.to(unembedding.device, unembedding.dtype)


def _split(tensors: Mapping[str, Tensor], num_layers: int) -> list[dict[str, Tensor]]:
    """Return the tensors of each depth under our names: layers behind the target's own."""
    parts: list[dict[str, Tensor]] = []
    while f"model.layers.{num_layers + len(parts)}.eh_proj.weight" in tensors:
        prefix = f"model.layers.{num_layers + len(parts)}."
        part = _strip(tensors, prefix)
        block = part.keys() - {*_DEEPSEEK, "embed_tokens.weight", "shared_head.head.weight"}
        names = _DEEPSEEK | {name: f"block.{name}" for name in block}
        parts.append({names.get(name, name): tensor for name, tensor in part.items()})
    return parts


def _split_qwen(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the tensors of the one depth under our names, with norms that multiply."""
    part = _strip(tensors, "mtp.")
    found = {}
    for name, tensor in part.items():
        ours = _QWEN.get(name, name.replace("layers.0.", "block.", 1))
        is_norm = "norm" in name.split(".")[-2]
        found[ours] = tensor + 1 if is_norm and not _is_gated_norm(name) else tensor
    return [found]


def _is_gated_norm(name: str) -> bool:
    """Say whether a norm of Qwen3-Next stores its weight as it is: that of linear attention."""
    return ".linear_attn." in name


def _strip(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
