"""`bench` and `info`: what the kernels use and move; versions and devices."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from spec_kernels.cli._common import OUT, device_name, friendly_errors, progress, versions


def bench(
    static: Annotated[
        bool, typer.Option("--static", help="Compile the kernels and count; needs no GPU.")
    ] = False,
    target: Annotated[list[str] | None, typer.Option(help="sm_80, sm_90, ...; repeatable.")] = None,
    operation: Annotated[
        list[str] | None, typer.Option(help="accept, row_law, ...; repeatable (default: all).")
    ] = None,
    configuration: Annotated[
        list[str] | None,
        typer.Option(help="bf16, bf16-odd, ...; repeatable (default: each operation's first)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no table.")] = False,
) -> None:
    """Say what the kernels use and move, and what a model says binds them.

    Launches are those of the whole call; bytes and floor are those of a small one: one request.
    Times are not measured: for those see `make bench` and `make gpu`.
    """
    with friendly_errors():
        if not static:
            raise ValueError("bench needs --static; measured benchmarks run by: make bench")
        from spec_kernels.testing import static_report

        calls = static_report.select(operation, configuration)
        with progress() as say:
            found = []
            for one in target or ["sm_90"]:
                say(f"compiling for {one}")
                found += static_report.rows(one, calls)
            say("counting bytes")
            found = static_report.with_traffic(found, calls)
        report = static_report.to_json(found) if as_json else static_report.to_table(found)
        OUT.file.write(report + "\n")


def info() -> None:
    """Print versions and devices."""
    with friendly_errors():
        from spec_kernels.integrations.smollm2 import fast_dtype

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        rows = versions() | {
            "device": device_name(device),
            "threads": str(torch.get_num_threads()),
            "dtype auto": str(fast_dtype(device)).removeprefix("torch."),
        }
        for name, value in rows.items():
            OUT.print(f"{name:14}{value}")
