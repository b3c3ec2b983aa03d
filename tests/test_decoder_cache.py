"""The decoder on KV caches: what they hold after each round, and after a round that failed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache as remember
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from spec_kernels.decoder import Chunk, Decoder, Request, Run
from spec_kernels.integrations.transformers import TransformersTarget
from spec_kernels.proposers import BestFirst, DraftModelProposer, NgramProposer
from spec_kernels.targets import KVCache, ModuleTarget
from spec_kernels.types import Draft, OutOfBlocks
from tests.tiny_models import TinyGPT, gpt

BLOCK_SIZES = (1, 4, 16)
AnyTarget = ModuleTarget | TransformersTarget
PROPOSERS: dict[str, Callable[[ModuleTarget], Any]] = {
    "chain": lambda model: DraftModelProposer(model, temperature=0.7),
    "template": lambda model: DraftModelProposer(model, tree=[2, 2, 1], temperature=0.7),
    "best-first": lambda model: DraftModelProposer(model, tree=BestFirst(8, depth=3, children=2)),
    "ngram": lambda model: NgramProposer(),
    "ngram-tree": lambda model: NgramProposer(nodes=8),
    "plain": lambda model: None,
}
REQUESTS = [
    Request([1, 2, 3], max_new_tokens=9, temperature=1.1, seed=3, presence_penalty=0.5),
    Request([4, 5, 4, 5, 4], max_new_tokens=12, temperature=1.0, seed=4, stop_strings=["zzz"]),
    Request([9], max_new_tokens=3, temperature=0.8, seed=5),
]


def text(ids: Any) -> str:
    return "".join(chr(97 + i % 26) for i in ids)


def decoder_of(kind: str, target: AnyTarget) -> Decoder:
    return Decoder(target, PROPOSERS[kind](paged()), gamma=4, detokenize=text)


@remember
def expected_outputs(make: Callable[..., AnyTarget]) -> dict[int, tuple[int, ...]]:
    """What the requests give when nothing fails."""
    outputs = decoder_of("template", contiguous(make())).generate(REQUESTS)
    return {index: output.tokens for index, output in enumerate(outputs)}


def paged(block_size: int = 4, num_blocks: int | None = None) -> ModuleTarget:
    return ModuleTarget(TinyGPT().eval(), block_size=block_size, num_blocks=num_blocks)


def llama(block_size: int = 4) -> TransformersTarget:
    """A Hugging Face model of two layers, in float64 up to its logits."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 31}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.4)).double()
    model.lm_head.register_forward_hook(lambda head, inputs, logits: logits.float())
    return TransformersTarget(model.eval(), block_size=block_size)


@remember
def contiguous(target: AnyTarget) -> AnyTarget:
    """The same model without blocks."""
    if isinstance(target, ModuleTarget):
        return ModuleTarget(target.module)
    return TransformersTarget(target.model)


def rows_of(cache: KVCache, request: int, length: int) -> list[Tensor]:
    """K and V of the first rows of a request, every layer."""
    layers = [cache.rows(n, cache.context_lens, length) for n in range(len(cache.keys))]
    return [part[request].clone() for both in layers for part in both]


def check_blocks(cache: KVCache) -> None:
    """Free and live blocks are all blocks, none is there twice, and the device knows them."""
    lists = [cache.blocks_of(request) for request in range(cache.batch)]
    held = [block for blocks in lists for block in blocks]
    assert len(held) == len(set(held))
    assert cache.num_free + len(held) == cache.keys[0].shape[0]
    assert set(cache._lists.pool._free).isdisjoint(held)
    for blocks, entries in zip(lists, cache.block_table.tolist(), strict=True):
        assert list(blocks) == [entry for entry in entries if entry >= 0] == entries[: len(blocks)]


def check_cache(run: Run, target: AnyTarget) -> None:
    """The target's cache holds a fresh prefill of all committed tokens but the last, no more."""
    cache = run.cache
    check_blocks(cache)
    for index, row in enumerate(run._rows):
        length = 0 if row.is_done else row.length - 1
        assert cache.context_lens[index] == length
        assert len(cache.blocks_of(index)) == -(-length // cache.block_size)
        if length:
            check_rows(target, cache, index, run.state.tokens[index, :length].tolist())


def check_rows(target: AnyTarget, cache: KVCache, index: int, tokens: list[int]) -> None:
    """The rows of a request are those of a fresh prefill."""
    plain = contiguous(target)
    fresh = plain.open(1, len(tokens))
    plain.prefill(fresh, 0, tokens)
    pairs = zip(rows_of(cache, index, len(tokens)), rows_of(fresh, 0, len(tokens)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-12)


def check_draft_cache(run: Run, target: ModuleTarget) -> None:
    """The cache of the draft model, `target`, holds a prefix of the committed tokens."""
    cache = getattr(run.session, "cache", None)
    if cache is None:
        return
    check_blocks(cache)
    for index, row in enumerate(run._rows):
        length = int(cache.context_lens[index])
        assert length < row.length
        if length and not row.is_done:
            check_rows(target, cache, index, run.state.tokens[index, :length].tolist())


def poison_dead_rows(cache: KVCache) -> int:
    """Fill every row that no request counts as its own with NaN; return how many there are."""
    position = torch.arange(cache.max_rows).expand(cache.batch, -1)
    flat = torch.where(position < cache.context_lens[:, None], cache._rows(position), -1)
    is_dead = torch.ones(cache.keys[0].shape[:2], dtype=torch.bool).flatten()
    is_dead[flat[flat >= 0]] = False
    for tensor in cache.tensors.tensors:
        tensor.flatten(0, 1)[is_dead] = torch.nan
    return int(is_dead.sum())


def random_requests(rng: random.Random) -> list[Request]:
    """One to four requests of other lengths, temperatures and budgets: they leave one by one."""
    return [
        Request(
            [rng.randrange(31) for _ in range(rng.randint(1, 18))],
            max_new_tokens=rng.randint(1, 30),
            temperature=rng.choice([0.0, 0.7, 1.3]),
            seed=rng.randrange(2**40),
        )
        for _ in range(rng.randint(1, 4))
    ]


CASES = [(paged, size, kind) for size in BLOCK_SIZES for kind in PROPOSERS]
CASES += [(llama, 4, kind) for kind in PROPOSERS]


@pytest.mark.parametrize(
    ("make", "block_size", "kind", "rounds"),
    [(paged, 1, "template", 12), (paged, 4, "best-first", 12), (paged, 16, "chain", 12)]
    + [(paged, 4, "ngram-tree", 12), (llama, 4, "template", 12), (llama, 1, "ngram", 12)]
    + [pytest.param(*case, 200, marks=pytest.mark.slow) for case in CASES],
)
def test_random_rounds(
    make: Callable[..., AnyTarget], block_size: int, kind: str, rounds: int
) -> None:
    """Batch after batch, ragged, requests leaving at different times: each cache is a fresh
    prefill of what was committed, and dead rows, full of NaN, never reach an output."""
    rng, target = random.Random(f"{block_size}-{kind}"), make(block_size)
    decoder, undisturbed = decoder_of(kind, target), decoder_of(kind, contiguous(target))
    done = moved = 0
    while done < rounds:
        requests = random_requests(rng)
        expected = undisturbed.generate(requests)
        run, chunks = decoder.start(requests), []
        while not run.is_done:
            assert poison_dead_rows(run.cache) > 0
            if getattr(run.session, "cache", None) is not None:
                poison_dead_rows(run.session.cache)
            chunks += run.step()
            check_cache(run, target)
            check_draft_cache(run, gpt())
            done += 1
        assert run.cache.num_free == run.cache.keys[0].shape[0]
        assert outputs_of(chunks) == {i: output.tokens for i, output in enumerate(expected)}
        moved += sum(output.stats.accepted for output in expected)
    assert moved > 0 or kind == "plain"


def outputs_of(chunks: list[Chunk]) -> dict[int, tuple[int, ...]]:
    return {chunk.request: chunk.generation.tokens for chunk in chunks if chunk.generation}


# ------------------------------------------------------------------------------ faults


class PlantedError(BaseException):
    """Stands for everything that can stop a round, Ctrl-C included."""


def failing(function: Callable[..., Any], *, calls: int = 1) -> Callable[..., Any]:
    """Do what `function` does, but raise behind the call of that number, once."""
    left = [calls]

    def call(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        left[0] -= 1
        if left[0] == 0:
            raise PlantedError
        return result

    return call


def plant(place: str, decoder: Decoder, run: Run, patch: pytest.MonkeyPatch) -> None:
    """Let one part of the next round fail once it has done its work."""
    caches, target = "spec_kernels.nn._cache", decoder.target
    head = target.module if isinstance(target, ModuleTarget) else target._head
    owner, name, calls = {
        "propose": (run.session, "propose", 1),
        "draft-forward": (run.session._model, "forward", 2),
        "reserve": (run.cache, "reserve", 1),
        "slots": (run.cache, "slots", 1),
        "first-layer": (run.cache, "append", 1),
        "last-layer": (run.cache, "append", 2),
        "model": (head, "head" if isinstance(target, ModuleTarget) else "forward", 1),
        "verifier": (decoder, "verifier", 1),
        "detokenize": (run._rows[1].scanner._text, "_detokenize", 1),
        "move": (caches, "compact_cache", 1),
        "keep": (run.cache, "keep", 1),
        "commit": (run.session, "commit", 1),
    }[place]
    if isinstance(owner, str):
        import spec_kernels.nn._cache as owner  # type: ignore[no-redef]
    patch.setattr(owner, name, failing(getattr(owner, name), calls=calls))


def snapshot(run: Run) -> list[Any]:
    """Lengths, blocks and contents of the caches; sequences and counters."""
    cache, draft = run.cache, run.session.cache
    lens = [cache.context_lens.tolist(), draft.context_lens.tolist()]
    blocks = [cache.blocks_of(request) for request in range(cache.batch)]
    rows = [
        [part.tolist() for part in rows_of(each, request, most)]
        for each, most in ((cache, max(lens[0])), (draft, max(lens[1])))
        for request in range(cache.batch)
    ]
    steps = [row.stats.steps for row in run._rows]
    return [lens, blocks, rows, run.state.tokens.tolist(), steps]


def finish(run: Run, target: AnyTarget) -> dict[int, tuple[int, ...]]:
    """Go on to the end, under check."""
    chunks: list[Chunk] = []
    while not run.is_done:
        poison_dead_rows(run.cache)
        chunks += run.step()
        check_cache(run, target)
    return outputs_of(chunks)


PLACES = ["propose", "draft-forward", "reserve", "slots", "first-layer", "last-layer", "model"]
PLACES += ["verifier", "detokenize", "move", "keep", "commit"]


@pytest.mark.parametrize(
    ("make", "place"),
    [(paged, place) for place in PLACES]
    + [(llama, "last-layer"), (llama, "move")]
    + [pytest.param(llama, place, marks=pytest.mark.slow) for place in PLACES],
)
def test_a_fault_at_any_point_leaves_everything_as_before(
    make: Callable[..., AnyTarget], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first round and a later one, on trees: rows have to move. Generation then goes on with
    the same text."""
    target = make()
    decoder = decoder_of("template", target)
    expected = expected_outputs(make)
    for good_rounds in (0, 2):
        run = decoder.start(REQUESTS)
        for _ in range(good_rounds):
            run.step()
        before = snapshot(run)
        with monkeypatch.context() as patch:
            plant(place, decoder, run, patch)
            with pytest.raises(PlantedError):
                run.step()
        assert snapshot(run) == before
        check_cache(run, target)
        assert expected.items() >= finish(run, target).items()


def test_a_round_without_blocks_can_be_repeated() -> None:
    """Somebody else holds the blocks: the round says how many are missing, and changes nothing."""
    target = paged()
    decoder = decoder_of("template", target)
    expected = expected_outputs(paged)
    run = decoder.start(REQUESTS)
    run.step()
    before, pool = snapshot(run), run.cache._lists.pool
    run.cache.extend(99)  # or the first tree would bring blocks of its own
    stolen = pool.take(pool.num_free - 1)
    with pytest.raises(OutOfBlocks) as caught:
        run.step()
    assert caught.value.missing > 0
    pool.release(stolen)
    assert snapshot(run) == before
    assert expected.items() >= finish(run, target).items()


def test_a_request_that_ends_makes_room_for_the_others() -> None:
    """Blocks for both requests at their longest do not exist; the short one leaves in time."""
    requests = [Request([1, 2, 3], max_new_tokens=2), Request([4], max_new_tokens=30)]
    expected = [output.tokens for output in Decoder(gpt()).generate(requests)]
    target = paged(block_size=4, num_blocks=8)  # 30 rows of the second request: all of them
    assert [output.tokens for output in Decoder(target).generate(requests)] == expected
    with pytest.raises(OutOfBlocks):
        Decoder(paged(block_size=4, num_blocks=7)).generate(requests)


def test_an_interrupted_generator_leaves_a_run_that_goes_on() -> None:
    target = paged()
    decoder = decoder_of("template", target)
    expected = expected_outputs(paged)

    def chunks(run: Run) -> Iterator[Chunk]:
        while not run.is_done:
            yield from run.step()

    run = decoder.start(REQUESTS)
    stream = chunks(run)
    next(stream)
    before = snapshot(run)
    stream.close()
    assert snapshot(run) == before
    assert expected.items() >= finish(run, target).items()


def test_room_is_made_without_reading_the_draft() -> None:
    """By the width of a tree, or by that of a chain and what is left of each budget."""
    run = Decoder(paged(1, num_blocks=40), gamma=4, detokenize=text).start(REQUESTS)
    tokens = torch.empty(3, 5, dtype=torch.int64, device="meta")  # nothing can be read
    held = [len(run.cache.blocks_of(request)) for request in range(3)]
    run._rows[0].is_done = True
    for parents, counts in ((None, [0, 5, 3]), (tokens.int(), [0, 5, 5])):
        run._reserve(Draft(tokens, tokens[:, 0].int(), parents))
        after = [len(run.cache.blocks_of(request)) for request in range(3)]
        assert [a - b for a, b in zip(after, held, strict=True)] == counts


def read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let targets make room as they do where reading costs a wait, on a GPU."""

    def make_room(cache: KVCache, num_nodes: Tensor, nodes: int, *, is_tree: bool) -> None:
        cache.holds_tree = is_tree
        if is_tree:
            cache.extend(nodes)
        cache.fill()

    monkeypatch.setattr("spec_kernels.targets.module.make_room", make_room)


@pytest.mark.parametrize("kind", ["chain", "template", "ngram"])
def test_the_host_reads_the_device_once_a_round(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is made from host numbers: the same text."""
    expected = [output.tokens for output in decoder_of(kind, gpt()).generate(REQUESTS)]
    read_nothing(monkeypatch)
    target = paged()
    run = decoder_of(kind, target).start(REQUESTS)
    chunks: list[Chunk] = []
    while not run.is_done:
        chunks += run.step()
        check_cache(run, target)
    assert outputs_of(chunks) == dict(enumerate(expected))


@pytest.mark.parametrize("kind", ["chain", "template", "best-first"])
def test_a_draft_model_that_is_not_counted_has_room_for_all(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many drafts are accepted from few blocks, if they are enough, as from all."""
    read_nothing(monkeypatch)
    monkeypatch.setattr("spec_kernels.proposers.draft_model.can_read", lambda tensor: False)

    def decode(num_blocks: int | None) -> list[tuple[tuple[int, ...], int]]:
        proposer = PROPOSERS[kind](paged(num_blocks=num_blocks))
        outputs = Decoder(paged(), proposer, gamma=4, detokenize=text).generate(REQUESTS)
        return [(output.tokens, output.stats.accepted) for output in outputs]

    expected = decode(None)
    assert sum(accepted for _, accepted in expected) > 0
    assert decode(40) == expected
    with pytest.raises(OutOfBlocks, match="missing"):
        decode(9)
