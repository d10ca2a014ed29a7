"""Adapters with something between A and B: the narrow result is in memory, and the rest is fused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inductor_fusions.decisions.problems import FEW_ROWS
from inductor_fusions.fusions.lora.op import NARROW_MM
from inductor_fusions.fusions.lora.profit import check_few_rows
from inductor_fusions.reasons import LeftToStock, Reason
from tests.block_mm.support import check, rand, run
from tests.lora.spellings import WHOLE, operands, targets
from tests.support.arguments import named

Between = Callable[[Any], Any]

BETWEEN: dict[str, Between] = {
    "vector": lambda h: h * torch.linspace(0.5, 2, 16, dtype=h.dtype),
    "mask": lambda h: h * (torch.arange(16) % 3 > 0),
    "mask of samples": lambda h: (h.view(4, 24, 16) * (torch.arange(4) > 0)[:, None, None]).view(96, 16),
    "fill": lambda h: h.masked_fill(torch.arange(16) % 3 == 0, 0.0),
    "relu": F.relu,
    "gelu": F.gelu,
    "normalised": lambda h: F.normalize(h, dim=-1),
    "wider and back": lambda h: (h.float() * 1.5).sin().to(h.dtype),
}


def adapted(between: Between, scale: float = 0.5) -> Callable[..., Any]:
    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        base = F.linear(x, w)
        return (base + F.linear(between(F.linear(x.to(a.dtype), a)), b) * scale).to(base.dtype)

    return fn


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("dtype", [torch.bfloat16, WHOLE], ids=str)
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_between(name: str, dtype: torch.dtype, train: bool) -> None:
    seen = check(adapted(BETWEEN[name]), operands(dtype=dtype), train=train, budget=2.0)
    (call,) = seen.calls()
    assert list(named(call).groups) == [0, 0] and len(targets(seen, NARROW_MM)) == 1
    assert not seen.products()
    if train:  # the gradient of the input is a sum of the same form
        sums = [call for call in seen.calls(1) if list(named(call).groups) == [0, 0]]
        assert len(sums) == 1 and targets(seen, NARROW_MM, 1)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_float16(train: bool) -> None:
    args = tuple(t.detach().half().requires_grad_() for t in operands())
    assert check(adapted(torch.tanh), args, train=train, budget=2.0).fused("lora") >= 1


def test_several_linears() -> None:
    """q and v: one kernel for both bases and a plain linear, one skinny GEMM for both As."""

    def fn(x: Any, w: Any, a: Any, b: Any, u: Any, c: Any, d: Any) -> Any:
        q = F.linear(x, w) + F.linear(F.relu(F.linear(x, a)), b)
        k = F.linear(x, u)
        return q, k, F.linear(x, w + 0) + F.linear(F.linear(x, c) * 2.0, d)

    args = (*operands(), rand(128, 64), rand(16, 64), rand(128, 16))
    seen = check(fn, args, budget=2.0)
    (call,) = seen.calls()
    assert sorted(named(call).groups) == [0, 0, 1, 1, 2]
    (narrow,) = targets(seen, NARROW_MM)
    assert len(named(narrow).b) == 2


@pytest.mark.parametrize("biases", [False, True], ids=["no biases", "biases"])
def test_a_base_in_memory(biases: bool) -> None:
    """What is added to is what the adapter reads, behind a linear: the bottleneck of Houlsby et al."""

    def fn(x: Any, w: Any, a: Any, b: Any, c: Any = None, d: Any = None) -> Any:
        y = F.linear(x, w)
        return y + F.linear(F.gelu(F.linear(y, a, c)), b, d)

    args = (rand(96, 64), rand(64, 64), rand(16, 64), rand(64, 16), *[rand(16), rand(64)] * biases)
    for train in (False, True):
        seen = check(fn, args, train=train, budget=2.0)
        assert "lora_accumulate" in next(s.kernel for s in seen.sites if s.fusion == "lora")
        assert seen.products() == 1  # the base


@pytest.mark.parametrize("name", ["nothing", "relu", "view"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, WHOLE], ids=str)
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_a_bias_of_a(name: str, dtype: torch.dtype, train: bool) -> None:
    """It is added to the narrow result, once; two adapters on one input have one skinny GEMM."""
    function = {"nothing": lambda h: h, "relu": F.relu, "view": lambda h: h.view(4, 24, 16)}[name]

    def fn(x: Any, w: Any, a: Any, b: Any, c: Any, e: Any) -> Any:
        base, x = F.linear(x, w), x.to(a.dtype)
        up = F.linear(function(F.linear(x, a, c)), b).view(base.shape)
        return (base + up * 0.5 + F.linear(F.linear(x, e, c * 2.0), b)).to(base.dtype)

    x, w, a, b = operands(dtype=dtype)
    args = (x, w, a, b, rand(16, dtype=a.dtype), rand(16, 64, dtype=a.dtype))
    seen = check(fn, args, train=train, budget=2.0)
    (narrow,) = targets(seen, NARROW_MM)
    assert len(named(narrow).b) == 2 and not seen.products() and not seen.codes("lora")


def test_few_rows_are_not_measured() -> None:
    seen = run(adapted(torch.relu), operands(rows=8), policy="profitable")
    assert seen.codes("lora") == [Reason.NOT_MEASURED.code]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [5, 96])
def test_gate_of_rows(dtype: torch.dtype, rows: int) -> None:
    def fn(x: Any, w: Any, a: Any, b: Any, gate: Any) -> Any:
        up = F.linear(F.linear(x.to(a.dtype), a), b) * gate * 2.0
        return F.linear(x, w) + up.to(x.dtype)

    x, w, a, b = operands(rows=rows)
    seen = check(fn, (x, w, a.to(dtype), b.to(dtype), rand(rows, 1, dtype=dtype)), budget=2.0)
    assert seen.fused("lora") == 1 and not seen.products()


#: Of an input, a linear, an adapter and another narrow matrix: what is none behind something.
OTHERS: dict[str, Callable[..., Any]] = {
    # Another order of the rows: nothing is known of what is between.
    "reached by other operations": lambda x, w, a, b, c: adapted(lambda h: h.flip(0))(x, w, a, b),
    # A gated pair of skinny GEMMs is no adapter: which of them would be A?
    "two skinny GEMMs": lambda x, w, a, b, c: (
        F.linear(x, w) + F.linear(F.silu(F.linear(x, a)) * F.linear(x, c), b)
    ),
    "broadcast": lambda x, w, a, b, c: F.linear(x, w) + F.linear(F.linear(x[:1], a).relu() + x[:, :16], b),
    # A mean from columns of one product, a variance from another.
    "columns of two products": lambda x, w, a, b, c: (
        F.linear(x, w) + F.linear(F.linear(x, a)[..., :8] + torch.exp(F.linear(x, a[:8] * 2)), b[:, :8])
    ),
    # A product that has more than half of the input's columns.
    "few columns of a wide product": lambda x, w, a, b, c: (
        F.linear(x, w) + F.linear(F.linear(x, w[:40]).relu()[..., :8], b[:, :8])
    ),
    "some rows": lambda x, w, a, b, c: F.linear(x, w)[:48] + F.linear(F.linear(x, a).relu()[:48], b),
    # Two linears with an activation between them are a small MLP, of which nothing is said.
    "a bottleneck alone": lambda x, w, a, b, c: F.linear(F.relu(F.linear(x, a)), b).sin(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_adapter(name: str) -> None:
    seen = check(OTHERS[name], (*operands(), rand(16, 64)), budget=2.0)
    assert not seen.fused("lora") and not (name == "a bottleneck alone" and seen.codes("lora"))


def test_the_backward_of_a_small_mlp() -> None:
    """The gradient of its input is a sum of two functions of skinny GEMMs: neither is an adapter."""

    def fn(x: Any, g: Any, u: Any, d: Any) -> Any:
        return F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d)

    seen = check(fn, (rand(96, 128), rand(16, 128), rand(16, 128), rand(128, 16)), train=True, budget=2.0)
    assert not seen.fused("lora") and not seen.codes("lora")


@pytest.mark.parametrize("tokens, plain, left", [
    (FEW_ROWS, False, True), (FEW_ROWS + 1, False, False), (None, False, False), (1, True, False),
])  # fmt: skip
def test_few_rows_are_left_to_stock(tokens: int | None, plain: bool, left: bool) -> None:
    """The operation for few rows is not measured with anything between A and B."""
    with pytest.raises(LeftToStock, match="not measured") if left else contextlib.nullcontext():
        check_few_rows(tokens, plain)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_some_columns_of_a_packed_a_for_one_row(train: bool) -> None:
    """Those of one row are contiguous, unlike those of several: B reads them where they are."""

    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        _, middle, _ = F.linear(x, a).chunk(3, dim=-1)
        return F.linear(x, w) + F.linear(middle, b) * 2.0

    seen = check(fn, (rand(1, 256), rand(128, 256), rand(24, 256), rand(128, 8)), train=train, budget=2.0)
    # In training also the gradient of x, and those of both matrices.
    assert seen.fused("lora") == 1 + 3 * train


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_function_of_columns(train: bool, dtype: torch.dtype) -> None:
    """PVeRA without its vector behind B."""

    def fn(x: Any, w: Any, a: Any, b: Any, d: Any) -> Any:
        mean, variance = (d * F.linear(x, a)).chunk(2, dim=-1)
        return F.linear(x, w) + F.linear(mean + torch.exp(0.5 * variance), b[:, :8])

    given = [t.detach().to(dtype).requires_grad_() for t in (*operands(), torch.rand(16))]
    seen = check(fn, given, train=train, budget=2.0)
    assert seen.fused("lora") >= 1 + train and seen.products() == 0
