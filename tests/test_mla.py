"""Contract of `verify_attention_mla`, for every layer, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from spec_kernels import eager, reference
from spec_kernels.ops import verify_attention_mla
from tests.attention_cases import CHAIN, COMB, Case, make
from tests.layers import LAYERS, SMALL_LAYERS, layer
from tests.test_attention import check_budget, dense, later, slow

SHORT: dict[str, Any] = {"contexts": (0, 17, 40), "nodes": (3, 0, 2), "kv_heads": 1}

# why these: the published latents, one and many tiles of rows, words, windows, 8-bit caches
SMALL = [
    Case(**SHORT, heads=4, dim=512, rope=64),
    Case(**SHORT, heads=3, dim=192, rope=32, tree="", block_size=0, dtype=torch.float32),
    Case(**SHORT, heads=4, dim=256, rope=64, window=3, softcap=5.0, sinks=True),
]
LARGE = [
    Case((0, 33, 1000), (5, 40, 2), heads=128, kv_heads=1, dim=512, rope=64, tree=COMB),
    Case((1030, 16), (4, 65), heads=16, kv_heads=1, dim=512, rope=64, dtype=torch.float16),
    Case(**SHORT, heads=16, dim=256, rope=64, cache="e4m3", scales="token"),
    Case(**SHORT, heads=16, dim=512, rope=64, cache="e4m3"),
    Case(**SHORT, heads=8, dim=96, rope=24, cache="int8", scales="token", block_size=1),
]


def run(name: str, case: Case) -> None:
    """Compare a layer with the oracle, within the error that eager makes in the same dtype."""
    args, keywords = make(case)
    got = layer(name).verify_attention_mla(*args, **keywords)
    expected = reference.verify_attention_mla(*args, **keywords)
    judge = eager.verify_attention_mla(*args, **keywords)
    check_budget(got[0], judge[0], expected[0], case.dtype)
    check_budget(got[1], judge[1], expected[1], torch.float32)
    assert (got[0][got[1] == -math.inf] == 0.0).all()


@pytest.mark.parametrize("case", [*SMALL, *slow(LARGE)], ids=str)
@pytest.mark.parametrize("name", LAYERS[1:])
def test_kernels_keep_the_error_budget(name: str, case: Case) -> None:
    run(name, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_LAYERS[3:])
def test_kernels_keep_it_compiled_and_in_every_order(name: str) -> None:
    run(name, Case((20, 3), (2, 0), heads=4, kv_heads=1, dim=512, rope=64))


@pytest.mark.parametrize("case", [*SMALL, *slow(LARGE[:2]), *LARGE[2:]], ids=str)
def test_eager_is_as_exact_as_torch(case: Case) -> None:
    """Keys are the rows of the cache, values their first columns."""
    args, keywords = make(case)
    latent, rope, cache, *rest = args
    keys, scale = cache.unsqueeze(2), keywords.get("cache_scale")
    if scale is not None and scale.dim():
        scale = scale.unsqueeze(2)
    judge = dense(
        case,
        (torch.cat([latent, rope], 2), keys, keys[..., : case.dim], *rest),
        keywords | {"key_scale": scale, "value_scale": scale},
    )
    got = layer("eager").verify_attention_mla(*args, **keywords)
    expected = reference.verify_attention_mla(*args, **keywords)
    check_budget(got[0], judge[0], expected[0], case.dtype)
    check_budget(got[1], judge[1], expected[1], torch.float32)


@pytest.mark.parametrize("name", LAYERS)
def test_without_a_rotary_part(name: str) -> None:
    case = Case((5, 20), (2, 3), heads=4, kv_heads=1, dim=32, rope=16, dtype=torch.float32)
    (latent, rope, cache, *rest), keywords = make(case)
    out, _ = layer(name).verify_attention_mla(
        latent, rope[..., :0], cache[..., :32], *rest, **keywords
    )
    expected, _ = reference.verify_attention_mla(
        latent, rope * 0.0, cache.nan_to_num(0.0), *rest, **keywords
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["eager", "triton-interpreter"])
def test_invariant_rows_have_the_bits_of_plain_decoding(name: str) -> None:
    case = Case((45,), (5,), heads=4, kv_heads=1, dim=64, rope=16, tree=CHAIN)
    (latent, rope, cache, *rest), keywords = make(case)
    chain = layer(name).verify_attention_mla(latent, rope, cache, *rest, **keywords, invariant=True)
    for node in (0, 4):
        query = torch.cat([latent, rope], 2)
        single, _, _, *now = later((query, cache, None, *rest), keywords, node)
        got = layer(name).verify_attention_mla(
            single[..., :64], single[..., 64:], cache, *now, scale=keywords["scale"],
            block_table=keywords["block_table"], return_lse=True, invariant=True,
        )  # fmt: skip
        assert torch.equal(got[0][0], chain[0][node])
        assert torch.equal(got[1][0], chain[1][node])


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rope": ({"query_rope": torch.zeros(5, 3, 32)}, TypeError, "query_rope must be [5, 3, rope]"),
    "cache": ({"latent_cache": torch.zeros(5, 8, 16).half()}, ValueError, "latent_cache must be"),
    "scale": ({"cache_scale": torch.ones(())}, ValueError, "cache_scale must be None"),
    "contiguous": ({"cu_seqlens_q": torch.zeros(2).int()}, ValueError, "cu_seqlens_q must be [4]"),
    "grad": ({"query_rope": torch.zeros(5, 3, 32).half().requires_grad_()}, NotImplementedError,
             "verify_attention_mla has no gradient"),
}  # fmt: skip


@pytest.mark.parametrize("change", REFUSED)
def test_refusals_name_the_argument(change: str) -> None:
    args, keywords = make(SMALL[1]._replace(dtype=torch.float16))
    names = ("query_latent", "query_rope", "latent_cache", "context_lens", "cu_seqlens_q")
    values, error, message = REFUSED[change]
    with pytest.raises(error) as caught:
        verify_attention_mla(
            **{**dict(zip((*names, "max_seqlen_q"), args, strict=True)), **keywords, **values}
        )
    assert message in str(caught.value)
