"""The MTP modules for SmolLM2-135M-Instruct that come with the package.

They were made by `python -m spec_kernels train-mtp`; the card `data/smollm2-mtp/README.md` has the
commands, the text, the time and the acceptance by depth.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from spec_kernels.nn.mtp import MTP, load_mtp

Kind = Literal["parallel", "sequential"]


def weights_folder(kind: Kind) -> Path:
    """Return the folder with `config.json` and `model.safetensors` of one kind.

    Example:
        >>> sorted(file.name for file in weights_folder("sequential").iterdir())
        ['config.json', 'model.safetensors', 'record.json']
    """
    return Path(str(resources.files("spec_kernels"))) / "data" / "smollm2-mtp" / kind


def load_smollm2_mtp(model: Any, kind: Kind, *, dtype: torch.dtype | None = None) -> MTP:
    """Load the modules of one kind for a loaded SmolLM2.

    Args:
        model: the transformers model, from `integrations.smollm2.load`; its matrices are shared.
        kind: "parallel" or "sequential".
        dtype: of the modules; by default the model's.

    Raises:
        ValueError: the model has another hidden size or a smaller vocabulary.
    """
    return load_mtp(weights_folder(kind), *matrices_of(model), dtype=dtype)


def matrices_of(model: Any) -> tuple[Tensor, Tensor]:
    """Return embedding and unembedding of a transformers model, `[vocab, size]` each, shared."""
    embedding: Tensor = model.get_input_embeddings().weight
    unembedding: Tensor = model.get_output_embeddings().weight
    return embedding.detach(), unembedding.detach()
