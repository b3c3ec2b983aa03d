"""Contract of `verify_attention` and `merge_attention`, for every layer, against float64."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from spec_kernels import eager, reference, tree
from spec_kernels.ops import merge_attention, verify_attention
from tests.attention_cases import CHAIN, COMB, RANDOM, STAR, Case, describe_tree, make, make_parents
from tests.layers import LAYERS, SMALL_LAYERS, layer

RAGGED = {"contexts": (0, 1, 15, 16, 17, 33, 1000), "nodes": (5, 1, 7, 0, 3, 4, 2)}

# why these: a chain without words, each form of tree, more nodes than one and two words hold; odd
# head dims and groups; every storage; every option, windows smaller than the draft too
SMALL = [
    Case(),
    Case(tree="", heads=3, kv_heads=1, dim=40, block_size=1, dtype=torch.float32),
    Case(block_size=0, layout="HND", heads=10, kv_heads=2, dim=88, tree=CHAIN),
    Case((37, 5), (33, 65), heads=2, kv_heads=1, tree=COMB),
    Case(window=3, softcap=5.0, sinks=True, tree=STAR),
    Case(window=20, dtype=torch.float16, cache="e4m3", scales="token", layout="HND"),
    Case(cache="int8", dim=48, v_dim=80, heads=9, kv_heads=1, block_size=4),
]
LARGE = [
    Case(**RAGGED, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, tree=kind)
    for heads, kv_heads, dim, kind, dtype in (
        (10, 2, 88, "random", torch.bfloat16),
        (9, 1, 48, "comb", torch.float16),
        (14, 2, 104, "star", torch.bfloat16),
        (6, 6, 224, "chain", torch.bfloat16),
        (15, 5, 120, "random", torch.float16),
        (32, 8, 128, "", torch.bfloat16),
        (12, 1, 256, "random", torch.float32),
        (4, 4, 96, "random", torch.bfloat16),
    )
]
LARGE += [
    Case((0, 45), (200, 65), heads=2, kv_heads=2, block_size=1),
    Case((45, 300), (200, 1), heads=2, kv_heads=1, window=64, tree=CHAIN),
    Case((2100, 1030), (4, 33), heads=4, kv_heads=1, window=1030, sinks=True),
    Case((2100, 1030), (4, 3), heads=4, kv_heads=2, cache="e4m3", scales="token"),
    Case(cache="int8", scales="token", dtype=torch.float16, softcap=20.0),
    Case(cache="e4m3", dtype=torch.float32, block_size=0, window=1),
    Case(dtype=torch.float32, softcap=30.0, sinks=True, layout="HND"),
    Case(dim=64, v_dim=128, block_size=3),
    Case(dim=36, heads=4, kv_heads=4, dtype=torch.float16),  # no 16 bytes anywhere
]
VERY_LARGE = [Case((0, 1, 15, 16, 17, 33, 1000, 8192), (5, 1, 7, 0, 3, 4, 2, 8))]


def slow(cases: list[Case]) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def dense(case: Case, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The same attention by torch from a dense mask: out in the dtype of the queries, lse in
    float32."""
    query, keys, values, context_lens, cu, _ = args
    out = torch.zeros(query.shape[0], case.heads, values.shape[3], dtype=query.dtype)
    lse = torch.full(
        out.shape[:2], -math.inf, dtype=torch.promote_types(query.dtype, torch.float32)
    )
    for b, context in enumerate(context_lens.tolist()):
        first, last = cu[b : b + 2].tolist()
        seen = list(range(context + last - first))
        k, v = (
            reference_rows(cache, scale, keywords["block_table"], b, seen).to(query.dtype)
            for cache, scale in ((keys, keywords["key_scale"]), (values, keywords["value_scale"]))
        )
        mask = torch.zeros(last - first, len(seen), dtype=torch.bool)
        for token in range(first, last):
            sees = visible_positions(
                context, len(seen), first, token - first, keywords.get("ancestors"),
                keywords.get("depths"), case.window,
            )  # fmt: skip
            mask[token - first, sees] = True
        q, k, v = (x.transpose(0, 1) for x in (query[first:last], k, v))
        group = case.heads // case.kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = score(case, q.to(lse.dtype), k.to(lse.dtype), mask, keywords["sinks"])
        lse[first:last] = scores.logsumexp(-1).transpose(0, 1)
        if case.softcap is None and not case.sinks:
            part = F.scaled_dot_product_attention(q[None], k[None], v[None], mask[None, None])[0]
        else:
            part = score(case, q, k, mask, keywords["sinks"]).softmax(-1)[..., : len(seen)] @ v
        out[first:last] = part.transpose(0, 1)
    return out, lse


def score(case: Case, q: Tensor, k: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
    """Scores of heads, nodes and positions, and of the sinks behind them, in the dtype of q."""
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    if case.softcap is not None:
        scores = case.softcap * (scores / case.softcap).tanh()
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        sinks = sinks.to(q.dtype)[:, None, None].expand(-1, q.shape[1], 1)
        scores = torch.cat([scores, sinks], -1)
    return scores


def reference_rows(*args: Any) -> Tensor:
    return reference.attention.read_rows(*args)


def visible_positions(*args: Any) -> list[int]:
    return reference.attention.visible_positions(*args)


def check_budget(got: Tensor, judge: Tensor, oracle: Tensor, dtype: torch.dtype) -> None:
    """`err(got) <= 2 err(judge) + eps max|oracle|`, where the oracle is finite."""
    assert torch.equal(got.isfinite(), oracle.isfinite())
    finite = oracle.isfinite()
    if not finite.any():
        return
    error = (got.double() - oracle)[finite].abs().max()
    allowed = 2 * (judge.double() - oracle)[finite].abs().max()
    allowed += torch.finfo(dtype).eps * oracle[finite].abs().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def run(name: str, case: Case) -> None:
    """Compare a layer with the oracle, within the error that eager makes in the same dtype."""
    args, keywords = make(case)
    out, lse = layer(name).verify_attention(*args, **keywords)
    expected_out, expected_lse = reference.verify_attention(*args, **keywords)
    eager_out, eager_lse = eager.verify_attention(*args, **keywords)
    assert (out.dtype, lse.dtype) == (case.dtype, torch.float32)
    check_budget(out, eager_out, expected_out, case.dtype)
    check_budget(lse, eager_lse, expected_lse, torch.float32)
    assert (out[lse == -math.inf] == 0.0).all()


@pytest.mark.parametrize("case", [*SMALL, *slow(LARGE)], ids=str)
@pytest.mark.parametrize("name", LAYERS[1:])
def test_kernels_keep_the_error_budget(name: str, case: Case) -> None:
    run(name, case)


@pytest.mark.parametrize("name", SMALL_LAYERS[3:])
@pytest.mark.parametrize(
    "case",
    [
        Case((0, 17, 33), (5, 0, 4), heads=2, kv_heads=1, dim=64, dtype=torch.float16),
        *slow([SMALL[3], SMALL[4], Case((1030,), (3,), 2, 1, sinks=True)]),
    ],
    ids=str,
)
def test_kernels_keep_it_compiled_and_in_every_order(name: str, case: Case) -> None:
    run(name, case)


@pytest.mark.parametrize("case", [*SMALL, *LARGE, *slow(VERY_LARGE)], ids=str)
def test_eager_is_as_exact_as_torch(case: Case) -> None:
    args, keywords = make(case)
    out, lse = eager.verify_attention(*args, **keywords)
    expected_out, expected_lse = reference.verify_attention(*args, **keywords)
    torch_out, torch_lse = dense(case, args, keywords)
    check_budget(out, torch_out, expected_out, case.dtype)
    check_budget(lse, torch_lse, expected_lse, torch.float32)
    again = layer("eager").verify_attention(*args, **keywords)  # under watch
    assert all(map(torch.equal, again, (out, lse)))


@pytest.mark.parametrize("case", [Case(dtype=torch.float64), Case(tree="", window=4)], ids=str)
def test_the_reference_is_that_of_torch(case: Case) -> None:
    """In float64 both are the same sum."""
    args, keywords = make(case._replace(dtype=torch.float64))
    got = reference.verify_attention(*args, **keywords)
    torch.testing.assert_close(got, dense(case, args, keywords), rtol=1e-12, atol=1e-12)


# --------------------------------------------------------------------------- edges


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_rows_that_see_nothing_are_exact_zeros(name: str, sinks: bool) -> None:
    """No context and no ancestor bits; and tokens behind the last request (public case B137)."""
    case = Case((0, 40, 0), (2, 1, 1), heads=2, kv_heads=1, sinks=sinks, dim=16)
    args, keywords = make(case)
    query, *rest = args
    query = torch.cat([query, query[:2]])
    keywords["ancestors"] = torch.cat([keywords["ancestors"], keywords["ancestors"][:2]])
    keywords["depths"] = torch.cat([keywords["depths"], keywords["depths"][:2]])
    keywords["ancestors"][0] = 0
    out, lse = layer(name).verify_attention(query, *rest, **keywords)
    assert (out[[0, 4, 5]] == 0.0).all()
    assert (lse[4:] == -math.inf).all()
    torch.testing.assert_close(lse[0], keywords["sinks"] if sinks else lse[4])
    _, expected = reference.verify_attention(query, *rest, **keywords)
    torch.testing.assert_close(lse.double(), expected, rtol=1e-5, atol=1e-5)


def test_eager_rows_that_see_nothing_in_the_dtype_of_sums() -> None:
    """Torch's fused attention, whose own lse serves in float32, gives such rows an lse of 0."""
    args, keywords = make(Case((0, 4), (2, 1), block_size=0, dtype=torch.float32))
    keywords["ancestors"][:2] = 0
    out, lse = eager.verify_attention(*args, **keywords)
    assert (out[:2] == 0.0).all()
    assert (lse[:2] == -math.inf).all()
    assert (lse[2] > -math.inf).all()


@pytest.mark.parametrize("name", LAYERS)
def test_empty_calls(name: str) -> None:
    args, keywords = make(Case((3, 0), (0, 0), dim=16))
    out, lse = layer(name).verify_attention(*args, **keywords)
    assert (out.shape, lse.shape) == ((0, 4, 16), (0, 4))
    none = torch.zeros(0, dtype=torch.int32)
    out, lse = layer(name).verify_attention(
        torch.ones(2, 4, 16), args[1].float(), args[2].float(), none,
        torch.zeros(1, dtype=torch.int32), 0, block_table=none.view(0, 1), return_lse=True,
    )  # fmt: skip
    assert (out == 0.0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("name", LAYERS)
def test_a_row_depends_on_its_request_alone(name: str) -> None:
    case = Case((9, 33, 20), (3, 2, 3), heads=2, kv_heads=1, dim=16, block_size=4)
    args, keywords = make(case)
    query, keys, values, context_lens, _, most = args
    whole, _ = layer(name).verify_attention(*args, **keywords)
    own = {k: keywords[k][3:5] for k in ("ancestors", "depths")}
    cu = torch.tensor([0, 2], dtype=torch.int32)
    table = keywords["block_table"][1:2]
    alone, _ = layer(name).verify_attention(
        query[3:5], keys, values, context_lens[1:2], cu, most, block_table=table, **own
    )
    assert torch.equal(alone, whole[3:5])


@pytest.mark.parametrize("name", LAYERS)
def test_positions_behind_the_limit_are_not_seen(name: str) -> None:
    args, keywords = make(Case((20, 3), (3, 2), heads=2, kv_heads=1, dim=16, dtype=torch.float32))
    out, lse = layer(name).verify_attention(*args, **keywords, max_seqlen_k=10)
    expected, expected_lse = reference.verify_attention(*args, **keywords, max_seqlen_k=10)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    without = layer(name).verify_attention(*args, **{**keywords, "return_lse": False})
    assert without[1] is None


@pytest.mark.parametrize("name", LAYERS)
def test_queries_and_caches_at_any_stride(name: str) -> None:
    """Columns of a wider projection, keys and values interleaved in one tensor (public B099)."""
    case = Case((5, 17), (2, 3), heads=2, kv_heads=2, dim=20, dtype=torch.float32)
    args, keywords = make(case)
    query, keys, values, *rest = args
    wide = torch.randn(len(query), 2, 23)
    wide[..., 3:] = query
    both = torch.stack([keys, values], -1)  # columns two elements apart
    out, _ = layer(name).verify_attention(
        wide[..., 3:], both[..., 0], both[..., 1], *rest, **keywords
    )
    expected, _ = reference.verify_attention(*args, **keywords)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_columns_behind_the_64th_count() -> None:
    """Public case B129."""
    args, keywords = make(Case((20,), (2,), heads=1, kv_heads=1, dim=128, dtype=torch.float32))
    args[0][..., :64] = 0.0
    args[2][..., :64] = 0.0
    with_keys, _ = layer("triton-interpreter").verify_attention(*args, **keywords)
    expected, _ = reference.verify_attention(*args, **keywords)
    torch.testing.assert_close(with_keys.double(), expected, rtol=1e-5, atol=1e-5)
    assert (with_keys[..., 64:] != 0.0).all()


@pytest.mark.parametrize("block_size", [0, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_eager_bits_do_not_depend_on_what_else_is_asked_for(
    dtype: torch.dtype, block_size: int
) -> None:
    """Neither on lse nor on a window that cuts nothing nor on other requests."""
    sizes = (40, 40, 300, 2100, 1500), (1, 4, 6, 2, 70)
    case = Case(*sizes, block_size=block_size, dtype=dtype)
    args, keywords = make(case)
    out, _ = eager.verify_attention(*args, **keywords)
    alone, _ = eager.verify_attention(*args, **{**keywords, "return_lse": False, "window": 2200})
    assert torch.equal(out, alone)
    query, keys, values, context_lens, cu, most = args
    for b, (first, last) in enumerate(zip(cu.tolist(), cu[1:].tolist(), strict=False)):
        caches = (keys, values) if block_size else (keys[b : b + 1], values[b : b + 1])
        table = keywords["block_table"]
        own, _ = eager.verify_attention(
            query[first:last], *caches, context_lens[b : b + 1], cu[b : b + 2] - first, most,
            block_table=None if table is None else table[b : b + 1],
            ancestors=keywords["ancestors"][first:last], depths=keywords["depths"][first:last],
        )  # fmt: skip
        assert torch.equal(own, out[first:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("context", [40, 700], ids=["unpacked", "packed"])
def test_eager_bits_do_not_depend_on_requests_of_equal_size(
    dtype: torch.dtype, context: int
) -> None:
    """They share a call, at most `ALIKE` of them, each with its own tree."""
    case = Case((context,) * 10, (0, *(6,) * 9), block_size=0, dtype=dtype)
    (query, keys, values, context_lens, cu, most), keywords = make(case)
    out, _ = eager.verify_attention(
        query, keys, values, context_lens, cu, most, ancestors=keywords["ancestors"]
    )
    for b in (1, 5, 8, 9):
        own = slice(6 * b - 6, 6 * b)
        alone, _ = eager.verify_attention(
            query[own], keys[b : b + 1], values[b : b + 1], context_lens[:1], cu[1:3], most,
            ancestors=keywords["ancestors"][own],
        )  # fmt: skip
        assert torch.equal(alone, out[own])


@pytest.mark.parametrize("requests", [3, 1], ids=["together", "alone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_eager_requests_of_equal_size_are_gathered_together(
    dtype: torch.dtype, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of short ones are put together at once, as many as are held; bits are the same."""
    case = Case((40,) * 3, (4,) * 3, block_size=16, dtype=dtype)
    at_once = sys.modules["spec_kernels.eager._at_once"]
    held = requests * 44 * 2 * case.kv_heads * case.dim * dtype.itemsize
    monkeypatch.setattr(at_once, "GATHERED", held)
    at_once.plan_for.cache_clear()
    (query, *caches, context_lens, cu, most), keywords = make(case)
    table, words = keywords["block_table"], keywords["ancestors"]
    out, _ = eager.verify_attention(
        query, *caches, context_lens, cu, most, block_table=table, ancestors=words
    )
    for b in range(3):
        own = slice(4 * b, 4 * b + 4)
        alone, _ = eager.verify_attention(
            query[own], *caches, context_lens[:1], cu[:2], most,
            block_table=table[b : b + 1], ancestors=words[own],
        )  # fmt: skip
        assert torch.equal(alone, out[own])


def test_eager_strides_of_queries_and_words_are_free() -> None:
    """Queries whose heads lie apart, every second word: the result is laid out as always."""
    case = Case((40,) * 2, (4,) * 2, dim=16, dtype=torch.float32, block_size=0)
    (query, *rest), keywords = make(case)
    words = keywords["ancestors"]
    expected, _ = eager.verify_attention(query, *rest, ancestors=words)
    apart = query.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.cat([words, ~words], 1)[:, :1]
    assert not apart.is_contiguous()
    assert not wide.is_contiguous()
    out, _ = eager.verify_attention(apart, *rest, ancestors=wide)
    assert torch.equal(out, expected)
    assert out.stride() == expected.stride()


@pytest.mark.parametrize("tree", ["", RANDOM], ids=["chain", "tree"])
@pytest.mark.parametrize("block_size", [0, 16])
def test_eager_rows_of_no_request_are_zeros(tree: str, block_size: int) -> None:
    """Behind requests of equal size, fewer rows than requests, or more."""
    case = Case((40,) * 2, (3,) * 2, block_size=block_size, dtype=torch.float32, tree=tree)
    (query, *caches, context_lens, cu, most), keywords = make(case)
    del keywords["return_lse"]
    keywords.pop("depths", None)  # without a window they say nothing
    words = keywords.pop("ancestors", None)
    whole, _ = eager.verify_attention(
        query, *caches, context_lens, cu, most, ancestors=words, **keywords
    )
    for more in (1, 3):
        padded = torch.cat([query, query[:more]])
        own = None if words is None else torch.cat([words, words[:more]])
        out, _ = eager.verify_attention(
            padded, *caches, context_lens, cu, most, ancestors=own, **keywords
        )
        assert torch.equal(out[:6], whole)
        assert not out[6:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_eager_bits_do_not_depend_on_how_many_heads_are_held(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a long cache KV heads are attended one after the other."""
    args, keywords = make(
        Case((5_000,), (40,), heads=12, kv_heads=3, dim=64, block_size=0, dtype=dtype)
    )
    held, _ = eager.verify_attention(*args, ancestors=keywords["ancestors"])
    monkeypatch.setattr(sys.modules["spec_kernels.eager.attention"], "HELD", 1 << 30)
    whole, _ = eager.verify_attention(*args, ancestors=keywords["ancestors"])
    assert torch.equal(held, whole)


@pytest.mark.parametrize("context", [40, 9_000], ids=["one-piece", "pieces"])
def test_eager_remembers_a_mask_for_its_own_tree_only(context: int) -> None:
    """Calls of one size in a row: a chain, trees, and the chain again."""
    case = Case((context,), (4,), heads=2, kv_heads=1, dim=16, dtype=torch.float32, block_size=0)
    args, _ = make(case)
    _, keys, values, *_ = args
    for kind in ("", STAR, COMB, CHAIN, ""):
        words = describe_tree(make_parents(kind, 4), 1)[0] if kind else None
        out, _ = eager.verify_attention(*args, ancestors=words)
        seen = torch.ones(4, context + 4, dtype=torch.bool)
        bits = torch.ones(4, 4).tril() if words is None else words >> torch.arange(4) & 1
        seen[:, context:] = bits.bool()
        q, k, v = (x.double().transpose(0, 1) for x in (args[0], keys[0], values[0]))
        expected = F.scaled_dot_product_attention(
            q, k[:, : context + 4], v[:, : context + 4], seen, enable_gqa=True
        )
        torch.testing.assert_close(out.double(), expected.transpose(0, 1), rtol=1e-5, atol=1e-6)


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made."""

    def __init__(self, *inputs: Tensor | None) -> None:
        super().__init__()
        self._known = {x.untyped_storage().data_ptr() for x in inputs if x is not None}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple) else (result,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self._known:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(
    "case",
    [
        Case(dtype=torch.float32, block_size=0),
        Case(dtype=torch.bfloat16, block_size=0, sinks=True),
        Case(dtype=torch.bfloat16, window=4_000),
        Case(dtype=torch.float32, softcap=5.0, tree=""),
    ],
    ids=str,
)
def test_eager_memory_does_not_grow_with_the_context(case: Case) -> None:
    """A dense mask has tokens * (context + nodes) entries."""
    found = []
    for context in (5_000, 8_000):
        args, keywords = make(
            case._replace(contexts=(context,), nodes=(40,), heads=2, kv_heads=1, dim=16)
        )
        with Largest(*args[:5], *(x for x in keywords.values() if isinstance(x, Tensor))) as made:
            eager.verify_attention(*args, **keywords)
        found.append(made.bytes)
    assert found[0] == found[1]


# --------------------------------------------------------------------------- merging


@pytest.mark.parametrize("name", SMALL_LAYERS)
def test_merging_two_parts_gives_the_whole(name: str) -> None:
    a, b = torch.randn(2, 7, 3, 40).half().unbind(0)
    lse_a, lse_b = (torch.randn(2, 7, 3) * 20).unbind(0)
    lse_a[0], lse_b[0], lse_a[1], lse_b[2] = -math.inf, -math.inf, -math.inf, -math.inf
    out, lse = layer(name).merge_attention(a, lse_a, b, lse_b)
    expected, expected_lse = reference.merge_attention(a, lse_a, b, lse_b)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)
    assert (out[0] == 0.0).all()
    assert torch.equal(out[1], b[1])
    assert torch.equal(out[2], a[2])


def test_a_shared_prefix_can_be_attended_once() -> None:
    """All nodes of all requests against one prefix, then each request's own rows, merged."""
    case = Case((40, 35), (3, 5), heads=4, kv_heads=2, dim=32, dtype=torch.float32, block_size=16)
    (query, keys, values, context_lens, cu, most), keywords = make(case)
    table = keywords.pop("block_table")
    table[1, :2] = table[0, :2]  # the first 32 positions are the same
    whole, whole_lse = verify_attention(
        query, keys, values, context_lens, cu, most, block_table=table, **keywords
    )
    prefix = verify_attention(
        query, keys, values, torch.tensor([32], dtype=torch.int32),
        torch.tensor([0, len(query)], dtype=torch.int32), len(query), block_table=table[:1, :2],
        return_lse=True,
    )  # fmt: skip
    own = verify_attention(
        query, keys, values, context_lens - 32, cu, most, block_table=table[:, 2:], **keywords
    )
    out, lse = merge_attention(*prefix, *own)
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------- invariance


def later(args: tuple[Any, ...], keywords: dict[str, Any], node: int) -> tuple[Any, ...]:
    """The same token decoded alone, after the chain up to it was committed."""
    query, keys, values, context_lens, _, most = args
    cu = torch.tensor([0, 1], dtype=torch.int32)
    return (query[node : node + 1], keys, values, context_lens + node, cu, 1 if node else most)


@pytest.mark.parametrize("name", ["eager", "triton-interpreter"])
def test_invariant_rows_have_the_bits_of_plain_decoding(name: str) -> None:
    args, keywords = make(Case((90,), (9,), heads=2, kv_heads=1, tree=CHAIN, block_size=16))
    table = keywords["block_table"]
    chain = layer(name).verify_attention(*args, **keywords, invariant=True)
    for node in (0, 1, 8):
        single = layer(name).verify_attention(
            *later(args, keywords, node), block_table=table, return_lse=True, invariant=True
        )
        assert torch.equal(single[0][0], chain[0][node])
        assert torch.equal(single[1][0], chain[1][node])


# --------------------------------------------------------------------------- trees and refusals


def test_words_of_the_tree_module_are_understood() -> None:
    """`tree.ancestor_words` and `tree.depths` against the slow way."""
    parents = [make_parents(kind, n) for kind, n in (("random", 40), ("comb", 33))]
    padded = torch.tensor([p + [0] * (40 - len(p)) for p in parents], dtype=torch.int32)
    num_nodes = torch.tensor([40, 33], dtype=torch.int32)
    words, depths = tree.ancestor_words(padded, num_nodes), tree.depths(padded, num_nodes)
    for b, p in enumerate(parents):
        expected_words, expected_depths = describe_tree(p, words.shape[2])
        assert torch.equal(words[b, : len(p)], expected_words)
        assert torch.equal(depths[b, : len(p)], expected_depths)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dtype": ({"query": torch.zeros(8, 4, 64).long()}, TypeError, "query must be"),
    "heads": ({"query": torch.zeros(20, 3, 64).bfloat16()}, ValueError, "multiple of 2 heads"),
    "cache": ({"key_cache": torch.zeros(4, 16, 2, 64)}, TypeError, "key_cache must be"),
    "values": ({"value_cache": torch.zeros(4, 8, 2, 64)}, ValueError, "value_cache must be"),
    "cu": ({"cu_seqlens_q": torch.zeros(6, dtype=torch.int32)}, ValueError, "cu_seqlens_q must be"),
    "contiguous": ({"block_table": None}, ValueError, "a cache without block_table must have 6"),
    "depths": ({"depths": None, "window": 3}, ValueError, "a window over a tree needs depths"),
    "window": ({"window": 0}, ValueError, "window must be positive, got 0"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap must be positive"),
    "limit": ({"max_seqlen_k": 0}, ValueError, "max_seqlen_k must be positive"),
    "nodes": ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q must be at least 0"),
    "words": ({"ancestors": torch.zeros(20, 0, dtype=torch.int32)}, ValueError, "one word"),
    "scale": ({"key_scale": torch.ones(())}, ValueError, "key_scale must be None for a cache of"),
    "sinks": ({"sinks": torch.ones(3)}, ValueError, "sinks must be [4]"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_refusals_name_the_argument(change: str) -> None:
    args, keywords = make(Case())
    names = ("query", "key_cache", "value_cache", "context_lens", "cu_seqlens_q", "max_seqlen_q")
    values, error, message = REFUSED[change]
    with pytest.raises(error) as caught:
        verify_attention(**{**dict(zip(names, args, strict=True)), **keywords, **values})
    assert message in str(caught.value)


def test_scales_come_in_one_form() -> None:
    args, keywords = make(Case(cache="int8"))
    for value in (None, torch.ones(args[2].shape[:3])):
        with pytest.raises(ValueError, match="both be given, in one form"):
            verify_attention(*args, **{**keywords, "value_scale": value})


@pytest.mark.parametrize(
    "call",
    [
        lambda a, k: verify_attention(a[0].requires_grad_(), *a[1:], **k),
        lambda a, k: merge_attention(
            a[0].requires_grad_(), torch.zeros(20, 4), a[0], torch.zeros(20, 4)
        ),
    ],
    ids=["verify_attention", "merge_attention"],
)
def test_gradients_are_refused_rather_than_lost(call: Callable[..., Any]) -> None:
    args, keywords = make(Case())
    with pytest.raises(NotImplementedError, match="has no gradient"):
        call(args, keywords)
    with torch.no_grad():
        call(args, keywords)
