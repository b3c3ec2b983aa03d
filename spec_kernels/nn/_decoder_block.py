"""The decoder block of a sequential MTP module, and the configuration of MTP modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_kernels._check import require

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention over a block's own cache: query `[batch, tokens, heads, head_dim]` and key, value
`[batch, tokens, kv_heads, head_dim]`, positions encoded, to `[batch, tokens, heads, head_dim]`."""


@dataclass(frozen=True)
class MTPConfig:
    """Shape of the modules; saved as JSON beside the weights.

    Attributes:
        kind: "parallel" (a residual head per depth) or "sequential" (a decoder block per depth).
        hidden_size: width of the target's hidden states.
        depth: extra tokens, at least 1.
        is_shared: sequential: one module serves every depth, fed with its own state (EAGLE-1,
            FastMTP), so depth may be raised after training.
        is_tied: use the target's unembedding; else parallel heads own one each.
        embedding_first: sequential: the projection reads [embedding; state] (as shipped checkpoints
            of DeepSeek-V3 do), else [state; embedding] (as its report writes).
        heads, kv_heads, head_dim, intermediate_size, rope_theta, norm_eps: of the decoder block.
    """

    kind: Literal["parallel", "sequential"]
    hidden_size: int
    depth: int
    is_shared: bool = False
    is_tied: bool = True
    embedding_first: bool = False
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        kinds = ("parallel", "sequential")
        require(self.kind in kinds, f"kind must be one of {', '.join(kinds)}, got {self.kind!r}")
        sizes = ["hidden_size", "depth"]
        if self.kind == "sequential":
            sizes += ["heads", "kv_heads", "head_dim", "intermediate_size"]
            require(self.is_tied, "sequential modules share the target's unembedding: is_tied")
        for name in sizes:
            value = getattr(self, name)
            require(value >= 1, f"{name} must be >= 1, got {value}")
        if self.kind == "sequential":
            require(
                self.heads % self.kv_heads == 0,
                f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}",
            )
            require(self.head_dim % 2 == 0, f"head_dim must be even, got {self.head_dim}")


class Block(Protocol):
    """What `SequentialMTP` asks of a decoder block; any module with this call will do."""

    def __call__(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return `[batch, tokens, size]` of hidden `[batch, tokens, size]`, positions `[batch,
        tokens]`."""
        ...


class DecoderBlock(nn.Module):
    """A pre-norm decoder block: grouped-query attention with rotary positions, then SwiGLU.

    The parameters are named as in Hugging Face's Llama, so its layers load as they are.

    Args:
        config: sizes of the block.

    Example:
        >>> block = DecoderBlock(MTPConfig("sequential", 8, 1, heads=2, kv_heads=1, head_dim=4,
        ...                                intermediate_size=16))
        >>> block(torch.zeros(1, 3, 8), torch.arange(3)[None], attend_causally).shape
        torch.Size([1, 3, 8])
    """

    def __init__(self, config: MTPConfig) -> None:
        super().__init__()
        size, width = config.hidden_size, config.head_dim
        self.head_dim, self.rope_theta = width, config.rope_theta

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.input_layernorm = nn.RMSNorm(size, eps=config.norm_eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(size, config.heads * width),
                "k_proj": linear(size, config.kv_heads * width),
                "v_proj": linear(size, config.kv_heads * width),
                "o_proj": linear(config.heads * width, size),
            }
        )
        self.post_attention_layernorm = nn.RMSNorm(size, eps=config.norm_eps)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(size, config.intermediate_size),
                "up_proj": linear(size, config.intermediate_size),
                "down_proj": linear(config.intermediate_size, size),
            }
        )

    def forward(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Apply attention and MLP, each added to its input.

        Args:
            hidden: `[batch, tokens, size]`.
            positions: `[batch, tokens] int64`.
            attend: stores key and value, and attends to what precedes.
        """
        x = self.input_layernorm(hidden)
        query, key, value = (
            self.self_attn[name](x).unflatten(-1, (-1, self.head_dim))
            for name in ("q_proj", "k_proj", "v_proj")
        )
        heads = query.shape[-2]
        turned = rotate(torch.cat([query, key], -2), positions, self.rope_theta)
        query, key = turned[..., :heads, :], turned[..., heads:, :]
        hidden = hidden + self.self_attn["o_proj"](attend(query, key, value).flatten(-2))
        x = self.post_attention_layernorm(hidden)
        gated = F.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x)
        out: Tensor = hidden + self.mlp["down_proj"](gated)
        return out


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Encode positions by rotating pairs of channels, first half against second half.

    Args:
        x: `[batch, tokens, heads, head_dim]`.
        positions: `[batch, tokens] int64`.
        theta: base of the wavelengths.

    Source: Su et al. 2021 (RoPE), in the half-split order of Hugging Face's Llama.
    """
    half = x.shape[-1] // 2
    exact = torch.promote_types(x.dtype, torch.float32)
    angles = positions[..., None, None].to(exact) * _signed_frequencies(
        half, theta, exact, x.device
    )
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.addcmul(x * cos, x.roll(half, -1), sin)


@functools.lru_cache(maxsize=16)
def _signed_frequencies(
    half: int, theta: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return `[2 * half]` radians per position: the cosine is the same for both halves, the sine
    has opposite signs."""
    frequencies = theta ** -(torch.arange(half, dtype=dtype, device=device) / half)
    return torch.cat([-frequencies, frequencies])


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend within the tokens given, each to itself and the ones before: training, no cache."""
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)
