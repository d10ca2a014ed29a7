"""Adapters that are added to what is in memory: the operation, its kernel, and which sums become one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from inductor_fusions.fusions.lora import accumulate_kernel
from inductor_fusions.fusions.lora.accumulate import LORA_ACCUMULATE
from inductor_fusions.fusions.lora.accumulate_kernel import Shape
from inductor_fusions.fusions.lora.op import NARROW_MM
from inductor_fusions.reasons import Reason
from tests.block_mm.support import check, rand, run
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


@pytest.mark.parametrize(("position", "given", "text"), [
    (0, rand(5), "base"),
    (0, torch.ones(5, 6, dtype=torch.int8), "base"),
    (0, rand(4, 6), "base"),
    (0, rand(5, 7), "base"),
    (1, [], "an a"),
    (1, [rand(5, 3), rand(5)], "a and b"),
    (1, [rand(5, 3), rand(5, 4)], "a and b"),
    (1, [rand(5, 3), torch.rand(5, 2)], "a and b"),
    (2, [rand(3, 6)], "an a, b and scale"),
    (3, [1.0], "scale"),
    (4, [torch.rand(5, 6)], "kept"),
    (4, [torch.rand(5, 1) > 0], "kept"),
    (4, [torch.rand(4, 6) > 0], "kept"),
    (4, [torch.rand(5) > 0], "kept"),
    (4, [], "kept_products"),
    (5, [2], "kept_products"),
    (5, [-1], "kept_products"),
])  # fmt: skip
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


def several_dims(x: Any, w: Any, a: Any, b: Any) -> Any:
    x = x.view(2, 3, 16, 64)
    return torch.cat([x, x], dim=-1).sin() + F.linear(F.linear(x, a), b) * 0.3


#: Sums of an adapter and of what is no product, of x, w, a and b.
BASES: dict[str, Callable[..., Any]] = {
    "extern": extern,
    "subtracted": lambda x, w, a, b: torch.cat([x, x], dim=1) - F.linear(F.linear(x, a), b),
    "addmm": lambda x, w, a, b: torch.addmm(torch.cat([x, x], dim=1), x @ a.t(), b.t(), alpha=-0.5),
    "several dims": several_dims,
    "a residual": lambda x, w, a, b: torch.cat([x, x], dim=1) + extern(x, w, a, b),
    "two terms": lambda x, w, a, b: (
        quantised_linear(x, w) - 2 * (quantised_linear(x.sin(), w) - F.linear(F.linear(x, a), b))
    ),
    "two adapters": lambda x, w, a, b: extern(x, w, a, b) + F.linear(F.linear(x, a[:8]), b[:, :8]) * 0.5,
    "transposed": lambda x, w, a, b: F.linear(F.linear(x, a), b) + w.repeat(1, 2)[:, :96].t(),
    "a bias": lambda x, w, a, b: quantised_linear(x, w) + F.linear(F.linear(x, a), b, w[:, 0]) * 2.0,
    "a bias behind a factor": lambda x, w, a, b: (
        quantised_linear(x, w) + F.linear(F.linear(x, a) * w[0, 0], b, w[:, 1])
    ),
    "times a tensor": lambda x, w, a, b: quantised_linear(x, w) + F.linear(F.linear(x, a), b) * w[0, 0],
}


@pytest.mark.parametrize("name", BASES)
def test_base_that_is_no_product(name: str) -> None:
    seen = check(BASES[name], operands(), budget=2.0)
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


def test_float16() -> None:
    args = tuple(t.half() for t in operands())
    seen = check(extern, args, budget=2.0)
    assert seen.fused("lora") == 1
    seen = check(extern, (*args[:2], *(t.float() for t in args[2:])), budget=2.0)
    assert seen.reasons("lora") == ["the adapters are float32 and the base is float16"]


def test_odd_rank_of_float32() -> None:
    """Halves with zeros up to what vector loads can read."""
    seen = check(extern, operands(rank=5, dtype=WHOLE), budget=2.0)
    assert seen.fused("lora") == 1


def test_not_measured() -> None:
    seen = run(extern, operands(), policy="profitable")
    assert not seen.fused("lora") and "measure" in seen.reasons("lora")[0]


# -- masks ------------------------------------------------------------------------------------------------


def mask_first(up: Any, kept: Any) -> Any:
    return (kept.to(up.dtype) / 0.8) * up


def mask_with_its_factor(up: Any, kept: Any) -> Any:
    return up * (kept.to(up.dtype) * 1.25)


#: What a dropout makes of the gradient of its result.
MASKS: dict[str, Callable[[Any, Any], Any]] = {
    "behind": lambda up, kept: up * kept * 1.25,
    "with its factor": mask_with_its_factor,
    "first": mask_first,
    "viewed as several dims": lambda up, kept: (
        (up.view(2, ROWS // 2, -1) * kept.view(2, ROWS // 2, -1)) * 1.25
    ).view(ROWS, -1),
    "a bool with a number": lambda up, kept: up * (1.25 * kept),
}


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


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [HALF, WHOLE], ids=["bfloat16", "float32"])
def test_spellings_of_a_mask(name: str, dtype: torch.dtype) -> None:
    seen = check(lambda linears: backward(MASKS[name], linears), (gradients(1, dtype),), budget=2.0)
    assert seen.fused("lora") == 1 and not seen.reasons("lora")
    (call,) = targets(seen, LORA_ACCUMULATE)
    base, _, _, scales, kept, products, _ = call.args
    assert base.target is torch.ops.aten.mm.default and list(products) == [0]
    assert scales == [pytest.approx(1.25)] or scales == [pytest.approx(2.5)]
    assert [mask.meta["val"].dtype for mask in kept] == [torch.bool]


@pytest.mark.parametrize("dtype", [HALF, WHOLE, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_masks(count: int, dtype: torch.dtype) -> None:
    """The products without the adapters are one grouped GEMM still."""
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


def used_elsewhere(dy: Any, w: Any, a: Any, b: Any, kept: Any) -> Any:
    up = dy @ b @ a
    return dy @ w + up * kept, up


#: What is nearly a sum of products with a mask, and why it is none.
NEAR_MISSES: dict[str, tuple[Callable[..., Any], Reason]] = {
    "rounded": (
        lambda dy, w, a, b, kept: (
            (dy @ w).float()
            + ((dy.float() @ b.float() @ a.float()) * kept).to(torch.float8_e4m3fn).float()
        ), Reason.ROUNDED,
    ),
    "no mask": (
        lambda dy, w, a, b, kept: dy @ w + (dy @ b @ a) * (kept + 0.5).to(dy.dtype), Reason.BEHIND_ADAPTER,
    ),
    "selected": (
        lambda dy, w, a, b, kept: dy @ w + torch.where(kept, dy @ b @ a, 0), Reason.BEHIND_ADAPTER,
    ),
    "two masks": (
        lambda dy, w, a, b, kept: dy @ w + ((dy @ b @ a) * kept) * kept.flip(0), Reason.TERMS,
    ),
    "used elsewhere": (used_elsewhere, Reason.USED_ELSEWHERE),
    "broadcast": (lambda dy, w, a, b, kept: dy @ w + ((dy @ b @ a) * kept + w[:1]), Reason.TERMS),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name: str) -> None:
    fn, reason = NEAR_MISSES[name]
    seen = run(fn, gradients(1)[0])
    assert not targets(seen, LORA_ACCUMULATE)
    assert reason.code in seen.codes("lora"), seen.reasons("lora")
