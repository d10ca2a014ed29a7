"""What the fused attention keeps for its backward may change behind it where eager allows it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from inductor_fusions import config, reporting
from inductor_fusions._inductor.compiling import fresh_compile
from tests.attention.support import capture, rand, visible
from tests.attention.test_leaving import KERNELS, SPELLINGS, attend, by_einsum, traced


def added(q: Any, k: Any, v: Any, m: Any) -> Any:
    return torch.softmax(q @ k.mT * 0.35 + m, -1) @ v


def of_expanded(q: Any, k: Any, v: Any, m: Any) -> Any:
    return torch.softmax(q @ k.mT * 0.35 + m[:, :, :1].expand(-1, 3, q.shape[2], -1), -1) @ v


def computed(q: Any, k: Any, v: Any, m: Any) -> Any:
    return torch.softmax(q @ k.mT * 0.35 + (1 - m) * -0.5, -1) @ v


def filled(q: Any, k: Any, v: Any, m: Any) -> Any:
    return torch.softmax((q @ k.mT * 0.35).masked_fill(m < -1.0, -10.0), -1) @ v


def scaled(q: Any, k: Any, v: Any, m: Any) -> Any:
    return torch.softmax((q * 0.35) @ k.mT + m, -1) @ v


def through_views(q: Any, k: Any, v: Any, m: Any) -> Any:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return torch.softmax(q @ k.mT * 0.35 + m, -1) @ v


def spelled_otherwise(q: Any, k: Any, v: Any, m: Any) -> Any:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.35
    return torch.einsum("bhqk,bhkd->bqhd", (scores + m).softmax(-1), v)


def without_mask(q: Any, k: Any, v: Any, m: Any) -> Any:
    return attend(q, k, v)


FORMS = [added, of_expanded, computed, filled, scaled, through_views, spelled_otherwise, without_mask]


def inputs(trained: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"q": (2, 3, 6, 16), "k": (2, 3, 9, 16), "v": (2, 3, 9, 16), "m": (2, 1, 6, 9)}
    return {name: rand(*shape, grad=name in trained) for name, shape in shapes.items()}


def gradients(fn: Callable[..., Any], given: dict[str, torch.Tensor], changed: str) -> Any:
    """Gradients where the caller changes inputs before the backward; None where autograd refuses."""
    own = {name: x.detach().clone().requires_grad_(x.requires_grad) for name, x in given.items()}
    out = fn(*own.values())
    with torch.no_grad():
        for name in changed:
            own[name].mul_(-1.3) if own[name].is_floating_point() else own[name].logical_not_()
    out.square().sum().backward()
    return {name: x.grad for name, x in own.items() if x.requires_grad}


def same_gradients(
    fn: Callable[..., Any],
    given: dict[str, torch.Tensor],
    changed: str,
    backend: Any = None,
    fused: int | None = 1,
) -> None:
    try:
        wide = {name: x.double().detach().requires_grad_(x.requires_grad) for name, x in given.items()}
        wide |= {name: x for name, x in given.items() if not x.is_floating_point()}
        expected = gradients(fn, wide, changed)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    with fresh_compile(), config.patch(policy="always"), reporting.isolated() as sites:
        found = gradients(torch.compile(fn, backend=backend or traced()), given, changed)
    done = [site for site in sites if site.fusion == "attention" and site.verdict == "fused"]
    assert fused is None or len(done) == fused, sites
    for name, true in expected.items():
        torch.testing.assert_close(found[name].double(), true, atol=2e-5, rtol=2e-5, msg=f"{name}, {changed}")


TRAINED = ["qkv", "v", "q", "k", "qk", "qkvm", "m"]


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("form", FORMS)
def test_inputs_that_the_caller_changes(form: Callable[..., Any], trained: str) -> None:
    """With what is said of fully masked rows in turn: each pair of it and of the others occurs."""
    place = FORMS.index(form) + TRAINED.index(trained)
    if "m" in trained and form in (filled, without_mask):
        trained = trained.replace("m", "v")
    for i, changed in enumerate("qkvm"):
        with config.patch(empty_rows=("keep", "ignore")[(place + i) % 2]):
            same_gradients(form, inputs(trained), changed, fused=None)


@pytest.mark.parametrize("kernel", ["flex", "short"])
def test_inputs_of_other_kernels_that_the_caller_changes(kernel: str) -> None:
    for trained, changed in itertools.product(("qkv", "v"), "qkm"):
        for form in (added, scaled):
            with KERNELS[kernel]():
                same_gradients(form, inputs(trained), changed, fused=None)


def test_mask_of_a_call_that_the_caller_changes() -> None:
    """SDPA keeps what it converts a boolean mask to."""

    def fn(q: Any, k: Any, v: Any, m: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=m)

    with KERNELS["flex"]():
        same_gradients(fn, {**inputs("qkv"), "m": visible(2, 1, 1, 9)}, "m")


def test_inputs_of_generated_code_that_the_caller_changes() -> None:
    for form, trained, changed in ((added, "qkv", "m"), (attend, "v", "q"), (scaled, "qkv", "q")):
        given = inputs(trained)
        if form is attend:
            given.pop("m")
        same_gradients(form, given, changed, backend="inductor")


@pytest.mark.parametrize("name", ["q", "k", "m"])
def test_values_that_the_graph_changes(name: str) -> None:
    """Where eager keeps them it raises, and so may we."""

    def fn(q: Any, k: Any, v: Any, m: Any) -> Any:
        q, k, m = q * 1.0, k * 1.0, m * 1.0
        o = added(q, k, v, m)
        {"q": q, "k": k, "m": m}[name].add_(1.0)
        return o + q.sum() + k.sum() + m.sum()

    same_gradients(fn, inputs("v"), "")
    if name == "m":
        same_gradients(fn, inputs("qkv"), "")


def test_inputs_that_the_graph_changes() -> None:
    def fn(q: Any, k: Any, v: Any, m: Any) -> Any:
        o = added(q, k, v, m)
        m.add_(1.0)
        q.mul_(2.0)
        return o

    same_gradients(fn, inputs("v"), "")


def test_values_that_leave_and_that_the_caller_changes() -> None:
    def run(fn: Any, q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.detach().clone().requires_grad_(x.requires_grad) for x in (q, k, v))
        o, kept, bias = fn(q, k, v)
        with torch.no_grad():
            kept.zero_()
            bias.zero_()
        o.square().sum().backward()
        return v.grad

    def fn(q: Any, k: Any, v: Any) -> Any:
        k, bias = k * 2.0, (q[..., :1] * 0.1).detach()
        return torch.softmax(q @ k.mT * 0.35 + bias, -1) @ v, k, bias

    q, k, v, _ = inputs("v").values()
    with fresh_compile(), config.patch(policy="always"):
        found = run(torch.compile(fn, backend=traced()), q, k, v)
    torch.testing.assert_close(found, run(fn, q, k, v))


def test_bodies() -> None:
    def fn(q: Any, k: Any, v: Any, m: Any) -> Any:
        return checkpoint(added, q, k, v, m, use_reentrant=False)

    for trained, changed in (("qkv", ""), ("v", "")):
        same_gradients(fn, inputs(trained), changed)


# -- what costs nothing ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling", [name for name in SPELLINGS if "einsum" not in name and name != "shared heads"]
)
def test_nothing_is_copied_that_eager_keeps(spelling: str) -> None:
    """It keeps a copy of what it has to bring into one batch: views of projections, and shared heads."""
    attention, shapes = SPELLINGS[spelling]
    run = capture(lambda *x: attention(*x) + 1, *(rand(*s) for s in shapes), train=True)
    copies = len(run.calls("own.default")) + len(run.calls("own"))
    assert len(run.fused) == 1 and copies == {"projections": 3, "groups": 2}.get(spelling, 0)


def test_nothing_is_copied_that_the_graph_made() -> None:
    weight = torch.nn.Parameter(torch.randn(48, 48))
    mask = visible(2, 1, 6, 6)

    def fn(x: Any, mask: Any) -> Any:
        q, k, v = (y.unflatten(-1, (1, 16)).transpose(1, 2) for y in (x @ weight).chunk(3, -1))
        bias = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
        return torch.softmax(q @ k.mT * 0.25 + bias, -1) @ v + 1

    run = capture(fn, rand(2, 6, 48), mask, train=True)
    assert (
        len(run.fused) == 1
        and not run.calls("own.default")
        and not run.calls("own")
        and not run.calls("clone")
    )


def test_an_einsum_that_copies_is_copied() -> None:
    """Eager keeps copies of what it permutes."""
    fn = by_einsum("bqhd", "bkhd", "bkhd", "bqhd")
    given = [rand(2, 6, 3, 16), rand(2, 9, 3, 16), rand(2, 9, 3, 16)]
    for changed in "qkv":
        same_gradients(fn, dict(zip("qkv", given, strict=True)), changed)


def test_mask_of_a_module() -> None:
    module = torch.nn.MultiheadAttention(16, 2, batch_first=True)

    def run(fn: Any, x: Any) -> Any:
        mask = torch.linspace(-1, 1, 36, dtype=x.dtype).view(6, 6)
        out = fn(x, mask)
        mask.zero_()
        found = torch.autograd.grad(out.square().sum(), [*module.parameters()])
        return [each.float() for each in found]

    def fn(x: Any, mask: Any) -> Any:
        return module(x, x, x, attn_mask=mask, need_weights=True)[0]

    x = torch.randn(2, 6, 16)
    with fresh_compile(), config.patch(policy="always"):
        found = run(torch.compile(fn, backend=traced()), x)
    for ours, eager in zip(found, run(fn, x), strict=True):
        torch.testing.assert_close(ours, eager)


def test_one_copy_of_a_mask_for_all_layers() -> None:
    def fn(q: Any, k: Any, v: Any, m: Any) -> Any:
        return added(added(q, k, v, m) * 1.0, k, v, m) + 1

    with config.patch(empty_rows="ignore"):
        run = capture(fn, *inputs("qkv").values(), train=True)
    assert len(run.fused) == 2 and len(run.calls("own.default")) + len(run.calls("own")) == 1
