"""`generate` and `demo`: text from a prompt, with plain decoding beside it if wanted."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from spec_kernels.cli._common import (
    ERR,
    OUT,
    Dtype,
    FastLinear,
    Gamma,
    Model,
    Threads,
    device_name,
    friendly_errors,
    parse_gamma,
    versions,
)
from spec_kernels.cli._drafting import ChildrenName, Drafting, ProposerName
from spec_kernels.cli._setup import Setup, load
from spec_kernels.cli.plan import Profile
from spec_kernels.comparison import Comparison, TimedRun, compare
from spec_kernels.decoder import Request

RuleName = Literal["block", "token", "coupled"]


def _stream(setup: Setup, request: Request) -> TimedRun:
    """Decode one request, writing its text to stdout as it comes."""
    timed = TimedRun.start(setup.decoder(speculative=True), request)
    while not timed.is_done:
        for chunk in timed.step():
            OUT.file.write(chunk.text)
            OUT.file.flush()
    OUT.file.write("\n")
    return timed


def _compare(setup: Setup, request: Request) -> Comparison:
    """Decode both ways; both texts grow side by side on a terminal, and are printed at the end."""
    decoders = (setup.decoder(speculative=False), setup.decoder(speculative=True))

    def panels(plain: TimedRun, speculative: TimedRun) -> Table:
        grid = Table.grid(expand=True)
        cells = []
        for title, timed in (("plain", plain), ("speculative", speculative)):
            grid.add_column(ratio=1)
            style = "green" if timed.is_done else "dim"
            cells.append(Panel(Text(timed.text), title=title, border_style=style))
        grid.add_row(*cells)
        return grid

    if OUT.is_terminal:
        with Live(console=OUT, refresh_per_second=8, transient=True) as live:
            result = compare(*decoders, request, show=lambda *runs: live.update(panels(*runs)))
    else:
        ERR.print("warming up, then decoding in turns")
        result = compare(*decoders, request)
    for title, timed in (("plain", result.plain), ("speculative", result.speculative)):
        OUT.print(Text(f"--- {title}", style="bold"))
        OUT.print(Text(timed.text), soft_wrap=True)
    return result


def _agreement(setup: Setup, request: Request, result: Comparison) -> str:
    """Say in words what (dis)agreement of the two outputs means."""
    sampled = request.temperature > 0 and setup.rule != "coupled"
    if sampled:
        return "not expected: both are drawn from the same law, with other random numbers"
    rounding = setup.dtype != "float32"
    if result.position is None:
        count = len(result.plain.result.tokens)
        note = f" (not guaranteed in {setup.dtype}: near-ties may flip)" if rounding else ""
        return f"all {count} tokens equal{note}"
    gap = "one output ended" if result.logit_gap is None else f"logit gap {result.logit_gap:.3g}"
    note = f"; {setup.dtype} rounds differently for other widths" if rounding else ""
    return f"first difference at token {result.position}, {gap}{note}"


def _report(setup: Setup, request: Request, timed: TimedRun, result: Comparison | None) -> Group:
    stats = timed.result.stats
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("tokens per second", f"{timed.tokens_per_second:.1f}")
    if result is not None:
        table.add_row("  plain decoding", f"{result.plain.tokens_per_second:.1f}")
        table.add_row("  speed-up", f"{result.speedup:.2f}x")
        table.add_row("  agreement", _agreement(setup, request, result))
    table.add_row("tokens per round", f"{stats.mean_accepted_length:.2f} ({stats.steps} rounds)")
    rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_by_position) or "no drafts"
    table.add_row("accepted by position", rates)
    if setup.is_adaptive:
        counts = sorted(timed.run.pace.rounds.items())
        table.add_row("rounds by gamma", "  ".join(f"{gamma}: {n}" for gamma, n in counts))
    parts = vars(stats.seconds)
    table.add_row("seconds", "  ".join(f"{name} {value:.2f}" for name, value in parts.items()))
    table.add_row("finished by", timed.result.finish_reason)
    described = _settings(setup, request)
    keys = ("model", "dtype", "device", "threads", "proposer", "rule", "gamma", "tree")
    settings = "  ".join(f"{key} {described[key]}" for key in (*keys, "temperature", "context"))
    return Group(table, Text(settings, style="dim"))


def _settings(setup: Setup, request: Request) -> dict[str, Any]:
    return {
        "model": setup.model,
        "batch": 1,
        "context": len(request.prompt),
        "proposer": setup.drafting.proposer,
        "gamma": "auto" if setup.is_adaptive else setup.gamma,
        "rule": setup.rule,
        "tree": setup.drafting.shape,
        "temperature": request.temperature,
        "device": device_name(setup.target.device),
        "versions": versions(),
        "dtype": setup.dtype,
        "fast_linear": setup.fast_linear,
        "threads": torch.get_num_threads(),
        "seed": request.seed,
        "max_new_tokens": request.max_new_tokens,
    }


def _json(setup: Setup, request: Request, timed: TimedRun, result: Comparison | None) -> str:
    stats = timed.result.stats
    record: dict[str, Any] = {
        "text": timed.result.text,
        "tokens_per_second": timed.tokens_per_second,
        "mean_accepted_length": stats.mean_accepted_length,
        "acceptance_by_position": stats.acceptance_by_position,
        "acceptance_matrix": vars(stats.matrix),
        "rounds_by_gamma": dict(sorted(timed.run.pace.rounds.items())),
        "profile": asdict(Profile.of(timed, result)),
        "seconds": vars(stats.seconds),
        "settings": _settings(setup, request),
        "finish_reason": timed.result.finish_reason,
    }
    if result is not None:
        record["plain_tokens_per_second"] = result.plain.tokens_per_second
        record["speedup"] = result.speedup
        record["outputs_agree"] = result.position is None
        record["first_difference"] = result.position
        record["logit_gap"] = result.logit_gap
    return json.dumps(record)


def _solve(setup: Setup, request: Request, *, compared: bool, as_json: bool) -> None:
    """Decode one request and print what came of it."""
    result = _compare(setup, request) if compared else None
    timed = result.speculative if result is not None else _stream(setup, request)
    OUT.print(_report(setup, request, timed, result))
    if as_json:
        OUT.file.write(_json(setup, request, timed, result) + "\n")


def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    model: Model = "smollm2",
    proposer: Annotated[ProposerName, typer.Option(help="Who drafts.")] = "ngram",
    draft_model: Annotated[
        str | None, typer.Option(help="Directory of the model for --proposer draft.")
    ] = None,
    proposer_weights: Annotated[
        str | None,
        typer.Option(help="Directory of the weights for --proposer heads or mtp."),
    ] = None,
    exit_layer: Annotated[
        int | None, typer.Option(help="Layers of the model that draft for --proposer early-exit.")
    ] = None,
    gamma: Annotated[
        str, typer.Option(help="Most drafts per round; 0 = plain decoding; or auto, up to 8.")
    ] = "8",
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Token budget.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep this probability mass.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Relative to the most likely token.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    rule: Annotated[RuleName, typer.Option(help="How drafts are accepted.")] = "block",
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this string; repeatable.")] = None,
    min_ngram: Annotated[int, typer.Option(min=1, help="Shortest match of ngram.")] = 2,
    tree: Annotated[
        str | None,
        typer.Option(
            help="A tree of drafts with laws: children by depth, 4,2,2, or parents, -1,0,0,1."
        ),
    ] = None,
    tree_nodes: Annotated[
        int | None, typer.Option(help="Nodes of a tree that grows where drafts are likely.")
    ] = None,
    tree_children: Annotated[
        ChildrenName | None,
        typer.Option(help="How the siblings of --tree are chosen (default: sampled)."),
    ] = None,
    dtype: Dtype = "auto",
    fast_linear: FastLinear = False,
    threads: Threads = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Use the chat template (default: if there is one)."),
    ] = None,
    compared: Annotated[
        bool, typer.Option("--compare", help="Decode plainly too, and compare.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Generate text from a prompt."""
    with friendly_errors():
        if not prompt.strip():
            raise ValueError("the prompt must not be empty")
        # one token stands for the prompt: faults in the numbers show before a model is loaded
        request = Request(
            [0],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop_strings=stop or (),
        )
        drafting = Drafting(
            proposer=proposer,
            gamma=parse_gamma(gamma),
            draft_model=draft_model,
            weights=proposer_weights,
            exit_layer=exit_layer,
            min_ngram=min_ngram,
            tree=tree,
            nodes=tree_nodes,
            children=tree_children,
        )
        setup = load(model, drafting, rule, dtype, threads, fast_linear=fast_linear)
        setup.is_adaptive = gamma == "auto" and setup.proposer is not None
        from spec_kernels.integrations.prompts import encode_prompt

        use_chat = bool(setup.tokenizer.chat_template) if chat is None else chat
        ids = encode_prompt(setup.tokenizer, prompt, chat=use_chat)
        _solve(setup, replace(request, prompt=ids), compared=compared, as_json=as_json)


def demo(
    model: Model = "smollm2",
    gamma: Gamma = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Token budget of each task.")] = 96,
    dtype: Dtype = "auto",
    fast_linear: FastLinear = False,
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="End each task with JSON.")] = False,
) -> None:
    """Run three tasks, plain and speculative side by side: copying, code, a free answer."""
    with friendly_errors():
        from spec_kernels.integrations.prompts import DEMO_PROMPTS

        drafting = Drafting(gamma=gamma)
        setup = load(model, drafting, "block", dtype, threads, fast_linear=fast_linear)
        for prompt in DEMO_PROMPTS:
            OUT.rule(prompt.name)
            OUT.print(Text(prompt.text, style="dim"), soft_wrap=True)
            request = Request(prompt.encode(setup.tokenizer), max_new_tokens=max_new_tokens)
            _solve(setup, request, compared=True, as_json=as_json)
