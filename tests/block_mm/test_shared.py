"""Linears that share an input: what becomes one operation, and what must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.block_mm.support import Linears, check, rand, run
from tests.support import padding
from tests.support.arguments import named
from tests.support.modules import Module
from tests.support.on_a_gpu import compiled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True, (True, False, True)])
@pytest.mark.parametrize("outs", [(64, 64, 64), (64, 16, 16), (32, 128)])
def test_qkv(outs: tuple[int, ...], bias: Any, dtype: torch.dtype) -> None:
    """Equal and unequal widths, with every mixture of biases, in inference and in training."""
    bias = bias if isinstance(bias, bool) else bias[: len(outs)]
    model = Linears(64, outs, bias).to(dtype)
    x = rand(2, 16, 64, dtype=dtype)
    seen = check(model, (x,))
    (call,) = seen.calls()
    assert len(named(call).a) == len(outs) and seen.products() == 0
    assert seen.fused("qkv") == 1 and not seen.reasons("qkv")
    trained = check(model, (x,), train=True)
    assert len(trained.calls(0)) == 1 and trained.products(0) == 0


def test_backward_is_one_sum_and_one_group() -> None:
    """dX = sum of dY_i @ W_i is one product chain, and the gradients of the weights are one group."""
    seen = check(Linears(64, (64, 32, 32)).bfloat16(), (rand(2, 16, 64),), train=True)
    calls = sorted(seen.calls(1), key=lambda call: named(call).groups[-1])
    assert [list(named(call).groups) for call in calls] == [[0, 0, 0], [0, 1, 2]]
    assert seen.products(1) == 0


def test_backward_with_a_term_that_is_turned() -> None:
    """The term that is no product is viewed behind the place of the sum: its views are moved first."""

    def fn(x: Any, w: Any, v: Any, u: Any) -> Any:
        return F.linear(x, w), F.linear(x, v), torch.einsum("...i,oi->...o", x, u)

    args = [rand(1, 32), *(rand(16, 32) for _ in range(3))]
    seen = check(fn, tuple(t.requires_grad_() for t in args), train=True)
    assert any(len(named(call).a) == 2 and named(call).bias for call in seen.calls(1))


@pytest.mark.parametrize(
    ("equation", "shape"), [("bsi,oi->bso", (32, 64)), ("ibh,hnd->ibnd", (64, 4, 8))], ids=["linear", "heads"]
)
def test_einsum_on_three_dims(equation: str, shape: tuple[int, ...]) -> None:
    """It is a bmm of one sample, which Inductor makes an mm of, on a GPU."""
    from torch._inductor.fx_passes import joint_graph

    if not hasattr(joint_graph, "bmm_to_mm"):
        pytest.skip("this torch leaves it a bmm")

    def fn(x: Any, w: Any, v: Any) -> Any:
        return torch.einsum(equation, x, w), torch.einsum(equation, x, v)

    args = tuple(t.requires_grad_() for t in (rand(2, 16, 64), rand(*shape), rand(*shape)))
    seen = check(fn, args, train=True)
    assert len(seen.calls(0)) == 1 and [len(named(call).a) for call in seen.calls(1)] == [2, 2]
    assert seen.products(0) == seen.products(1) == 0
    with compiled(fn) as (call, seen):
        call(*args)
    assert len(seen.calls()) == 1 and seen.products() == 0


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_inputs_that_are_computed_more_than_once(train: bool) -> None:
    """AOTAutograd merges equal operations in training alone."""

    def normed(x: Any, w: Any, v: Any, u: Any) -> Any:
        return tuple(F.linear(F.rms_norm(x, (64,)), each) for each in (w, v, u))

    def gated(x: Any, w: Any, v: Any, p: Any) -> Any:
        return F.silu(F.linear(x * p, w)) * F.linear(x * p, v)

    x, w, v, u = rand(2, 16, 64), rand(64, 64), rand(64, 64), rand(64, 64)
    seen = check(normed, (x, w, v, u), train=train)
    assert seen.fused("qkv") >= 1 and seen.products() == 0
    seen = check(gated, (x, w, v, rand(2, 16, 1)), train=train)
    assert seen.fused("qkv" if train else "gated_mlp") and seen.products() == 0


def test_inputs_that_are_computed_in_two_ways() -> None:
    """Norms with two epsilons, and two draws of a dropout, are two inputs."""

    def normed(x: Any, w: Any, v: Any) -> Any:
        return F.linear(F.rms_norm(x, (64,), None, 1e-5), w), F.linear(F.rms_norm(x, (64,), None, 0.1), v)

    def dropped(x: Any, w: Any, v: Any) -> Any:
        return F.linear(F.dropout(x, 0.5), w), F.linear(F.dropout(x, 0.5), v)

    inputs = rand(2, 16, 64), rand(64, 64), rand(64, 64)
    assert not check(normed, inputs).fused("qkv")
    assert not run(dropped, inputs).fused("qkv")


def linears(x: Any, *weights: Any) -> Any:
    return tuple(F.linear(x, w) for w in weights)


def meet_through_a_cast(x: Any, w: Any, v: Any) -> Any:
    return F.linear(x.to(w.dtype), w), F.linear(x.reshape(32, 64).to(w.dtype), v)


def padded_columns(x: Any, w: Any, v: Any) -> Any:
    """The input is padded once for each product, in the same way: one value."""
    return F.pad(x, (0, 4)) @ w.t(), F.pad(x, (0, 4)) @ v.t(), F.pad(x, (4, 0)) @ v.t()


def one_stands_in_the_way(x: Any, w: Any, v: Any) -> Any:
    q, k = x @ w, x @ v
    return q, k, x @ q.relu()


#: A function, its inputs, and how many products each operation has.
INPUTS: dict[str, tuple[Callable[..., Any], list[torch.Tensor], list[int]]] = {
    "that meet through a cast": (
        meet_through_a_cast, [rand(2, 16, 64, dtype=torch.float32), rand(32, 64), rand(16, 64)], [2],
    ),
    "that differ": (
        lambda x, y, w, v: (F.linear(x, w), F.linear(y, v)),
        [rand(32, 64), rand(32, 64), rand(32, 64), rand(16, 64)], [],
    ),
    "that are permuted differently": (
        lambda x, w, v: (x.t() @ w, x.reshape(64, 64) @ v), [rand(64, 64), rand(64, 32), rand(64, 16)], [],
    ),
    "that are transposed": (
        lambda x, w, v: (x.t() @ w, x.t() @ v), [rand(64, 32), rand(64, 32), rand(64, 16)], [2],
    ),
    "whose columns are padded": (padded_columns, [rand(32, 60), rand(32, 64), rand(16, 64)], [2]),
    "of which one stands in the way": (
        one_stands_in_the_way, [rand(64, 64), rand(64, 64), rand(64, 64)], [2],
    ),
    "of ten linears": (linears, [rand(8, 32), *(rand(16, 32) for _ in range(10))], [2, 8]),
    "of which one has odd columns": (linears, [rand(16, 64), rand(64, 64), rand(60, 64), rand(64, 64)], [2]),
    "of weights that are views": (
        lambda x, w, v, u: (F.linear(x, w[:32]), F.linear(x, w[32:]), x @ v[:, :48], x @ u),
        [rand(2, 16, 64), rand(64, 64), rand(64, 64), rand(64, 24)], [4],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(name: str) -> None:
    """Each product is in an operation, or is left: none is lost."""
    fn, inputs, products = INPUTS[name]
    seen = check(fn, inputs)
    assert sorted(len(named(call).a) for call in seen.calls()) == products
    assert name != "that differ" or not seen.sites
    trained = check(fn, inputs, train=True, budget=2.0)
    assert sorted(len(named(call).a) for call in trained.calls()) == products


def test_tied_weights() -> None:
    """One weight in two linears with different biases."""

    def fn(x: Any, w: Any, b: Any, c: Any) -> Any:
        return F.linear(x, w, b), F.linear(x, w, c)

    (call,) = check(fn, (rand(16, 64), rand(32, 64), rand(32), rand(32)), train=True).calls()
    assert named(call).b[0] is named(call).b[1]


@pytest.mark.parametrize(("fn", "reason"), [
    # The second weight is made from the first result, the third one from the second's.
    (lambda x, w: (y := x @ w, z := x @ y, x @ (z + 1)), "one of the products is an operand of another"),
    # The second weight is made from a function of the first result: never before it.
    (lambda x, w: x @ (x @ w).relu(), "before the operands of another are computed"),
])  # fmt: skip
def test_operand_of_another_product(fn: Any, reason: str) -> None:
    seen = check(fn, (rand(64, 64), rand(64, 64)), train=True, budget=2.0)
    assert all(len(named(call).a) == 1 for call in seen.calls(0))
    assert reason in seen.reasons("qkv")[0]


def test_keys_and_values_of_all_decoder_layers() -> None:
    """Cross-attention: as one group where they are kept anyway, as in training."""

    def decoder(net: Any, x: Any, memory: Any) -> Any:
        for q, k in zip(net.queries, net.keys, strict=True):
            x = x + torch.softmax(q(x) @ k(memory).t(), -1) @ memory
        return x

    parts = {
        name: nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3)) for name in ("keys", "queries")
    }
    model = Module(decoder, parts).bfloat16()
    trained = check(model, (rand(64, 32), rand(64, 32)), train=True, budget=2.0)
    assert max(len(named(call).a) for call in trained.calls(0)) == 3


def test_batches_that_are_no_linears_of_an_input() -> None:
    """Of an input whose samples could be one matrix, and of matrices of their own."""

    def fn(x: Any, w: Any, v: Any, m: Any) -> Any:
        x = x.transpose(1, 2)
        matrices = [w.expand(2, 64, 64), v.expand(2, 64, 64)]
        same = [torch.bmm(torch.relu(x).contiguous(), each) for each in matrices]
        return same, torch.bmm(x, m), torch.bmm(x, m * 2)

    seen = check(fn, (rand(2, 64, 48), rand(64, 64, grad=False), rand(64, 64, grad=False), rand(2, 64, 64)))
    assert not seen.reasons("qkv"), seen.reasons("qkv")


def test_not_where_it_needs_more_memory() -> None:
    """Results that are small in the end, one after the other, are not all held at once."""

    def fn(x: Any, *weights: Any) -> Any:
        return sum(((x @ w).float().exp().sum(-1) @ torch.ones(256, 1)) for w in weights)

    seen = run(fn, (rand(256, 64), *(rand(64, 512) for _ in range(4))))
    assert not [c for c in seen.calls() if len(named(c).a) == 4]
    assert any("peak memory" in reason for reason in seen.reasons("qkv"))


def test_one_that_is_left_over() -> None:
    """Values that would be in memory beside the scores: one site has q and k, another says why v is not."""

    def fn(x: Any, wq: Any, wk: Any, wv: Any) -> Any:
        return F.silu((x @ wq) @ (x @ wk).t()) @ (x @ wv)

    weights = [rand(64, n, grad=False) for n in (64, 64, 72)]
    seen = check(fn, (rand(256, 64, grad=False), *weights))
    fused, left = [site for site in seen.sites if site.fusion == "qkv"]
    assert fused.verdict == "fused" and fused.details["weights"] == "bfloat16[64, 64], bfloat16[64, 64]"
    assert (left.code, left.details["weights"]) == ("memory", "bfloat16[64, 72]")


@pytest.mark.parametrize(("width", "outs", "dtype", "says"), [
    (60, (64, 64), torch.bfloat16, "not a multiple of 8"),
    (64, (60, 64), torch.bfloat16, "the number of columns, 60, is not a multiple of 8"),
    (64, (64, 64), torch.float64, "the matrices have dtype float64, which no kernel supports"),
    (64, (64, 64), torch.float32, "TF32 is off"),
])  # fmt: skip
def test_left_alone(width: int, outs: tuple[int, ...], dtype: torch.dtype, says: str) -> None:
    seen = check(Linears(width, outs).to(dtype), (rand(32, width, dtype=dtype),))
    (reason,) = seen.reasons("qkv")
    assert not seen.calls() and says in reason


def test_float32_with_tf32(tf32: None) -> None:
    assert len(check(Linears(64, (64, 64)), (rand(16, 64, dtype=torch.float32),)).calls()) == 1


def test_dynamic_rows() -> None:
    """Proved for every number of rows; not measured, so left to stock unless asked for."""
    model = Linears(64, (64, 32)).bfloat16()
    assert len(check(model, (rand(7, 64),), dynamic=True).calls()) == 1
    left = run(model, (rand(7, 64),), dynamic=True, policy="profitable")
    assert not left.calls() and "symbolic" in left.reasons("qkv")[0]


def test_symbolic_sizes_of_operands_move_with_them() -> None:
    """Each input is a matrix of as many rows as there are tokens, which are counted for each."""

    class Shared(torch.nn.Linear):
        def forward(self, x: Any, y: Any) -> Any:
            first = super().forward(x)
            return first, super().forward(y * 2)

    for train in (False, True):
        args = (rand(6, 8, 64), rand(4, 2, 64))
        seen = check(Shared(64, 32, bias=False).bfloat16(), args, dynamic=True, train=train)
        assert seen.fused("qkv") >= 1


def test_input_that_is_an_output_of_another_group() -> None:
    """The second group reads what the first was fused into."""

    def chained(net: Any, x: Any) -> Any:
        y, z = net.first(x)
        return y, z, *net.second(y)

    parts = {"first": Linears(64, (64, 32)), "second": Linears(64, (32, 48))}
    seen = check(Module(chained, parts).bfloat16(), (rand(16, 64),), train=True)
    assert seen.fused("qkv") >= 2 and len(seen.calls()) == 2


def padded(x: Any, w: Any, bias: Any = None, value: float = 0.0) -> Any:
    """As Inductor pads the rows of a product that is aligned badly, where that is faster (pad_mm.py)."""
    rows = 8 - x.shape[0] % 8
    wide = F.pad(x, (0, 0, 0, rows), value=value)
    return (wide @ w.t() if bias is None else torch.addmm(bias, wide, w.t()))[:-rows]


@pytest.mark.parametrize("bias", [False, True])
def test_rows_that_inductor_pads(bias: bool) -> None:
    """Each product pads the input by itself; what is fused reads it as it was."""

    def fn(x: Any, w: Any, v: Any, b: Any) -> Any:
        return padded(x, w, b if bias else None), padded(x, v)

    x = rand(37, 64)
    seen = check(fn, (x, rand(32, 64), rand(16, 64), rand(32)))
    (call,) = seen.calls()
    assert seen.products() == 0 and seen.fused("qkv") == 1 and not seen.reasons("qkv")
    assert all(list(node.meta["val"].shape) == [37, 64] for node in named(call).a)


@pytest.mark.parametrize("which", range(4))
def test_gradients_that_inductor_pads(which: int) -> None:
    """Products of one weight's gradient are in several groups: with their padding, and as they are."""

    def fn(x: Any, *weights: Any) -> Any:
        first, second, third = (F.linear(x, w) for w in weights)
        return first * 0.5 * second * third

    with padding.padded(which):
        seen = check(fn, (rand(70, 32), *(rand(16, 32) for _ in range(3))), train=True)
    assert seen.fused("qkv") >= 2


def test_padded_product_of_a_padded_product() -> None:
    """One weight, twice in a row: the second product reads what is left of the first one's rows."""

    def fn(x: Any, w: Any) -> Any:
        y = padded(x, w)
        return y, padded(y, w)

    seen = check(fn, (rand(37, 64), rand(64, 64)))
    assert seen.reasons("qkv") == ["one of the products is an operand of another"]


def test_padding_that_is_read_elsewhere() -> None:
    """The product of the padded rows stays for its other reader, and is right in both places."""

    def fn(x: Any, w: Any, v: Any) -> Any:
        wide = F.pad(x, (0, 0, 0, 3)) @ w.t()
        return wide[:-3], wide.float().sum(0), padded(x, v)

    check(fn, (rand(37, 64), rand(32, 64), rand(16, 64)))


#: x and w -> a product of padded rows that is cut otherwise.
NO_PADDING: dict[str, Callable[[Any, Any], Any]] = {
    "in front": lambda x, w: (F.pad(x, (0, 0, 3, 0)) @ w.t())[:-3],
    "ones": lambda x, w: (F.pad(x, (0, 0, 0, 3), value=1.0) @ w.t())[:-3],
    "fewer rows": lambda x, w: (F.pad(x, (0, 0, 0, 3)) @ w.t())[:-4],
    "columns": lambda x, w: (F.pad(x, (0, 0, 0, 3)) @ w.t())[:, :-8],
}


@pytest.mark.parametrize("name", NO_PADDING)
def test_slices_that_are_no_padding(name: str) -> None:
    fn = lambda x, w, v: (NO_PADDING[name](x, w), padded(x, v))  # noqa: E731
    assert not check(fn, (rand(37, 64), rand(32, 64), rand(16, 64))).calls()
