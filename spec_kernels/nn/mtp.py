"""Multi-token prediction: modules that draft several tokens from the target's own hidden states.

    parallel     state_k(i) = z_i + silu(W_k z_i + b_k)
    sequential   state_k(i) = Block_k(M_k [norm(state_(k-1)(i)); norm(Emb(x_(i+k)))])
    logits_k(i) = unembedding(norm(state_k(i))), they predict x_(i+k+1)

`z_i = state_0(i)` is the target's last hidden state at position i, from which its own head predicts
x_(i+1). So depth 1 is the first *extra* token. Parallel heads see none of the drafts before them;
sequential modules see each. Either only proposes: the verifier keeps the output exact.

The embedding and the unembedding are the target's; they are shared, never saved. A reduced draft
vocabulary makes drafting and training cheaper: tokens outside it are never drafted.

Source: Gloeckle et al. 2024 (section 2); DeepSeek-V3 technical report 2024 (section 2.2).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_kernels._check import require
from spec_kernels.nn._decoder_block import Attend, DecoderBlock, MTPConfig, attend_causally


class _Shared(nn.Module):
    """What both kinds have: the config, the target's matrices, the draft vocabulary."""

    embedding: Tensor | None
    draft_to_target: Tensor | None

    def __init__(
        self,
        config: MTPConfig,
        unembedding: Tensor,
        embedding: Tensor | None,
        draft_to_target: Tensor | None,
    ) -> None:
        super().__init__()
        require(
            unembedding.ndim == 2 and unembedding.shape[1] == config.hidden_size,
            f"unembedding must be [vocab, {config.hidden_size}], got {list(unembedding.shape)}",
        )
        self.config = config
        self.target_vocab = unembedding.shape[0]
        self.register_buffer("embedding", embedding, persistent=False)
        rows = unembedding if draft_to_target is None else unembedding[draft_to_target]
        self.unembed = _frozen_linear(rows.detach())
        self.register_buffer("draft_to_target", draft_to_target)

    @property
    def unembedding(self) -> Tensor:
        """The target's output matrix, `[draft_vocab, hidden_size]`."""
        return self.unembed.weight

    @property
    def draft_vocab(self) -> int:
        """Columns of the draft logits."""
        return self.unembed.out_features


def _frozen_linear(weight: Tensor) -> nn.Linear:
    """Return a layer over a weight that is neither trained nor saved, nor copied."""
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    del layer.weight
    layer.register_buffer("weight", weight, persistent=False)
    return layer


class ParallelHeads(_Shared):
    """Residual heads over one hidden state: head k predicts the k-th extra token.

    Args:
        config: of kind "parallel".
        unembedding: `[vocab, hidden_size]`, the target's output matrix; shared, not copied (but for
            the rows of a reduced draft vocabulary), not trained, not saved.
        draft_to_target: `[draft_vocab] int64`, target id of each draft column; None = all ids.

    Raises:
        ValueError: the config is of another kind, or the sizes do not fit.

    Example:
        >>> heads = ParallelHeads(MTPConfig("parallel", hidden_size=4, depth=3), torch.eye(6, 4))
        >>> states = heads(torch.ones(2, 4))
        >>> states.shape, heads.logits(states[:, 0], depth=1).shape
        (torch.Size([2, 3, 4]), torch.Size([2, 6]))
    """

    def __init__(
        self, config: MTPConfig, unembedding: Tensor, *, draft_to_target: Tensor | None = None
    ) -> None:
        require(config.kind == "parallel", f'config.kind must be "parallel", got {config.kind!r}')
        super().__init__(config, unembedding, None, draft_to_target)
        size = config.hidden_size
        self.heads = nn.ModuleList(nn.Linear(size, size) for _ in range(config.depth))
        self.norms = nn.ModuleList(
            nn.RMSNorm(size, eps=config.norm_eps) for _ in range(config.depth)
        )
        self.outputs = nn.ModuleList()
        if not config.is_tied:
            own = (nn.Linear(size, self.draft_vocab, bias=False) for _ in range(config.depth))
            self.outputs.extend(own)

    def state(self, hidden: Tensor, depth: int) -> Tensor:
        """Return the state of head `depth` (1 = first extra token), `[..., hidden_size]`."""
        out: Tensor = hidden + F.silu(self.heads[depth - 1](hidden))
        return out

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the states of all heads.

        Args:
            hidden: `[..., hidden_size]`, the target's last hidden states.

        Returns:
            `[..., depth, hidden_size]`.
        """
        depths = range(1, self.config.depth + 1)
        return torch.stack([self.state(hidden, depth) for depth in depths], -2)

    def logits(self, state: Tensor, depth: int, columns: Tensor | None = None) -> Tensor:
        """Return `[..., draft_vocab]` of states `[..., hidden_size]` of head `depth`.

        With `columns [n] int64` only those, `[..., n]`: training compares a part of them.
        """
        output = self.unembed if self.config.is_tied else self.outputs[depth - 1]
        assert isinstance(output, nn.Linear)
        return _multiply(output, self.norms[depth - 1](state), columns)


class MTPModule(nn.Module):
    """One depth of `SequentialMTP`: merge state and embedding, then one decoder block.

    Args:
        config: of kind "sequential".
        block: the decoder block; by default `DecoderBlock(config)`.
    """

    def __init__(self, config: MTPConfig, block: nn.Module | None = None) -> None:
        super().__init__()
        size = config.hidden_size
        self.embedding_first = config.embedding_first
        self.embedding_norm = nn.RMSNorm(size, eps=config.norm_eps)
        self.hidden_norm = nn.RMSNorm(size, eps=config.norm_eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.block = DecoderBlock(config) if block is None else block
        self.norm = nn.RMSNorm(size, eps=config.norm_eps)

    def forward(
        self, hidden: Tensor, embedding: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Return the state of this depth, `[batch, tokens, size]`, before its final norm."""
        parts = [self.hidden_norm(hidden), self.embedding_norm(embedding)]
        merged = self.projection(torch.cat(parts[::-1] if self.embedding_first else parts, -1))
        out: Tensor = self.block(merged, positions, attend)
        return out


class SequentialMTP(_Shared):
    """One module per depth, each fed with the state of the one before and the next token.

    Args:
        config: of kind "sequential".
        embedding: `[vocab, hidden_size]`, the target's input matrix.
        unembedding: `[vocab, hidden_size]`, the target's output matrix. Both are shared, neither
            trained nor saved.
        draft_to_target: `[draft_vocab] int64`, target id of each draft column; None = all ids.
        blocks: decoder blocks to use in the place of `DecoderBlock`, one per depth (one if
            shared).

    Raises:
        ValueError: the config is of another kind, or the sizes do not fit.

    Example:
        >>> config = MTPConfig("sequential", 8, 2, heads=2, kv_heads=1, head_dim=4,
        ...                    intermediate_size=16)
        >>> mtp = SequentialMTP(config, torch.randn(6, 8), torch.randn(6, 8))
        >>> [state.shape[1] for state in mtp(torch.randn(1, 5, 8), torch.tensor([[0, 1, 2, 3, 4]]))]
        [4, 3]
    """

    def __init__(
        self,
        config: MTPConfig,
        embedding: Tensor,
        unembedding: Tensor,
        *,
        draft_to_target: Tensor | None = None,
        blocks: list[nn.Module] | None = None,
    ) -> None:
        require(config.kind == "sequential", f'config.kind must be "sequential", got {config.kind}')
        require(
            embedding.ndim == 2 and embedding.shape[1] == config.hidden_size,
            f"embedding must be [vocab, {config.hidden_size}], got {list(embedding.shape)}",
        )
        super().__init__(config, unembedding, embedding.detach(), draft_to_target)
        count = 1 if config.is_shared else config.depth
        require(
            blocks is None or len(blocks) == count,
            f"blocks must hold {count} modules, got {0 if blocks is None else len(blocks)}",
        )
        given = [None] * count if blocks is None else blocks
        self.layers = nn.ModuleList(MTPModule(config, block) for block in given)

    def module(self, depth: int) -> MTPModule:
        """Return the module of a depth, 1 = first extra token."""
        module = self.layers[0 if self.config.is_shared else depth - 1]
        assert isinstance(module, MTPModule)
        return module

    def state(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Attend, depth: int
    ) -> Tensor:
        """Return the states of one depth.

        Args:
            hidden: `[batch, tokens, hidden_size]`, states of depth - 1 at positions i.
            tokens: `[batch, tokens] int64`, x_(i + depth).
            positions: `[batch, tokens] int64`, i.
            attend: attention over this depth's own cache.
            depth: 1 = first extra token.
        """
        assert self.embedding is not None
        embedding = F.embedding(tokens, self.embedding)
        out: Tensor = self.module(depth)(hidden, embedding, positions, attend)
        return out

    def forward(self, hidden: Tensor, tokens: Tensor, depth: int | None = None) -> list[Tensor]:
        """Return the states of every depth over whole sequences, as training needs them.

        Args:
            hidden: `[batch, length, hidden_size]`, the target's last hidden states.
            tokens: `[batch, length] int64`.
            depth: deepest one wanted; by default the config's.

        Returns:
            for k = 1..depth `[batch, length - k, hidden_size]`: entry i has seen tokens up to
            i + k and predicts token i + k + 1.
        """
        states, length = [], tokens.shape[1]
        for k in range(1, (self.config.depth if depth is None else depth) + 1):
            positions = torch.arange(length - k, device=tokens.device).expand(len(tokens), -1)
            inputs = hidden[:, : length - k]
            hidden = self.state(inputs, tokens[:, k:], positions, attend_causally, k)
            states.append(hidden)
        return states

    def logits(self, state: Tensor, depth: int, columns: Tensor | None = None) -> Tensor:
        """Return `[..., draft_vocab]` of states `[..., hidden_size]` of a depth.

        With `columns [n] int64` only those, `[..., n]`: training compares a part of them.
        """
        return _multiply(self.unembed, self.module(depth).norm(state), columns)


def _multiply(output: nn.Linear, state: Tensor, columns: Tensor | None) -> Tensor:
    """Apply an output layer, or those columns of it."""
    out: Tensor = output(state) if columns is None else F.linear(state, output.weight[columns])
    return out


MTP = ParallelHeads | SequentialMTP


def save_mtp(module: MTP, folder: str | Path) -> None:
    """Write `config.json` and `model.safetensors` into `folder`, which is made if need be.

    The target's embedding and unembedding are not written.
    """
    from safetensors.torch import save_file

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(asdict(module.config), indent=2) + "\n")


def load_mtp(
    folder: str | Path,
    embedding: Tensor,
    unembedding: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> MTP:
    """Read modules that `save_mtp` wrote.

    Args:
        folder: with `config.json` and `model.safetensors`.
        embedding: `[vocab, hidden_size]`, the target's input matrix.
        unembedding: `[vocab, hidden_size]`, the target's output matrix.
        dtype: of the loaded parameters; by default the unembedding's.

    Raises:
        ValueError: a file is missing or unreadable, or its tensors do not fit the config.
    """
    from safetensors.torch import load_file

    path = Path(folder)
    try:
        fields: dict[str, Any] = json.loads((path / "config.json").read_text())
        tensors = load_file(path / "model.safetensors")
        config = MTPConfig(**fields)
    except Exception as error:  # JSON, safetensors and unknown fields have no common base
        raise ValueError(f"cannot read MTP modules from {path}: {error}") from error
    ids = tensors.get("draft_to_target")
    if ids is not None:
        ids = ids.to(unembedding.device)
        outside = bool(((ids < 0) | (ids >= unembedding.shape[0])).any())
        require(not outside, f"draft_to_target of {path} has ids outside the target's vocabulary")
    module: MTP
    if config.kind == "parallel":
        module = ParallelHeads(config, unembedding, draft_to_target=ids)
    else:
        module = SequentialMTP(config, embedding, unembedding, draft_to_target=ids)
    module.to(unembedding.device, unembedding.dtype if dtype is None else dtype)
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"the weights in {path} do not fit its config: {error}") from error
    return module
