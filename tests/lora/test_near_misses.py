"""Graphs that look like linears with adapters: why they are none, or how they are read all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inductor_fusions.fusions.lora.op import NARROW_MM
from inductor_fusions.reasons import Reason
from tests.block_mm.support import check, rand, run
from tests.lora.spellings import WHOLE, linear, operands, peft_in_float32, targets
from tests.support import padding
from tests.support.arguments import named


def result_used_elsewhere(x: Any, w: Any, a: Any, b: Any) -> Any:
    up = F.linear(F.linear(x, a), b)
    return F.linear(x, w) + up, up


NEAR_MISSES: dict[str, tuple[Callable[..., Any], Reason]] = {
    "scaled by a matrix": (
        lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a), b) * (x[:, :1] * w[:, 0]),
        Reason.BEHIND_ADAPTER,
    ),
    "divided by a vector": (
        lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a), b) / (w[:, 0].abs() + 1),
        Reason.BEHIND_ADAPTER,
    ),
    "no base": (lambda x, w, a, b: F.linear(F.linear(x, a), b) + w[:1, :1], Reason.NO_BASE),
    "used elsewhere": (result_used_elsewhere, Reason.USED_ELSEWHERE),
    "times two tensors": (
        lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a), b) * w[0, 0] * w[0, 1], Reason.TERMS,
    ),
    "times a tensor inside and outside": (
        lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a) * w[0, 0], b) * w[0, 1], Reason.TERMS,
    ),
    "columns of a packed A that vector loads cannot read": (
        lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a)[:, :6], b[:, :6]), Reason.LAYOUT,
    ),
    "no columns of A": (
        lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a[:0]), b[:, :0]), Reason.EMPTY,
    ),
    "permuted": (
        lambda x, w, a, b: F.linear(x, w)[:, :96] + F.linear(F.linear(x, a), b)[:, :96].t(), Reason.NO_BASE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_no_linear_with_an_adapter(name: str) -> None:
    fn, reason = NEAR_MISSES[name]
    seen = check(fn, operands(), budget=2.0)
    assert not seen.fused("lora")
    assert reason.code in seen.codes("lora"), seen.reasons("lora")


def test_no_columns() -> None:
    seen = run(lambda x, w, a, b: F.linear(x, w[:0]) + F.linear(F.linear(x, a), b[:0]), operands())
    assert seen.codes("lora") == [Reason.EMPTY.code]


def test_rows_that_depend_on_data() -> None:
    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        x = x[(x[:, 0] > 0).nonzero()[:, 0]]
        return F.linear(x, w) + F.linear(F.linear(x, a), b)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert check(fn, operands()).fused("lora") == 1


def test_two_products_of_a_batch_and_a_residual_are_no_adapters() -> None:
    def fn(x: Any, a: Any, b: Any) -> Any:
        return x + torch.bmm(torch.bmm(x, a), b) * 2.0

    assert not check(fn, [torch.randn(2, *s).bfloat16() for s in ((48, 64), (64, 8), (8, 64))]).sites


def test_a_linear_attention_is_no_rotation() -> None:
    """One square matrix multiplies the queries of each head, but it is computed from the input."""

    def fn(x: Any, q: Any, k: Any, v: Any, w: Any) -> Any:
        inputs = ((x, q), (x.flip(1), k), (x.flip(2), v))  # not fused with each other
        q, k, v = (F.linear(each, w).view(1, 48, 8, 8).transpose(1, 2) for each, w in inputs)
        return F.linear((q @ (k.mT @ v)).transpose(1, 2).reshape(1, 48, 64), w)

    args = [torch.randn(*shape).bfloat16() / 8 for shape in ((1, 48, 64), *[(64, 64)] * 4)]
    assert not [site for site in check(fn, args, budget=2.0).sites if site.fusion == "lora"]


def test_gradients_of_a_normalised_linear_attention_are_no_adapters() -> None:
    """Two products of low rank are added to the gradient of the divisor, which reads other values."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        totals = torch.einsum("bld,bd->bl", q, k.sum(1))
        return torch.einsum("bld,bdm->blm", q, torch.einsum("bld,blm->bdm", k, v)) / totals[..., None]

    args = [torch.rand(8, 16, 8).add(0.5).bfloat16().requires_grad_() for _ in range(3)]
    assert not [site for site in run(fn, args, train=True).sites if site.fusion == "lora"]


def in_float16(rows: int, x: float, a: float) -> tuple[torch.Tensor, ...]:
    """x, w, a, b, of one number each."""
    fills = {(rows, 64): x, (128, 64): 0.25, (16, 64): a, (128, 16): 1e-4}
    return tuple(torch.full(shape, fill, dtype=torch.float16) for shape, fill in fills.items())


def test_float16_whose_factor_overflows() -> None:
    """What A gives is in the range of float16, twice that is not, and the result is."""
    seen = check(linear, in_float16(96, 1.0, 625.0), budget=2.0)
    assert seen.fused("lora") == 1 and all(bool(y.isfinite().all()) for y in seen.outputs)


@pytest.mark.parametrize("rows", [8, 96])
def test_float16_whose_input_is_scaled(rows: int) -> None:
    """What A gives is in the range of float16 with the factor of the input, and not without it."""

    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        return F.linear(x, w) + F.linear(F.linear(x * 2**-10, a), b)

    seen = check(fn, in_float16(rows, 16.0, 256.0), budget=2.0)
    assert seen.fused("lora") == 1 and all(bool(y.isfinite().all()) for y in seen.outputs)
    (down,) = targets(seen, NARROW_MM)
    assert list(named(down).scales) == [2**-10]


def test_float16_whose_tensor_overflows() -> None:
    """As with a number; of a tensor it is not known."""

    def fn(x: Any, w: Any, a: Any, b: Any, scale: Any) -> Any:
        return F.linear(x, w) + F.linear(F.linear(x, a), b) * scale

    seen = check(fn, (*in_float16(96, 1.0, 625.0), torch.tensor(4.0)), budget=2.0)
    assert not seen.fused("lora") and any("may overflow" in reason for reason in seen.reasons("lora"))
    assert all(bool(y.isfinite().all()) for y in seen.outputs)


def test_float64() -> None:
    """Kernels add up in float32, those of the gradients too."""
    x, w, a, b = (t.detach().double().requires_grad_() for t in operands())
    seen = check(linear, (x, w, a, b), train=True)
    assert not seen.fused("lora") and not targets(seen, NARROW_MM, 1)


def test_matrices_of_different_dtypes() -> None:
    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        return F.linear(x, w) + F.linear(F.linear(x.float(), a).to(b.dtype), b)

    x, w, a, b = operands()
    seen = run(fn, (x, w, a.float(), b))
    assert seen.reasons("lora") == ["the two matrices of an adapter have different dtypes"]


def test_float16_base_of_float32_adapters() -> None:
    x, w, a, b = operands(dtype=WHOLE)
    seen = run(peft_in_float32, (x.half(), w.half(), a, b))
    assert not seen.calls() and any("float16" in reason for reason in seen.reasons("lora"))
    # x is read without its cast all the same.
    assert len(targets(seen, NARROW_MM)) == 1


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_rank_above_that_of_the_kernels(train: bool) -> None:
    """It is said of the linear, and in training of the gradient of its input."""
    given = [rand(*shape) for shape in ((96, 320), (384, 320), (136, 320), (384, 136))]
    seen = run(linear, given, train=train)
    assert seen.codes("lora") == ["limit"] * (1 + train) and "rank 136" in seen.reasons("lora")[0]
    seen = run(lambda x, w, a, b: F.linear(x, w), given, train=train)
    assert not seen.codes("lora")
    # No adapter: of another input, or wider than half of it.
    seen = run(lambda x, w, a, b: F.linear(x.sin(), w) + F.linear(F.linear(x, a), b), given, train=train)
    assert not seen.codes("lora")
    given[2:] = rand(168, 320), rand(384, 168)
    assert not run(linear, given, train=train).codes("lora")


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_symbolic_rank(train: bool) -> None:
    """Where A and B are arguments, `dynamic=True` makes their sizes symbols."""
    assert run(linear, operands(), train=train, dynamic=True).codes("lora") == ["symbolic"] * (1 + train)


GATED: dict[str, Callable[..., Any]] = {
    "number": lambda x, w, a, b, g: F.linear(x, w) + torch.tanh(g[0, 0]) * F.linear(F.linear(x, a), b),
    "tokens": lambda x, w, a, b, g: F.linear(x, w) + g[:, :1].sigmoid() * F.linear(F.linear(x, a), b),
    "columns": lambda x, w, a, b, g: F.linear(x, w) + F.linear(F.linear(x, a), b) * g[0],
    "elements": lambda x, w, a, b, g: F.linear(x, w) + g * F.linear(F.linear(x, a), b),
    "between": lambda x, w, a, b, g: F.linear(x, w) + F.linear(F.linear(x, a) * g[:, :1], b),
    "function": lambda x, w, a, b, g: F.linear(x, w) + F.linear(F.silu(F.linear(x, a)), b),
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", GATED)
def test_symbolic_rank_of_a_gated_adapter(name: str, train: bool) -> None:
    """The gate's gradient reads what it multiplies, and the gradient of A reads the gate."""
    fn, args = GATED[name], (*operands(), rand(96, 128))
    assert run(fn, args, train=train, dynamic=True).codes("lora") == ["symbolic"] * (1 + train)


def test_symbolic_rank_on_another_input() -> None:
    def fn(x: Any, w: Any, a: Any, b: Any, g: Any) -> Any:
        return F.linear(x.sin(), w) + F.linear(F.linear(x, a), b) * g

    assert not run(fn, (*operands(), rand(96, 128)), train=True, dynamic=True).codes("lora")


@pytest.mark.parametrize("rank", [16, 40])
def test_two_linears_in_a_row(rank: int) -> None:
    """A head behind a body: where it is narrow between them, they look like an adapter without a base."""
    x, _, a, b = operands(rank)
    seen = run(lambda x, a, b: F.linear(F.linear(x, a), b), (x, a, b), train=True)
    said = ["returns the result of the two products", "those of a gradient"] if rank == 16 else []
    reasons = seen.reasons("lora")
    assert len(reasons) == len(said) and all(map(str.__contains__, reasons, said)), reasons


@pytest.mark.parametrize("behind", [F.relu, lambda y: y.sigmoid() * y, lambda y: y * (y.detach() > 0)])
def test_two_linears_between_functions(behind: Callable[..., Any]) -> None:
    """Nothing is said of adapters, or of `torch.where`, which the gradient of a function is."""
    x, _, a, b = operands()
    seen = run(lambda x, a, b: behind(F.linear(F.linear(x.relu(), a), b)), (x, a, b), train=True)
    assert seen.codes("lora") == ["no-base"] * 2, seen.reasons("lora")
    assert "those of a gradient" in seen.reasons("lora")[1]


def test_without_measurements_it_is_left_to_stock() -> None:
    seen = run(linear, operands(), policy="profitable")
    assert not seen.fused("lora")
    assert any("measure" in reason for reason in seen.reasons("lora"))


def test_a_batch_is_decided_by_all_of_its_tokens() -> None:
    """The gradients of adapters, too: the matrix that they read may be a view of one of more dims."""
    w, a, b = rand(512, 512), rand(16, 512, dtype=WHOLE), rand(512, 16, dtype=WHOLE)
    found = []
    for shape in ((1024, 512), (4, 256, 512)):
        given = [t.detach().requires_grad_() for t in (rand(*shape), a, b)]
        seen = run(lambda x, a, b: peft_in_float32(x, w, a, b), given, train=True, policy="profitable")
        found.append(sorted((site.verdict, site.kernel) for site in seen.sites))
    assert found[0] == found[1]
    gradients = [kernel for verdict, kernel in found[0] if kernel.startswith("narrow_mm, 512 x (1024 -> 16)")]
    assert len(gradients) == 2


def padded(name: str) -> Callable[..., Any]:
    """An adapter of rank 5 whose products Inductor has padded to 8, each by itself (pad_mm.py)."""
    before, value = (3, 0.0) if name == "in front" else (0, 1.0 if name == "ones" else 0.0)

    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        h = x @ a.t()
        if name != "up":
            sides = (before, 3 - before)
            h = (x @ F.pad(a.t(), sides, value=value))[:, : -4 if name == "one column less" else -3]
            h = F.pad(h, (0, 1)) if name == "one column less" else h
        y = h @ b.t()
        if name in ("up", "both"):
            y = F.pad(h, (0, 3)) @ F.pad(b.t(), (0, 0, 0, 3))
        return F.linear(x, w) + 0.5 * y

    return fn


@pytest.mark.parametrize("name", ["down", "up", "both"])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_ranks_that_inductor_pads(name: str, train: bool) -> None:
    """What is fused reads the adapter as it was: whether stock pads depends on what it has just measured."""
    args = operands(5)
    seen = check(padded(name), args, train=train)
    assert seen.fused("lora") >= 1
    (call,) = targets(seen, NARROW_MM)[:1]
    assert list(named(call).b[0].meta["val"].shape)[-1] in (5, 8)


def test_rows_and_ranks_that_inductor_pads() -> None:
    """The product before its columns are cut off is the down-projection, not one more linear on x."""

    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        h = F.pad(x, (0, 0, 0, 3)) @ F.pad(a.t(), (0, 3))
        return F.linear(x, w) + 0.5 * (h[:-3][:, :-3] @ b.t())

    seen = check(fn, operands(5))
    assert seen.fused("lora") >= 1
    (call,) = seen.calls()
    (total,) = call.meta["val"] if isinstance(call.meta["val"], (list, tuple)) else [call.meta["val"]]
    assert list(total.shape) == list(seen.outputs[0].shape)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_all_sizes_that_inductor_pads(train: bool) -> None:
    """Rows, rank and K at once: 100 tokens and a rank of 4 are multiples of 8 after padding only."""
    x, w, a, b = (rand(*sizes) for sizes in ((100, 64), (48, 64), (4, 64), (48, 4)))
    with padding.padded(0, share=1.0):
        seen = check(lambda x, w, a, b: F.linear(x, w) + 2.0 * (x @ a.t() @ b.t()), (x, w, a, b), train=train)
    assert seen.fused("lora") >= 1


@pytest.mark.parametrize("name", ["in front", "ones", "one column less"])
def test_ranks_that_are_padded_otherwise(name: str) -> None:
    """No zeros behind, or fewer columns than there were: the numbers are right, whatever is fused."""
    check(padded(name), operands(5))


def test_ranks_that_are_cropped() -> None:
    """Padding by less than nothing takes columns away: they must not come back."""

    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        return F.linear(x, w) + 0.5 * (F.pad(x @ a.t(), (0, -3)) @ F.pad(b.t(), (0, 0, 0, -3)))

    check(fn, operands(8))


def test_a_number_of_each_row() -> None:
    """BiDAF: a linear of one column is added to all columns of another, and is no adapter (MoRA)."""
    x, w, _, _ = operands(8)
    seen = check(
        lambda x, w, v: F.linear(x, v).expand(-1, w.shape[0]) + F.linear(x, w), (x, w, rand(1, x.shape[1]))
    )
    assert not seen.reasons("lora")


def test_differences_of_batches_of_products() -> None:
    """Rows of an attention that see no key: nothing is there that adapters would be merged into."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        means = torch.bmm(k.mT, v) * 0.25
        return torch.bmm(q, means - means * 0.5)

    assert not check(fn, [rand(6, 7, 64) for _ in range(3)]).reasons("lora")
