"""Tokens per second of the decoder by gamma, where the time goes, and what the model predicts.

For every proposer and gamma 1..8 (and "auto"): decoded text per second of the rounds, the split of
their time, and beside the measured speed-up over plain decoding the one of `cost_model`, from
numbers measured apart from it:

- v: forwards over 1..9 nodes behind the first prompt, in turns, plus what else a plain round takes;
- c and o: rounds of another prompt;
- alpha, and the share of rounds with drafts: counted at the largest gamma, on the same prompts.

Greedy, batch 1, prompts of kind "copy". The draft model is the target without most of its layers:
too slow to gain time, but its rounds have a c.

    python -m benchmarks.bench_decoder --threads 2

Last line of stdout: one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from benchmarks import harness
from benchmarks.bench_trees import skip_layers
from spec_kernels.cost_model import StepCosts, speedups
from spec_kernels.decoder import Decoder, Request
from spec_kernels.integrations import smollm2
from spec_kernels.integrations.prompts import PROMPTS
from spec_kernels.integrations.transformers import TransformersTarget
from spec_kernels.proposers import DraftModelProposer, NgramProposer
from spec_kernels.stats import DecoderStats

MAX_GAMMA = 8
METRIC = "tokens per second of the rounds, prefill left out; speed-up over plain decoding"


def decode(
    target: Any, proposer: Any, gamma: Any, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[DecoderStats, Any]:
    """Decode the prompts one after the other; return the counters of all, and the last run."""
    decoder = Decoder(target, proposer, gamma=gamma, max_gamma=MAX_GAMMA)
    total, run = DecoderStats(), None
    for prompt in prompts:
        run = decoder.start([Request(prompt, max_new_tokens=tokens)])
        chunks = []
        while not run.is_done:
            chunks += run.step()
        stats = chunks[-1].generation.stats
        seconds = {k: v + getattr(total.seconds, k) for k, v in vars(stats.seconds).items()}
        total = DecoderStats.total([total, stats])
        for name, value in seconds.items():
            setattr(total.seconds, name, value)
    return total, run


def measure_forwards(target: Any, prompt: Sequence[int], repeats: int) -> dict[int, float]:
    """Return median seconds of a forward over 1..9 nodes behind a prompt."""
    cache = target.open(1, len(prompt) + MAX_GAMMA + 1)
    target.prefill(cache, 0, prompt[:-1])
    lens = cache.context_lens.clone()

    def forward(nodes: int) -> Any:
        tokens = torch.tensor([list(prompt[-1:]) * nodes])

        @torch.no_grad()
        def call() -> None:
            target.forward(tokens, torch.tensor([nodes], dtype=torch.int32), cache)
            cache.truncate(lens)

        return call

    calls = {str(nodes): forward(nodes) for nodes in range(1, MAX_GAMMA + 2)}
    times = harness.measure(calls, repeats=repeats)
    return {int(nodes): found.p50 for nodes, found in times.items()}


def predict(
    forwards: dict[int, float], plain: DecoderStats, meter: Any, counted: DecoderStats
) -> tuple[list[float], dict[str, Any]]:
    """Return the speed-up of gamma 0..8, and the v, c, o and alpha that it comes from."""
    apart = meter.costs()
    seconds = plain.seconds
    rest = (seconds.decode - seconds.verify) / plain.steps
    step = forwards[1] + rest
    v = {nodes: (time + rest) / step for nodes, time in forwards.items()}
    costs = StepCosts(v, c=apart.c, o=apart.o)
    rows = zip(counted.matrix.accepted, counted.matrix.tried, strict=True)
    alpha = [kept[0] / tried[0] for kept, tried in rows if tried and tried[0]]
    alpha = [*alpha, *[0.0] * MAX_GAMMA][:MAX_GAMMA]
    drafted = counted.matrix.tried[0][0] / counted.steps if counted.matrix.tried else 0.0
    gains = speedups(alpha, costs, max_gamma=MAX_GAMMA, drafted=drafted)
    return gains, {"v": v, "c": costs.c, "o": costs.o, "alpha": alpha, "drafted": drafted}


def measure(
    target: Any, proposer: Any, name: str, prompts: list[list[int]], options: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows of one proposer, and what its predictions come from."""
    other, chosen = prompts[0], prompts[1:]
    forwards = measure_forwards(target, chosen[0], options.forwards)
    _, apart = decode(target, proposer, "auto", [other], options.max_new_tokens)
    gammas = [0, *range(1, MAX_GAMMA + 1), "auto"]
    found: dict[Any, list[DecoderStats]] = {gamma: [] for gamma in gammas}
    for _ in range(options.repeats):
        for gamma in gammas:
            stats, _ = decode(target, proposer, gamma, chosen, options.max_new_tokens)
            found[gamma].append(stats)
    gains, inputs = predict(forwards, found[0][-1], apart.pace.meter, found[MAX_GAMMA][-1])
    speeds = {
        gamma: statistics.median(one.emitted / one.seconds.decode for one in runs)
        for gamma, runs in found.items()
    }
    rows = []
    for gamma, runs in found.items():
        stats, parts = runs[-1], vars(runs[-1].seconds)
        row = {
            "proposer": name,
            "gamma": gamma,
            "tokens_per_second": speeds[gamma],
            "tokens_per_round": stats.mean_accepted_length,
            "measured": speeds[gamma] / speeds[0],
            "predicted": None if gamma == "auto" else gains[gamma],
            "split": {
                part: parts[part] / stats.seconds.decode
                for part in ("draft", "verify", "accept", "state")
            },
        }
        rows.append(row)
        print(describe(row), flush=True)
    return rows, inputs


def describe(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    split = "  ".join(f"{part} {share:4.0%}" for part, share in row["split"].items())
    guess = "" if row["predicted"] is None else f"{row['predicted']:9.2f}"
    return (
        f"{row['proposer']:12}{row['gamma']!s:>6}{row['tokens_per_second']:9.1f}"
        f"{row['tokens_per_round']:7.2f}{row['measured']:10.2f}{guess:>9}   {split}"
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--forwards", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--layers", type=int, default=6, help="of the draft model, from the first")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model, tokenizer = smollm2.load(dtype="float32")
    target = TransformersTarget(model)
    copies = [prompt for prompt in PROMPTS if prompt.kind == "copy"]
    prompts = [prompt.encode(tokenizer) for prompt in copies[: options.prompts + 1]]
    total = len(model.model.layers)
    drafter = TransformersTarget(skip_layers(model, range(options.layers, total)))
    proposers = {"ngram": NgramProposer(4, 2), "draft-model": DraftModelProposer(drafter)}
    head = harness.header(
        model="smollm2",
        dtype="float32",
        batch=1,
        context=[len(prompt) for prompt in prompts[1:]],
        prompts=[prompt.name for prompt in copies[1 : options.prompts + 1]],
        max_new_tokens=options.max_new_tokens,
        gamma=f"0..{MAX_GAMMA} and auto",
        sampling="greedy",
        draft_model=f"the first {options.layers} of {total} layers",
        metric=METRIC,
        command="python -m benchmarks.bench_decoder " + " ".join(sys.argv[1:]),
    )
    print(f"{'proposer':12}{'gamma':>6}{'tok/s':>9}{'/round':>7}{'measured':>10}{'predicted':>9}")
    rows: list[dict[str, Any]] = []
    head["inputs"] = {}
    for name, proposer in proposers.items():
        found, head["inputs"][name] = measure(target, proposer, name, prompts, options)
        rows += found
    harness.print_record("decoder", head, rows)
    return {"benchmark": "decoder", **head, "rows": rows}


if __name__ == "__main__":
    main()
