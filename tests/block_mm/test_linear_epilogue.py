"""A linear and the activation behind it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inductor_fusions.fusions import linear_epilogue
from tests.block_mm.support import check, rand, run
from tests.support.arguments import named

TAILS: dict[str, Callable[..., Any]] = {
    "relu": lambda x, w, b, y: F.relu(F.linear(x, w, b)),
    "quick": lambda x, w, b, y: (lambda h: h * torch.sigmoid(1.702 * h))(F.linear(x, w, b)),
    "squared": lambda x, w, b, y: F.relu(F.linear(x, w, b)).square(),
    "gelu": lambda x, w, b, y: F.gelu(F.linear(x, w)),
    "sigmoid": lambda x, w, b, y: torch.sigmoid(F.linear(x, w) + 0.3 * y + b),
    "tanh": lambda x, w, b, y: torch.tanh(F.linear(x, w, b)),
    "silu": lambda x, w, b, y: F.silu(F.linear(x, w, b)),
    "gelu_tanh": lambda x, w, b, y: F.gelu(F.linear(x, w, b), approximate="tanh"),
    "sigmoid alone": lambda x, w, b, y: torch.sigmoid(F.linear(x, w)),
    "scaled": lambda x, w, b, y: F.gelu(2 * F.linear(x, w)),
    "heads": lambda x, w, b, y: F.relu(F.linear(x, w, b).view(2, 16, 4, 8)).transpose(1, 2),
    "residual": lambda x, w, b, y: F.relu(F.linear(x, w, b) + y),
}
#: Those that go into the kernel; the others stay in the graph, for Inductor's scheduler to fuse.
INSIDE = {
    "relu": "relu", "gelu": "gelu", "silu": "silu", "gelu_tanh": "gelu_tanh", "sigmoid alone": "sigmoid",
    "heads": "relu", "quick": "gelu_quick", "squared": "relu_squared",
}  # fmt: skip


@pytest.mark.parametrize("name", TAILS)
def test_tail(name: str) -> None:
    args = (rand(2, 16, 64), rand(32, 64), rand(32), rand(2, 16, 32))
    seen = check(TAILS[name], args, budget=2.0)
    (call,) = seen.calls()
    assert named(call).activations == INSIDE.get(name, "") and len(named(call).a) == 1
    assert seen.fused("linear_epilogue") == 1 and seen.products() == 0


def test_training() -> None:
    seen = check(TAILS["gelu"], (rand(16, 64), rand(32, 64), rand(32), rand(16, 32)), train=True, budget=2.0)
    assert seen.fused("linear_epilogue") == 1
    (call, *_) = seen.calls()
    assert named(call).activations == ""  # the backward needs what the linear gives


@pytest.mark.parametrize("between, name", [(torch.nn.ReLU, "relu"), (torch.nn.Identity, "")])
def test_one_after_the_other(between: Callable[..., torch.nn.Module], name: str) -> None:
    """Each reads what has taken the place of the activation, or of the linear, before it."""
    widths = [64, 32, 48, 16]
    layers = [torch.nn.Sequential(torch.nn.Linear(*pair), between()) for pair in pairwise(widths)]
    seen = check(torch.nn.Sequential(*layers).bfloat16(), (rand(16, 64),), budget=3.0)
    assert [named(call).activations for call in seen.calls()] == [name] * 3


def test_read_beside_its_activation() -> None:
    """The linear is used as well: the activation stays behind it, for the scheduler."""

    def fn(x: Any, w: Any) -> Any:
        y = F.linear(x, w)
        return F.gelu(y), y + 1

    seen = check(fn, (rand(16, 64), rand(32, 64)), budget=2.0)
    (call,) = seen.calls()
    assert named(call).activations == "" and seen.fused("linear_epilogue") == 1


#: Functions of two inputs (32, 64) and a weight (64, 64): a linear without an activation, and no cross layer.
NO_SITES: dict[str, Callable[..., Any]] = {
    "alone": lambda x0, x, w: F.linear(x, w),
    "a number is added": lambda x0, x, w: F.linear(x, w) + 1,
    "summed": lambda x0, x, w: F.linear(x, w).sum(-1),
    "an activation in front": lambda x0, x, w: F.linear(F.relu(x), w),
    "multiplied": lambda x0, x, w: x0 * F.linear(x, w),
    "multiplied by one row": lambda x0, x, w: x0[:1] * F.linear(x, w) + x,
    "one row is added": lambda x0, x, w: x0 * F.linear(x, w) + x[0],
    "added to a product of inputs": lambda x0, x, w: F.linear(x, w) + x * x0,
}


@pytest.mark.parametrize("name", NO_SITES)
def test_no_site(name: str) -> None:
    assert not check(NO_SITES[name], (rand(32, 64), rand(32, 64), rand(64, 64)), budget=2.0).sites


#: Functions of x (rows, 64) and a weight (32, 64), beside which no activation stands.
FEW_ROWS: dict[str, Callable[..., Any]] = {
    "alone": F.linear,
    "residual": lambda x, w: F.linear(x, w) + x[:, :32],
    "bias": lambda x, w: F.linear(x, w, w[:, 0].contiguous()),
    "normalised": lambda x, w: F.linear(x, w).softmax(-1),
    "decoding": lambda x, w: F.linear(x.unsqueeze(1), w).amax(-1),
    "read by a product": lambda x, w: F.linear(x, w) @ w,
}


@pytest.mark.parametrize("name", FEW_ROWS)
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_few_rows(name: str, rows: int) -> None:
    seen = check(FEW_ROWS[name], (rand(rows, 64), rand(32, 64)), budget=2.0)
    assert seen.fused("linear_epilogue") == 1
    kernels = [site.kernel.split()[1] for site in seen.sites if site.verdict == "fused"]
    assert kernels == ["row" if rows <= 4 else "tiled"]


@pytest.mark.parametrize(("fn", "args", "dynamic"), [
    (F.linear, (rand(17, 64), rand(32, 64)), None),
    (F.linear, (rand(1, 64).float(), rand(32, 64).float()), None),
    (torch.mm, (rand(1, 64), rand(64, 32)), None),
    (F.linear, (rand(3, 64), rand(32, 64)), True),
], ids=["17 rows", "float32", "a weight (in, out)", "symbolic rows"])  # fmt: skip
def test_no_few_rows(fn: Callable[..., Any], args: tuple[Any, ...], dynamic: bool | None) -> None:
    assert not check(fn, args, budget=2.0, dynamic=dynamic).sites


def test_few_rows_are_fused_where_they_pay() -> None:
    """The second linear of an MLP of Llama-3.1-8B pays; one of 16 columns is near no measurement."""
    weights = torch.empty(4096, 14336, dtype=torch.bfloat16), torch.empty(16, 2048, dtype=torch.bfloat16)
    found = []
    for weight in weights:
        x = torch.empty(1, weight.shape[1], dtype=torch.bfloat16)
        found += [(site.verdict, site.code) for site in run(F.linear, (x, weight), policy="profitable").sites]
    assert found == [("fused", ""), ("left to stock", "not-measured")]


def test_read_by_a_product() -> None:
    def fn(x: Any, w: Any, v: Any) -> Any:
        y = F.linear(x, w)
        return F.relu(y), y @ v

    seen = check(fn, (rand(32, 64), rand(32, 64), rand(32, 16)))
    assert seen.reasons("linear_epilogue") == ["an operation that is not pointwise also reads the linear"]


def test_a_stale_input_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site whose input is in no graph any more stays as it is, and so does the compile."""
    monkeypatch.setattr(linear_epilogue, "product", functools.cache(linear_epilogue.product))
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(2)]
    seen = check(torch.nn.Sequential(*layers).bfloat16(), (rand(16, 64),), budget=3.0, strict=False)
    assert [site.verdict for site in seen.sites] == ["fused", "failed"]


def test_a_small_number_is_added() -> None:
    """What keeps a logarithm finite is not taken for a rounding error."""

    def fn(x: Any, w: Any) -> Any:
        return (F.relu(F.linear(x, w).float()) + 1e-12).to(x.dtype).log()

    seen = check(fn, (rand(16, 64), rand(32, 64)), budget=2.0)
    assert all(bool(y.isfinite().all()) for y in seen.outputs)


def test_float64_result() -> None:
    """In float32 this sigmoid is 0."""

    def fn(x: Any, w: Any) -> Any:
        return torch.sigmoid(F.linear(x, w).double())

    assert "the result has dtype float64, which no kernel supports" in check(
        fn, (rand(16, 64), rand(32, 64))
    ).reasons("linear_epilogue")


def test_broadcast_against_itself() -> None:
    def fn(x: Any, w: Any) -> Any:
        y = F.linear(x, w)
        return y.unsqueeze(0) * torch.sigmoid(y).unsqueeze(1)

    seen = check(fn, (rand(16, 64), rand(32, 64)), budget=2.0)
    assert "the result of the linear is broadcast" in seen.reasons("linear_epilogue")


#: Functions of x (32, 64), a linear of it to 64 columns, and y (64,); what stock computes the activation in.
NOT_STORED: dict[str, tuple[Callable[..., Any], str]] = {
    "mean": (lambda x, h, w, y: F.relu(h).mean(0) @ w, "mean"),
    "squeeze and excite": (
        lambda x, h, w, y: x + F.silu(h) * torch.sigmoid(F.silu(h).mean(0) @ w),
        "mean and mul",
    ),
    "cat": (lambda x, h, w, y: torch.cat((F.relu(h), x), 1) @ torch.cat((w, w)), "cat or stack"),
    "norm": (lambda x, h, w, y: F.layer_norm(F.gelu(h + x), (64,)) @ w, "sub and var_mean"),
    "broadcast": (lambda x, h, w, y: F.relu(h)[:, None] * y[:4, None], "mul"),
}
STORED: dict[str, Callable[..., Any]] = {
    "product": lambda x, h, w, y: F.relu(h) @ w,
    "output": lambda x, h, w, y: F.relu(h),
    "heads": lambda x, h, w, y: F.relu(h).view(32, 4, 16).transpose(0, 1).contiguous() @ w[:16, :16],
    "residual and norm": lambda x, h, w, y: (F.layer_norm(F.relu(h) + x, (64,)) @ w, F.relu(h) @ w),
    "another linear": lambda x, h, w, y: (torch.sigmoid(h) * (x @ w)) @ w,
}


def verdict_without_tables(fn: Callable[..., Any], rows: int = 32) -> list[str]:
    args = (rand(rows, 64), rand(64, 64), rand(64, 64), rand(64))
    seen = run(lambda x, v, w, y: fn(x, F.linear(x, v), w, y), args, policy="profitable")
    return [site.reason for site in seen.sites if site.fusion == "linear_epilogue"]


@pytest.mark.parametrize("name", NOT_STORED)
def test_stock_does_not_store_the_activation(name: str) -> None:
    fn, readers = NOT_STORED[name]
    (reason, *_) = verdict_without_tables(fn)
    assert f"in the kernels that read it ({readers}), and does not store it" in reason
    assert all("not store it" not in each for each in verdict_without_tables(fn, rows=16))


@pytest.mark.parametrize("name", STORED)
def test_stock_stores_the_activation(name: str) -> None:
    reasons = verdict_without_tables(STORED[name])
    assert reasons and all("not store it" not in each for each in reasons)
