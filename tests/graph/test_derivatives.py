"""Derivatives that a graph takes of its own values, and what they forbid to operations of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from inductor_fusions import testing
from inductor_fusions.effects import derivatives, modes
from inductor_fusions.fusion import Rejected

REVERSE = "inside torch.func.grad"
FORWARD = "forward-mode derivative"


def _grad_increment_nesting() -> None: ...


def _grad_decrement_nesting() -> None: ...


def _jvp_increment_nesting() -> None: ...


def _jvp_decrement_nesting() -> None: ...


def graph(*calls: Callable[[], None] | None) -> tuple[fx.Graph, list[fx.Node]]:
    """A product for each None, and the calls in between."""
    built, products = fx.Graph(), []
    x = built.placeholder("x")
    x.meta["example_value"] = torch.zeros(3)
    for call in calls:
        if call is not None:
            built.call_function(call)
            continue
        products.append(built.call_function(torch.mul, (x, 2)))
        products[-1].meta["example_value"] = torch.zeros(3)
    built.output(tuple(products))
    return built, products


def check_operation(nodes: list[fx.Node]) -> None:
    built = nodes[0].graph
    derivatives.check_operation(nodes, derivatives.Derivatives(built, modes.Modes(built)))


@pytest.mark.parametrize(("enter", "leave", "reason"), [
    (_grad_increment_nesting, _grad_decrement_nesting, REVERSE),
    (_jvp_increment_nesting, _jvp_decrement_nesting, FORWARD),
])  # fmt: skip
def test_transforms(enter: Any, leave: Any, reason: str) -> None:
    """In force from where it begins to where it ends."""
    _, (before, inside, behind) = graph(None, enter, None, leave, None)
    for node in (before, behind):
        check_operation([node])
    for nodes in ([inside], [before, inside], [inside, behind]):
        with pytest.raises(Rejected, match=reason):
            check_operation(nodes)


def test_a_second_transform_is_still_open() -> None:
    _, (inside,) = graph(_grad_increment_nesting, _grad_increment_nesting, _grad_decrement_nesting, None)
    with pytest.raises(Rejected, match=REVERSE):
        check_operation([inside])


def test_an_operation_of_torch_has_rules() -> None:
    """Reverse mode is no obstacle to what torch has rules for."""
    built, (inside,) = graph(_grad_increment_nesting, None, _grad_decrement_nesting)
    known = derivatives.Derivatives(built, modes.Modes(built))
    assert known.refused(inside) == "" and known.refused_operation(inside) != ""


def seen(fn: Callable[..., Any], *inputs: torch.Tensor) -> dict[str, str]:
    """Why each node of the first graph of a function is refused, by its name."""
    found: dict[str, str] = {}

    def backend(module: fx.GraphModule, example_inputs: Any) -> Any:
        known = derivatives.Derivatives(module.graph, modes.Modes(module.graph))
        found.update({node.name: known.refused(node) for node in module.graph.nodes})
        return module.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        torch.compile(fn, backend=backend)(*inputs)
    torch._dynamo.reset()
    return found


def test_what_a_gradient_is_taken_of() -> None:
    """And nothing else: neither what stands beside it, nor what is made of it."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        of = torch.sin(x)
        beside = torch.cos(y)
        (gradient,) = torch.autograd.grad(of.sum(), x, create_graph=True)
        return torch.tanh(gradient).sum() + beside.sum()

    found = seen(fn, *(torch.randn(3, requires_grad=True) for _ in range(2)))
    refused = {name for name, why in found.items() if why}
    assert any(name.startswith("of") or name.startswith("sin") for name in refused), found
    assert not any(name.startswith(("beside", "cos", "tanh")) for name in refused), found


def test_pairs_of_features() -> None:
    """An operation with a backward that is none to differentiate: a gradient penalty leaves its products."""

    def interact(t: torch.Tensor) -> torch.Tensor:
        z = torch.bmm(t, t.transpose(1, 2))
        i, j = torch.tril_indices(z.shape[1], z.shape[1], offset=-1)
        return z[:, i, j]

    def penalty(t: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(F.silu(interact(t)).sum(), t, create_graph=True)
        return gradient.square().sum()

    t = torch.randn(4, 5, 8, requires_grad=True)
    fusion = "inductor_fusions.fusions.dot_interaction"
    with (
        torch._dynamo.config.patch(trace_autograd_ops=True),
        mock.patch(f"{fusion}.check_kernel", lambda *_: None),
    ):
        first = testing.check(interact, (t,), backend=testing.EAGER_AFTER_PASSES, fused=1)
        testing.check(
            penalty, (t,), backend=testing.EAGER_AFTER_PASSES, fused=0, reason="a second derivative",
            slack=16.0,
        )  # fmt: skip
    assert first.sites[0].fusion == "dot_interaction"
