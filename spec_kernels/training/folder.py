"""The folders of a training: text with hidden states, checkpoint, weights, record.

    states/NAME-000.safetensors ...   hidden states, part by part: a part is there whole or not
    parallel/checkpoint.pt            a training under way; several kinds share the states
    parallel/weights/                 `config.json`, `model.safetensors` (bfloat16), `record.json`

Each folder has a `settings.json`: what its contents depend on. Other settings are refused.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from spec_kernels._check import require
from spec_kernels.nn.mtp import MTP, save_mtp
from spec_kernels.training.corpus import Corpus
from spec_kernels.training.losses import Acceptance
from spec_kernels.training.passages import Passage


class States:
    """Passages with their hidden states on disk, made once.

    Args:
        path: made if need be.
        settings: what they depend on, as JSON.

    Raises:
        ValueError: the folder was made with other settings, or its settings are unreadable.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        _claim(path, settings)

    def corpus(
        self, name: str, make: Callable[[int], Sequence[Passage]], starts: Sequence[int]
    ) -> Corpus:
        """Return the passages of all parts; those on disk are read, the others made and written.

        Args:
            name: of the files.
            make: makes the part that starts at a given index.
            starts: one per part.
        """
        passages: list[Passage] = []
        for index, start in enumerate(starts):
            file = self.path / f"{name}-{index:03}.safetensors"
            if not file.exists():
                Corpus.pack(make(start)).save(file)
            passages += Corpus.load(file).unpack()
        return Corpus.pack(passages)


class TrainingFolder:
    """A training on disk, so that it can stop at any time and go on.

    Args:
        path: made if need be.
        settings: what the training depends on, as JSON.

    Raises:
        ValueError: the folder was made with other settings, or its settings are unreadable.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        _claim(path, settings)

    @property
    def checkpoint(self) -> Path:
        """Return the file of the training under way."""
        return self.path / "checkpoint.pt"

    def finish(self, module: MTP, record: dict[str, Any]) -> Path:
        """Write the weights in bfloat16 and what was measured; return their folder."""
        folder = self.path / "weights"
        save_mtp(copy.deepcopy(module).to(torch.bfloat16), folder)
        _write(folder / "record.json", self.settings | record)
        return folder


def _claim(path: Path, settings: dict[str, Any]) -> None:
    """Note the settings in a new folder; refuse one that was made with others."""
    file = path / "settings.json"
    if file.exists():
        try:
            found = dict(json.loads(file.read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"cannot read {file}: {error}") from error
        names = sorted(n for n in found | settings if found.get(n) != settings.get(n))
        differ = ", ".join(f"{n} {found.get(n)}, not {settings.get(n)}" for n in names)
        require(not names, f"{path} was made with {differ}; give another folder")
    path.mkdir(parents=True, exist_ok=True)
    _write(file, settings)


def describe(acceptance: Acceptance) -> dict[str, Any]:
    """Return what a record says of an acceptance, rounded to four digits.

    `by_sequence` has a row per sequence: places, then those where 1, 2, ... depths were right.
    """

    def rounded(values: list[float]) -> list[float]:
        return [round(value, 4) for value in values]

    return {
        "places": acceptance.tokens,
        "top1": rounded(acceptance.top1),
        "survival": rounded(acceptance.survival),
        "kl": rounded(acceptance.loss),
        "by_sequence": [
            [len(hits), *hits.cumprod(1).sum(0).tolist()]
            for hits in torch.split(acceptance.hits, acceptance.sequence.bincount().tolist())
        ],
    }


def _write(file: Path, value: dict[str, Any]) -> None:
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(partial, file)
