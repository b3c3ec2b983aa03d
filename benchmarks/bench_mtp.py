"""Multi-token prediction on the demo model: chains and trees, in turns with plain decoding.

The modules that come with the package draft greedy answers to held-out questions
(`training.recipe`: topics that they were not trained on), batch 1. All forms decode the same text
at the same time, round by round, so a machine that drifts drifts for all. In units of a plain
round's time: *v* is the forward over root and drafts, *c* the drafting, *o* accepting and moving
the caches; a form pays if its tokens per round exceed their sum. `--clock cpu` counts CPU seconds,
for one thread on a machine that others use.

    python -m benchmarks.bench_mtp --threads 2 --fast-linear

Last line of stdout: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Final
from unittest import mock

import torch

from benchmarks import harness
from benchmarks.bench_decoder import Lane, count, take_turns
from spec_kernels.decoder import Decoder
from spec_kernels.integrations.prompts import encode_prompt
from spec_kernels.integrations.smollm2_mtp import load_smollm2_mtp
from spec_kernels.integrations.transformers import TransformersTarget
from spec_kernels.proposers import HeadsProposer, MTPProposer
from spec_kernels.targets import speed_up_linear_
from spec_kernels.training.recipe import held_out_prompts

FORMS: Final = {
    "plain": ("", 0, None),
    "sequential, chain of 1": ("sequential", 1, None),
    "sequential, chain of 3": ("sequential", 3, None),
    "sequential, tree 3": ("sequential", 1, (3,)),
    "sequential, tree -1,0,0,1": ("sequential", 2, (-1, 0, 0, 1)),
    "sequential, tree 3-1-1": ("sequential", 3, (3, 1, 1)),
    "parallel, chain of 3": ("parallel", 3, None),
    "parallel, tree 3-1-1": ("parallel", 3, (3, 1, 1)),
}
"""By name: kind of the modules, depth, children of each level of a tree or its parents."""


def make_decoders(target: Any, modules: dict[str, Any], eos: int) -> dict[str, tuple[Decoder, int]]:
    """Return a decoder and its depth by the name of the form."""
    makers: dict[str, Any] = {"sequential": MTPProposer, "parallel": HeadsProposer}
    decoders = {}
    for name, (kind, depth, tree) in FORMS.items():
        shape = {} if tree is None else {"tree": tree, "children": "fixed"}
        proposer = makers[kind](modules[kind], **shape) if kind else None
        decoders[name] = (Decoder(target, proposer, gamma=depth, eos_ids=[eos]), depth)
    return decoders


def row_of(name: str, depth: int, lanes: Sequence[Lane], plain: Sequence[Lane]) -> dict[str, Any]:
    """Return what a form took on all prompts, beside plain decoding."""
    rounds = [one for lane in lanes for one in lane.rounds]
    unit = sum(lane.seconds() for lane in plain) / sum(len(lane.rounds) for lane in plain)
    parts = {
        part: sum(lane.seconds(part) for lane in lanes) / len(rounds) / unit
        for part in ("verify", "draft", "accept", "state")
    }
    kept = [(drafts > 0, judged.accepted) for _, drafts, judged, _ in rounds]
    return {
        "form": name,
        "tokens_per_round": sum(len(lane.tokens) for lane in lanes) / len(rounds),
        "alpha": count(kept, depth)[0],
        "v": parts["verify"],
        "c": parts["draft"],
        "o": parts["accept"] + parts["state"],
        "tokens_per_second": speed(lanes),
        "speedup": speed(lanes) / speed(plain),
        "same_text": sum(a.tokens == b.tokens for a, b in zip(lanes, plain, strict=True)),
    }


def speed(lanes: Sequence[Lane]) -> float:
    """Return tokens per second of the rounds."""
    return sum(len(lane.tokens) for lane in lanes) / sum(lane.seconds() for lane in lanes)


def describe(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    alpha = " ".join(f"{rate:.2f}" for rate in row["alpha"])
    numbers = (row[name] for name in ("v", "c", "o", "tokens_per_second", "speedup"))
    return (
        f"{row['form']:27}{row['tokens_per_round']:8.2f}  {alpha:16}"
        + "".join(f"{number:8.2f}" for number in numbers)
        + f"{row['same_text']:6}"
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--fast-linear", action="store_true", help="with speed_up_linear_")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--clock", choices=harness.CLOCKS, default="wall", help="cpu: 1 thread")
    parser.add_argument("--write", action="store_true", help="keep the record in results/")
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(given)
    torch.set_num_threads(options.threads)
    model, tokenizer = harness.load_demo_model(options.dtype)
    modules = {kind: load_smollm2_mtp(model, kind) for kind in ("sequential", "parallel")}
    if options.fast_linear:
        speed_up_linear_(torch.nn.ModuleList([model, *modules.values()]))
    decoders = make_decoders(TransformersTarget(model), modules, tokenizer.eos_token_id)
    questions = held_out_prompts()
    prompts = [
        encode_prompt(tokenizer, text, chat=True)
        for text in questions[:: len(questions) // options.prompts][: options.prompts]
    ]
    head = harness.header(
        model="smollm2",
        dtype=options.dtype,
        fast_linear=options.fast_linear,
        batch=1,
        context="the prompts' own, from position 0",
        prompts=f"{len(prompts)} held-out questions, {options.max_new_tokens} tokens each",
        gamma="depth of the form",
        sampling="greedy",
        clock=options.clock,
        metric="tokens per second of the rounds, prefill left out; speed-up over plain decoding",
        command="python -m benchmarks.bench_mtp " + " ".join(given),
    )
    clock = harness.CLOCKS[options.clock]
    lanes: dict[str, list[Lane]] = {name: [] for name in FORMS}
    with mock.patch.object(time, "perf_counter", clock):
        for prompt in prompts:
            for name, (decoder, _) in decoders.items():
                lanes[name].append(Lane(decoder, prompt, options.max_new_tokens))
            take_turns([each[-1] for each in lanes.values()])
    print(
        f"{'form':27}{'/round':>8}  {'alpha by depth':16}{'v':>8}{'c':>8}{'o':>8}"
        f"{'tok/s':>8}{'speed':>8}{'same':>6}"
    )
    rows = []
    for name, (_, depth) in decoders.items():
        rows.append(row_of(name, depth, lanes[name], lanes["plain"]))
        print(describe(rows[-1]), flush=True)
    record = {"benchmark": f"mtp-{options.dtype}", **head, "rows": rows}
    if options.write:
        harness.write(record, "cpu")
    print(json.dumps(record))
    return record


if __name__ == "__main__":
    main()
