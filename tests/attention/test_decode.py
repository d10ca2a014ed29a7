"""Attention of a few queries to a cache: which attentions become one operation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from inductor_fusions import testing
from inductor_fusions.fusions.attention.decode import op
from tests.attention.support import additive, capture, cases, check, decode_everywhere, qkv, visible
from tests.support.arguments import named
from tests.support.hopper import Hopper

DTYPE = torch.bfloat16


def sdpa(q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


def repeated(q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> Any:
    """As Hugging Face's `repeat_kv` has it."""
    batch, few, length, _ = k.shape
    groups = q.shape[1] // few
    k, v = (
        x[:, :, None].expand(batch, few, groups, length, x.shape[3]).reshape(batch, -1, length, x.shape[3])
        for x in (k, v)
    )
    return sdpa(q, k, v, mask, **options)


def by_hand(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = q @ k.mT * 0.25
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ v


def cached(queries: int = 1, heads: int = 4, kv_heads: int = 2, **options: Any) -> list[torch.Tensor]:
    return list(qkv(queries, 40, heads=heads, kv_heads=kv_heads, grad=False, dtype=DTYPE, **options))


def used(*shape: int) -> torch.Tensor:
    """A mask of a cache that is partly full."""
    mask = visible(*shape, 40)
    mask[..., 25:] = False
    return mask


LOW = torch.finfo(DTYPE).min
POSITIVE: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "boolean": (repeated, [*cached(), used(2, 1, 1)]),
    "additive": (repeated, [*cached(), additive(used(2, 1, 1), LOW).to(DTYPE)]),
    "-inf": (repeated, [*cached(), additive(used(2, 1, 1), -math.inf).to(DTYPE)]),
    "float32 mask": (repeated, [*cached(), additive(used(2, 1, 1))]),
    "heads of their own": (sdpa, [*cached(kv_heads=4), used(2, 1, 1)]),
    "enable_gqa": (lambda *a: sdpa(*a, enable_gqa=True), [*cached(), used(2, 1, 1)]),
    "scale": (lambda *a: repeated(*a, scale=0.7), [*cached(), used(2, 1, 1)]),
    "16 queries": (repeated, [*cached(16), used(2, 1, 16)]),
    "mask of 2 dims": (repeated, [*cached(3), used(3)]),
    "mask of one sample": (repeated, [*cached(3), used(1, 1, 3)]),
    "mask of heads": (repeated, [*cached(3), used(2, 4, 3)]),
    "mask of one column": (repeated, [*cached(3), torch.randn(2, 4, 3, 1).to(DTYPE)]),
    "mask that is repeated": (repeated, [*cached(3), used(2, 1, 1).expand(2, 4, 3, 40)]),
    "no mask": (repeated, cached()),
    "causal": (lambda *a: repeated(*a, is_causal=True), cached(5)),
    "head dim 80, values of 24": (repeated, [*cached(dim=80, v_dim=24), used(2, 1, 1)]),
    "by hand": (by_hand, [*cached(kv_heads=4), used(2, 1, 1)]),
    "by hand, additive": (by_hand, [*cached(kv_heads=4), additive(used(2, 1, 1), LOW).to(DTYPE)]),
    "fully masked row": (repeated, [*cached(3), used(2, 1, 3) & (torch.arange(3) > 0)[:, None]]),
}


@cases(POSITIVE)
def test_becomes_it(case: tuple[Callable[..., Any], list[torch.Tensor]]) -> None:
    fn, inputs = case
    with decode_everywhere():
        seen = check(fn, inputs, train=False, kernel="decode")
    (call,) = seen.ours.calls("decode_attention.default")
    # Heads that share keys are not repeated.
    heads = named(call).k.meta["example_value"].shape[1]
    assert heads == inputs[1].shape[1]


def test_a_mask_that_is_made_in_the_graph_is_repeated_nowhere() -> None:
    def layer(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return sdpa(q, k, v, (~mask).expand(2, 4, 3, 40), enable_gqa=True)

    with decode_everywhere():
        seen = check(layer, [*cached(3), ~used(2, 1, 1)], train=False, kernel="decode")
    (call,) = seen.ours.calls("decode_tiles.default")
    assert named(call).mask.meta["example_value"].shape == (2, 1, 1, 40)


def soft_capped(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = torch.tanh(q @ k.mT * 0.25 / 5) * 5
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


NEGATIVE: dict[str, tuple[Callable[..., Any], list[torch.Tensor], bool]] = {
    "training": (repeated, [t.requires_grad_() for t in cached()] + [used(2, 1, 1)], True),
    "a mask that takes a gradient": (
        repeated, [*cached(), torch.randn(2, 1, 1, 40).to(DTYPE).requires_grad_()], True,
    ),
    "17 queries": (repeated, [*cached(17), used(2, 1, 17)], False),
    "float32": (repeated, [*(t.float() for t in cached()), used(2, 1, 1)], False),
    "head dim 264": (repeated, [*cached(dim=264), used(2, 1, 1)], False),
    "a function of the scores": (soft_capped, [*cached(kv_heads=4), used(2, 1, 1)], False),
}  # fmt: skip


@cases(NEGATIVE)
def test_does_not_become_it(case: tuple[Callable[..., Any], list[torch.Tensor], bool]) -> None:
    fn, inputs, train = case
    with decode_everywhere():
        seen = check(fn, inputs, train=train, fused=None)
    assert not seen.ours.calls("decode_attention.default")


def test_dropout_does_not_become_it() -> None:
    inputs = [*cached(), used(2, 1, 1)]
    with decode_everywhere(), torch.no_grad():
        seen = capture(lambda *a: repeated(*a, dropout_p=0.5), *inputs, train=False)
    assert not seen.calls("decode_attention.default")


def test_nothing_is_measured() -> None:
    """Without a row of a table nothing changes: heads are not repeated, as before."""
    with decode_everywhere(), testing.config.patch(attention_kernel="auto"):
        seen = check(repeated, [*cached(), used(2, 1, 1)], train=False)
    assert not seen.ours.calls("decode_attention.default")


def test_layers_share_what_is_known_of_a_mask() -> None:
    def layers(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return repeated(repeated(q, k, v, mask), k, v, mask)

    with decode_everywhere():
        seen = check(layers, [*cached(), additive(used(2, 1, 1), LOW).to(DTYPE)], train=False, fused=2)
    assert len(seen.ours.calls("decode_attention.default")) == 2
    assert len(seen.ours.calls("decode_tiles.default")) == 1


def test_a_mask_that_is_overwritten_between_layers() -> None:
    def layers(q: Any, k: Any, v: Any, mask: Any) -> Any:
        mask = mask.clone()
        first = repeated(q, k, v, mask)
        mask[..., :30] = False
        mask[..., 30:] = True
        return repeated(first, k, v, mask)

    with decode_everywhere():
        seen = check(layers, [*cached(), used(2, 1, 1)], train=False, fused=2)
    assert len(seen.ours.calls("decode_tiles.default")) == 2


def test_no_size_is_a_constant() -> None:
    """Batch and length of the cache may change without a compile."""
    counter = CompileCounterWithBackend("inductor")
    with decode_everywhere(), torch.no_grad(), testing.config.patch(strict=True):
        torch._dynamo.reset()
        compiled = torch.compile(repeated, backend=counter)
        for batch, keys in ((3, 40), (5, 129), (7, 64)):
            q, k, v = qkv(1, keys, batch=batch, heads=4, kv_heads=2, grad=False, dtype=DTYPE)
            mask = visible(batch, 1, 1, keys)
            for tensor, dims in ((q, 0), (k, (0, 2)), (v, (0, 2)), (mask, (0, 3))):
                torch._dynamo.mark_dynamic(tensor, dims)
            if batch == 3:
                seen = capture(repeated, q, k, v, mask, train=False)
                assert seen.calls("decode_attention.default")
            torch.testing.assert_close(compiled(q, k, v, mask), repeated(q, k, v, mask), rtol=2e-2, atol=2e-2)
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_a_model_with_a_static_cache(kind: str) -> None:
    """Each layer of Hugging Face's Llama, and what it writes into the cache."""
    transformers = pytest.importorskip("transformers")
    settings = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, attn_implementation=kind,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(settings).eval().to(DTYPE)
    ids, mask = torch.randint(97, (2, 1)), torch.zeros(2, 1, 1, 32, dtype=torch.bool)
    mask[0, ..., :8], mask[1, ..., 3:8] = True, True
    mask = mask if kind == "sdpa" else additive(mask, LOW).to(DTYPE)

    def start() -> Any:
        cache = transformers.StaticCache(config=settings, max_cache_len=32)
        with torch.no_grad():
            model(torch.arange(14).view(2, 7), past_key_values=cache)
        return cache

    def step(ids: Any, mask: Any, cache: Any) -> Any:
        positions = torch.full((2, 1), 7)
        return model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits

    ours, eager = start(), start()
    with torch.no_grad():
        wanted = step(ids, mask, eager)
    with decode_everywhere():
        seen = capture(step, ids, mask, ours, train=False)
    assert len(seen.calls("decode_attention.default")) == 2 and len(seen.calls("decode_tiles.default")) == 1
    torch.testing.assert_close(seen.outputs, wanted, rtol=2e-2, atol=2e-2)
    for mine, theirs in zip(ours.layers, eager.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=2e-2, atol=2e-2)
        assert mine.cumulative_length == theirs.cumulative_length


@pytest.mark.parametrize("dynamic", [False, True])
def test_launched_by_inductor(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers in the code that Inductor writes: the cache is changed in place, and never copied."""
    import triton

    from devtools import cuda_codegen

    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    monkeypatch.setattr(op, "_has_kernel", lambda q: True)

    def step(q: Any, new: Any, keys: Any, values: Any, position: Any, mask: Any) -> Any:
        keys.index_copy_(2, position, new)
        values.index_copy_(2, position, new)
        out = repeated(repeated(q, keys, values, mask), keys, values, mask)
        return out.transpose(1, 2).flatten(2)

    q, k, v = qkv(1, 256, batch=3, heads=8, kv_heads=2, dim=64, grad=False, dtype=DTYPE)
    new, mask = k[:, :, :1].clone(), additive(visible(3, 1, 1, 256))
    if dynamic:
        for tensor, dims in ((q, 0), (k, (0, 2)), (v, (0, 2)), (new, 0), (mask, (0, 3))):
            torch._dynamo.mark_dynamic(tensor, dims)
    with decode_everywhere(), torch.no_grad():
        code = cuda_codegen.generate(step, (q, new, k, v, torch.tensor([4]), mask), run=False).forward
    assert not code.extern_calls, code.extern_calls
    ours = [name.rsplit("_", 1)[0] for name in code.launches if not name.startswith("triton_")]
    assert ours == ["order_kernel", *(["part_kernel", "join_kernel"] * 2)]
    # What it makes is no larger than the parts; the cache of 2 heads has more elements than that.
    if not dynamic:
        assert max(code.buffers) < 3 * 2 * 256 * 64
        assert sum("index_copy" in name for name in code.launches) == 1, code.launches
