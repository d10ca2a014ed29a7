"""act(x @ Wg) * (x @ Wu): every activation in every spelling, and what is near it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inductor_fusions.reasons import Reason
from tests.block_mm.support import GatedMLP, check, rand, run
from tests.support.arguments import named


def gelu_new(x: Any) -> Any:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


ACTIVATIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "silu": ("silu", F.silu),
    "silu by hand": ("silu", lambda x: x * torch.sigmoid(x)),
    "silu by exp": ("silu", lambda x: x / (1 + torch.exp(-x))),
    "silu in float32": ("silu", lambda x: F.silu(x.float()).to(x.dtype)),
    "gelu": ("gelu", F.gelu),
    "gelu by hand": ("gelu", lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    "gelu tanh": ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    "gelu new": ("gelu_tanh", gelu_new),
    "relu": ("relu", F.relu),
    "quick": ("gelu_quick", lambda x: x * torch.sigmoid(1.702 * x)),
    "squared": ("relu_squared", lambda x: F.relu(x).square()),
    "squared by pow": ("relu_squared", lambda x: torch.pow(F.relu(x), 2)),
    "sigmoid": ("sigmoid", torch.sigmoid),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str) -> None:
    expected, act = ACTIVATIONS[name]
    seen = check(GatedMLP(act).bfloat16(), (rand(2, 16, 64),))
    (call,) = seen.calls()
    assert named(call).activations == f"{expected}," and named(call).gated is True
    assert seen.products() == 1 and seen.fused("gated_mlp") == 1


def test_bias() -> None:
    (call,) = check(GatedMLP(F.silu, bias=True).bfloat16(), (rand(2, 16, 64),)).calls()
    assert list(named(call).bias_groups) == [0, 1]


def test_gate_on_the_right() -> None:
    w, v = rand(32, 64), rand(32, 64)
    (call,) = check(lambda x, w, v: F.linear(x, v) * F.silu(F.linear(x, w)), (rand(16, 64), w, v)).calls()
    assert named(call).activations == "silu,"


#: One linear to 64 columns, whose result is taken apart: (gate, what it multiplies) of it.
PACKED: dict[str, Callable[[Any], Any]] = {
    "chunk": lambda h: h.chunk(2, -1),
    "chunk, up first": lambda h: h.chunk(2, -1)[::-1],
    "split": lambda h: h.split(32, dim=-1),
    "split with sizes": lambda h: torch.split(h, [32, 32], dim=-1),
    "tensor_split": lambda h: h.tensor_split(2, -1),
    "slices": lambda h: (h[..., :32], h[..., 32:]),
    "interleaved": lambda h: (h[..., ::2], h[..., 1::2]),
    "narrow": lambda h: (h.narrow(-1, 32, 32), h.narrow(-1, 0, 32)),
    "rows": lambda h: h.unflatten(-1, (2, 32)).unbind(-2),
    "columns": lambda h: h.view(*h.shape[:-1], 32, 2).unbind(-1),
    "selected": lambda h: (lambda t: (t.select(-2, 0), t[..., 1, :]))(h.view(*h.shape[:-1], 2, 32)),
    "a quarter each": lambda h: (h[..., 16:32], h[..., 48:]),
    "of a half": lambda h: h[..., 16:48].chunk(2, -1),
}  # fmt: skip


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", PACKED)
def test_packed(name: str, bias: bool) -> None:
    """Columns of a product are a product with columns of the weight."""

    def fn(x: Any, w: Any, b: Any) -> Any:
        gate, up = PACKED[name](F.linear(x, w, b if bias else None))
        return F.silu(gate) * up

    seen = check(fn, (rand(2, 8, 64), rand(64, 64), rand(64)))
    (call,) = seen.calls()
    assert named(call).gated is True and seen.products() == 0 and seen.fused("gated_mlp") == 1


def test_glu() -> None:
    (call,) = check(
        lambda x, w, b: F.glu(F.linear(x, w, b)), (rand(2, 8, 64), rand(64, 64), rand(64))
    ).calls()
    assert named(call).activations == "sigmoid," and named(call).gated is True
    assert not check(lambda x, w: F.glu(F.linear(x, w), 0), (rand(16, 64), rand(64, 64))).fused("gated_mlp")


def chunked(x: Any, w: Any) -> Any:
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize(("rows", "asked"), [(16, True), (512, False)])
def test_packed_is_measured_for_few_rows(rows: int, asked: bool) -> None:
    """The gains in the tables are against two linears; stock computes a packed one at once."""
    seen = run(chunked, (rand(rows, 64), rand(64, 64)), policy="profitable")
    (reason,) = (site.reason for site in seen.sites if site.fusion == "gated_mlp")
    assert ("gate and up are one linear" not in reason) == asked, reason


def test_packed_in_training() -> None:
    """The backward reads what is taken apart: one linear stays, as it is."""
    seen = check(chunked, (rand(16, 64), rand(64, 64)), train=True, budget=2.0)
    assert seen.codes("gated_mlp")[0] == "used-elsewhere"


#: x, weight to 64 columns -> what is not a gate times as many columns of the same linear.
NOT_PACKED: dict[str, Callable[[Any, Any], Any]] = {
    "rows": lambda x, w: F.silu(F.linear(x, w)[:8]) * F.linear(x, w)[8:],
    "the whole as well": lambda x, w: (lambda h: F.silu(h[..., :32]) * h[..., 32:] + h.sum(-1, keepdim=True))(
        F.linear(x, w)
    ),
    "the same columns": lambda x, w: (lambda h: F.silu(h[..., :32]) * h[..., :32])(F.linear(x, w)),
    "one column": lambda x, w: (lambda h: F.silu(h[..., :1]) * h[..., 1:])(F.linear(x, w)),
    "turned round": lambda x, w: (lambda h: F.silu(h[..., :32]) * h[..., 32:].flip(-1))(F.linear(x, w)),
    "an element": lambda x, w: (lambda h: F.silu(h[3]) * h[4])(F.linear(x, w).view(-1)),
    "rows of a view": lambda x, w: (lambda h: F.silu(h[:, 0]) * h[:, 1])(F.linear(x, w).view(8, 2, 64)),
}


@pytest.mark.parametrize("name", NOT_PACKED)
def test_not_packed(name: str) -> None:
    seen = check(NOT_PACKED[name], (rand(16, 64), rand(64, 64)), budget=2.0)
    assert not seen.fused("gated_mlp")


#: Near misses: x, w, v -> a value that is not act(x w) * (x v) with an activation that is known.
NEAR: dict[str, Callable[[Any, Any, Any], Any]] = {
    "another slope": lambda x, w, v: (x @ w) * torch.sigmoid(1.6 * (x @ w)) * (x @ v),
    "another constant": lambda x, w, v: 0.5 * (x @ w) * (1 + torch.erf((x @ w) * 0.7)) * (x @ v),
    "half of gelu": lambda x, w, v: (x @ w) * (1 + torch.erf((x @ w) / math.sqrt(2.0))) * (x @ v),
    "a sum": lambda x, w, v: F.silu(x @ w) + (x @ v),
    "tanh": lambda x, w, v: torch.tanh(x @ w) * (x @ v),
    "cubed": lambda x, w, v: F.relu(x @ w) ** 3 * (x @ v),
    "leaky": lambda x, w, v: F.leaky_relu(x @ w) * (x @ v),
    "both activated": lambda x, w, v: F.silu(x @ w) * F.silu(x @ v),
    "a small number more": lambda x, w, v: (F.relu(x @ w) + 1e-12) * (x @ v),
    "broadcast against each other": lambda x, w, v: F.silu(x @ w)[None] * (x @ v)[:, None],
    "the negative": lambda x, w, v: F.silu(-(x @ w)) * (x @ v),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_miss(name: str) -> None:
    seen = check(NEAR[name], (rand(16, 64), rand(64, 32), rand(64, 32)), budget=2.0)
    assert not seen.fused("gated_mlp")
    assert not any(named(call).gated for call in seen.calls())


@pytest.mark.parametrize(("steps", "told"), [(3, True), (60, False)])
def test_what_is_between_is_walked_once(steps: int, told: bool) -> None:
    """Each step has two paths to the linear: 60 of them would not end."""

    def fn(x: Any, w: Any, v: Any) -> Any:
        y = x @ w
        for _ in range(steps):
            y = torch.tanh(y) * (y + 1.0)
        return y * (x @ v)

    seen = run(fn, (rand(16, 64), rand(64, 32), rand(64, 32)))
    assert ("activation" in seen.codes("gated_mlp")) is told


def test_training() -> None:
    """The backward needs the linears: they become one operation with two outputs."""
    seen = check(GatedMLP(F.silu).bfloat16(), (rand(2, 16, 64),), train=True, budget=2.0)
    assert seen.codes("gated_mlp")[0] == "used-elsewhere"
    (call,) = seen.calls(0)
    assert named(call).gated is False and len(named(call).a) == 2
    assert any(list(named(c).groups) == [0, 0] for c in seen.calls(1))


def test_rows_that_inductor_pads() -> None:
    def fn(x: Any, w: Any, v: Any) -> Any:
        gate, up = ((F.pad(x, (0, 0, 0, 3)) @ each.t())[:-3] for each in (w, v))
        return F.silu(gate) * up

    seen = check(fn, (rand(37, 64), rand(128, 64), rand(128, 64)))
    assert seen.fused("gated_mlp") == 1 and seen.products() == 0


def gelu_inside(x: Any, w: Any, v: Any) -> Any:
    g, u = x @ w, x @ v
    return (0.5 * g) * ((1 + torch.erf(g * 0.5**0.5)) * u)


def with_a_third_factor(x: Any, w: Any, v: Any) -> Any:
    return torch.tanh(x @ w) * ((x @ v) * x.sum())


def normed(x: Any, w: Any, v: Any) -> Any:
    return torch.sigmoid(x @ w) * F.layer_norm(x @ v, (128,))


def of_another_input(x: Any, w: Any, v: Any) -> Any:
    return torch.sigmoid(x @ w) * ((x + 1) @ v + x.sum())


@pytest.mark.parametrize("fn", [gelu_inside, with_a_third_factor, normed, of_another_input])
def test_what_is_between_is_told(fn: Any) -> None:
    """Not of a part of a gate that is fused, and of linears of different inputs."""
    seen = check(fn, (rand(16, 64), rand(64, 128), rand(64, 128)), budget=2.0)
    told = fn in (with_a_third_factor, normed)
    assert seen.codes("gated_mlp") == [Reason.ACTIVATION.code] * told
    assert not told or "other tensors" in seen.reasons("gated_mlp")[0]
    assert seen.fused("gated_mlp") == (fn is gelu_inside)


def returned(x: Any, w: Any, v: Any, y: Any) -> Any:
    gate = F.silu(x @ w)
    return gate, gate * (x @ v)


def added(t: Any, x: Any, w: Any, v: Any) -> Any:
    return torch.addcmul(t, F.silu(x @ w), x @ v)


#: What `addcmul` adds to a pair, how, and the code of the reason if it is left.
ADDED: dict[str, tuple[tuple[int, ...], Callable[..., Any], str]] = {
    "a residual": ((16, 32), added, ""),
    "a bias": ((32,), added, ""),
    "to a multiple": ((16, 32), lambda t, x, w, v: torch.addcmul(t, x @ v, F.gelu(x @ w), value=0.5), ""),
    "to linears": ((16, 32), lambda t, x, w, v: torch.addcmul(t, x @ v, x @ w), ""),
    "broadcast": ((2, 16, 32), added, "shapes"),
    "float16": ((16, 32), added, "range"),
    "no kernel": ((16, 32), lambda t, x, w, v: torch.addcmul(t, torch.tanh(x @ w), x @ v), "activation"),
    "to one of the pair": ((1,), lambda t, x, w, v: t + (lambda h: torch.addcmul(h, F.silu(x @ w), h))(x @ v),
                           "used-elsewhere"),
    "to the gate": ((1,), lambda t, x, w, v: t + (lambda h: torch.addcmul(h, h, x @ v))(F.silu(x @ w)),
                    "used-elsewhere"),
}  # fmt: skip


@pytest.mark.parametrize("name", ADDED)
def test_added_to(name: str) -> None:
    """In the graphs of torch 2.11, `addcmul` is a product and a sum."""
    shape, fn, code = ADDED[name]
    dtype = torch.float16 if name == "float16" else torch.bfloat16
    seen = check(fn, [rand(*each, dtype=dtype) for each in (shape, (16, 64), (64, 32), (64, 32))], budget=2.0)
    decomposed = not any(node.target is torch.ops.aten.addcmul.default for node in seen.graphs[0].nodes)
    left = [code] * bool(code and not (decomposed and code in ("shapes", "range")))
    assert seen.codes("gated_mlp") == left, seen.reasons("gated_mlp")
    assert seen.fused("gated_mlp") == (not left)


#: A function of x, both weights and another input, the widths, and the code or the text of the only reason.
LEFT: dict[str, tuple[Callable[..., Any], tuple[int, int], str]] = {
    "different inputs": (lambda x, w, v, y: F.silu(x @ w) * (y @ v), (32, 32), "of different inputs"),
    "broadcast": (lambda x, w, v, y: torch.sigmoid(x @ w) * (x @ v), (1, 32), ""),
    "returned": (returned, (32, 32), "used-elsewhere"),
    "odd width": (lambda x, w, v, y: F.silu(x @ w) * (x @ v), (36, 36), "not a multiple of 8"),
    "no kernel": (lambda x, w, v, y: torch.tanh(x @ w) * (x @ v), (128, 128), Reason.ACTIVATION.code),
    # What a small factor keeps in range may overflow before it is applied.
    "float16": (lambda x, w, v, y: 0.01 * F.silu(x @ w) * (x @ v), (32, 32), Reason.RANGE.code),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    fn, widths, says = LEFT[name]
    dtype = torch.float16 if name == "float16" else torch.bfloat16
    shapes = (16, 64), (64, widths[0]), (64, widths[1]), (16, 64)
    seen = check(fn, [rand(*shape, dtype=dtype) for shape in shapes], budget=2.0)
    assert not seen.fused("gated_mlp") and (name != "returned" or seen.fused("qkv") == 1)
    (reason,) = seen.reasons("gated_mlp")
    assert says in (*seen.codes("gated_mlp"), "") or says in reason, reason


def test_experts_by_grouped_mm() -> None:
    """Tokens in the order of their experts, each of which has a matrix; the operation takes no float64."""

    def fn(x: Any, y: Any, w: Any, v: Any, ends: Any) -> Any:
        return F.silu(F.grouped_mm(x, w, offs=ends)) * F.grouped_mm(y, v, offs=ends)

    x, w, v = rand(48, 64, grad=False), rand(4, 64, 128, grad=False), rand(4, 64, 128, grad=False)
    ends = torch.tensor([16, 16, 40, 48], dtype=torch.int32)
    assert run(lambda *args: fn(x, *args), (x, w, v, ends)).codes("gated_mlp") == ["limit"]
    assert not run(fn, (x, x.flip(0), w, v, ends)).codes("gated_mlp")


def test_a_size_that_is_added() -> None:
    """A symbolic number beside a linear is no bias, and no tensor."""

    def fn(x: Any, w: Any, v: Any, n: int) -> Any:
        return F.linear(x, w) * (F.linear(x, v) + n)

    args = (torch.randn(2, 48, 64), torch.randn(128, 64), torch.randn(128, 64), 7)
    torch.testing.assert_close(run(fn, args, dynamic=True).outputs[0], fn(*args))
