"""Tokens per second of the demo model: plain, speculative, and transformers' assisted generation.

For every dtype and prompt four variants run in turns, `--repeats` times, after a warm-up that also
records where outputs part. Greedy, batch 1, time of whole calls, the prefill of the prompt
included; of the repeats the median counts. Rows add up the prompts of one kind: all tokens over all
seconds. `--clock cpu` counts CPU seconds instead, for one thread on a machine that others use.

    python -m benchmarks.bench_generate --threads 2

Last line of stdout: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import harness
from spec_kernels.comparison import first_difference
from spec_kernels.decoder import Decoder, Request
from spec_kernels.integrations import smollm2
from spec_kernels.integrations.prompts import PROMPTS
from spec_kernels.integrations.transformers import TransformersTarget
from spec_kernels.proposers import NgramProposer
from spec_kernels.targets import speed_up_linear_

VARIANTS = ("plain", "ngram", "hf-plain", "hf-lookup")
GAMMA = 8


def make_variants(
    model: Any, eos: int, max_new_tokens: int
) -> dict[str, Callable[[list[int]], list[int]]]:
    """Return functions from prompt ids to generated ids."""
    target = TransformersTarget(model)
    proposer = NgramProposer()

    def ours(decoder: Decoder) -> Callable[[list[int]], list[int]]:
        def call(prompt: list[int]) -> list[int]:
            (output,) = decoder.generate([Request(prompt, max_new_tokens=max_new_tokens)])
            return list(output.tokens)

        return call

    def theirs(**options: Any) -> Callable[[list[int]], list[int]]:
        def call(prompt: list[int]) -> list[int]:
            ids = torch.tensor([prompt])
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                **options,
            )
            return output[0, len(prompt) :].tolist()

        return call

    return {
        "plain": ours(Decoder(target, eos_ids=[eos])),
        "ngram": ours(Decoder(target, proposer, gamma=GAMMA, eos_ids=[eos])),
        "hf-plain": theirs(),
        "hf-lookup": theirs(prompt_lookup_num_tokens=GAMMA),
    }


def measure(model: Any, tokenizer: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one record per prompt: tokens and median seconds of every variant."""
    variants = make_variants(model, tokenizer.eos_token_id, options.max_new_tokens)
    clock = harness.CLOCKS[options.clock]
    records = []
    for prompt in (p for p in PROMPTS if p.kind in options.kinds):
        ids = prompt.encode(tokenizer)
        outputs = {name: call(ids) for name, call in variants.items()}  # warm-up and check
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(options.repeats):
            for name, call in variants.items():
                began = clock()
                call(ids)
                seconds[name].append(clock() - began)
        reference = outputs["hf-plain"]
        records.append(
            {
                "prompt": prompt.name,
                "kind": prompt.kind,
                "tokens": {name: len(output) for name, output in outputs.items()},
                "seconds": {name: statistics.median(times) for name, times in seconds.items()},
                "first_difference": {
                    name: first_difference(output, reference) for name, output in outputs.items()
                },
            }
        )
    return records


def summarise(records: list[dict[str, Any]], kind: str) -> dict[str, float]:
    """Return tokens per second of every variant over the prompts of one kind, and the ratios."""
    chosen = [record for record in records if record["kind"] == kind]
    speed = {
        name: sum(r["tokens"][name] for r in chosen) / sum(r["seconds"][name] for r in chosen)
        for name in VARIANTS
    }
    return speed | {
        "speedup": speed["ngram"] / speed["plain"],
        "hf_speedup": speed["hf-lookup"] / speed["hf-plain"],
        "against_hf_lookup": speed["ngram"] / speed["hf-lookup"],
        "against_hf_plain": speed["plain"] / speed["hf-plain"],
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--kinds", nargs="+", default=["copy", "free"])
    parser.add_argument(
        "--fast-linear", action="store_true", help="speed_up_linear_ for all variants"
    )
    parser.add_argument("--clock", choices=harness.CLOCKS, default="wall")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    head = harness.header(
        command="python -m benchmarks.bench_generate " + " ".join(arguments or sys.argv[1:]),
        metric=f"tokens per {options.clock} second",
        native_bfloat16=smollm2.fast_dtype() is torch.bfloat16,
        fast_linear=options.fast_linear,
        load=round(os.getloadavg()[0], 1),
    )
    print("  ".join(f"{key} {value}" for key, value in head.items()))
    ratios = ("speedup", "hf_speedup", "against_hf_lookup", "against_hf_plain")
    print(
        f"{'tokens/s (' + options.clock + ')':18}"
        + "".join(f"{name:>18}" for name in (*VARIANTS, *ratios))
    )
    results: dict[str, Any] = {}
    for dtype in options.dtypes:
        model, tokenizer = harness.load_demo_model(dtype)
        if options.fast_linear:
            speed_up_linear_(model)
        records = measure(model, tokenizer, options)
        for kind in options.kinds:
            summary = summarise(records, kind)
            print(f"{dtype + ' ' + kind:18}" + "".join(f"{v:18.2f}" for v in summary.values()))
            results[f"{dtype} {kind}"] = summary
        results[f"{dtype} prompts"] = records
    record = {
        "benchmark": "generate",
        "model": "smollm2",
        "batch": 1,
        "gamma": GAMMA,
        "temperature": 0.0,
        "sampling": "greedy",
        "context": "the prompts' own, from position 0",
        **head,
        "results": results,
    }
    print(json.dumps(record))
    return record


if __name__ == "__main__":
    main()
