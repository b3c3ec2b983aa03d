"""The command line: generate text speculatively, compare with plain decoding, run the demo, and
report what the kernels use.

Generated text goes to stdout as it comes; progress and errors go to stderr. With `--json` the last
line of stdout is one JSON object.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NoReturn

import torch
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from spec_kernels import __version__
from spec_kernels.comparison import Comparison, TimedRun, compare
from spec_kernels.decoder import Decoder, Request
from spec_kernels.proposers import BestFirst, DraftModelProposer, NgramProposer, TreeTemplate

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Speculative decoding, verified exactly.",
)
_OUT = Console(highlight=False)
_ERR = Console(stderr=True, highlight=False)

ProposerName = Literal["ngram", "draft", "none"]
RuleName = Literal["block", "token", "coupled"]
DtypeName = Literal["auto", "float32", "bfloat16"]
ChildrenName = Literal["sampled", "replacement", "fixed", "mixed"]


@dataclass
class Setup:
    """A loaded model and how it is to be decoded."""

    model: str
    target: Any
    tokenizer: Any
    proposer: Any
    gamma: int
    rule: str
    dtype: str
    eos_ids: list[int]
    tree: str

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def decoder(self, *, speculative: bool) -> Decoder:
        """Return the speculative or the plain decoder."""
        proposer = self.proposer if speculative else None
        return Decoder(
            self.target,
            proposer,
            gamma=self.gamma,
            rule=self.rule,
            eos_ids=self.eos_ids,
            detokenize=self.detokenize,
        )


@contextlib.contextmanager
def _friendly_errors() -> Iterator[None]:
    """Turn what a user can cause into one line on stderr and exit code 2."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except ModuleNotFoundError as error:
        _fail(f"{error}; run: python -m pip install 'spec-kernels[demo]'")
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    _ERR.print(Text("error: ", style="bold red") + Text(message), soft_wrap=True)
    raise typer.Exit(2)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show the present long step on stderr: a spinner on a terminal, else a line each."""
    if not _ERR.is_terminal:
        yield lambda message: _ERR.print(Text(message), soft_wrap=True)
        return
    with _ERR.status("starting") as status:
        yield status.update


def _load(
    model: str,
    draft_model: str | None,
    proposer: str,
    gamma: int,
    rule: str,
    dtype: str,
    threads: int | None,
    min_ngram: int,
    tree: str | None = None,
    nodes: int | None = None,
    children: str = "sampled",
) -> Setup:
    if proposer == "draft" and draft_model is None:
        raise ValueError("--proposer draft needs --draft-model DIRECTORY")
    if tree is not None and (proposer != "draft" or nodes is not None):
        raise ValueError("--tree needs --proposer draft and no --tree-nodes")
    shape = None if tree is None else TreeTemplate.parse(tree)
    gamma = gamma if shape is None else min(gamma, shape.depth)
    if threads is not None:
        torch.set_num_threads(threads)
    with _progress() as progress:
        progress("importing transformers")
        import transformers

        from spec_kernels.integrations import smollm2
        from spec_kernels.integrations.transformers import TransformersTarget

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded, tokenizer = smollm2.load(model, dtype=dtype, device=device, progress=progress)
        target = TransformersTarget(loaded)
        drafts: Any = None
        if proposer == "ngram":
            drafts = NgramProposer(max(4, min_ngram), min_ngram, nodes=nodes)
        elif proposer == "draft":
            assert draft_model is not None
            small, other = smollm2.load(
                draft_model, dtype=loaded.dtype, device=device, progress=progress
            )
            if other.get_vocab() != tokenizer.get_vocab():
                raise ValueError(f"{draft_model} has another tokenizer than {model}")
            best = None if nodes is None else BestFirst(nodes, depth=max(gamma, 1))
            drafts = DraftModelProposer(
                TransformersTarget(small),
                padded_vocab=True,
                tree=best if shape is None else shape.parents,
                children=children,
            )
    eos = getattr(loaded.generation_config, "eos_token_id", None) or tokenizer.eos_token_id
    return Setup(
        model=model,
        target=target,
        tokenizer=tokenizer,
        proposer=drafts,
        gamma=gamma,
        rule=rule,
        dtype=str(loaded.dtype).removeprefix("torch."),
        eos_ids=eos if isinstance(eos, list) else [] if eos is None else [eos],
        tree=f"{tree} {children}" if tree else f"{nodes} nodes" if nodes else "chain",
    )


def _stream(setup: Setup, request: Request) -> TimedRun:
    """Decode one request, writing its text to stdout as it comes."""
    timed = TimedRun.start(setup.decoder(speculative=True), request)
    while not timed.is_done:
        for chunk in timed.step():
            _OUT.file.write(chunk.text)
            _OUT.file.flush()
    _OUT.file.write("\n")
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

    if _OUT.is_terminal:
        with Live(console=_OUT, refresh_per_second=8, transient=True) as live:
            result = compare(*decoders, request, show=lambda *runs: live.update(panels(*runs)))
    else:
        _ERR.print("warming up, then decoding in turns")
        result = compare(*decoders, request)
    for title, timed in (("plain", result.plain), ("speculative", result.speculative)):
        _OUT.print(Text(f"--- {title}", style="bold"))
        _OUT.print(Text(timed.text), soft_wrap=True)
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
    parts = vars(stats.seconds)
    table.add_row("seconds", "  ".join(f"{name} {value:.2f}" for name, value in parts.items()))
    table.add_row("finished by", timed.result.finish_reason)
    described = _settings(setup, request)
    keys = ("model", "dtype", "device", "threads", "rule", "gamma", "tree", "temperature")
    settings = "  ".join(f"{key} {described[key]}" for key in (*keys, "context"))
    return Group(table, Text(settings, style="dim"))


def _settings(setup: Setup, request: Request) -> dict[str, Any]:
    return {
        "model": setup.model,
        "batch": 1,
        "context": len(request.prompt),
        "gamma": setup.gamma if setup.proposer is not None else 0,
        "rule": setup.rule,
        "tree": setup.tree,
        "temperature": request.temperature,
        "device": _device_name(setup.target.device),
        "versions": _versions(),
        "dtype": setup.dtype,
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


def _versions() -> dict[str, str]:
    versions = {"spec_kernels": __version__, "python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "tokenizers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.cpu.get_capabilities().get('cpu_name') or platform.machine()})"


def _solve(setup: Setup, request: Request, *, compared: bool, as_json: bool) -> None:
    """Decode one request and print what came of it."""
    result = _compare(setup, request) if compared else None
    timed = result.speculative if result is not None else _stream(setup, request)
    _OUT.print(_report(setup, request, timed, result))
    if as_json:
        _OUT.file.write(_json(setup, request, timed, result) + "\n")


Model = Annotated[str, typer.Option(help='"smollm2", or a local model directory.')]
Gamma = Annotated[int, typer.Option(min=0, help="Most drafts per round; 0 = plain decoding.")]
Dtype = Annotated[DtypeName, typer.Option(help="auto = bfloat16 where the device has it.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    model: Model = "smollm2",
    proposer: Annotated[ProposerName, typer.Option(help="Who drafts.")] = "ngram",
    draft_model: Annotated[
        str | None, typer.Option(help="Directory of the model for --proposer draft.")
    ] = None,
    gamma: Gamma = 8,
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
        str | None, typer.Option(help="Children by depth, as 4,2,2: a tree of the draft model.")
    ] = None,
    tree_nodes: Annotated[
        int | None, typer.Option(help="Nodes of a tree of ngram, or of the draft model's best.")
    ] = None,
    tree_children: Annotated[
        ChildrenName, typer.Option(help="How the siblings of --tree are chosen.")
    ] = "sampled",
    dtype: Dtype = "auto",
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
    with _friendly_errors():
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
        shape = (tree, tree_nodes, tree_children)
        setup = _load(model, draft_model, proposer, gamma, rule, dtype, threads, min_ngram, *shape)
        from spec_kernels.integrations.prompts import encode_prompt

        use_chat = bool(setup.tokenizer.chat_template) if chat is None else chat
        ids = encode_prompt(setup.tokenizer, prompt, chat=use_chat)
        _solve(setup, replace(request, prompt=ids), compared=compared, as_json=as_json)


@app.command()
def demo(
    model: Model = "smollm2",
    gamma: Gamma = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Token budget of each task.")] = 96,
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="End each task with JSON.")] = False,
) -> None:
    """Run three tasks, plain and speculative side by side: copying, code, a free answer."""
    with _friendly_errors():
        from spec_kernels.integrations.prompts import DEMO_PROMPTS

        setup = _load(model, None, "ngram", gamma, "block", dtype, threads, 2)
        for prompt in DEMO_PROMPTS:
            _OUT.rule(prompt.name)
            _OUT.print(Text(prompt.text, style="dim"), soft_wrap=True)
            request = Request(prompt.encode(setup.tokenizer), max_new_tokens=max_new_tokens)
            _solve(setup, request, compared=True, as_json=as_json)


@app.command()
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
    with _friendly_errors():
        if not static:
            raise ValueError("bench needs --static; measured benchmarks run by: make bench")
        from spec_kernels.testing import static_report

        calls = static_report.select(operation, configuration)
        with _progress() as progress:
            found = []
            for one in target or ["sm_90"]:
                progress(f"compiling for {one}")
                found += static_report.rows(one, calls)
            progress("counting bytes")
            found = static_report.with_traffic(found, calls)
        report = static_report.to_json(found) if as_json else static_report.to_table(found)
        _OUT.file.write(report + "\n")


@app.command()
def info() -> None:
    """Print versions and devices."""
    with _friendly_errors():
        from spec_kernels.integrations.smollm2 import fast_dtype

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        rows = _versions() | {
            "device": _device_name(device),
            "threads": str(torch.get_num_threads()),
            "dtype auto": str(fast_dtype(device)).removeprefix("torch."),
        }
        for name, value in rows.items():
            _OUT.print(f"{name:14}{value}")
