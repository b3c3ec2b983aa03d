"""Acceptance of trees with drawn children: ours beside recursive rejection on probability tensors.

    python -m benchmarks.bench_tree_accept

A tree 4-2-2 per request: 29 nodes, children drawn without replacement. Ours by both rules; the
peer by the token rule of SpecInfer and Sequoia, written over whole `[rows, vocab]` tensors as their
loops are. All are checked against the float64 reference: tokens, for the peer the kept path.

Last line of stdout: one JSON object.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, native
from benchmarks.workloads import Workload, chosen
from spec_kernels import eager, ops, reference
from spec_kernels.types import Draft, SamplingParams

METRIC = "seconds of one call"
TREE = (4, 2, 2)
VARIATION = 0.3


class Problem:
    """Logits and drawn children at every node of a tree of `TREE` per request.

    Attributes:
        draft: the tokens, their tree, and where they were drawn.
        children: of every node.
    """

    def __init__(self, w: Workload, device: str) -> None:
        self.children: list[list[int]] = [[]]
        parents, level = [-1], [0]
        for width in TREE:
            grown = []
            for node in level:
                self.children[node] = list(range(len(parents), len(parents) + width))
                grown += self.children[node]
                parents += [node] * width
                self.children += [[] for _ in range(width)]
            level = grown
        self.nodes, self.temperature, batch = len(parents), w.temperature, w.batch
        generator = torch.Generator().manual_seed(0)
        shape = (batch * self.nodes, w.vocab)
        self.target = 2.5 * torch.randn(shape, generator=generator)
        p = (self.target / w.temperature).softmax(-1)
        q = (1.0 - VARIATION) * p + VARIATION * p.roll(w.vocab // 2, -1)
        tokens = torch.zeros(batch, self.nodes, dtype=torch.int64)
        for node, own in enumerate(self.children):
            if own:
                rows = q[node :: self.nodes]
                tokens[:, own] = torch.multinomial(rows, len(own), generator=generator)
        coins = torch.rand(batch, self.nodes + 1, generator=generator, dtype=torch.float64)
        self.target, self.logits = self.target.to(device), (q.log() * w.temperature).to(device)
        self.coins, self.finals = coins[:, :-1].to(device), coins[:, -1].to(device)
        self.params = SamplingParams.make(w.temperature, batch=batch, device=device)
        rows = torch.arange(batch * self.nodes, dtype=torch.int32, device=device)
        self.rows = rows.view(batch, self.nodes)
        law = ops.row_law(self.logits, self.params, rows // self.nodes)
        parent = torch.tensor(parents, dtype=torch.int32, device=device).repeat(batch, 1)
        drawn = self.rows.gather(1, parent.clamp(min=0).long()).where(parent >= 0, -1)
        count = torch.full((batch,), self.nodes, dtype=torch.int32, device=device)
        self.draft = Draft(tokens.to(device), count, parent, self.logits, law, drawn)

    def accept(self, layer: Any, rule: str) -> Any:
        """Verify by a layer; replacement is off."""
        args = (self.draft, self.target, self.params, self.rows, self.coins, self.finals)
        return layer.accept(*args, rule=rule, max_depth=len(TREE))

    def peer(self) -> list[list[int]]:
        """Verify by recursive rejection; return the kept path of every request."""
        p = (self.target / self.temperature).softmax(-1)
        q = (self.logits / self.temperature).softmax(-1)
        return [self._walk(b, p, q) for b in range(len(self.coins))]

    def _walk(self, b: int, p: Tensor, q: Tensor) -> list[int]:
        path = [0]
        while True:
            row = b * self.nodes + path[-1]
            wanted, left = p[row], q[row]
            for child in self.children[path[-1]]:
                y = self.draft.tokens[b, child]
                if self.coins[b, child] * left[y] < wanted[y]:
                    path.append(child)
                    break
                wanted = (wanted - left).clamp(min=0.0)
                wanted = wanted / wanted.sum()
                left = left.clone()
                left[y] = 0.0
                left = left / left.sum()
            else:
                torch.multinomial(wanted, 1)
                return path


def check(problem: Problem, judge: Problem, variants: dict[str, Any]) -> None:
    """Raise AssertionError unless all agree with the reference, which `judge` runs on
    a CPU; one draw may fall beside a boundary that float32 sums have moved."""
    for rule in ("token", "block"):
        expected = judge.accept(reference, rule)
        for name, call in variants.items():
            if rule in name and not name.startswith("recursive"):
                found = call()
                assert torch.equal(found.path.cpu(), expected.path), f"{name}: another path"
                other = (found.output_tokens.cpu() != expected.output_tokens).any(1).sum()
                assert int(other) <= 1, f"{name}: {other} other tokens"
        if rule == "token":
            paths = [[int(x) for x in row if x >= 0] for row in expected.path]
            assert problem.peer() == paths, "recursive rejection: another path"


def make_case(w: Workload, options: harness.Options) -> harness.Case:
    """Return the checked row of one workload."""
    problem = Problem(w, options.device)
    variants: dict[str, Any] = {
        "ours (token)": lambda: problem.accept(ops, "token"),
        "ours (block)": lambda: problem.accept(ops, "block"),
        "recursive rejection (token)": problem.peer,
    }
    if options.device != "cpu":
        variants["eager (token)"] = lambda: problem.accept(eager, "token")
    check(problem, Problem(w, "cpu"), variants)
    variants["the same, compiled (token)"] = "its loop follows values that only the host sees"
    variants["native"] = "no floor of its own: see read"
    variants["read"] = native.reader(options.device, problem.target, problem.logits)
    settings = {**w.settings(filters=False), "context": None, "gamma": len(TREE)}
    settings |= {"tree": "-".join(map(str, TREE)), "nodes": problem.nodes}
    return harness.Case(settings, variants, problem.target.nbytes + problem.logits.nbytes)


def cases(options: harness.Options) -> Iterator[harness.Case]:
    """Yield a chat service, then the other workloads."""
    for w in chosen(options, "big-vocab", "moe-latent"):
        yield make_case(w, options)


if __name__ == "__main__":
    harness.main("tree_accept", METRIC, cases, __doc__)
