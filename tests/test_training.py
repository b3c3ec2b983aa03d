"""Training of MTP modules: gradients, losses, the corpus, exact resuming."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from spec_kernels.decoder import Decoder, Request
from spec_kernels.nn.mtp import MTP, MTPConfig, ParallelHeads, SequentialMTP
from spec_kernels.targets import TableTarget
from spec_kernels.training import (
    Corpus,
    Training,
    backward,
    draft_vocabulary,
    kl_loss,
    measure_acceptance,
    next_tokens_loss,
    overlap_loss,
    read,
    start_from_trunk,
    train,
    write,
)

SIZE, VOCAB, DEPTH = 12, 17, 3
KINDS = ("parallel", "sequential", "shared")
IDS = torch.tensor([0, 2, 3, 5, 8, 11, 16])


def make(kind: str, *, ids: Tensor | None = None, dtype: torch.dtype = torch.float64) -> MTP:
    torch.manual_seed(3)
    matrix = torch.randn(VOCAB, SIZE, dtype=dtype)
    module: MTP
    if kind == "parallel":
        config = MTPConfig("parallel", SIZE, DEPTH)
        module = ParallelHeads(config, matrix, draft_to_target=ids)
    else:
        sizes = {"heads": 2, "kv_heads": 1, "head_dim": 4, "intermediate_size": 8}
        config = MTPConfig("sequential", SIZE, DEPTH, is_shared=kind == "shared", **sizes)
        embedding = torch.randn(VOCAB, SIZE, dtype=dtype)
        module = SequentialMTP(config, embedding, matrix, draft_to_target=ids)
    module.to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


FIRST = torch.tensor([0, 2, 5])


def ragged() -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    tokens = torch.randint(VOCAB, (3, 9))
    tokens[1, 6:] = -1
    return torch.randn(3, 9, SIZE, dtype=torch.float64), tokens


def naive_loss(
    module: MTP, hidden: Tensor, tokens: Tensor, weights: list[float], name: str
) -> Tensor:
    """Sum the weighted losses place by place, all logits in memory at once."""
    ids = list(range(VOCAB)) if module.draft_to_target is None else module.draft_to_target.tolist()
    total = hidden.new_zeros(())
    if isinstance(module, SequentialMTP):
        states = module(hidden, tokens.clamp(min=0))
    else:
        states = [module(hidden)[:, :, k] for k in range(DEPTH)]
    for k, state in enumerate(states, 1):
        terms = []
        places = ((row, i) for row in range(3) for i in range(9 - k) if i + k + 1 >= FIRST[row])
        for row, i in places:
            q = module.logits(state[row, i], k).log_softmax(-1)
            if name == "tokens":
                following = int(tokens[row, i + k + 1]) if i + k + 1 < 9 else -1
                if following in ids:
                    terms.append(-q[ids.index(following)])
            elif tokens[row, i + k] >= 0:
                own = (module.unembedding @ hidden[row, i + k]).detach()
                p = own.softmax(-1)
                kl = (p * (own.log_softmax(-1) - q)).sum()
                terms.append(kl if name == "kl" else 1 - torch.minimum(p, q.exp()).sum())
        total = total + weights[k - 1] * torch.stack(terms).mean()
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tokens", "kl", "overlap"])
@pytest.mark.parametrize("is_reduced", [False, True])
def test_gradients_by_depth_equal_those_of_the_sum(kind: str, name: str, is_reduced: bool) -> None:
    module = make(kind, ids=IDS if is_reduced else None)
    hidden, tokens = ragged()
    weights, trunk = [0.5, 0.25, 1.0], hidden.clone().requires_grad_()
    value = naive_loss(module, trunk, tokens, weights, name)
    value.backward()
    expected = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    lean = hidden.clone().requires_grad_()
    losses = backward(module, lean, tokens, weights, loss=name, first=FIRST)  # type: ignore[arg-type]
    found = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    # the losses are summed in float32
    total = sum(w * loss for w, loss in zip(weights, losses, strict=True))
    assert total == pytest.approx(value.item(), rel=1e-5)
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(lean.grad, trunk.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_depths_behind_the_last_weight_get_no_gradient(kind: str) -> None:
    module = make(kind)
    losses = backward(module, *ragged(), [1.0, 0.0, 0.0])
    assert len(losses) == 1
    deeper = [p for n, p in module.named_parameters() if n.split(".")[1] != "0"]
    assert all(p.grad is None for p in deeper)
    assert any(p.grad is not None for p in module.parameters())


def test_losses_of_known_laws() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25]]).log()
    q = torch.tensor([[0.25, 0.25, 0.5]]).log()
    assert overlap_loss(q, p).item() == pytest.approx(0.25)
    assert overlap_loss(q, q).item() == pytest.approx(0.0, abs=1e-6)
    assert kl_loss(q, p).item() == pytest.approx(0.25 * 0.6931472)
    assert next_tokens_loss(q, torch.tensor([2])).item() == pytest.approx(0.6931472)
    assert next_tokens_loss(q, torch.tensor([-1])).item() == 0.0


def successor_corpus(sequences: int = 12) -> tuple[Corpus, Tensor]:
    """Text of a chain in which id x is followed by x + 1, and the chain's unembedding."""
    table = 9.0 * torch.eye(7).roll(1, dims=1)
    texts = [[(start + i) % 7 for i in range(10)] for start in range(sequences)]
    corpus = Corpus.pack(list(read(TableTarget(table), texts, length=10)))
    return corpus, table.T.contiguous()


@pytest.mark.parametrize("kind", ["parallel", "sequential"])
def test_modules_learn_a_chain_that_they_can_know(kind: str) -> None:
    corpus, unembedding = successor_corpus()
    module: MTP
    if kind == "parallel":
        module = ParallelHeads(MTPConfig("parallel", 7, 2), unembedding)
    else:
        sizes = {"heads": 1, "kv_heads": 1, "head_dim": 8, "intermediate_size": 16}
        config = MTPConfig("sequential", 7, 2, **sizes)
        module = SequentialMTP(config, torch.eye(7), unembedding)
    torch.manual_seed(0)
    start_from_trunk(module, corpus)
    before = measure_acceptance(module, corpus, unembedding)
    assert max(before.top1) < 0.5
    train(module, corpus, Training(steps=120, learning_rate=4e-2))
    after = measure_acceptance(module, corpus, unembedding)
    assert after.survival == [1.0, 1.0]
    assert after.tokens == 12 * 8
    assert max(after.loss) < min(before.loss)


def test_fresh_modules_predict_what_the_target_predicts() -> None:
    corpus, unembedding = successor_corpus()
    heads = ParallelHeads(MTPConfig("parallel", 7, 2), unembedding)
    start_from_trunk(heads, corpus)
    hidden = corpus.hidden[0].float()
    own = F.linear(hidden, unembedding).argmax(-1)
    for depth in (1, 2):
        assert torch.equal(heads.logits(heads.state(hidden, depth), depth).argmax(-1), own)


def small_training(steps: int = 9) -> tuple[MTP, Corpus, Training]:
    hidden, tokens = ragged()
    corpus = Corpus(tokens, hidden.to(torch.bfloat16), FIRST)
    module = make("sequential", dtype=torch.float32)
    return module, corpus, Training(steps=steps, batch=2, first_depth_until=0.4)


def test_an_interrupted_training_resumes_exactly(tmp_path: Path) -> None:
    module, corpus, training = small_training()
    assert train(module, corpus, training) == 9
    resumed, file = small_training()[0], tmp_path / "deep" / "state.pt"

    def interrupt(step: int, losses: list[float]) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    done = train(resumed, corpus, training, checkpoint=file, report=interrupt)
    assert done == 5
    assert signal.getsignal(signal.SIGINT) is before
    other = make("sequential", dtype=torch.float32)  # as a new process would
    assert train(other, corpus, training, checkpoint=file) == 9
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    module, corpus, training = small_training()
    train(module, corpus, training, checkpoint=tmp_path / "state.pt")
    other = Training(steps=9, batch=2, seed=1)
    with pytest.raises(ValueError, match=r"cannot resume from .*state.pt"):
        train(module, corpus, other, checkpoint=tmp_path / "state.pt")
    (tmp_path / "state.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="cannot resume"):
        train(module, corpus, training, checkpoint=tmp_path / "state.pt")


def test_a_corpus_holds_the_states_of_each_piece(tmp_path: Path) -> None:
    target = TableTarget(torch.randn(6, 6))
    passages = list(read(target, [[1, 2, 3, 4, 5], [0], [3, 3]], length=2))
    corpus = Corpus.pack([*passages, passages[0]._replace(first=1)])
    assert corpus.tokens.tolist() == [[1, 2], [3, 4], [3, 3], [1, 2]]
    assert corpus.num_tokens == 7
    assert torch.equal(corpus.hidden.argmax(-1), corpus.tokens)
    corpus.save(tmp_path / "new" / "states.safetensors")
    loaded = Corpus.load(tmp_path / "new" / "states.safetensors")
    pairs = zip(vars(loaded).values(), vars(corpus).values(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    again = Corpus.pack(loaded.unpack())
    assert torch.equal(again.hidden, corpus.hidden)
    assert torch.equal(again.first, corpus.first)
    first, last = corpus.split(0.3)
    assert (len(first.tokens), len(last.tokens)) == (2, 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_writes_what_plain_decoding_gives_and_keeps_its_states(
    temperature: float,
) -> None:
    torch.manual_seed(2)
    target, prompts, seeds = TableTarget(torch.randn(6, 6)), [[0, 1], [2, 2], [5, 4, 3]], [7, 8, 9]
    passages = write(
        target, prompts, max_new_tokens=9, temperature=temperature, seeds=seeds, eos_ids=[1]
    )
    requests = [
        Request(prompt, max_new_tokens=9, temperature=temperature, seed=seed)
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    answers = Decoder(target, eos_ids=[1]).generate(requests)
    for passage, prompt, answer in zip(passages, prompts, answers, strict=True):
        assert passage.tokens.tolist() == [*prompt, *answer.tokens][:-1]
        assert passage.first == len(prompt)
        assert torch.equal(passage.hidden.argmax(-1), passage.tokens)
    assert len({len(passage.tokens) for passage in passages}) > 1  # some ended early


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Training(steps=0), "at least 1"),
        (lambda: Training(steps=1, loss="mse"), "loss must be one of"),  # type: ignore[arg-type]
        (lambda: Training(steps=1, first_depth_until=2.0), "first_depth_until"),
        (lambda: Training(steps=1, depth_weights=(1.0,)).weights(2, 0), "one per depth"),
        (lambda: draft_vocabulary(IDS, 0, 9), "1 to 9 ids"),
        (lambda: Corpus.pack(list(read(TableTarget(torch.eye(3)), [[1]], length=4))), "two tokens"),
        (lambda: successor_corpus()[0].split(1.0), "held_out"),
        (lambda: backward(make("parallel"), *ragged(), [1.0]), "must have 3 values"),
    ],
)
def test_impossible_trainings_are_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
