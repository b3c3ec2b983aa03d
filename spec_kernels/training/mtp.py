"""Train multi-token prediction modules on a frozen target.

    loss = sum_k weight_k * loss_k          loss_k over the states of depth k, k = 1..depth

loss_k is the cross entropy of the token k + 1 places on ("tokens"), or compares the module's law
with the target's own law there: Kullback-Leibler ("kl"), or `1 - sum_x min(p, q)` ("overlap"),
whose minimum is the maximum of acceptance. DeepSeek-V3's loss is `weight_k = lambda / depth`.

Memory holds the logits of one depth at a time: each depth goes backward to its states before the
next one's logits are made, and the states go backward once, together (Gloeckle et al. 2024,
section 2). The gradients are those of the sum.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_kernels._check import require
from spec_kernels.nn.mtp import MTP, SequentialMTP
from spec_kernels.training.corpus import Corpus
from spec_kernels.types import PAD_TOKEN

LossName = Literal["tokens", "kl", "overlap"]


@dataclass(frozen=True)
class Training:
    """How to train.

    Attributes:
        steps: updates.
        batch: sequences per update.
        learning_rate: of AdamW, falling linearly to 0.
        loss: "tokens", "kl" or "overlap".
        depth_weights: weight of each depth's loss; None = 1 / depth each.
        first_depth_until: share of the steps that train depth 1 only; the deeper ones start from
            what it has learned.
        clip: largest norm of the gradient.
        seed: of the order of the sequences.
    """

    steps: int
    batch: int = 4
    learning_rate: float = 1.5e-3
    loss: LossName = "kl"
    depth_weights: tuple[float, ...] | None = None
    first_depth_until: float = 0.0
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.steps >= 1 and self.batch >= 1, "steps and batch must be at least 1")
        names = ("tokens", "kl", "overlap")
        require(self.loss in names, f"loss must be one of {', '.join(names)}, got {self.loss!r}")
        require(
            0.0 <= self.first_depth_until <= 1.0,
            f"first_depth_until must be in [0, 1], got {self.first_depth_until}",
        )

    def weights(self, depth: int, step: int) -> list[float]:
        """Return the weight of each depth at a step.

        Raises:
            ValueError: depth_weights has another length.
        """
        given = self.depth_weights
        require(
            given is None or len(given) == depth,
            f"depth_weights must have {depth} values, one per depth, got {given}",
        )
        if step < self.first_depth_until * self.steps:
            return [1.0] + [0.0] * (depth - 1)
        return [1.0 / depth] * depth if given is None else list(given)


@dataclass(frozen=True)
class Acceptance:
    """How often drafts would be right, on text that the target is asked about token by token.

    Attributes:
        tokens: places judged, at depth 1.
        top1: per depth, share of places where the module's first id is the target's.
        survival: per depth, share of places where this depth and all before are right: tokens per
            round are 1 + their sum.
        loss: per depth, "tokens" loss.
    """

    tokens: int
    top1: list[float]
    survival: list[float]
    loss: list[float]


def next_tokens_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy where there is a target.

    Args:
        logits: `[places, draft_vocab]` float.
        targets: `[places] int64`, draft columns; negative = none: padding, or a token outside the
            draft vocabulary.
    """
    total = F.cross_entropy(logits.float(), targets.clamp(min=-1), ignore_index=-1, reduction="sum")
    return total / (targets >= 0).sum().clamp(min=1)


def overlap_loss(logits: Tensor, target_logits: Tensor, is_valid: Tensor) -> Tensor:
    """Return the mean of `1 - sum_x min(p, q)`: the probability that a drawn draft is rejected.

    Args:
        logits: `[places, draft_vocab]`, the module's.
        target_logits: `[places, draft_vocab]`, the target's on the same ids.
        is_valid: `[places] bool`, the places that count.

    Source: Leviathan et al. 2023, section 3.2: beta = sum_x min(p, q).
    """
    p, q = target_logits.float().softmax(-1), logits.float().softmax(-1)
    rejected = 1.0 - torch.minimum(p, q).sum(-1)
    return (rejected * is_valid).sum() / is_valid.sum().clamp(min=1)


def _kl_loss(logits: Tensor, target_logits: Tensor, is_valid: Tensor) -> Tensor:
    p = target_logits.float().log_softmax(-1)
    q = logits.float().log_softmax(-1)
    divergence = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    return (divergence * is_valid).sum() / is_valid.sum().clamp(min=1)


def _states(module: MTP, hidden: Tensor, tokens: Tensor, depth: int) -> list[Tensor]:
    """Return states `[batch, length - k, size]` for k = 1..depth, as `SequentialMTP` does."""
    if isinstance(module, SequentialMTP):
        found: list[Tensor] = module(hidden, tokens.clamp(min=0), depth)
        return found
    return [module.state(hidden[:, : hidden.shape[1] - k], k) for k in range(1, depth + 1)]


class _Places:
    """What the states of one depth are to predict: entry i the token after position i + depth."""

    def __init__(self, module: MTP, hidden: Tensor, tokens: Tensor, depth: int) -> None:
        self.tokens = F.pad(tokens[:, depth + 1 :], (0, 1), value=PAD_TOKEN)
        self.is_valid = (tokens[:, depth:] != PAD_TOKEN).flatten()
        self.hidden, self.depth = hidden, depth
        self.ids = module.draft_to_target
        self.unembedding = module.unembedding

    def columns(self, vocab: int) -> Tensor:
        """Return the draft column of each next token, -1 where there is none."""
        tokens = self.tokens.flatten()
        if self.ids is None:
            return tokens
        inverse = torch.full((vocab,), -1, dtype=torch.int64, device=tokens.device)
        inverse[self.ids] = torch.arange(len(self.ids), device=tokens.device)
        return torch.where(tokens >= 0, inverse[tokens.clamp(min=0)], -1)

    def target_logits(self) -> Tensor:
        """Return the target's own logits there, on the draft vocabulary."""
        with torch.no_grad():
            return F.linear(self.hidden[:, self.depth :], self.unembedding).flatten(0, 1)


def _loss(module: MTP, state: Tensor, places: _Places, name: LossName, vocab: int) -> Tensor:
    logits = module.logits(state, places.depth).flatten(0, 1)
    if name == "tokens":
        return next_tokens_loss(logits, places.columns(vocab))
    compare = _kl_loss if name == "kl" else overlap_loss
    return compare(logits, places.target_logits(), places.is_valid)


def backward(
    module: MTP,
    hidden: Tensor,
    tokens: Tensor,
    weights: Sequence[float],
    *,
    loss: LossName = "tokens",
    vocab: int,
) -> list[float]:
    """Accumulate the gradients of `sum_k weights[k] * loss_k`, one depth's logits in memory.

    Args:
        module: parallel heads or sequential modules.
        hidden: `[batch, length, size]`, the target's last hidden states. If it requires grad, the
            gradient goes on into the target.
        tokens: `[batch, length] int64`, `PAD_TOKEN` behind the end.
        weights: one per depth; depths behind the last weight that is not 0 are left out.
        loss: "tokens", "kl" or "overlap".
        vocab: size of the target's vocabulary.

    Returns:
        the loss of each depth that was computed, unweighted.

    Raises:
        ValueError: another number of weights than depths.

    Example:
        >>> from spec_kernels.nn.mtp import MTPConfig, ParallelHeads
        >>> heads = ParallelHeads(MTPConfig("parallel", 4, 2), torch.eye(6, 4))
        >>> losses = backward(heads, torch.ones(1, 5, 4), torch.arange(5)[None], [1, 1], vocab=6)
        >>> len(losses), heads.heads[0].weight.grad is not None
        (2, True)
    """
    depth = module.config.depth
    require(
        len(weights) == depth, f"weights must have {depth} values, one per depth, got {weights}"
    )
    last = max((k for k, weight in enumerate(weights, 1) if weight), default=0)
    states = _states(module, hidden, tokens, last)
    losses, gradients = [], []
    for k, state in enumerate(states, 1):
        leaf = state.detach().requires_grad_()
        places = _Places(module, hidden, tokens, k)
        value = _loss(module, leaf, places, loss, vocab)
        (weights[k - 1] * value).backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        gradients.append(leaf.grad)
        losses.append(value.item())
    torch.autograd.backward(states, gradients)
    return losses


@torch.no_grad()
def measure_acceptance(
    module: MTP, corpus: Corpus, unembedding: Tensor, *, batch: int = 8
) -> Acceptance:
    """Measure acceptance by depth on held-out text, as greedy decoding would judge it.

    Args:
        module: what drafts.
        corpus: the text; at each place the target's own argmax over its whole vocabulary counts.
        unembedding: `[vocab, size]`, the target's.
        batch: sequences at a time.
    """
    depth = module.config.depth
    right, all_right = torch.zeros(depth), torch.zeros(depth)
    loss, count = torch.zeros(depth), torch.zeros(depth)
    for start in range(0, len(corpus.tokens), batch):
        tokens = corpus.tokens[start : start + batch].to(unembedding.device)
        hidden = corpus.hidden[start : start + batch].to(unembedding.device, unembedding.dtype)
        own = F.linear(hidden, unembedding).argmax(-1)
        before = torch.ones_like(own, dtype=torch.bool)
        for k, state in enumerate(_states(module, hidden, tokens, depth), 1):
            logits = module.logits(state, k)
            drafted = logits.argmax(-1)
            if module.draft_to_target is not None:
                drafted = module.draft_to_target[drafted]
            # all depths are judged at the places that the deepest one has
            places = tokens[:, depth:] != PAD_TOKEN
            hit = (drafted == own[:, k:])[:, : places.shape[1]]
            before = hit if k == 1 else before & hit
            right[k - 1] += (hit & places).sum().cpu()
            all_right[k - 1] += (before & places).sum().cpu()
            count[k - 1] += places.sum().cpu()
            columns = _Places(module, hidden, tokens, k).columns(unembedding.shape[0])
            loss[k - 1] += next_tokens_loss(logits.flatten(0, 1), columns).cpu() * len(tokens)
    return Acceptance(
        tokens=int(count[0]),
        top1=(right / count).tolist(),
        survival=(all_right / count).tolist(),
        loss=(loss / len(corpus.tokens)).tolist(),
    )


@torch.no_grad()
def start_from_trunk(module: MTP, corpus: Corpus) -> None:
    """Set the parameters so that training starts from the target's own prediction.

    Residual branches start at zero, the projection passes the hidden state through, and the last
    norm gives it its usual size: the first logits are the target's own, for the token before.

    Args:
        module: fresh modules.
        corpus: gives the usual size of a hidden state.
    """
    size = corpus.hidden[corpus.tokens != PAD_TOKEN].float().square().mean().sqrt().item()
    for name, parameter in module.named_parameters():
        if name.startswith("heads.") or name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()
        elif name.startswith("norms.") or name.split(".", 2)[2:] == ["norm.weight"]:
            parameter.fill_(size)
        elif name.startswith("outputs."):
            parameter.copy_(module.unembedding)
        elif name.endswith("projection.weight"):
            state, embedding = parameter.chunk(2, 1)
            if module.config.embedding_first:
                state, embedding = embedding, state
            torch.nn.init.eye_(state)
            torch.nn.init.normal_(embedding, std=0.02)


Report = Callable[[int, list[float]], None]
"""Called after each step with the steps done and the loss of each depth."""


def train(
    module: MTP,
    corpus: Corpus,
    training: Training,
    *,
    vocab: int,
    checkpoint: str | Path | None = None,
    save_every: int = 50,
    report: Report = lambda step, losses: None,
) -> int:
    """Train the modules in place; the target stays as it is.

    A checkpoint resumes exactly: the parameters after the last step are the same, interrupted or
    not. Ctrl-C finishes the step under way, saves, and returns; a second one interrupts at once.

    Args:
        module: what to train, on the device and in the dtype to train in.
        corpus: the text.
        training: how.
        vocab: size of the target's vocabulary.
        checkpoint: file to resume from if it exists, and to save to.
        save_every: steps between saves.
        report: called after each step.

    Returns:
        steps done in all; fewer than `training.steps` after Ctrl-C.

    Raises:
        ValueError: the checkpoint is unreadable or of another training.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=training.learning_rate)
    path = None if checkpoint is None else Path(checkpoint)
    step = _resume(path, module, optimizer, training)
    with _interruptible() as is_interrupted:
        while step < training.steps and not is_interrupted():
            losses = _step(module, corpus, training, optimizer, step, vocab)
            step += 1
            report(step, losses)
            if step % save_every == 0:
                _save(path, module, optimizer, training, step)
    _save(path, module, optimizer, training, step)
    return step


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Note the first Ctrl-C instead of raising; where signals can't be caught, change nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    seen: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        del frame
        seen.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


def _step(
    module: MTP,
    corpus: Corpus,
    training: Training,
    optimizer: torch.optim.Optimizer,
    step: int,
    vocab: int,
) -> list[float]:
    rows = _rows(len(corpus.tokens), training, step)
    parameter = next(module.parameters())
    tokens = corpus.tokens[rows].to(parameter.device)
    hidden = corpus.hidden[rows].to(parameter.device, parameter.dtype)
    weights = training.weights(module.config.depth, step)
    optimizer.zero_grad(set_to_none=True)
    losses = backward(module, hidden, tokens, weights, loss=training.loss, vocab=vocab)
    torch.nn.utils.clip_grad_norm_(module.parameters(), training.clip)
    for group in optimizer.param_groups:
        group["lr"] = training.learning_rate * (1.0 - step / training.steps)
    optimizer.step()
    return losses


def _rows(count: int, training: Training, step: int) -> Tensor:
    """Return the sequences of a step: every epoch is a fresh permutation, known from the seed."""
    batch = min(training.batch, count)
    places = range(step * batch, (step + 1) * batch)
    orders = {}
    for epoch in {place // count for place in places}:
        generator = torch.Generator().manual_seed(training.seed * 1_000_003 + epoch)
        orders[epoch] = torch.randperm(count, generator=generator)
    return torch.stack([orders[place // count][place % count] for place in places])


def _save(
    path: Path | None,
    module: MTP,
    optimizer: torch.optim.Optimizer,
    training: Training,
    step: int,
) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    state = {
        "module": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "training": dataclasses.asdict(training),
        "step": step,
    }
    torch.save(state, partial)
    os.replace(partial, path)  # a crash leaves the old file or the new one


def _resume(
    path: Path | None, module: MTP, optimizer: torch.optim.Optimizer, training: Training
) -> int:
    if path is None or not path.exists():
        return 0
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
        given = dataclasses.asdict(training)
        require(state["training"] == given, f"it was made with {state['training']}, not {given}")
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
    except Exception as error:  # pickle, zip, key and shape faults have no common base
        raise ValueError(f"cannot resume from {path}: {error}") from error
