"""Tokens per round of the demo model, drafts in chains and in trees, under every rule.

The proposer is the model itself without some of its layers: too slow to gain time, but it drafts
from laws of its own, as a draft model does. Sampled at one temperature, all prompts in one batch,
float32. What is counted is tokens per round, so a busy machine changes nothing.

    python -m benchmarks.bench_trees

Last line of stdout: one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from benchmarks import harness
from spec_kernels.decoder import Decoder, Request
from spec_kernels.integrations.prompts import PROMPTS
from spec_kernels.integrations.transformers import TransformersTarget
from spec_kernels.proposers import BestFirst, DraftModelProposer, NgramProposer
from spec_kernels.stats import DecoderStats

DEPTH = 3
TREE = (3, 2, 1)
BUDGET = 16
RULES = ("token", "block", "coupled")


def skip_layers(model: Any, skipped: Sequence[int]) -> Any:
    """Return the model without some of its layers; the weights are shared."""
    small = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    kept = [layer for i, layer in enumerate(small.model.layers) if i not in skipped]
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index
    small.model.layers = torch.nn.ModuleList(kept)
    small.config.num_hidden_layers = len(kept)
    return small


def make_proposers(model: Any, skipped: Sequence[int]) -> dict[str, Any]:
    """Return the proposers by the name of their row; those of the draft model come first."""
    drafter = TransformersTarget(skip_layers(model, skipped))
    rows: dict[str, Any] = {"draft model, chain of 3": DraftModelProposer(drafter)}
    for children in ("sampled", "mixed", "fixed"):
        name = f"draft model, tree 3-2-1, {children}"
        rows[name] = DraftModelProposer(drafter, tree=TREE, children=children)
    best = BestFirst(nodes=BUDGET, depth=DEPTH, expanded=3, children=3)
    rows[f"draft model, best {BUDGET} nodes"] = DraftModelProposer(drafter, tree=best)
    rows["n-gram, chain of 3"] = NgramProposer(4, 1)
    rows[f"n-gram, tree of {BUDGET} nodes"] = NgramProposer(4, 1, nodes=BUDGET)
    return rows


def measure(
    target: TransformersTarget, proposer: Any, rule: str, requests: Sequence[Request], eos: int
) -> DecoderStats:
    """Decode all requests in one batch; return their counters."""
    decoder = Decoder(target, proposer, gamma=DEPTH, rule=rule, eos_ids=[eos])
    return DecoderStats.total(output.stats for output in decoder.generate(requests))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--skipped", type=int, nargs="+", default=[14, 18, 22])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model, tokenizer = harness.load_demo_model("float32")
    target = TransformersTarget(model)
    requests = [
        Request(
            prompt.encode(tokenizer),
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            seed=seed,
        )
        for seed, prompt in enumerate(PROMPTS[:: len(PROMPTS) // options.prompts])
    ]
    print(f"{'tokens per round':36}" + "".join(f"{rule:>10}" for rule in RULES))
    results: dict[str, dict[str, float]] = {}
    for name, proposer in make_proposers(model, options.skipped).items():
        results[name] = {}
        for rule in RULES:
            stats = measure(target, proposer, rule, requests, tokenizer.eos_token_id)
            results[name][rule] = stats.mean_accepted_length
        print(f"{name:36}" + "".join(f"{v:10.2f}" for v in results[name].values()), flush=True)
    record = {
        "benchmark": "trees",
        "model": "smollm2",
        "proposer": f"the model without layers {options.skipped}",
        "batch": len(requests),
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "sampling": f"temperature {options.temperature}",
        "gamma": DEPTH,
        "context": "the prompts' own, from position 0",
        "command": "python -m benchmarks.bench_trees " + " ".join(arguments or sys.argv[1:]),
        "dtype": "float32",
        "device": torch.cpu.get_capabilities().get("cpu_name") or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "metric": "tokens per round and request",
        "results": results,
    }
    print(json.dumps(record))
    return record


if __name__ == "__main__":
    main()
