"""Fake values of nodes that a pass of somebody else has made without them."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import fx

from inductor_fusions import _inductor, config, fusions, testing
from inductor_fusions._inductor import value_of
from inductor_fusions.driver.passes import FusionPass
from inductor_fusions.graph import values


class Again(_inductor.CustomGraphPass):
    """Makes nodes once more, without what is known of them."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.op in ("call_method", "call_function") and (not self.names or node.target in self.names):
                with graph.inserting_before(node):
                    made = graph.create_node(node.op, node.target, node.args, node.kwargs)
                node.replace_all_uses_with(made)
                graph.erase_node(node)

    def uuid(self) -> Any:
        return None


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = torch.rsqrt(q.abs().sum() + 1)
    return ((q @ k.transpose(-2, -1)) * scale * q.shape[-1] ** -0.5).softmax(-1) @ v


def given(train: bool) -> list[torch.Tensor]:
    return [torch.randn(2, 4, size, 8, requires_grad=train) for size in (7, 9, 9)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_values_are_those_of_dynamo(train: bool, dynamic: bool) -> None:
    def described(graph: fx.Graph) -> list[Any]:
        found = [value_of(node) for node in graph.nodes if node.op != "output"]
        return [
            (v.shape, v.stride(), v.dtype, v.requires_grad) if isinstance(v, torch.Tensor) else str(v)
            for v in found
        ]

    seen: list[Any] = []

    def backend(module: fx.GraphModule, _: Any) -> Any:
        before = described(module.graph)
        Again()(module.graph)
        assert described(module.graph) != before
        values.complete(module.graph)
        seen.append((before, described(module.graph)))
        return module

    torch._dynamo.reset()
    torch.compile(attention, backend=backend, dynamic=dynamic, fullgraph=True)(*given(train))
    ((before, after),) = seen
    assert after == before


def test_what_depends_on_data_or_writes_has_no_value() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        x.add_(1)
        return x.nonzero()

    def backend(module: fx.GraphModule, _: Any) -> Any:
        Again()(module.graph)
        values.complete(module.graph)
        known = {node.target: value_of(node) is not None for node in module.graph.nodes}
        assert known[operator.mul] and not known["add_"] and not known["nonzero"]
        return module

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(fn, backend=backend)(torch.ones(3))


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("names", [(), ("softmax",)], ids=["all", "some"])
def test_pass_before_ours(names: tuple[str, ...], train: bool) -> None:
    """Stock compiles the graph of such a pass; so do we, and fuse."""
    ours = FusionPass("pre_grad", tuple(f for f in fusions.ALL if f.stage == "pre_grad"), Again(*names))
    inputs = given(train)
    with inductor_config.patch(pre_grad_custom_pass=ours), config.patch(policy="always", strict=True):
        run = testing.capture(attention, *inputs, train=train, backend="inductor")
    assert [site.verdict for site in run.sites if site.fusion == "attention"] == ["fused"]
    torch.testing.assert_close(run.outputs, attention(*inputs), rtol=1e-4, atol=1e-5)


def test_pass_before_ours_behind_autograd() -> None:
    """As torch.compile calls the hook behind autograd, on a graph of aten operations."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def fn(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        torch._assert_async((w > -99).all())
        return x @ w + x @ a @ b

    inputs = [torch.randn(*size) for size in ((64, 128), (128, 256), (128, 8), (8, 256))]
    graph = make_fx(fn, tracing_mode="fake")(*inputs).graph
    before = [str(value_of(node)) for node in graph.nodes]
    Again()(graph)
    values.complete(graph)
    assert [str(value_of(node)) for node in graph.nodes] == before
    assert before.count("None") == 2  # of the assertion, and of the output
