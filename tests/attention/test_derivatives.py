"""Derivatives that a compiled function takes of its own attention: which leave it fused, and which do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from inductor_fusions import testing
from tests.attention.support import cases, check, flex_everywhere, qkv, rand, scored, short_everywhere

Function = Callable[..., Any]

FORWARD = "forward-mode derivative"
TWICE = "a second derivative"
AT_ONCE = "batched gradients"


attend = scored(lambda s: s * 0.3)


def loss(q: Any, k: Any, v: Any) -> Any:
    return attend(q, k, v).sin().sum()


@pytest.fixture(autouse=True)
def gradients_in_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dynamo writes torch.autograd.grad into its graphs."""
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


def forward_mode(q: Any, k: Any, v: Any) -> Any:
    return torch.func.jvp(lambda x: attend(x, k, v), (q,), (v,))


def dual_numbers(q: Any, k: Any, v: Any) -> Any:
    with forward_ad.dual_level():
        found = attend(forward_ad.make_dual(q, v), k, v)
        return forward_ad.unpack_dual(found).tangent


def gradient(q: Any, k: Any, v: Any) -> Any:
    return torch.func.grad(lambda x: loss(x, k, v))(q)


def gradient_and_value(q: Any, k: Any, v: Any) -> Any:
    return torch.func.grad_and_value(lambda x: loss(x, k, v))(q)


def vector_product(q: Any, k: Any, v: Any) -> Any:
    found, back = torch.func.vjp(lambda x: attend(x, k, v), q)
    return back(found)


def jacobian(q: Any, k: Any, v: Any) -> Any:
    return torch.func.jacrev(lambda x: attend(x, k, v).sum((0, 1)))(q)


def penalty(q: Any, k: Any, v: Any) -> Any:
    (found,) = torch.autograd.grad(loss(q, k, v), q, create_graph=True)
    return found.square().sum()


def penalty_of_a_checkpoint(q: Any, k: Any, v: Any) -> Any:
    inside = checkpoint(attend, q, k, v, use_reentrant=False)
    (found,) = torch.autograd.grad(inside.sin().sum(), q, create_graph=True)
    return found.square().sum()


def penalty_through_memory(q: Any, k: Any, v: Any) -> Any:
    """The attention is written into what the gradient is taken of."""
    held = torch.zeros_like(q)
    held[:] = attend(q, k, v)
    (found,) = torch.autograd.grad(held.sin().sum(), q, create_graph=True)
    return found.square().sum()


def gradient_kept_apart(q: Any, k: Any, v: Any) -> Any:
    (found,) = torch.autograd.grad(loss(q, k, v), q, create_graph=True)
    return found.detach()


def batched(q: Any, k: Any, v: Any) -> Any:
    several = torch.stack([v, v * 2])
    return torch.autograd.grad(attend(q, k, v), q, several, is_grads_batched=True)


def weighted(q: Any, k: Any, v: Any) -> Any:
    """Nothing that the attention reads takes a gradient outside, but what its gradient is made of does."""
    q, k = q.detach(), k.detach()
    return torch.func.grad(lambda x: (attend(x, k, k) * v).sum())(q)


def beside_a_penalty(q: Any, k: Any, v: Any) -> Any:
    """The gradient of another value is differentiated."""
    (found,) = torch.autograd.grad((q * k).sin().sum(), q, create_graph=True)
    return found.square().sum() + attend(q, k, v).sum()


#: What is computed, whether its inputs take gradients, and why it is not fused; "" where it is.
TAKEN: dict[str, tuple[Function, bool, str]] = {
    "forward mode": (forward_mode, False, FORWARD),
    "forward mode and a backward": (forward_mode, True, FORWARD),
    "dual numbers": (dual_numbers, False, FORWARD),
    "hessian": (lambda q, k, v: torch.func.hessian(lambda x: loss(x, k, v))(q), False, FORWARD),
    "gradient": (gradient, False, ""),
    "gradient and a backward": (gradient, True, TWICE),
    "gradient and value": (gradient_and_value, False, ""),
    "gradient and value, and a backward": (gradient_and_value, True, TWICE),
    "product with a vector": (vector_product, False, ""),
    "product with a vector and a backward": (vector_product, True, TWICE),
    "jacobian": (jacobian, False, AT_ONCE),
    "jacobian and a backward": (jacobian, True, AT_ONCE),
    "batched gradients": (batched, True, AT_ONCE),
    "gradient of each sample": (
        lambda q, k, v: torch.func.vmap(torch.func.grad(loss))(q, k, v),
        False,
        "inside torch.vmap",
    ),
    "gradient of a gradient": (
        lambda q, k, v: torch.func.grad(lambda x: gradient(x, k, v).square().sum())(q),
        False,
        TWICE,
    ),
    "penalty": (penalty, True, TWICE),
    "penalty of a checkpoint": (penalty_of_a_checkpoint, True, TWICE),
    "penalty through memory": (penalty_through_memory, True, TWICE),
    "gradient by autograd": (lambda q, k, v: torch.autograd.grad(loss(q, k, v), q), True, ""),
    "gradient that is detached": (gradient_kept_apart, True, ""),
    "weights of the gradient": (weighted, True, TWICE),
    "weights without gradient": (weighted, False, ""),
    # The transform is over where the attention stands.
    "behind a gradient": (
        lambda q, k, v: attend(torch.func.grad(lambda x: (x * x * k).sum())(q), k, v),
        True,
        "",
    ),
    "beside a penalty": (beside_a_penalty, True, ""),
}


@cases(TAKEN)
def test_derivatives(case: tuple[Function, bool, str]) -> None:
    fn, learns, reason = case
    inputs = qkv(5, 5, batch=1, heads=2, grad=learns)
    check(fn, inputs, fused=0 if reason else 1, reason=reason or None, slack=16.0)


@cases({name: TAKEN[name] for name in ("gradient", "product with a vector", "penalty", "behind a gradient")})
def test_kernels_without_rules_for_transforms(case: tuple[Function, bool, str]) -> None:
    """Flex attention and the operation for short attention have none: SDPA stands there."""
    fn, learns, reason = case
    inside = fn in (gradient, vector_product)
    for kernel, everywhere in (("flex", flex_everywhere), ("short", short_everywhere)):
        with everywhere(*(("flex",) if kernel == "flex" else ())):
            seen = check(fn, qkv(5, 5, batch=1, heads=2, grad=learns), fused=0 if reason else 1, slack=16.0)
        if not reason:
            assert seen.sites[0].kernel.startswith("sdpa" if inside else kernel), (kernel, seen.sites)


def test_calls_of_sdpa() -> None:
    """A call that would be rewritten stays where a tangent is asked for; eager computes it by products."""

    def tangent(q: Any, k: Any, v: Any) -> Any:
        whole = torch.ones(5, 5, dtype=torch.bool)
        call = lambda x: torch.nn.functional.scaled_dot_product_attention(x, k, v, whole)  # noqa: E731
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.func.jvp(call, (q,), (v,))

    check(tangent, qkv(5, 5, grad=False), fused=0, reason=FORWARD, slack=16.0)


def test_checkpoint_without_a_backward() -> None:
    """torch recomputes nothing then, and refuses operations that may draw random numbers in there."""
    fn = lambda q, k, v: checkpoint(attend, q, k, v, use_reentrant=False)  # noqa: E731
    check(fn, qkv(grad=False), fused=0, reason="recomputed for no backward")
    with torch.no_grad():
        check(fn, qkv(grad=False), train=False)
    check(fn, qkv())


def test_checkpoint_around_a_gradient_inside() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        return torch.autograd.grad(checkpoint(attend, q, k, v, use_reentrant=False).sin().sum(), q)

    check(fn, qkv(), fused=0, reason="recomputed for no backward", slack=16.0)


def test_saved_tensors_hooks() -> None:
    """What the fused operation keeps goes through the hooks of the caller."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x / 2):
            return attend(q, k, v)

    check(fn, qkv())


def test_products_in_different_modes() -> None:
    """Modes are compared: one that is entered and left in between without effect is none."""

    def mask_without_gradient(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.mT * 0.3
        with torch.no_grad():
            hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v

    def scores_without_gradient(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.mT
        with torch.no_grad():
            scores = scores * 0.3
        return torch.softmax(scores, -1) @ v

    def autocast_that_is_off(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            scores = q @ k.mT * 0.3
        return torch.softmax(scores, -1) @ v

    def autocast_that_is_on(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = q @ k.mT * 0.3
        return torch.softmax(scores.float(), -1) @ v

    def autocast_that_is_left_for_the_softmax(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = q @ k.mT * 0.3
            with torch.autocast("cpu", enabled=False):
                weights = torch.softmax(scores.float(), -1)
            return weights @ v

    check(mask_without_gradient, qkv(5, 5), kernel="is_causal")
    check(autocast_that_is_left_for_the_softmax, qkv(5, 5), slack=2**17)
    check(autocast_that_is_off, qkv(5, 5))
    check(scores_without_gradient, qkv(5, 5), fused=0, reason="mode")
    check(autocast_that_is_on, qkv(5, 5, grad=False), fused=0, reason="autocast changes", slack=2**17)


def test_autocast_around() -> None:
    """Weights in float32 and values in half precision are one product there, and none elsewhere."""

    def inside(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attend(q, k, v).float()

    inputs = [t.to(torch.bfloat16).requires_grad_(False) for t in qkv(5, 5, grad=False)]
    check(inside, inputs, train=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(attend, inputs, train=False, reference=lambda *given: attend(*given))


def test_same_input_learns_elsewhere() -> None:
    """A parameter that a gradient outside flows into stands beside the attention in a transform."""
    check(lambda q, k, v, w: gradient(q, k, v) + w, (*qkv(5, 5, grad=False), rand(16)), slack=16.0)


@pytest.mark.parametrize("name", ["gradient", "gradient and value", "product with a vector"])
def test_gradients_that_leave_lie_as_in_eager_mode(name: str) -> None:
    """Not as the backward of the fused attention has them."""
    inputs = [x.detach() for x in qkv(5, 5, batch=1, heads=2)]
    fn = TAKEN[name][0]
    ours, eager = (
        testing.capture(fn, *inputs, train=False, policy="always", backend=backend)
        for backend in ("inductor", "eager")
    )
    assert [site.verdict for site in ours.sites] == ["fused"]
    assert [x.stride() for x in ours.tensors] == [x.stride() for x in eager.tensors]
