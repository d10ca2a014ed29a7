"""Adapters that are added to what is in memory: the operation, its kernel, and which sums become one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from inductor_fusions import config, tables
from inductor_fusions.fusion import LeftToStock
from inductor_fusions.fusions.lora import accumulate_kernel, profit
from inductor_fusions.fusions.lora.accumulate import LORA_ACCUMULATE
from inductor_fusions.fusions.lora.accumulate_kernel import Config, Shape
from inductor_fusions.fusions.lora.op import NARROW_MM
from inductor_fusions.reasons import Reason
from tests.block_mm.support import Run, check, rand, run
from tests.lora.accumulated import CASES, SPECIAL
from tests.lora.spellings import WHOLE, operands, targets
from tests.support.arguments import named
from tests.support.interpreter import errors_of

errors = errors_of("tests.lora.accumulated")
HALF = torch.bfloat16
ROWS, IN = 96, 128


# -- the kernel and the operation -------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_error(name: str, errors: Callable[[str], float]) -> None:
    """Half an ulp of the result: it is rounded once."""
    assert errors(name) < (1e-6 if CASES[name].dtypes[2] == WHOLE else 5e-4)


@pytest.mark.parametrize("name", SPECIAL)
def test_no_numbers_under_a_mask(name: str, errors: Callable[[str], float]) -> None:
    """0 times what is no number is none, in the row that has it and in no other."""
    assert errors(name) == 0


def arguments() -> list[Any]:
    """Of a valid call."""
    return [
        rand(5, 6), [rand(5, 3), rand(5, 2)], [rand(3, 6), rand(2, 6)], [1.0, 0.5],
        [torch.rand(5, 6) > 0.5], [1], HALF,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("position", "given", "text"),
    [
        (0, rand(5), "base"),
        (0, torch.ones(5, 6, dtype=torch.int8), "base"),
        (0, rand(4, 6), "base"),
        (0, rand(5, 7), "base"),
        (1, [], "an a"),
        (1, [rand(5, 3), rand(5)], "a and b"),
        (1, [rand(5, 3), rand(5, 4)], "a and b"),
        (1, [rand(5, 3), torch.rand(5, 2)], "a and b"),
        (2, [rand(3, 6)], "a b"),
        (3, [1.0], "scale"),
        (4, [torch.rand(5, 6)], "kept"),
        (4, [torch.rand(5, 1) > 0], "kept"),
        (4, [], "kept_products"),
        (5, [2], "kept_products"),
        (5, [-1], "kept_products"),
    ],
)
def test_arguments_that_do_not_fit(position: int, given: Any, text: str) -> None:
    call = arguments()
    call[position] = given
    for device in ("cpu", "meta"):
        moved = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t, d=device: t.to(d), call)
        with pytest.raises((ValueError, RuntimeError), match=text):
            LORA_ACCUMULATE(*moved)


def test_result_is_no_view_of_the_base() -> None:
    """Also where it has its values and its dtype."""
    call = arguments()
    call[0], call[3], call[6] = torch.randn(5, 6), [0.0, 0.0], WHOLE
    y = LORA_ACCUMULATE(*call)
    assert torch.equal(y, call[0]) and y.data_ptr() != call[0].data_ptr()


def test_configurations() -> None:
    shape = Shape(4096, 4096, (16,), 1, HALF, HALF)
    for some in (shape, replace(shape, rows=None), replace(shape, rows=3), replace(shape, narrow=WHOLE)):
        tried = accumulate_kernel.candidates(some)
        assert tried[0] == accumulate_kernel.default(some) and len(tried) == len(set(tried)) > 2
    assert accumulate_kernel.default(replace(shape, rows=3)).block_m == 16


def test_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration of the nearest number of tokens; the gain of those on both sides."""
    shape = Shape(4096, 64, (16,), 1, HALF, HALF)
    first, second = Config(64, 128, 4), Config(128, 128, 8)
    posed = profit.Accumulated(4096, (64,), 64, (16,), 1, HALF, HALF)
    found = {
        "lora_accumulate": [
            {**accumulate_kernel.key(shape), "tokens": 2048, "config": first.to_json()},
            {**accumulate_kernel.key(shape), "tokens": 8192, "config": second.to_json()},
        ],
        "lora_sums": [{**posed.key, "tokens": 4096, "gain": 1.5}],
    }
    monkeypatch.setattr(tables, "load", lambda name: found)
    monkeypatch.setattr(tables, "device_name", lambda device: "any")
    monkeypatch.setattr(profit, "capability", lambda device: 90)
    device = torch.device("cuda")
    assert accumulate_kernel.choose(replace(shape, rows=2100), device) == first
    assert accumulate_kernel.choose(replace(shape, rows=6000), device) == second
    assert accumulate_kernel.choose(replace(shape, rows=512, columns=128), device) == first
    # Nothing like it; and tiles that threads have no room for.
    for other in (replace(shape, rows=None), replace(shape, masks=0), replace(shape, columns=65)):
        assert accumulate_kernel.choose(other, device) == accumulate_kernel.default(other)
    assert "1.50x measured" in profit.accumulate_kernel(posed, device)
    for miss in (replace(posed, tokens=512), replace(posed, tokens=None), replace(posed, masks=2)):
        with config.patch(estimate=False), pytest.raises(LeftToStock, match=r"measured|symbolic"):
            profit.accumulate_kernel(miss, device)


# -- sums without a product -------------------------------------------------------------------------------


@torch.library.custom_op("inductor_fusions_tests::quantised_linear", mutates_args=())
def quantised_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What a library for quantised weights does, with a gradient for x."""
    return x @ w.to(x.dtype).t()


@torch.library.custom_op("inductor_fusions_tests::quantised_gradient", mutates_args=())
def quantised_gradient(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return dy @ w.to(dy.dtype)


quantised_linear.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[0]))
quantised_gradient.register_fake(lambda dy, w: dy.new_empty(dy.shape[0], w.shape[1]))
quantised_linear.register_autograd(
    lambda ctx, dy: (quantised_gradient(dy, ctx.saved_tensors[0]), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


def extern(x: Any, w: Any, a: Any, b: Any) -> Any:
    base = quantised_linear(x, w)
    return (base + F.linear(F.linear(x.to(a.dtype), a), b) * 2.0).to(base.dtype)


def subtracted(x: Any, w: Any, a: Any, b: Any) -> Any:
    return torch.cat([x, x], dim=1) - F.linear(F.linear(x, a), b)


def by_addmm(x: Any, w: Any, a: Any, b: Any) -> Any:
    return torch.addmm(torch.cat([x, x], dim=1), x @ a.t(), b.t(), alpha=-0.5)


def several_dims(x: Any, w: Any, a: Any, b: Any) -> Any:
    x = x.view(2, 3, 16, 64)
    return torch.cat([x, x], dim=-1).sin() + F.linear(F.linear(x, a), b) * 0.3


def with_a_residual(x: Any, w: Any, a: Any, b: Any) -> Any:
    return torch.cat([x, x], dim=1) + extern(x, w, a, b)


def two_terms(x: Any, w: Any, a: Any, b: Any) -> Any:
    return quantised_linear(x, w) - 2 * (quantised_linear(x.sin(), w) - F.linear(F.linear(x, a), b))


def two_adapters(x: Any, w: Any, a: Any, b: Any) -> Any:
    return extern(x, w, a, b) + F.linear(F.linear(x, a[:8]), b[:, :8]) * 0.5


def transposed(x: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(F.linear(x, a), b) + w.repeat(1, 2)[:, :96].t()


def with_a_bias(x: Any, w: Any, a: Any, b: Any) -> Any:
    return quantised_linear(x, w) + F.linear(F.linear(x, a), b, w[:, 0]) * 2.0


def times_a_tensor(x: Any, w: Any, a: Any, b: Any) -> Any:
    return quantised_linear(x, w) + F.linear(F.linear(x, a), b) * w[0, 0]


@pytest.mark.parametrize(
    "fn",
    [
        extern, subtracted, by_addmm, several_dims, with_a_residual, two_terms, two_adapters, transposed,
        with_a_bias, times_a_tensor,
    ],
    ids=lambda fn: fn.__name__,
)  # fmt: skip
def test_base_that_is_no_product(fn: Callable[..., Any]) -> None:
    seen = check(fn, operands(), budget=2.0)
    assert seen.fused("lora") == 1 and not seen.reasons("lora")
    assert len(targets(seen, LORA_ACCUMULATE)) == len(targets(seen, NARROW_MM)) == 1
    assert not seen.products()


@pytest.mark.parametrize("dtype", [HALF, WHOLE], ids=["bfloat16", "float32"])
def test_quantised_training(dtype: torch.dtype) -> None:
    """Forward and gradient of the input; the extern operations are its bases."""
    x, w, a, b = operands(dtype=dtype)
    leaves = [t.detach().requires_grad_() for t in (x, a, b)]
    seen = check(lambda x, a, b: extern(x, w, a, b), leaves, train=True, budget=2.0)
    assert [len(targets(seen, LORA_ACCUMULATE, graph)) for graph in (0, 1)] == [1, 1]
    assert not seen.reasons("lora") and not seen.products(0) and not seen.products(1)
    (call,) = targets(seen, LORA_ACCUMULATE)
    # float32 adapters are in halves, bfloat16 ones as they are; the base is read as it is.
    assert [node.meta["val"].shape[1] for node in named(call).a] == [16 if dtype == HALF else 48]
    assert {node.meta["val"].dtype for node in (named(call).base, *named(call).a, *named(call).b)} == {HALF}


def test_several_linears_on_one_input() -> None:
    """Each sum is one of its own."""

    def fn(x: Any, w: Any, a: Any, b: Any, c: Any) -> Any:
        return extern(x, w, a, b), extern(x, w, c, b)

    x, w, a, b = operands()
    seen = check(fn, (x, w, a, b, rand(16, 64)), budget=2.0)
    assert seen.fused("lora") == 2 and len(targets(seen, LORA_ACCUMULATE)) == 2


def test_float16() -> None:
    args = tuple(t.half() for t in operands())
    seen = check(extern, args, budget=2.0)
    assert seen.fused("lora") == 1
    seen = check(extern, (*args[:2], *(t.float() for t in args[2:])), budget=2.0)
    assert seen.reasons("lora") == ["float32 adapters on a base of float16"]


def test_odd_rank_of_float32() -> None:
    """Halves with zeros up to what vector loads can read."""
    seen = check(extern, operands(rank=5, dtype=WHOLE), budget=2.0)
    assert seen.fused("lora") == 1


def test_symbolic_rows() -> None:
    x, w, a, b = operands()
    torch._dynamo.mark_dynamic(x, 0)
    seen = check(extern, (x, w, a, b), budget=2.0)
    assert seen.fused("lora") == 1
    seen = run(extern, (x, w, a, b), policy="profitable")
    assert not seen.fused("lora") and len(seen.reasons("lora")) == 1


def test_not_measured() -> None:
    seen = run(extern, operands(), policy="profitable")
    assert not seen.fused("lora") and "measure" in seen.reasons("lora")[0]


# -- masks ------------------------------------------------------------------------------------------------


def mask_behind(up: Any, kept: Any) -> Any:
    return up * kept * 1.25


def mask_with_its_factor(up: Any, kept: Any) -> Any:
    return up * (kept.to(up.dtype) * 1.25)


def mask_first(up: Any, kept: Any) -> Any:
    return (kept.to(up.dtype) / 0.8) * up


def mask_of_another_shape(up: Any, kept: Any) -> Any:
    """Viewed as several dims on its way, and back."""
    flat = (up.view(2, ROWS // 2, -1) * kept.view(2, ROWS // 2, -1)) * 1.25
    return flat.view(ROWS, -1)


def mask_is_a_bool_with_a_number(up: Any, kept: Any) -> Any:
    return up * (1.25 * kept)


MASKS = [mask_behind, mask_with_its_factor, mask_first, mask_of_another_shape, mask_is_a_bool_with_a_number]


def gradients(count: int, dtype: torch.dtype = HALF, base: torch.dtype = HALF) -> list[Any]:
    """dY, W, A, B and a mask of each linear on one input."""
    found = []
    for i in range(count):
        width = 64 * (i + 1)
        found.append(
            (rand(ROWS, width, dtype=base), rand(width, IN, dtype=base), rand(16, IN, dtype=dtype),
             rand(width, 16, dtype=dtype), torch.rand(ROWS, IN) > 0.2)
        )  # fmt: skip
    return found


def backward(mask: Any, linears: Any) -> Any:
    """As autograd spells it."""
    total = None
    for dy, w, a, b, kept in linears:
        up = mask((dy.to(a.dtype) * 2.0) @ b @ a, kept).to(dy.dtype)
        part = dy @ w
        total = part + up if total is None else (total + up) + part
    return total


@pytest.mark.parametrize("mask", MASKS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("dtype", [HALF, WHOLE], ids=["bfloat16", "float32"])
def test_spellings_of_a_mask(mask: Callable[..., Any], dtype: torch.dtype) -> None:
    seen = check(lambda linears: backward(mask, linears), (gradients(1, dtype),), budget=2.0)
    assert seen.fused("lora") == 1 and not seen.reasons("lora")
    (call,) = targets(seen, LORA_ACCUMULATE)
    base, _, _, scales, kept, products, _ = call.args
    assert base.target is torch.ops.aten.mm.default and list(products) == [0]
    assert scales == [pytest.approx(1.25)] or scales == [pytest.approx(2.5)]
    assert [mask.meta["val"].dtype for mask in kept] == [torch.bool]


@pytest.mark.parametrize("dtype", [HALF, WHOLE, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_masks(count: int, dtype: torch.dtype) -> None:
    """The products without the adapters are one block GEMM still."""
    base = torch.float16 if dtype == torch.float16 else HALF
    given = gradients(count, dtype, base)
    seen = check(lambda linears: backward(mask_with_its_factor, linears), (given,), budget=2.0)
    assert seen.fused("lora") == 1 and not seen.reasons("lora")
    (call,) = targets(seen, LORA_ACCUMULATE)
    assert len(named(call).kept) == count and len(targets(seen, NARROW_MM)) == count
    assert len(seen.calls()) == (count > 1) and seen.products() == (count == 1)
    if count > 1:
        assert len(named(seen.calls()[0]).a) == count


def test_adapters_without_a_mask_ride_along() -> None:
    def fn(linears: Any) -> Any:
        dy, w, a, b, _ = linears[1]
        return backward(mask_first, linears[:1]) + (dy @ w + dy @ b @ a)

    seen = check(fn, (gradients(2),), budget=2.0)
    assert seen.fused("lora") == 1 and not seen.reasons("lora")
    (call,) = targets(seen, LORA_ACCUMULATE)
    assert len(named(call).a) == 2 and len(named(call).kept) == 1 and len(seen.calls()) == 1


def test_what_is_added_around_stays_outside() -> None:
    """It is a loop behind the kernel, as any other."""

    def fn(linears: Any, z: Any) -> Any:
        return torch.sigmoid(z.cos() + backward(mask_first, linears))

    seen = check(fn, (gradients(1), rand(ROWS, IN)), budget=2.0)
    (call,) = targets(seen, LORA_ACCUMULATE)
    assert named(call).base.target is torch.ops.aten.mm.default
    assert [user.target for user in call.users] == [torch.ops.aten.add.Tensor]


def test_symbolic_rows_with_masks() -> None:
    given = gradients(2)
    for dy, _, _, _, kept in given:
        torch._dynamo.mark_dynamic(dy, 0)
        torch._dynamo.mark_dynamic(kept, 0)
    seen = check(lambda linears: backward(mask_first, linears), (given,), budget=2.0)
    assert seen.fused("lora") == 1 and len(targets(seen, LORA_ACCUMULATE)) == 1


def test_no_numbers() -> None:
    """Of what is no number, a mask makes none."""
    given = gradients(1)
    with torch.no_grad():
        given[0][0][3] = float("inf")
    seen = run(lambda linears: backward(mask_first, linears), (given,))
    assert seen.fused("lora") == 1
    assert not seen.outputs[0][3].isfinite().any() and bool(seen.outputs[0][4:].isfinite().all())


def rounded_on_its_way(linears: Any) -> Any:
    dy, w, a, b, kept = linears[0]
    return (dy @ w).float() + ((dy.float() @ b.float() @ a.float()) * kept).to(torch.float8_e4m3fn).float()


def mask_of_one_column(linears: Any) -> Any:
    dy, w, a, b, kept = linears[0]
    return dy @ w + (dy @ b @ a) * kept[:, :1]


def mask_that_is_no_mask(linears: Any) -> Any:
    dy, w, a, b, kept = linears[0]
    return dy @ w + (dy @ b @ a) * (kept + 0.5).to(dy.dtype)


def selected(linears: Any) -> Any:
    dy, w, a, b, kept = linears[0]
    return dy @ w + torch.where(kept, dy @ b @ a, 0)


def two_masks(linears: Any) -> Any:
    dy, w, a, b, kept = linears[0]
    return dy @ w + ((dy @ b @ a) * kept) * kept.flip(0)


def used_elsewhere(linears: Any) -> Any:
    dy, w, a, b, kept = linears[0]
    up = dy @ b @ a
    return dy @ w + up * kept, up


def broadcast(linears: Any) -> Any:
    dy, w, a, b, kept = linears[0]
    return dy @ w + ((dy @ b @ a) * kept + w[:1])


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (rounded_on_its_way, Reason.ROUNDED),
        (mask_of_one_column, Reason.BEHIND_ADAPTER),
        (mask_that_is_no_mask, Reason.BEHIND_ADAPTER),
        (selected, Reason.BEHIND_ADAPTER),
        (two_masks, Reason.TERMS),
        (used_elsewhere, Reason.USED_ELSEWHERE),
        (broadcast, Reason.TERMS),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_near_misses(fn: Callable[..., Any], reason: Reason) -> None:
    seen = run(fn, (gradients(1),))
    assert not targets(seen, LORA_ACCUMULATE)
    assert reason.code in seen.codes("lora"), seen.reasons("lora")


# -- PEFT -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False], ids=["float32", "bfloat16"])
def test_dropout_of_a_llama(whole: bool) -> None:
    """Every adapter of the backward is fused; sums of its products are block GEMMs without them."""
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    from tests.lora.test_peft import Adapted, ids

    model, x = Adapted("Llama", whole=whole, lora_dropout=0.1).train(), ids("Llama")

    def step(policy: str) -> Run:
        torch.manual_seed(1)
        return run(model, (x,), train=True, policy=policy)

    ours, stock = step("always"), step("profitable")
    assert not any("dropout" in reason for reason in ours.reasons("lora"))
    calls = targets(ours, LORA_ACCUMULATE, 1)
    # In the first layer, the input of q, k and v has no gradient.
    assert sorted(len(named(call).kept) for call in calls) == [1, 1, 1, 1, 2, 2, 3]
    assert all(len(named(call).a) == len(named(call).kept) for call in calls)
    assert sorted(len(named(call).a) for call in ours.calls(1)) == [2, 2, 3]
    for y, z in zip((*ours.outputs, *ours.grads), (*stock.outputs, *stock.grads), strict=True):
        assert y is not None and z is not None
        assert float((y - z).float().norm() / z.float().norm()) < 5e-2
