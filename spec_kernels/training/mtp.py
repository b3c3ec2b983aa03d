"""Train multi-token prediction modules on a frozen target: the loop, and where it starts.

A checkpoint resumes exactly: everything that a step depends on is the step's number, the seed, the
corpus and what the checkpoint holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_kernels._check import require
from spec_kernels.nn.mtp import MTP
from spec_kernels.training.corpus import Corpus
from spec_kernels.training.losses import LossName, backward
from spec_kernels.types import PAD_TOKEN


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
        others: None = compare all columns of the draft vocabulary; else those of the likeliest
            tokens at the places of the step (four a place) and so many others, drawn anew for each
            step. The logits cost most of a step, so this makes it much cheaper.
        seed: of the order of the sequences and of the other columns.
    """

    steps: int
    batch: int = 4
    learning_rate: float = 1.5e-3
    loss: LossName = "kl"
    depth_weights: tuple[float, ...] | None = None
    first_depth_until: float = 0.0
    clip: float = 1.0
    others: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.steps >= 1 and self.batch >= 1, "steps and batch must be at least 1")
        names = ("tokens", "kl", "overlap")
        require(self.loss in names, f"loss must be one of {', '.join(names)}, got {self.loss!r}")
        require(self.others is None or self.others >= 0, "others must be None or at least 0")
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


@torch.no_grad()
def start_from_trunk(module: MTP, corpus: Corpus, *, seed: int = 0) -> None:
    """Set the parameters so that training starts from the target's own prediction.

    Residual branches start at zero, the projection passes the hidden state through, and the last
    norm gives it its usual size: the first logits are the target's own, for the token before. All
    else is drawn from the seed.

    Args:
        module: fresh modules.
        corpus: gives the usual size of a hidden state.
        seed: of the parameters that are drawn.
    """
    size = corpus.hidden[corpus.tokens != PAD_TOKEN].float().square().mean().sqrt().item()
    generator = torch.Generator().manual_seed(seed)

    def draw_(parameter: Tensor) -> None:
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * 0.5 * parameter.shape[1] ** -0.5)

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
            draw_(embedding)
        elif parameter.ndim == 2:
            draw_(parameter)


Report = Callable[[int, list[float]], None]
"""Called after each step with the steps done and the loss of each depth."""


def train(
    module: MTP,
    corpus: Corpus,
    training: Training,
    *,
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
    likely = None if training.others is None else _likely_columns(module, corpus)
    with _interruptible() as is_interrupted:
        while step < training.steps and not is_interrupted():
            losses = _step(module, corpus, training, optimizer, step, likely)
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
    likely: Tensor | None,
) -> list[float]:
    rows = _rows(len(corpus.tokens), training, step)
    parameter = next(module.parameters())
    tokens = corpus.tokens[rows].to(parameter.device)
    hidden = corpus.hidden[rows].to(parameter.device, parameter.dtype)
    first = corpus.first[rows].to(parameter.device)
    weights = training.weights(module.config.depth, step)
    optimizer.zero_grad(set_to_none=True)
    columns = None
    if likely is not None:
        columns = _columns(module, likely[rows], training, step).to(parameter.device)
    losses = backward(
        module, hidden, tokens, weights, loss=training.loss, first=first, columns=columns
    )
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


@torch.no_grad()
def _likely_columns(module: MTP, corpus: Corpus, count: int = 4) -> Tensor:
    """Return the columns of the target's likeliest tokens after each, `[sequences, length, 4]`."""
    unembedding = module.unembedding
    found = []
    for hidden in corpus.hidden:
        logits = F.linear(hidden.to(unembedding.device, unembedding.dtype), unembedding)
        found.append(logits.topk(min(count, module.draft_vocab)).indices.to("cpu", torch.int32))
    return torch.stack(found)


def _columns(module: MTP, likely: Tensor, training: Training, step: int) -> Tensor:
    """Return the columns that a step compares, ascending; known from the seed."""
    assert training.others is not None
    generator = torch.Generator().manual_seed(training.seed * 1_000_003 + 500_000 + step)
    order = torch.randperm(module.draft_vocab, generator=generator)
    is_compared = torch.zeros(module.draft_vocab, dtype=torch.bool)
    is_compared[likely.flatten().long()] = True
    is_compared[order[: training.others]] = True
    return is_compared.nonzero()[:, 0]


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
