"""The adaptor for Hugging Face models against the models' own full forward: tiny random models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from spec_kernels.decoder import Decoder, Request
from spec_kernels.integrations.transformers import TransformersTarget
from spec_kernels.proposers import EarlyExitProposer
from spec_kernels.targets import Cache, KVCache, Target, TargetOutput
from spec_kernels.tree import pack_parents

VOCAB, LENGTH = 61, 48
SIZES = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
WINDOW = {"sliding_window": 4}
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 3,
}
# Grouped heads, biases, learned positions and no grouping, scaled embeddings, a window in every
# layer, windows in some layers with caps on scores and logits, per-head norms and two rotary bases,
# sinks, and values narrower than keys.
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES | GROUPED,
    "qwen2": SIZES | {"num_key_value_heads": 3},
    "gpt2": {"n_embd": 24, "n_layer": 3, "n_head": 6, "vocab_size": VOCAB, "n_positions": LENGTH},
    "gemma": SIZES | GROUPED,
    "mistral": SIZES | GROUPED | WINDOW,
    "gemma2": SIZES | GROUPED | WINDOW | {"attn_logit_softcapping": 2.0},
    "gemma3_text": SIZES | GROUPED | WINDOW,
    "gpt_oss": SIZES | GROUPED | WINDOW | {"num_local_experts": 2, "num_experts_per_tok": 2},
    "deepseek_v3": SIZES | LATENT,
}
ROUNDING = {"gemma2": 1e-5}  # its own attention rounds its probabilities to float32


def make_model(kind: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Return a model with random weights large enough that attention matters."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **MODELS[kind])
    # the models' own softcap and sinks exist in their plain attention only
    own = "eager" if kind in ("gemma2", "gpt_oss") else "sdpa"
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=own, experts_implementation="eager"
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).eval()


def full_forward(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Return the model's own logits at every position, `[len(tokens), vocab]`."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def random_tokens(count: int) -> list[int]:
    return torch.randint(1, VOCAB, (count,)).tolist()


def check_forward(
    target: TransformersTarget,
    cache: Cache,
    committed: list[list[int]],
    drafts: list[list[int]],
    own: PreTrainedModel | None = None,
) -> None:
    """Forward root and drafts of every request; compare all rows with the model's own forward, or
    with that of another model.

    `committed[b]` ends with the root; an empty list marks an absent request.
    """
    rounding = ROUNDING.get(target.model.config.model_type, 1e-7)
    nodes = 2 + max(len(draft) for draft in drafts)
    tokens = torch.full((len(drafts), nodes), -1)
    num_nodes = torch.zeros(len(drafts), dtype=torch.int32)
    for row, (context, draft) in enumerate(zip(committed, drafts, strict=True)):
        if context:
            tokens[row, : 1 + len(draft)] = torch.tensor([context[-1], *draft])
            num_nodes[row] = 1 + len(draft)
    output = target.forward(tokens, num_nodes, cache, hidden=True)
    assert output.logits.shape == (int(num_nodes.sum()), VOCAB)
    assert output.hidden is not None
    for row, (context, draft) in enumerate(zip(committed, drafts, strict=True)):
        count = int(num_nodes[row])
        assert (output.row[row, count:] == -1).all()
        if not count:
            continue
        want = full_forward(own or target.model, context + draft)[-count:]
        got = output.logits[output.row[row, :count].long()]
        torch.testing.assert_close(got, want, rtol=rounding, atol=rounding)


def used_part(cache: KVCache, row: int) -> Tensor:
    """Return all K/V that count for one request, layers stacked."""
    length = int(cache.context_lens[row])
    layers = [cache.rows(n, cache.context_lens, length) for n in range(len(cache.keys))]
    return torch.cat([part[row].flatten(1) for both in layers for part in both], 1)


@pytest.mark.parametrize("kind", MODELS)
def test_equals_the_models_own_forward(kind: str) -> None:
    """Ragged rounds with rejections and absent requests: logits and caches stay those of a model
    that has seen the committed tokens only."""
    target = TransformersTarget(make_model(kind))
    assert isinstance(target, Target)
    lengths = [1, 9, 4]
    cache = target.open(len(lengths), LENGTH)
    committed = [random_tokens(length) for length in lengths]
    for row, context in enumerate(committed):
        target.prefill(cache, row, context[:-1])
    assert cache.context_lens.tolist() == [0, 8, 3]
    rounds = [  # drafts and accepted drafts of each request; None = absent
        ([3, 0, 5], [2, 0, 1]),
        ([4, None, 2], [0, None, 2]),
        ([None, 6, None], [None, 6, None]),
        ([0, 0, 0], [0, 0, 0]),
        ([2, 2, 2], [1, 2, 0]),
    ]
    for drafted, accepted in rounds:
        present = [count is not None for count in drafted]
        drafts = [random_tokens(count or 0) for count in drafted]
        contexts = [c if here else [] for c, here in zip(committed, present, strict=True)]
        check_forward(target, cache, contexts, drafts)
        path = torch.full((3, 9), -1, dtype=torch.int32)
        for row, count in enumerate(accepted):
            if count is not None:
                path[row, : count + 1] = torch.arange(count + 1)
                committed[row] += [*drafts[row][:count], *random_tokens(1)]
        cache.keep(path, torch.tensor([count or 0 for count in accepted], dtype=torch.int32))
        check_caches(target, cache, committed)


def check_caches(target: TransformersTarget, cache: KVCache, committed: list[list[int]]) -> None:
    """The cache holds what a fresh prefill of all committed tokens but the last would."""
    assert cache.context_lens.tolist() == [len(context) - 1 for context in committed]
    for row, context in enumerate(committed):
        fresh = target.open(1, LENGTH)
        target.prefill(fresh, 0, context[:-1])
        if len(context) > 1:
            torch.testing.assert_close(used_part(cache, row), used_part(fresh, 0))


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_long_prompt_is_prefilled_in_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_kernels.integrations.transformers._PREFILL_CHUNK", 7)
    target = TransformersTarget(make_model(kind))
    context = random_tokens(30)
    cache = target.open(1, LENGTH)
    hidden = target.prefill(cache, 0, context[:-1], hidden=True)
    assert hidden is not None
    logits = target.model.get_output_embeddings()(hidden)
    torch.testing.assert_close(logits, full_forward(target.model, context)[:-1])
    check_forward(target, cache, [context], [random_tokens(3)])


def test_float32_agrees_to_rounding() -> None:
    model = make_model("llama", torch.float32)
    wide = copy.deepcopy(model).double()
    context, draft = random_tokens(12), random_tokens(4)
    target = TransformersTarget(model)
    cache = target.open(1, LENGTH)
    target.prefill(cache, 0, context[:-1])
    tokens = torch.tensor([[context[-1], *draft]])
    got = target.forward(tokens, torch.tensor([5], dtype=torch.int32), cache).logits
    want = full_forward(wide, context + draft)[-5:]
    own = full_forward(model, context + draft)[-5:]
    error, own_error = (got - want).abs().max(), (own - want).abs().max()
    assert error <= 2 * own_error + torch.finfo(torch.float32).eps * want.abs().max()


def test_model_works_as_before_outside_our_calls() -> None:
    model = make_model("llama")
    before = full_forward(model, [5, 6, 7])
    hooks = len(model.get_output_embeddings()._forward_pre_hooks)
    target = TransformersTarget(model)
    cache = target.open(1, LENGTH)
    target.prefill(cache, 0, [1, 2])
    assert model.config._attn_implementation == "sdpa"
    assert len(model.get_output_embeddings()._forward_pre_hooks) == hooks
    assert torch.equal(full_forward(model, [5, 6, 7]), before)
    generated = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    assert generated.shape[1] <= 7


def test_failure_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    target = TransformersTarget(model)
    context, draft = random_tokens(6), random_tokens(3)
    cache = target.open(1, LENGTH)
    target.prefill(cache, 0, context[:-1])
    broken = model.model.layers[1].mlp

    def fail(*args: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(broken, "forward", fail)
        with pytest.raises(RuntimeError, match="planted"):
            check_forward(target, cache, [context], [draft])
        with pytest.raises(RuntimeError, match="planted"):
            target.prefill(cache, 0, [1, 2])
    assert cache.context_lens.tolist() == [5]
    assert model.config._attn_implementation == "sdpa"
    assert not model.get_output_embeddings()._forward_pre_hooks
    check_forward(target, cache, [context], [draft])


def test_capacity_is_checked_before_anything_is_written() -> None:
    target = TransformersTarget(make_model("llama"))
    cache = target.open(2, 6)
    target.prefill(cache, 0, [1, 2, 3, 4])
    before = used_part(cache, 0).clone()
    tokens, num_nodes = torch.tensor([[5, 6, 7], [5, -1, -1]]), torch.tensor([3, 1])
    with pytest.raises(ValueError, match="request 0 needs 7 positions, the capacity is 6"):
        target.forward(tokens, num_nodes, cache)
    with pytest.raises(ValueError, match="request 1 needs 7 positions"):
        target.prefill(cache, 1, [1] * 7)
    assert torch.equal(used_part(cache, 0), before)
    # the padding of a request at its capacity must not spoil its last row
    target.prefill(cache, 0, [5])
    check_forward(target, cache, [[1, 2, 3, 4, 5, 6], [9]], [[], [7, 8]])


def test_ids_outside_the_vocabulary_do_not_stop_the_forward() -> None:
    """Such a draft is rejected by the verifier; rows before it must be right."""
    target = TransformersTarget(make_model("llama"))
    cache = target.open(1, LENGTH)
    tokens = torch.tensor([[3, 4, VOCAB + 5, -7]])
    logits = target.forward(tokens, torch.tensor([4], dtype=torch.int32), cache).logits
    torch.testing.assert_close(logits[:2], full_forward(target.model, [3, 4]))


def test_embeddings_are_the_models_own() -> None:
    target = TransformersTarget(make_model("llama"))
    assert target.embed(torch.tensor([[1, 2]])).shape == (1, 2, SIZES["hidden_size"])


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mamba", {"hidden_size": 8, "num_hidden_layers": 1, "state_size": 2}, "recurrent state"),
        ("bloom", {"hidden_size": 8, "n_layer": 1, "n_head": 2}, "not support"),
        ("llama4_text", SIZES | GROUPED | {"num_local_experts": 2}, "chunked_attention"),
    ],
)
def test_refuses_what_it_cannot_do_exactly(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    config = AutoConfig.for_model(kind, **(changes | {"vocab_size": VOCAB}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with pytest.raises(NotImplementedError, match=message):
        prefill_once(model)


def prefill_once(model: PreTrainedModel) -> None:
    target = TransformersTarget(model)
    target.prefill(target.open(1, 8), 0, [1, 2])


def test_refuses_rotary_frequencies_that_change_with_length() -> None:
    config = AutoConfig.for_model("llama", **(SIZES | GROUPED))
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config.rope_parameters["original_max_position_embeddings"] = 16
    target = TransformersTarget(AutoModelForCausalLM.from_config(config).eval())
    target.open(1, 16)
    with pytest.raises(NotImplementedError, match="dynamic rotary frequencies"):
        target.open(1, 17)


def test_refuses_bad_arguments() -> None:
    with pytest.raises(TypeError, match="must be a transformers model"):
        TransformersTarget(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    target = TransformersTarget(make_model("llama"))
    for capacity in (0, LENGTH + 1):
        with pytest.raises(ValueError, match=f"capacity must be in 1..{LENGTH}"):
            target.open(1, capacity)
    with pytest.raises(ValueError, match="batch must be positive"):
        target.open(0, 4)
    target.model.train()
    with pytest.raises(ValueError, match="eval mode"):
        target.prefill(target.open(1, 4), 0, [1])


def random_tree(nodes: int) -> list[int]:
    """Parents of a random tree, often with several children at the root."""
    return [-1, *(int(torch.randint(max(0, i - 3), i, (1,))) for i in range(1, nodes))]


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to `node`."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def check_tree(
    target: TransformersTarget,
    output: TargetOutput,
    committed: list[list[int]],
    tokens: Tensor,
    trees: list[list[int]],
    start: int = 0,
) -> None:
    """Each node's logits are the model's own behind the context and the path to the node."""
    rounding = ROUNDING.get(target.model.config.model_type, 1e-7)
    for row, parents in enumerate(trees):
        assert (output.row[row, len(parents) :] == -1).all()
        assert (output.row[row, :start] == -1).all()
        for node in range(start, len(parents)):
            path = tokens[row, path_to(parents, node)].tolist()
            want = full_forward(target.model, committed[row][:-1] + path)[-1]
            got = output.logits[int(output.row[row, node])]
            torch.testing.assert_close(got, want, rtol=rounding, atol=rounding)


@pytest.mark.parametrize(
    "kind", ["llama", "gpt2", "mistral", "gemma2", "qwen2", "gpt_oss", "deepseek_v3"]
)
def test_trees_equal_the_models_own_forward_on_every_path(kind: str) -> None:
    """Ragged trees, requests without drafts and absent ones, whole and level by level; the kept
    path leaves the cache that a fresh prefill would. The cache is paged."""
    target = TransformersTarget(make_model(kind), block_size=4)
    committed = [random_tokens(length) for length in (6, 1, 9)]
    cache = target.open(3, LENGTH)
    for row, context in enumerate(committed):
        target.prefill(cache, row, context[:-1])
    for sizes in ([9, 14, 1], [14, 1, 0], [3, 0, 12]):
        trees = [random_tree(size) if size else [] for size in sizes]
        parents, num_nodes = pack_parents(trees)
        tokens = torch.randint(1, VOCAB, parents.shape)
        tokens[:, 0] = torch.tensor([context[-1] for context in committed])
        output = target.forward(tokens, num_nodes, cache, parents=parents)
        check_tree(target, output, committed, tokens, trees)
        for start, stop in ((0, 1), (1, 4), (4, 14)):
            part = parents[:, :stop], num_nodes.clamp(max=stop)
            output = target.forward(tokens[:, :stop], part[1], cache, parents=part[0], start=start)
            cut = [tree[:stop] for tree in trees]
            check_tree(target, output, committed, tokens, cut, start)
        path = torch.full((3, 15), -1, dtype=torch.int32)
        for row, tree in enumerate(trees):
            if tree:
                kept = path_to(tree, max(range(len(tree)), key=lambda n: len(path_to(tree, n))))
                path[row, : len(kept)] = torch.tensor(kept)
                committed[row] += [*tokens[row, kept[1:]].tolist(), *random_tokens(1)]
        assert (path != torch.arange(15)).logical_and(path >= 0).any()  # rows have to move
        cache.keep(path, ((path >= 0).sum(1) - 1).clamp(min=0))
        check_caches(target, cache, committed)


def test_a_tree_may_end_at_the_capacity() -> None:
    """Positions count against the capacity, nodes do not."""
    target = TransformersTarget(make_model("llama"))
    cache = target.open(2, 6)
    target.prefill(cache, 0, [1, 2, 3, 4])
    trees = [[-1, 0, 0, 0, 0], [-1, 0, 1, 2, 3, 4]]
    parents, num_nodes = pack_parents(trees)
    tokens = torch.randint(1, VOCAB, parents.shape)
    committed = [[1, 2, 3, 4, 5], [5]]
    tokens[:, 0] = 5
    output = target.forward(tokens, num_nodes, cache, parents=parents)
    check_tree(target, output, committed, tokens, trees)
    deep, count = pack_parents([[-1, 0, 0, 1], [-1]])
    with pytest.raises(ValueError, match="request 0 needs 7 positions, the capacity is 6"):
        target.forward(tokens[:, :4], count, cache, parents=deep)
    path = torch.tensor([[0, 4, -1], [0, 1, 2]], dtype=torch.int32)
    cache.keep(path, torch.tensor([1, 2], dtype=torch.int32))
    rows = [[*committed[0], int(tokens[0, 4]), 9], [*tokens[1, :3].tolist(), 9]]
    check_caches(target, cache, rows)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_faulty_node_spoils_its_descendants_only(batch: int) -> None:
    """NaN in the K/V of one node: not in those before it, beside it, or in rounds to come."""
    model = make_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[60] = float("nan")
        model.get_output_embeddings().weight[60] = 0.0
    target = TransformersTarget(model)
    cache = target.open(batch, LENGTH)
    for row in range(batch):
        target.prefill(cache, row, [1, 2, 3])
    trees = [[-1, 0, 0, 1, 2]] * batch
    parents, num_nodes = pack_parents(trees)
    tokens = torch.tensor([[4, 5, 60, 6, 7]]).repeat(batch, 1)
    output = target.forward(tokens, num_nodes, cache, parents=parents)
    is_bad = output.logits[output.row.long()].isnan().any(2)
    assert is_bad.tolist() == [[False, False, True, False, True]] * batch
    for node, path in enumerate([[4], [4, 5], None, [4, 5, 6]]):
        if path is not None:
            want = full_forward(model, [1, 2, 3, *path])[-1]
            torch.testing.assert_close(output.logits[int(output.row[-1, node])], want)
    chain = target.forward(tokens, num_nodes, cache)
    is_bad = chain.logits[chain.row.long()].isnan().any(2)
    assert is_bad.tolist() == [[False, False, True, True, True]] * batch
    cache.keep(torch.zeros(batch, 1, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32))
    check_forward(target, cache, [[1, 2, 3, 4, 8]] * batch, [[9]] * batch)
    target.prefill(cache, 0, [60])
    output = target.forward(tokens[:, :2], num_nodes.clamp(max=2), cache)
    assert output.logits[output.row[0].long()].isnan().all()  # a prompt is not patched up


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_an_early_exit_is_the_model_without_its_last_layers(kind: str) -> None:
    """On the cache of the whole model, whose layers it leaves as they were."""
    model = make_model(kind)
    target = TransformersTarget(model)
    short = copy.deepcopy(model)
    short.model.layers = short.model.layers[:2]
    short.config.num_hidden_layers = 2
    committed = [random_tokens(6), random_tokens(3)]
    cache = target.open(2, LENGTH)
    for row, context in enumerate(committed):
        target.prefill(cache, row, context[:-1])
    deep = cache.keys[2].clone()
    drafts = [random_tokens(3), random_tokens(1)]
    check_forward(target.exit(2), cache, committed, drafts, own=short)
    assert torch.equal(cache.keys[2], deep)
    check_forward(target, cache, committed, drafts)


def test_drafts_of_an_early_exit_leave_the_text_as_it_is() -> None:
    target = TransformersTarget(make_model("llama", torch.float32))
    request = Request(random_tokens(5), max_new_tokens=20)
    plain = Decoder(target).generate([request])[0]
    for tree in (None, [2, 1]):
        proposer = EarlyExitProposer(target, 2, tree=tree)
        drafted = Decoder(target, proposer, gamma=3).generate([request])[0]
        assert drafted.tokens == plain.tokens
        assert drafted.stats.accepted > 0


def test_an_early_exit_needs_layers_and_a_model_that_stops() -> None:
    with pytest.raises(ValueError, match=r"layers must be in 1..3, got 4"):
        TransformersTarget(make_model("llama")).exit(4)
    target = TransformersTarget(make_model("gpt2"))
    with pytest.raises(NotImplementedError, match="3 attention layers ran for the 2 layers"):
        target.exit(2)
    assert target.model.config.num_hidden_layers == 3
