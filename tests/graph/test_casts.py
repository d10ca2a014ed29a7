"""Casts that round for a purpose: to float8 and back, or through a dtype below those of a computation.

Every recogniser looks through casts that belong to a computation: up to float32 and back, to the dtype of the
products, or to that of the result. These do not, and must not vanish.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_fusions import _inductor, config, operands, testing
from inductor_fusions.fusions.dot_interaction import triangles
from inductor_fusions.graph.builder import Builder
from tests.block_mm.support import rand, run
from tests.support.arguments import named
from tests.support.errors import relative

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Quantised and back."""
    return x.to(E4M3).to(x.dtype)


def e5m2(x: torch.Tensor) -> torch.Tensor:
    return x.to(E5M2).to(x.dtype)


def through_float16(x: torch.Tensor) -> torch.Tensor:
    return x.to(F16).to(x.dtype)


def through_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.to(BF16).to(x.dtype)


#: Name -> dtype of the operands, and what rounds.
LOSSY: dict[str, tuple[torch.dtype, Callable[[torch.Tensor], torch.Tensor]]] = {
    "bfloat16 as e4m3": (BF16, e4m3),
    "bfloat16 as e5m2": (BF16, e5m2),
    "bfloat16 as float16": (BF16, through_float16),
    "float16 as bfloat16": (F16, through_bfloat16),
    "float16 as e4m3": (F16, e4m3),
    "float32 as bfloat16": (F32, through_bfloat16),
    "float32 as float16": (F32, through_float16),
    "float32 as e5m2": (F32, e5m2),
}


def taken_out(rounded: str) -> bool:
    """Whether Inductor itself takes these casts out: between dtypes of 16 bits, and before torch 2.13 between
    one of them and float32 too."""
    halves = rounded in ("bfloat16 as float16", "float16 as bfloat16")
    return halves or (
        _inductor.torch_version() < (2, 13) and rounded in ("float32 as bfloat16", "float32 as float16")
    )


#: What computes on linears, with a cast in the middle.
#: name -> (function, what may be fused where the cast is kept).
LINEARS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "before an activation": (lambda cast, x, w, u, a, b: F.silu(cast(F.linear(x, w))), {"linear_epilogue"}),
    "within an activation": (
        lambda cast, x, w, u, a, b: (y := F.linear(x, w)) * cast(torch.sigmoid(y)), {"linear_epilogue"},
    ),
    "before a gate": (
        lambda cast, x, w, u, a, b: cast(F.silu(F.linear(x, w))) * F.linear(x, u), {"linear_epilogue", "qkv"},
    ),
    "behind what a gate multiplies": (
        lambda cast, x, w, u, a, b: F.silu(F.linear(x, w)) * cast(F.linear(x, u)), {"linear_epilogue", "qkv"},
    ),
    "in a sum of products": (
        lambda cast, x, w, u, a, b: cast(x @ w.t()) + cast(x.flip(0) @ u.t()), set(),
    ),
    "within an adapter": (
        lambda cast, x, w, u, a, b: F.linear(x, w) + 2.0 * F.linear(cast(F.linear(x, a)), b), {"qkv"},
    ),
    "on the sum with an adapter": (
        lambda cast, x, w, u, a, b: cast(F.linear(x, w) + F.linear(F.linear(x, a), b)) + 1.0, {"lora"},
    ),
    "behind an adapter": (
        lambda cast, x, w, u, a, b: F.linear(x, w) + cast(F.linear(F.linear(x, a), b)), {"qkv"},
    ),
    "before an adapter": (
        lambda cast, x, w, u, a, b: F.linear(x, w) + F.linear(F.linear(cast(x), a), b), {"lora"},
    ),
}  # fmt: skip


def matrices(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, two weights, and an adapter."""
    shapes = (96, 64), (64, 64), (64, 64), (16, 64), (64, 16)
    return tuple(rand(*shape, dtype=dtype, grad=False) / 4 for shape in shapes)


@pytest.mark.parametrize("rounded", [name for name, (dtype, cast) in LOSSY.items() if not taken_out(name)])
@pytest.mark.parametrize("name", LINEARS)
def test_linears(name: str, rounded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is that with the cast, and not that without it."""
    monkeypatch.setattr(operands, "may_use_tf32", lambda: True)
    function, allowed = LINEARS[name]
    dtype, cast = LOSSY[rounded]
    torch.manual_seed(0)
    inputs = matrices(dtype)
    seen = run(lambda *args: function(cast, *args), inputs)
    (found,) = seen.outputs
    wanted, without = function(cast, *inputs), function(lambda x: x, *inputs)
    assert {site.fusion for site in seen.sites if site.verdict == "fused"} <= allowed
    assert found.dtype == wanted.dtype
    assert relative(found, wanted) < relative(without, wanted) / 3


def kept(x: torch.Tensor) -> torch.Tensor:
    """What the cast is for a computation of its own: up, and back."""
    return x.to(F32).to(x.dtype)


#: Function -> what is fused where the cast only belongs to the computation.
FUSED = {
    "before an activation": "linear_epilogue", "within an activation": "linear_epilogue",
    "before a gate": "gated_mlp", "behind what a gate multiplies": "gated_mlp", "within an adapter": "lora",
    "on the sum with an adapter": "lora", "behind an adapter": "lora", "before an adapter": "lora",
}  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
def test_linears_between_casts_that_keep(name: str) -> None:
    """The positive twin."""
    seen = run(lambda *args: LINEARS[name][0](kept, *args), matrices(BF16))
    assert seen.fused(FUSED[name]) == 1


@pytest.mark.parametrize("dtype", [E4M3, F16])
def test_result_in_another_dtype(dtype: torch.dtype) -> None:
    """The activation goes into the kernel, and float16 is what that rounds to; float8 is behind it."""
    seen = run(lambda x, w, u, a, b: F.relu(F.linear(x, w)).to(dtype), matrices(BF16))
    (call,) = seen.calls()
    assert named(call).activations == "relu"
    assert call.meta["val"][0].dtype == (BF16 if dtype == E4M3 else F16)
    assert seen.outputs[0].dtype == dtype


ATTENTIONS: dict[str, Callable[..., Any]] = {
    "the scores": lambda cast, q, k, v: torch.softmax(cast(q @ k.mT), -1) @ v,
    "scores that were widened": lambda cast, q, k, v: (
        torch.softmax(cast((q @ k.mT).to(F32)), -1, dtype=F32).to(v.dtype) @ v
    ),
    "the weights": lambda cast, q, k, v: cast(torch.softmax(q @ k.mT, -1)) @ v,
}


#: Scores that were widened are rounded to fewer bits than the operands have by these two alone.
ROUNDED = [
    (name, rounded)
    for name in ATTENTIONS
    for rounded in LOSSY
    if name != "scores that were widened" or rounded in ("bfloat16 as e4m3", "float32 as bfloat16")
]


@pytest.mark.parametrize(("name", "rounded"), ROUNDED)
def test_attention(name: str, rounded: str) -> None:
    dtype, cast = LOSSY[rounded]
    inputs = [(torch.randn(2, 3, n, 16) * 0.7).to(dtype) for n in (7, 13, 13)]
    run = testing.capture(
        lambda *args: ATTENTIONS[name](cast, *args), *inputs, train=False, backend=testing.EAGER_AFTER_PASSES
    )
    (site,) = [site for site in run.sites if site.fusion == "attention"]
    assert site.verdict == "rejected" and "rounded to" in site.reason
    torch.testing.assert_close(run.outputs, ATTENTIONS[name](cast, *inputs), equal_nan=True)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_between_casts_that_keep(name: str, dtype: torch.dtype) -> None:
    inputs = [(torch.randn(2, 3, n, 16) * 0.7).to(dtype) for n in (7, 13, 13)]
    testing.check(
        lambda *args: ATTENTIONS[name](kept, *args), inputs, fused=1, train=False,
        backend=testing.EAGER_AFTER_PASSES,
    )  # fmt: skip


def test_mask_in_float8() -> None:
    """float8_e4m3fn has no infinity: what hides a key becomes no number, and so does the result."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        seen = torch.ones(7, 7, dtype=torch.bool).tril()
        mask = torch.where(seen, 0.0, -torch.inf).to(E4M3).to(F32)
        return torch.softmax(q @ k.mT + mask, -1) @ v

    inputs = [torch.randn(2, 3, 7, 16) for _ in range(3)]
    with config.patch(policy="always"):
        run = testing.capture(attention, *inputs, train=False, backend=testing.EAGER_AFTER_PASSES)
    assert not any("causal" in site.kernel for site in run.sites)
    torch.testing.assert_close(run.outputs, attention(*inputs), equal_nan=True)


def test_indices_in_a_dtype_that_cuts_them_off() -> None:
    """Rows of a triangle with more than 127 of them, as int8 and back."""
    graph = torch.fx.Graph()
    made = graph.call_function(torch.tril_indices, (130, 130))
    steps = [made, graph.call_method("to", (made, torch.int8))]
    steps.append(graph.call_method("long", (steps[1],)))
    for node, dtype in zip(steps, (torch.int64, torch.int8, torch.int64), strict=True):
        node.meta["example_value"] = torch.tril_indices(130, 130).to(dtype)
    for source, known in ((made, True), (steps[-1], False)):
        index = graph.call_function(operator.getitem, (source, 0))
        index.meta["example_value"] = torch.zeros(3, dtype=torch.int64)
        assert (triangles._content(index) is not None) == known


def test_holds() -> None:
    """Reflexive and transitive; float32 holds both of 16 bits, and neither of these the other."""
    dtypes = BF16, F16, F32, F64
    assert all(operands.holds(dtype, dtype) for dtype in dtypes)
    for a, b, c in itertools.product(dtypes, repeat=3):
        if operands.holds(a, b) and operands.holds(b, c):
            assert operands.holds(a, c)
    assert operands.holds(F64, F32) and operands.holds(F32, BF16) and operands.holds(F32, F16)
    assert not operands.holds(BF16, F16) and not operands.holds(F16, BF16)
    assert operands.holds(BF16, F32, BF16) and not operands.holds(BF16, F32)
    assert not operands.holds(E4M3, E4M3) and not operands.holds(F32, E4M3) and not operands.holds(F32)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_truncated_by_bits(dtype: torch.dtype) -> None:
    """A number of the dtype, which no cast rounds: Inductor drops a cast and the one back."""
    x = torch.randn(64) * 100
    module = fx.symbolic_trace(lambda x: (x,))
    (placeholder, output) = module.graph.nodes
    placeholder.meta["val"] = FakeTensorMode().from_tensor(x)
    found = Builder(output, like=placeholder).truncated(placeholder, dtype)
    output.args = ((found,),)
    module.recompile()
    (made,) = module(x)
    assert torch.equal(made.to(dtype).float(), made) and (x - made).abs().max() < x.abs().max() * 2**-7
    assert all(node.target is not torch.ops.prims.convert_element_type.default for node in module.graph.nodes)
