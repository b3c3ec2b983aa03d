"""What all commands share: consoles, errors in one line, progress, options, versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from typing import Annotated, Final, Literal, NoReturn

import torch
import typer
from rich.console import Console
from rich.text import Text

from spec_kernels import __version__

OUT: Final = Console(highlight=False)
ERR: Final = Console(stderr=True, highlight=False)

DtypeName = Literal["auto", "float32", "bfloat16"]

Model = Annotated[str, typer.Option(help='"smollm2", or a local model directory.')]
Gamma = Annotated[int, typer.Option(min=0, help="Most drafts per round; 0 = plain decoding.")]
Dtype = Annotated[DtypeName, typer.Option(help="auto = bfloat16 where the device has it.")]
FastLinear = Annotated[
    bool, typer.Option("--fast-linear", help="CPU: read weights once for all rows of a forward.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]


def parse_gamma(text: str) -> int:
    """Read a gamma; that of "auto" is the largest one it may choose.

    Raises:
        ValueError: it is neither "auto" nor a number from 0 on.

    Example:
        >>> parse_gamma("4"), parse_gamma("auto")
        (4, 8)
    """
    if text == "auto":
        return 8
    if not text.isdecimal():
        raise ValueError(f"--gamma must be auto or a number from 0 on, got {text!r}")
    return int(text)


@contextlib.contextmanager
def friendly_errors() -> Iterator[None]:
    """Turn what a user can cause into one line on stderr and exit code 2."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except ModuleNotFoundError as error:
        fail(f"{error}; run: python -m pip install 'spec-kernels[demo]'")
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    ERR.print(Text("error: ", style="bold red") + Text(message), soft_wrap=True)
    raise typer.Exit(2)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Show the present long step on stderr: a spinner on a terminal, else a line each."""
    if not ERR.is_terminal:
        yield lambda message: ERR.print(Text(message), soft_wrap=True)
        return
    with ERR.status("starting") as status:
        yield status.update


def versions() -> dict[str, str]:
    versions = {"spec_kernels": __version__, "python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "tokenizers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.cpu.get_capabilities().get('cpu_name') or platform.machine()})"
