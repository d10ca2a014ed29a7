"""Which graphs are read as linears with adapters. test_near_misses.py has those that look alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inductor_fusions.fusions.lora.op import LORA_DOWN, LORA_LINEAR, NARROW_MM
from inductor_fusions.reasons import Reason
from tests.block_mm.support import check, rand, run
from tests.lora.spellings import (
    SCALES,
    SPELLINGS,
    WHOLE,
    linear,
    operands,
    peft_in_float32,
    targets,
    with_a_tail,
)
from tests.support.arguments import named
from tests.support.modules import Module
from tests.support.on_a_gpu import compiled


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    seen = check(SPELLINGS[name], operands(), budget=2.0)
    assert seen.fused("lora") == 1 and not seen.products()
    (call,) = seen.calls()
    assert list(named(call).groups) == [0, 0] and len(targets(seen, NARROW_MM)) == 1


@pytest.mark.parametrize(("fn", "dtype"), [
    (linear, torch.bfloat16), (with_a_tail, torch.bfloat16), (peft_in_float32, torch.bfloat16),
    (peft_in_float32, WHOLE),
])  # fmt: skip
def test_training(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    seen = check(fn, operands(dtype=dtype), train=True, budget=2.0)
    # Forward; backward: the gradient of the input, and those of A and of B.
    assert seen.fused("lora") == 4
    assert len(targets(seen, NARROW_MM, 1)) == 3
    (gradient,) = [call for call in seen.calls(1) if list(named(call).groups) == [0, 0]]
    assert len(named(gradient).a) == 2


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("rows", [8, 96])
def test_scales(name: str, rows: int) -> None:
    """Few rows, and a training step: a factor of the base is no matter of the operation for few rows."""
    seen = check(SCALES[name], operands(rows=rows), train=True, budget=2.0)
    assert seen.fused("lora") >= 2 and not seen.products()
    if rows == 96:
        assert [call for call in seen.calls(1) if list(named(call).groups) == [0, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_few_rows_of_a_subtracted_adapter(dtype: torch.dtype) -> None:
    args = tuple(t.detach().to(dtype) for t in operands(rows=8))
    seen = check(SCALES["subtracted"], args, budget=2.0)
    (call,) = targets(seen, LORA_LINEAR)
    assert list(named(call).scales) == [-2.0]


@pytest.mark.parametrize("rank", [1, 5, 16, 20, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, WHOLE], ids=str)
def test_rank(rank: int, dtype: torch.dtype) -> None:
    """A rank that vector loads cannot read is padded on its way into the kernel."""
    x, w, a, b = rand(96, 256), rand(128, 256), rand(rank, 256, dtype=dtype), rand(128, rank, dtype=dtype)
    seen = check(peft_in_float32, (x, w, a, b), budget=2.0)
    assert seen.fused("lora") == 1
    (call,) = seen.calls()
    inner = int(named(call).a[1].meta["val"].shape[1])
    wanted = 3 * rank if dtype == WHOLE else rank
    assert inner == wanted + -wanted % 8


@pytest.mark.parametrize("fn", [linear, peft_in_float32], ids=lambda fn: fn.__name__)
def test_few_rows(fn: Callable[..., Any]) -> None:
    """One operation, which reads everything as it is."""
    dtype = torch.bfloat16 if fn is linear else WHOLE
    seen = check(fn, operands(rank=5, dtype=dtype, rows=3), budget=2.0)
    assert len(targets(seen, LORA_LINEAR)) == 1 and not seen.products() and not seen.calls()
    assert named(targets(seen, LORA_LINEAR)[0]).early is True


@pytest.mark.parametrize("rows", [3, 96])
def test_results_of_two_dtypes(rows: int) -> None:
    """One is not rounded, as where Inductor takes out a cast that another one follows."""

    def fn(x: Any, w: Any, a: Any, b: Any, v: Any, c: Any, d: Any) -> Any:
        gate = F.linear(x, w) + F.linear(F.linear(x.to(a.dtype), a), b)
        return F.silu(gate), peft_in_float32(x, v, c, d)

    args = (*operands(dtype=WHOLE, rows=rows), *operands(dtype=WHOLE)[1:])
    seen = check(fn, args, budget=2.0)
    assert [y.dtype for y in seen.outputs] == [WHOLE, torch.bfloat16]
    assert seen.fused("lora") == 1 and not seen.products()


@pytest.mark.parametrize("fn", [
    lambda x, w, a, b: F.linear(x, w, w[:, 0].sin()) + F.linear(F.linear(x, a), b),
    lambda x, w, a, b: linear(x, w.sin(), a, b),
], ids=["bias", "weight"])  # fmt: skip
def test_what_is_computed_is_waited_for(fn: Callable[..., Any]) -> None:
    """The kernel that reads it may not start before the one that makes it."""
    seen = check(fn, operands(rows=3), budget=2.0)
    assert named(targets(seen, LORA_LINEAR)[0]).early is False


def biased(x: Any, w: Any, a: Any, b: Any, c: Any) -> Any:
    base = F.linear(x, w)
    return (base + F.linear(F.linear(x.to(a.dtype), a), b, c) * 2.0).to(base.dtype)


def biased_twice(x: Any, w: Any, a: Any, b: Any, c: Any) -> Any:
    base = F.linear(x, w, w[:, 0])
    return (base - F.linear(F.linear(x.to(a.dtype), a), b, c)).to(base.dtype)


def biased_times_a_tensor(x: Any, w: Any, a: Any, b: Any, c: Any) -> Any:
    base = F.linear(x, w, w[:, 0])
    return (base + F.linear(F.linear(x.to(a.dtype), a), b, c) * w.detach()[0, 0] * 3.0).to(base.dtype)


def biased_with_a_residual(x: Any, w: Any, a: Any, b: Any, c: Any) -> Any:
    return biased(x, w, a, b, c) + torch.cat([x, x], dim=1)


BIASED = [biased, biased_twice, biased_times_a_tensor, biased_with_a_residual]


@pytest.mark.parametrize("fn", BIASED, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, WHOLE], ids=str)
@pytest.mark.parametrize("rows", [8, 96])
def test_bias_of_the_adapter(fn: Callable[..., Any], dtype: torch.dtype, rows: int) -> None:
    """With its factor it joins that of the base, in float32."""
    args = (*operands(dtype=dtype, rows=rows), rand(128, dtype=dtype))
    seen = check(fn, args, budget=2.0)
    assert seen.fused("lora") == 1 and not seen.products()
    whole = rows == 8 and fn is not biased_times_a_tensor
    (call,) = targets(seen, LORA_LINEAR) if whole else seen.calls()
    assert [bias.meta["val"].dtype for bias in named(call).bias] == [WHOLE]
    # What is computed in the graph may be made between the two kernels.
    assert not whole or named(call).early is False


@pytest.mark.parametrize("fn", BIASED, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, WHOLE], ids=str)
def test_training_the_bias_of_the_adapter(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    args = (*operands(dtype=dtype), rand(128, dtype=dtype))
    seen = check(fn, args, train=True, budget=2.0)
    assert seen.fused("lora") >= 2 and not seen.products()


@pytest.mark.parametrize("rows", [8, 96])
def test_bias_of_the_adapter_as_it_is(rows: int) -> None:
    """Nothing is computed: it is the bias of the operation."""

    def fn(x: Any, w: Any, a: Any, b: Any, c: Any) -> Any:
        return F.linear(x, w) + F.linear(F.linear(x, a), b, c)

    seen = check(fn, (*operands(rows=rows), rand(128)), budget=2.0)
    (call,) = targets(seen, LORA_LINEAR) if rows == 8 else seen.calls()
    (bias,) = named(call).bias
    assert bias.op == "placeholder" and (rows == 96 or named(call).early is True)


def test_bias_of_the_adapter_beside_another_term() -> None:
    """The operation has one bias."""

    def fn(x: Any, w: Any, a: Any, b: Any, c: Any) -> Any:
        return F.linear(x, w) + (torch.cat([x, x], dim=1) + F.linear(F.linear(x, a), b, c))

    seen = check(fn, (*operands(), rand(128)), budget=2.0)
    assert not seen.fused("lora") and "the sum has both a bias and another term" in seen.reasons("lora")


@pytest.mark.parametrize("rows", [3, 8, 96])
@pytest.mark.parametrize("dtype", [torch.bfloat16, WHOLE], ids=str)
@pytest.mark.parametrize("where", ["behind", "between", "between, training"])
def test_scale_that_is_a_tensor(rows: int, dtype: torch.dtype, where: str) -> None:
    """Behind the second product, or between both."""
    train = where == "between, training"

    def fn(x: Any, w: Any, a: Any, b: Any, s: Any) -> Any:
        base, down = F.linear(x, w), F.linear(x.to(a.dtype), a)
        added = s * F.linear(down, b) if where == "behind" else F.linear(down * 0.5 * s, b)
        return (base + added).to(base.dtype)

    args = (*operands(dtype=dtype, rows=rows), torch.tensor(0.3, dtype=dtype))
    seen = check(fn, args, train=train, budget=2.0)
    assert seen.fused("lora") >= 1 + train and not seen.products()


def test_scale_of_one_element_that_widens() -> None:
    """Its float32 makes the sum float32, which rounds otherwise."""

    def fn(x: Any, w: Any, a: Any, b: Any, scale: Any) -> Any:
        return F.linear(x, w) + F.linear(F.linear(x, a), b) * scale

    seen = check(fn, (*operands(rows=96), torch.full((1,), 0.3)), budget=2.0)
    assert not seen.fused("lora") and seen.codes("lora") == [Reason.BEHIND_ADAPTER.code]


@pytest.mark.parametrize("rows", [3, 96])
def test_several_adapters_are_added(rows: int) -> None:
    def fn(x: Any, w: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        base = F.linear(x, w)
        result = base + F.linear(F.linear(x.to(a.dtype), a), b) * 2.0
        return (result + F.linear(F.linear(x.to(a.dtype), c), d) * 0.5).to(base.dtype)

    args = (*operands(dtype=WHOLE, rows=rows), rand(8, 64, dtype=WHOLE), rand(128, 8, dtype=WHOLE))
    seen = check(fn, args, budget=2.0)
    assert seen.fused("lora") == 1 and not seen.products()
    if rows > 64:
        (call,) = seen.calls()
        # The factors are in what the skinny GEMM makes: each product is one more step of one loop.
        assert named(call).scales == [1.0, 1.0, 1.0]
        factors = [f for node in call.graph.nodes if node.target is NARROW_MM for f in named(node).further]
        assert sorted(factors) == [0.5, 2.0]


@pytest.mark.parametrize("rows", [3, 96])
@pytest.mark.parametrize("adapted", [(0,), (1,), (0, 2), (0, 1, 2)], ids=str)
def test_some_linears_of_one_input(rows: int, adapted: tuple[int, ...]) -> None:
    """All in one kernel, those without an adapter too; the down-projections read the input once."""

    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        outputs = [F.linear(x, weight) for weight in w]
        for i in adapted:
            outputs[i] = outputs[i] + F.linear(F.linear(x, a[i]), b[i]) * 2.0
        return outputs

    widths = (64, 32, 16)
    args = (
        rand(rows, 64), [rand(n, 64) for n in widths], [rand(16, 64) for _ in widths],
        [rand(n, 16) for n in widths],
    )  # fmt: skip
    seen = check(fn, args, budget=2.0)
    assert seen.fused("lora") == 1 and not seen.products()
    assert len(targets(seen, NARROW_MM)) == (rows > 64)
    assert len(targets(seen, LORA_LINEAR)) == (rows <= 64)


@pytest.mark.parametrize("of_input", [True, False])
def test_gradients_of_adapters_that_keep_their_input(of_input: bool) -> None:
    """Those of A, which are skinny GEMMs since before autograd, read the input once."""

    def fn(x: Any, w: Any, v: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        y = (F.linear(x, w) + F.linear(LORA_DOWN(x, a), b) * 2.0).to(x.dtype)
        return y.sin() * (F.linear(x, v) + F.linear(LORA_DOWN(x, c), d) * 0.5).to(x.dtype)

    x, w, v = rand(512, 256), rand(128, 256), rand(128, 256)
    adapters = (16, 256), (128, 16), (5, 256), (128, 5)
    args = x, w, v, *(rand(*shape, dtype=WHOLE) for shape in adapters)
    for t in args:
        t.requires_grad_(t.dtype == WHOLE)
    x.requires_grad_(of_input)
    seen = check(fn, args, train=True, budget=2.0)
    (together,) = [call for call in targets(seen, NARROW_MM, 1) if named(call).transposed]
    assert len(named(together).b) == 2
    assert not seen.products(1)


def test_what_is_in_the_middle_is_an_output_where_it_is_used() -> None:
    """As where a backward needs it: the skinny GEMM has it."""

    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        h = F.linear(x.to(a.dtype), a)
        return (F.linear(x, w) + F.linear(h, b) * 2.0).to(x.dtype), h

    seen = check(fn, operands(dtype=WHOLE), budget=2.0)
    assert seen.fused("lora") == 1 and not seen.products()
    seen = check(fn, operands(dtype=WHOLE, rows=3), budget=2.0)
    assert seen.fused("lora") == 1 and not targets(seen, LORA_LINEAR)


def module_of(compute: Callable[..., Any]) -> Module:
    """What a function computes of x and of three parameters: w, a and b."""
    parts = dict(zip("wab", map(nn.Parameter, operands()[1:]), strict=True))
    return Module(lambda net, x: compute(x, net.w, net.a, net.b), parts)


def test_symbolic_sizes_that_are_computed_later() -> None:
    """The result has sizes of its own, and is made where the first of its operands is there."""

    def reshaped(x: Any, w: Any, a: Any, b: Any) -> Any:
        up, base = F.linear(F.linear(x, a), b), F.linear(x, w)
        half = x.shape[0] * 2
        return up.reshape(half, -1, 128) + base.reshape(half, -1, 128)

    for train in (False, True):
        x = rand(24, 4, 64)
        torch._dynamo.mark_dynamic(x, 0)
        assert check(module_of(reshaped), (x,), train=train, budget=2.0).fused("lora")


@pytest.mark.parametrize("form", ["gate of the rank", "down-projection that is used", "two activations"])
def test_rows_that_depend_on_values(form: str) -> None:
    """Nothing is asked about how many there are."""
    x, w, a, b = operands()
    offset, gate = rand(128), rand(16)

    def fn(chosen: Any, x: Any) -> Any:
        x = x[chosen.nonzero()[:, 0]]
        if form == "two activations":
            return F.gelu(F.linear(F.gelu(F.linear(x, w, offset)), w.t().contiguous())), w
        down = F.linear(x, a)
        return F.linear(x, w) + F.linear(down * gate if "gate" in form else down, b), down

    chosen = torch.arange(96) % 3 > 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), compiled(fn) as (call, _):
        ours, eager = call(chosen, x), fn(chosen, x)
        given = [torch.autograd.grad(y[0], (x, w), torch.ones_like(y[0]).cumsum(0)) for y in (ours, eager)]
    for found, wanted in zip((ours[0], *given[0]), (eager[0], *given[1]), strict=True):
        assert float((found - wanted).detach().norm()) <= 0.02 * float(wanted.detach().norm())


def test_factor_that_changes() -> None:
    """A number that the caller gives is an input of the graph from its second value on."""
    given = operands()

    def differentiate(y: Any) -> Any:
        return torch.autograd.grad(y, given, torch.ones_like(y).cumsum(0))

    def fn(factor: float) -> Any:
        x, w, a, b = given
        return F.linear(x, w) + F.linear(F.linear(x, a), b) * factor

    with compiled(fn) as (call, seen):
        for factor in (2.0, 0.5, 2, 3, -1):
            ours, eager = ([y, *differentiate(y)] for y in (call(factor), fn(factor)))
            for found, wanted in zip(ours, eager, strict=True):
                assert float((found - wanted).norm()) <= 0.02 * float(wanted.norm())
    assert seen.fused("lora") >= 2


def test_symbolic_strides() -> None:
    """torch computes strides with max(1, length - 1), which is length - 1 of a length that is symbolic."""
    x = rand(24, 5, 64)
    torch._dynamo.mark_dynamic(x, (0, 1))
    seen = check(module_of(lambda x, *others: linear(x[:, 1:], *others)), (x,), budget=2.0)
    assert seen.fused("lora") == 1 and not seen.reasons("lora")


@pytest.mark.parametrize("rows", [8, 96])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, WHOLE])
def test_down_projection_of_two_linears(rows: int, scale: float, dtype: torch.dtype) -> None:
    """Of linears on other inputs: the second one reads what the first one has replaced."""

    def fn(x: Any, y: Any, w: Any, v: Any, a: Any, b: Any, c: Any) -> Any:
        h = F.linear(y.to(a.dtype) * scale, a)
        first, second = F.linear(h, b) * 3 + F.linear(x, w), F.linear(h, c) + F.linear(y, v)
        return first.to(x.dtype), second.to(x.dtype), h

    x, w, a, b = operands(dtype=dtype, rows=rows)
    seen = run(fn, (x, rand(rows, 64), w, rand(128, 64), a, b, rand(128, 16, dtype=dtype)))
    assert seen.fused("lora") == 2
    args = [torch.randn(s) / 4 for s in ((rows, 64), (rows, 64), (128, 64), (128, 64))]
    args = [t.bfloat16() for t in args]
    args += [(torch.randn(s) / 4).to(dtype) for s in ((16, 64), (128, 16), (128, 16))]
    found = run(fn, args).outputs
    for y, z in zip(found, fn(*(t.double() for t in args)), strict=True):
        assert float((y.double() - z).norm() / z.norm()) < 0.01


def test_adapters_of_two_dtypes_on_few_rows() -> None:
    """The kernels for few rows take one dtype."""

    def fn(x: Any, w: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        y = (F.linear(x, w) + F.linear(F.linear(x, a), b)).float()
        return y + F.linear(F.linear(x.float(), c), d)

    args = (*operands(rows=8), *operands(dtype=WHOLE)[2:])
    seen = run(fn, args)
    assert seen.fused("lora") == 1 and not targets(seen, LORA_LINEAR)
    assert len(targets(seen, NARROW_MM)) == 2
