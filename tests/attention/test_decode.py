"""Attention of a few queries to a cache: the operation, its kernels, and which attentions become it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from inductor_fusions import testing
from inductor_fusions.fusions.attention.decode import op, plan
from tests.attention import decode_interpreted
from tests.attention.decode_interpreted import CASES
from tests.attention.support import additive, cases, check, decode_everywhere, qkv, visible
from tests.support.arguments import named
from tests.support.hopper import Hopper
from tests.support.interpreter import errors_of

DTYPE = torch.bfloat16
#: Half an ulp of float16, once for the weights and once for the result.
LIMIT = 6e-4

errors = errors_of("tests.attention.decode_interpreted")


# The operation and its kernels -------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_the_kernels(name: str, errors: Callable[[str], float]) -> None:
    assert errors(name) < LIMIT


@pytest.mark.parametrize("name", CASES)
def test_numbers_without_kernels(name: str) -> None:
    """What torch makes of the operation, in float64."""
    case = CASES[name]
    q, k, v, shown = decode_interpreted.inputs(case, torch.float64)
    mask = decode_interpreted.mask_of(case, shown)
    if case.mask:
        decode_interpreted.with_garbage(replace(case, garbage=0.0), k, v, shown)
    right = decode_interpreted.exact(case, q, k, v, mask, shown)
    if case.mask:
        decode_interpreted.with_garbage(case, k, v, shown)
    if case.mask and math.isfinite(case.garbage):
        right = decode_interpreted.exact(case, q, k, v, mask, shown)
    found = op.decode_attention(q, k, v, mask, scale=case.scale, causal=case.causal, tiles=(*case.tile, 4, 2))
    # A row in which all keys hold the lowest number of float32 has the digits of float32.
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["boolean", "float32", "no mask", "mask of heads"])
def test_opcheck(kind: str) -> None:
    case = CASES[kind]
    q, k, v, shown = decode_interpreted.inputs(case, torch.float32)
    mask = decode_interpreted.mask_of(case, shown)
    lowest = None if mask is None or mask.dtype == torch.bool else op.lowest_of(mask, mask.dtype)
    listed = None
    if mask is not None:
        torch.library.opcheck(op.DECODE_TILES, (mask, lowest, case.kv_heads, 16))
        listed = op.DECODE_TILES(mask, lowest, case.kv_heads, 16)
    arguments = (q, k, v, mask, lowest, listed, 0.3, case.causal, case.queries, [16, 3, 4, 2])
    torch.library.opcheck(op.DECODE_ATTENTION, arguments)


def test_flops() -> None:
    q, k, v = torch.ones(2, 4, 3, 8), torch.ones(2, 2, 5, 8), torch.ones(2, 2, 5, 6)
    with FlopCounterMode(display=False) as counter:
        op.DECODE_ATTENTION(q, k, v, None, None, None, 0.3, False, 3, [16, 3, 4, 2])
    assert counter.get_total_flops() == 2 * 2 * 4 * 3 * 5 * (8 + 6)


def test_tiles_that_are_seen() -> None:
    """Those in which any query of the heads that share keys sees a key, in order."""
    mask = torch.zeros(2, 4, 1, 50, dtype=torch.bool)
    mask[0, 1, 0, 17], mask[0, 0, 0, 49], mask[1, 3, 0, 0] = True, True, True
    found = op.DECODE_TILES(mask, None, 2, 16)
    assert found[0, 0, :3].tolist() == [2, 1, 3] and found[0, 1, 0] == 0
    assert found[1, 0, 0] == 0 and found[1, 1, :2].tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_hides(dtype: torch.dtype) -> None:
    """The lowest number beside a key that is seen; -inf always; nothing else."""
    least = torch.finfo(dtype).min
    rows = torch.tensor([[0.0, least], [least, least], [least, -math.inf], [-math.inf, -math.inf]])
    found = op.lowest_of(rows.to(dtype)[:, None, None, :], dtype)
    assert found.flatten().tolist() == [least, -math.inf, -math.inf, -math.inf]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {**a, "k": a["k"][:, :, :, :8]}, "heads"),
        (lambda a: {**a, "q": a["q"][0]}, "4-D"),
        (lambda a: {**a, "v": a["v"].double()}, "dtype"),
        (lambda a: {**a, "causal": True}, "either a mask or is_causal"),
        (lambda a: {**a, "mask": a["mask"].int()}, "boolean or floating"),
        (lambda a: {**a, "mask": a["mask"][..., :5]}, "one column"),
    ],
)
def test_arguments_that_do_not_fit(change: Any, message: str) -> None:
    q, k, v = qkv(1, 13, heads=4, kv_heads=2, grad=False)
    given = change({"q": q, "k": k, "v": v, "mask": visible(2, 1, 1, 13), "causal": False})
    with pytest.raises((ValueError, RuntimeError), match=message):
        op.DECODE_ATTENTION(
            *(given[name] for name in "qkv"),
            given["mask"],
            None,
            None,
            0.3,
            given["causal"],
            1,
            [16, 1, 4, 2],
        )


# Machine code ------------------------------------------------------------------------------------


def machine_code(arch: int, kind: int, by_row: bool, dim: int, block_m: int, config: plan.Config) -> Any:
    from devtools import cuda_codegen
    from inductor_fusions.fusions.attention.decode import kernels

    fn = kernels.part_kernel
    constants: dict[str, Any] = {
        "KIND": kind, "CAUSAL": False, "BY_ROW": by_row, "SCALE": 0.1, "GROUP": 4, "D": dim, "E": dim,
        "IS_SPLIT": True, "BLOCK_M": block_m, "BLOCK_N": config.block_n, "BLOCK_D": kernels.padded(dim),
        "BLOCK_E": kernels.padded(dim),
    }  # fmt: skip
    ones = {"q_d", "k_d", "v_e", "mask_j", "lowest_i", *(() if by_row else ("queries",))}
    pointers = dict.fromkeys("qkv", "*bf16") | {
        "mask": ("", "*i1", "*fp32")[kind] or "*bf16",
        "order": "*i32",
    }
    pointers |= dict.fromkeys(("lowest", "acc_out", "most_out", "total_out"), "*fp32")
    signature, aligned = {}, []
    for name in fn.arg_names:
        if name in constants or name in ones:
            signature[name] = "constexpr"
            constants.setdefault(name, 1)
            continue
        signature[name] = pointers.get(name, "i32")
        if name not in ("order_b", "order_h", "kv_heads", "queries"):
            aligned.append(name)
    return cuda_codegen.compile_function(
        fn, signature, constants, arch, aligned=aligned,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "by_row", "dim", "block_m", "archs"),
    [
        (1, False, 128, 16, (80, 90, 100, 120)),
        (2, False, 128, 16, (90, 120)),
        (2, True, 128, 32, (80, 90)),
        (1, True, 256, 32, (90, 120)),
        (0, False, 64, 16, (90,)),
        (1, False, 80, 16, (90,)),
    ],
)
def test_machine_code(kind: int, by_row: bool, dim: int, block_m: int, archs: tuple[int, ...]) -> None:
    """Tensor cores, loads that are under way beside them, and shared memory that every device has."""
    shape = plan.Shape(1, 32, 8, 1, 4096, dim, DTYPE, "boolean")
    for arch in archs:
        found = machine_code(arch, kind, by_row, dim, block_m, plan.default(shape))
        assert found.fits and found.uses_mma, found
        assert found.shared_bytes <= 99 * 1024, found
        assert "cp.async" in found.ptx, found


def test_configurations_fit() -> None:
    for dim in (64, 80, 128, 256):
        assert plan.default(plan.Shape(1, 8, 8, 1, 512, dim, DTYPE, "none")).fits(dim)
    assert not plan.Config(128, 1, 4, 3).fits(256)


@pytest.mark.parametrize(
    ("batch", "keys", "splits"), [(1, 4096, 64), (16, 4096, 4), (64, 4096, 1), (1, 64, 1), (1, 200, 4)]
)
def test_parts_fill_the_device(batch: int, keys: int, splits: int) -> None:
    """About four thread blocks for each of 132 multiprocessors, and no more parts than tiles."""
    shape = plan.Shape(batch, 32, 8, 1, keys, 128, DTYPE, "boolean")
    assert plan.Config(64, 4, 4, 2).splits(shape, 132) == splits


# Which attentions become it ----------------------------------------------------------------------


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
    "row without a key": (repeated, [*cached(3), used(2, 1, 3) & (torch.arange(3) > 0)[:, None]]),
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
        seen = testing.capture(
            lambda *a: repeated(*a, dropout_p=0.5), *inputs, train=False, backend=testing.EAGER_AFTER_PASSES
        )
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
                seen = testing.capture(
                    repeated, q, k, v, mask, train=False, backend=testing.EAGER_AFTER_PASSES
                )
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
        seen = testing.capture(step, ids, mask, ours, train=False, backend=testing.EAGER_AFTER_PASSES)
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
