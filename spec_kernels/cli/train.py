"""`train-mtp`: train modules that draft from a model's hidden states, on text of its own or given.

The model stays as it is. Its hidden states are computed once and kept in the folder of the
training; then the modules learn from them. Both can be stopped with Ctrl-C: the same command goes
on where they stopped.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import torch
import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from spec_kernels._check import require
from spec_kernels.cli._common import ERR, OUT, Model, Threads, friendly_errors, progress
from spec_kernels.cli._setup import Loaded
from spec_kernels.integrations.smollm2_mtp import matrices_of
from spec_kernels.nn._decoder_block import MTPConfig
from spec_kernels.nn.mtp import MTP, ParallelHeads, SequentialMTP, load_mtp
from spec_kernels.training import (
    Acceptance,
    Corpus,
    Training,
    draft_vocabulary,
    measure_acceptance,
    recipe,
    start_from_trunk,
    train,
)
from spec_kernels.training.folder import States, TrainingFolder, describe
from spec_kernels.training.passages import Passage, read, write

KindName = Literal["parallel", "sequential"]
LossOption = Literal["tokens", "kl", "overlap"]

_PART: Final = 68  # prompts that are answered together; all held-out ones
_PIECE: Final = 192  # most tokens of a piece of given text
_HELD_OUT: Final = 0.1  # share of given text


class _Bar:
    """A progress bar on stderr; off a terminal a line now and then."""

    def __init__(self) -> None:
        columns = ("{task.description}", "{task.completed:.0f}/{task.total:.0f}")
        self._bar = Progress(
            TextColumn(columns[0]),
            BarColumn(bar_width=24),
            TextColumn(columns[1]),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=ERR,
            disable=not ERR.is_terminal,
        )
        self._said = 0.0

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def task(self, name: str, total: int) -> TaskID:
        """Add a line."""
        return self._bar.add_task(name, total=total, note="")

    def set(self, task: TaskID, done: int, note: str = "") -> None:
        """Set what is done and what is said of it."""
        self._bar.update(task, completed=done, note=note)
        entry = self._bar.tasks[task]
        if not ERR.is_terminal and (time.monotonic() - self._said > 30 or done == entry.total):
            self._said = time.monotonic()
            ERR.print(f"{entry.description} {done}/{entry.total:.0f} {note}", soft_wrap=True)


def _read_texts(files: Sequence[Path]) -> list[str]:
    """Return the texts of the files; refuse what cannot be trained on, before a model is loaded."""
    texts = []
    for file in files:
        if not file.is_file():
            raise ValueError(f"--data must be self or text files, got {file}: no such file")
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is no UTF-8 text: {error}") from None
        if len(text.split()) < 32:
            raise ValueError(f"{file} holds fewer than 32 words, too little to train on")
        texts.append(text)
    return texts


def _corpora_of_files(
    source: Loaded, texts: Sequence[str], states: States, bar: _Bar
) -> tuple[Corpus, Corpus]:
    ids = [list(source.tokenizer.encode(text)) for text in texts]
    pieces = [one[i : i + _PIECE] for one in ids for i in range(0, len(one) - 1, _PIECE)]
    task = bar.task("reading", len(pieces))

    def part(start: int) -> list[Passage]:
        passages = []
        for passage in read(source.target, pieces[start : start + _PART], length=_PIECE):
            passages.append(passage)
            bar.set(task, start + len(passages))
        return passages

    return states.corpus("read", part, range(0, len(pieces), _PART)).split(_HELD_OUT)


def _corpora_of_self(
    source: Loaded, prompts: range, tokens: int, seed: int, states: States, bar: _Bar
) -> tuple[Corpus, Corpus]:
    """Return training text, drawn at a temperature, and held-out text, greedy as it is used."""
    from spec_kernels.integrations.prompts import encode_prompt

    def corpus(name: str, texts: Sequence[str], temperature: float, first: int) -> Corpus:
        task, written = bar.task(f"writing {name}", len(texts) * tokens), [0]

        def part(start: int) -> list[Passage]:
            ids = [
                encode_prompt(source.tokenizer, text, chat=bool(source.tokenizer.chat_template))
                for text in texts[start : start + _PART]
            ]
            written[0] = start * tokens

            def report(count: int) -> None:
                written[0] += count
                bar.set(task, written[0])

            return write(
                source.target,
                ids,
                max_new_tokens=tokens,
                temperature=temperature,
                seeds=[recipe.answer_seed(seed, first + start + i) for i in range(len(ids))],
                eos_ids=source.eos_ids,
                report=report,
            )

        return states.corpus(name, part, range(0, len(texts), _PART))

    held_out = corpus("held-out", recipe.held_out_prompts(), 0.0, 0)
    texts = recipe.training_prompts(seed)[prompts.start : prompts.stop]
    return corpus("training", texts, 0.7, prompts.start), held_out


def _describe_start(folder: Path) -> dict[str, str]:
    """Name the modules that training goes on with, by their folder and by their bytes."""
    file = folder / "model.safetensors"
    require(file.is_file(), f"--start {folder} has no {file.name}")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"start": folder.as_posix(), "start_sha256": digest}


def _load_module(source: Loaded, settings: dict[str, Any]) -> MTP:
    """Return the modules that training goes on with; refuse others than those asked for."""
    folder, matrices = settings["start"], matrices_of(source.model)
    try:
        module = load_mtp(folder, *matrices, dtype=torch.float32)
    except ValueError as error:
        raise ValueError(f"--start {folder}: {str(error).splitlines()[0]}") from error
    found = {name: getattr(module.config, name) for name in ("kind", "depth", "is_shared")}
    found["draft_vocab"] = module.draft_vocab
    vocab = len(matrices[1])
    asked = settings | {"draft_vocab": min(settings["draft_vocab"] or vocab, vocab)}
    if found["kind"] == "parallel":
        del found["is_shared"]
    names = [name for name, value in found.items() if value != asked[name]]
    differ = ", ".join(f"{name} {found[name]}, not {asked[name]}" for name in names)
    require(not names, f"--start {folder} holds modules of {differ}")
    return module


def _make_module(source: Loaded, corpus: Corpus, settings: dict[str, Any]) -> MTP:
    """Return fresh modules that fit the model."""
    depth, ids = settings["depth"], settings["draft_vocab"]
    embedding, unembedding = matrices_of(source.model)
    config = source.model.config.get_text_config(decoder=True)
    counted = torch.arange(corpus.tokens.shape[1]) >= corpus.first[:, None]
    vocab = unembedding.shape[0]
    chosen = None
    if 0 < ids < vocab:
        chosen = draft_vocabulary(corpus.tokens[counted], ids, vocab).to(unembedding.device)
    module: MTP
    if settings["kind"] == "parallel":
        shape = MTPConfig("parallel", config.hidden_size, depth, norm_eps=config.rms_norm_eps)
        module = ParallelHeads(shape, unembedding, draft_to_target=chosen)
    else:
        heads = config.num_attention_heads
        rope = getattr(config, "rope_parameters", None) or {}
        shape = MTPConfig(
            "sequential",
            config.hidden_size,
            depth,
            is_shared=settings["is_shared"],
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate_size=config.intermediate_size,
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            norm_eps=config.rms_norm_eps,
        )
        module = SequentialMTP(shape, embedding, unembedding, draft_to_target=chosen)
    module.to(unembedding.device)
    start_from_trunk(module, corpus, seed=settings["seed"])
    return module


def _note(losses: Sequence[float], acceptance: Acceptance | None) -> str:
    words = ["loss", *(f"{loss:.3f}" for loss in losses)]
    if acceptance is not None:
        words += ["held-out acceptance", *(f"{rate:.3f}" for rate in acceptance.top1)]
    return " ".join(words)


def _train(
    source: Loaded,
    module: MTP,
    corpora: tuple[Corpus, Corpus],
    training: Training,
    folder: TrainingFolder,
    bar: _Bar,
) -> int:
    corpus, held_out = corpora
    unembedding = matrices_of(source.model)[1]
    few = Corpus(held_out.tokens[:8], held_out.hidden[:8], held_out.first[:8])
    task = bar.task("training", training.steps)
    seen: list[Acceptance] = []
    every = max(training.steps // 4, 1)

    def report(step: int, losses: list[float]) -> None:
        if step % every == 0:
            seen[:] = [measure_acceptance(module, few, unembedding)]
        bar.set(task, step, _note(losses, seen[0] if seen else None))

    checkpoint = folder.checkpoint
    return train(module, corpus, training, checkpoint=checkpoint, save_every=20, report=report)


def _run(
    source: Loaded,
    given: MTP | None,
    texts: Sequence[str],
    states: States,
    training: Training,
    folder: TrainingFolder,
) -> None:
    settings, start = folder.settings, time.monotonic()
    with _Bar() as bar:
        if texts:
            corpora = _corpora_of_files(source, texts, states, bar)
        else:
            skipped = settings.get("skip_prompts", 0)
            prompts = range(skipped, skipped + settings["prompts"])
            sizes = (prompts, settings["new_tokens"], settings["seed"])
            corpora = _corpora_of_self(source, *sizes, states, bar)
        module = _make_module(source, corpora[0], settings) if given is None else given
        done = _train(source, module, corpora, training, folder, bar)
    if done < training.steps:
        ERR.print(f"stopped after step {done} of {training.steps}; the same command goes on")
        raise typer.Exit(130)
    with progress() as say:
        say("measuring on the held-out text")
        module.to(torch.bfloat16).to(torch.float32)  # as the weights will be read
        acceptance = measure_acceptance(module, corpora[1], matrices_of(source.model)[1])
    record = {
        "training_tokens": corpora[0].num_tokens,
        "held_out": describe(acceptance),
        "seconds": round(time.monotonic() - start),
        "threads": torch.get_num_threads(),
    }
    weights = folder.finish(module, record)
    rates = " ".join(f"{rate:.3f}" for rate in acceptance.top1)
    OUT.print(f"held-out acceptance by depth {rates}, over {acceptance.tokens} places")
    OUT.print(f"weights in {weights}", soft_wrap=True)


def train_mtp(
    out: Annotated[Path, typer.Option(help="Folder; what is there goes on.")],
    kind: Annotated[KindName, typer.Option(help="Heads beside each other, or one after another.")],
    data: Annotated[
        list[str] | None, typer.Option(help='Text files (repeatable), or "self": the model writes.')
    ] = None,
    model: Model = "smollm2",
    depth: Annotated[int, typer.Option(min=1, help="Extra tokens to predict.")] = 3,
    shared: Annotated[
        bool, typer.Option("--shared/--own", help="sequential: one module for all depths.")
    ] = True,
    draft_vocab: Annotated[int, typer.Option(min=0, help="Ids to draft from; 0 = all.")] = 8192,
    prompts: Annotated[int, typer.Option(min=2, help="Questions of self that are answered.")] = 816,
    skip_prompts: Annotated[
        int, typer.Option(min=0, help="Questions of self left out before them.")
    ] = 0,
    new_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of such an answer.")] = 144,
    steps: Annotated[int, typer.Option(min=1, help="Updates.")] = 760,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per update.")] = 4,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, falling to 0.")] = 1.5e-3,
    loss: Annotated[LossOption, typer.Option(help="What each depth learns.")] = "kl",
    first_depth_until: Annotated[
        float, typer.Option(help="Share of the updates for depth 1 alone.")
    ] = 0.6,
    others: Annotated[
        int | None,
        typer.Option(min=0, help="Compare the likeliest ids and so many others (default: all)."),
    ] = None,
    start: Annotated[
        Path | None, typer.Option(help="Folder of trained modules to go on with (default: fresh).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of text, start and order.")] = 0,
    threads: Threads = None,
) -> None:
    """Train multi-token prediction modules on a frozen model."""
    with friendly_errors():
        sources = data or ["self"]
        if "self" in sources and len(sources) > 1:
            raise ValueError("--data must be self or text files, not both")
        training = Training(
            steps,
            batch,
            learning_rate,
            loss,
            first_depth_until=first_depth_until if kind == "sequential" else 0.0,
            others=others,
            seed=seed,
        )
        texts = [] if sources == ["self"] else _read_texts([Path(name) for name in sources])
        written: dict[str, Any] = {}
        if texts:
            require(skip_prompts == 0, "--skip-prompts is for --data self")
        else:
            most = len(recipe.training_prompts(seed)) - skip_prompts
            require(most >= 2, f"--skip-prompts leaves {max(most, 0)} questions, 2 are needed")
            written = {"prompts": min(prompts, most), "new_tokens": new_tokens}
            written |= {"skip_prompts": skip_prompts} if skip_prompts else {}
        text_settings = {"model": model, "data": sources, "seed": seed, **written}
        settings = {
            **text_settings,
            "kind": kind,
            "depth": depth,
            "is_shared": shared,
            "draft_vocab": draft_vocab,
            "steps": steps,
            "batch": batch,
            "learning_rate": learning_rate,
            "loss": loss,
            "first_depth_until": training.first_depth_until,
            "others": others,
            **({} if start is None else _describe_start(start)),
        }
        if threads is not None:
            torch.set_num_threads(threads)
        with progress() as say:
            say("importing transformers")
            source = Loaded.load(model, torch.float32, say)
        given = None if start is None else _load_module(source, settings)
        states = States(out / "states", text_settings)
        folder = TrainingFolder(out / kind, settings)
        _run(source, given, texts, states, training, folder)
