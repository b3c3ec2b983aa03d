"""The command line: generate text speculatively, compare with plain decoding, run the demo, and
report what the kernels use.

Generated text goes to stdout as it comes; progress and errors go to stderr. With `--json` the last
line of stdout is one JSON object. Each command is a function in a file of its subject.
"""

from __future__ import annotations

import typer

from spec_kernels.cli import bench, generate, plan, train

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Speculative decoding, verified exactly.",
)
for command in (generate.generate, generate.demo, plan.plan, bench.bench, bench.info):
    app.command()(command)
app.command()(train.train_mtp)
