"""Sums of products: adapters, and gradients of a shared input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from inductor_fusions import config
from inductor_fusions.fusions.lora.op import NARROW_MM
from tests.block_mm.support import Linears, check, rand, run
from tests.support.arguments import named


def test_adapter() -> None:
    """x W + s (x A) B: the second product is in the same operation, its scale in what it reads."""

    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        return x @ w + 0.25 * ((x @ a) @ b)

    seen = check(fn, (rand(2, 16, 64), rand(64, 128), rand(64, 16), rand(16, 128)), train=True, budget=2.0)
    (call,) = [c for c in seen.calls(0) if list(named(c).groups) == [0, 0]]
    assert list(named(call).scales) == [1.0, 1.0]
    (down,) = [node for node in call.graph.nodes if node.target is NARROW_MM and any(named(node).further)]
    assert list(named(down).further) == [0.25]


def test_three_terms_and_a_residual() -> None:
    args = (rand(16, 64), rand(16, 64), rand(16, 64), rand(64, 32), rand(16, 32))
    (call,) = check(lambda x, y, z, w, r: x @ w + (r + y @ w) + z @ w, args).calls()
    assert len(named(call).a) == 3 and len(named(call).bias) == 1


def test_residual_of_more_dims() -> None:
    args = (rand(2, 8, 64), rand(2, 8, 32), rand(64, 32), rand(32, 32), rand(2, 8, 32))
    (call,) = check(lambda x, y, w, v, r: (x @ w + y @ v) + r, args).calls()
    assert len(named(call).bias) == 1 and named(call).bias[0].meta["val"].dim() == 2


def test_a_term_times_a_number_that_is_read_elsewhere() -> None:
    """The number is not lost: the products are summed, and the term is added by stock."""
    args = (rand(16, 64), rand(16, 32), rand(64, 32), rand(32, 32), rand(16, 32))
    seen = check(lambda x, y, w, v, r: (x @ w + y @ v + 2.0 * r, r.sin()), args)
    (call,) = seen.calls()
    assert not named(call).bias


def used_elsewhere(x: Any, y: Any, w: Any, v: Any) -> Any:
    first = x @ w
    return first + y @ v, first


#: x, y, weights from each to 32 columns -> what is no sum of two products.
NO_SUMS: dict[str, Callable[..., Any]] = {
    "used elsewhere": used_elsewhere,
    "a bias, which is broadcast": lambda x, y, w, v: x @ w + (y @ v + v[0]),
    "permuted": lambda x, y, w, v: x @ w + (y @ v).t(),
    "one product twice, which stock computes once": lambda x, y, w, v: (lambda z: z + z)(x @ w),
    "a difference": lambda x, y, w, v: x @ w - y @ v,
}


@pytest.mark.parametrize("name", NO_SUMS)
def test_no_sum(name: str) -> None:
    seen = check(NO_SUMS[name], (rand(32, 64), rand(32, 64), rand(64, 32), rand(64, 32)), budget=2.0)
    assert all(len(named(call).a) == 1 for call in seen.calls())


def test_float32_adapter_on_a_16_bit_base() -> None:
    """Dtypes that differ between products are left to stock, with that reason."""
    args = (rand(16, 64), rand(64, 32), rand(64, 16, dtype=torch.float32), rand(16, 32, dtype=torch.float32))
    with config.patch(lora=False):
        seen = run(lambda x, w, a, b: (x @ w + 2.0 * ((x.to(a.dtype) @ a) @ b)).to(x.dtype), args)
    assert not seen.calls()
    assert any("dtypes" in reason for reason in seen.reasons("qkv"))


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradient_of_a_shared_input(dynamic: bool) -> None:
    class Both(Linears):
        def forward(self, x: Any) -> Any:
            return tuple(part(x).sigmoid() for part in self.parts)

    seen = check(Both(64, (128, 32)).bfloat16(), (rand(6, 8, 64),), train=True, dynamic=dynamic, budget=2.0)
    assert [0, 0] in [list(named(call).groups) for call in seen.calls(1)]


@pytest.mark.parametrize("train", [False, True])
def test_symbolic_rows(train: bool) -> None:
    """The sum stands where its operands are there; the sizes by which they are viewed move with them."""

    class Sum(Linears):
        def forward(self, x: Any, y: Any) -> Any:  # type: ignore[override]
            return self.parts[0](x) + self.parts[1](y)

    args = (rand(6, 8, 64), rand(6, 8, 64))
    seen = check(Sum(64, (32, 32)).bfloat16(), args, dynamic=True, train=train, budget=2.0)
    assert [0, 0] in [list(named(call).groups) for call in seen.calls()]


def test_float64_term() -> None:
    """The kernel adds up in float32."""
    args = (rand(16, 64), rand(16, 64), rand(64, 32), rand(64, 32), rand(16, 32, dtype=torch.float64))
    seen = check(lambda x, y, w, v, r: r + (x @ w).double() + (y @ v).double(), args)
    assert not seen.fused("qkv") and "the result has dtype float64, which no kernel supports" in seen.reasons(
        "qkv"
    )


def test_factor_that_is_no_number() -> None:
    """No kernel is written with it."""

    def fn(x: Any, y: Any, w: Any, v: Any) -> Any:
        return (x @ w) * float("inf") + y @ v

    assert not run(fn, (rand(16, 64), rand(16, 64), rand(64, 32), rand(64, 32))).calls()


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_a_bias_of_one_linear(train: bool) -> None:
    def fn(x: Any, u: Any, c: Any, y: Any, v: Any) -> Any:
        return torch.nn.functional.linear(x, u, c) + torch.nn.functional.linear(y, v)

    args = (rand(2, 8, 64), rand(128, 64), rand(128), rand(2, 8, 32), rand(128, 32))
    seen = check(fn, args, train=train)
    (call,) = seen.calls()
    assert len(named(call).a) == 2 and named(call).bias[0].meta["val"].dim() == 1


def test_two_biases_and_a_scaled_one() -> None:
    """The operation has one bias for all its products, with no factor: another one stays where it is."""

    def fn(x: Any, u: Any, c: Any, y: Any, v: Any, r: Any, twice: bool) -> Any:
        second = torch.nn.functional.linear(y, v, c) * (1 if twice else 2)
        return torch.nn.functional.linear(x, u, c if twice else None) + second + x @ u.t() * 0.5 + r

    args = (rand(16, 64), rand(128, 64), rand(128), rand(16, 32), rand(128, 32), rand(16, 128))
    for twice in (True, False):
        seen = check(fn, (*args, twice), budget=2.0)
        assert all(len(named(call).bias) <= 1 for call in seen.calls())
