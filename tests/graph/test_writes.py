"""What a fusion knows to be overwritten."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._dynamo.utils import numpy_attr_wrapper, numpy_to_tensor_wrapper
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._higher_order_ops.wrap import wrap

from inductor_fusions.effects import liveness, writes
from inductor_fusions.effects.modes import Modes
from inductor_fusions.fusion import Rejected


def calls(graph: fx.Graph, place: str, other: Callable[[fx.Graph, fx.Node], Any]) -> tuple[fx.Node, fx.Node]:
    """x + x, doubled; `other` before, between or after. Returns the first and the last of both."""
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.zeros(3)
    if place == "before":
        other(graph, x)
    first = graph.call_function(torch.add, (x, x))
    if place == "between":
        other(graph, x)
    last = graph.call_function(torch.mul, (first, 2))
    if place == "after":
        other(graph, x)
    return first, last


def rand_like(x: Any) -> Any:
    """A function that Dynamo was told to leave in the graph."""
    return torch.rand_like(x)


def trampoline(x: Any) -> Any:
    """As Dynamo closes over a function that it was told to leave in the graph."""
    return rand_like(x)


trampoline.__module__ = "torch._dynamo.variables.misc"


def valued(graph: fx.Graph) -> fx.Node:
    """Another input."""
    node = graph.placeholder("other")
    node.meta["example_value"] = torch.zeros(3)
    return node


def body(graph: fx.Graph, inplace: bool) -> fx.Node:
    """A nested graph with an activation."""
    inner = fx.Graph()
    inner.output(inner.call_function(F.relu, (inner.placeholder("x"),), {"inplace": inplace}))
    owner = torch.nn.Module()
    owner.body = fx.GraphModule({}, inner)
    graph.owning_module = owner  # type: ignore[assignment]
    return graph.get_attr("body")


BETWEEN: dict[str, tuple[Callable[[fx.Graph, fx.Node], Any], str]] = {
    "a method": (lambda g, x: g.call_method("add_", (x, 1)), "add_ writes in place between here and there"),
    "an operator": (lambda g, x: g.call_function(operator.iadd, (x, 1)), "iadd writes in place"),
    "an item": (lambda g, x: g.call_function(operator.setitem, (x, 0, 1)), "setitem writes in place"),
    "out": (lambda g, x: g.call_function(torch.add, (x, 1), {"out": x}), "add_1 writes in place"),
    "another operator": (lambda g, x: g.call_function(operator.ipow, (x, 2)), "ipow writes in place"),
    "an operator as a method": (lambda g, x: g.call_method("__iadd__", (x, 1)), "writes in place"),
    "an old operator": (lambda g, x: g.call_method("__idiv__", (x, 2)), "idiv.* writes in place"),
    "out by position": (
        lambda g, x: g.call_function(torch.tensordot, (valued(g), valued(g), 0, x)),
        "tensordot writes in place",
    ),
    "noise": (
        lambda g, x: g.call_function(torch._C._nn.rrelu_with_noise, (valued(g), x, 0.1, 0.2, True)),
        "rrelu_with_noise writes in place",
    ),
    "inplace": (lambda g, x: g.call_function(F.relu, (x,), {"inplace": True}), "relu writes in place"),
    "inplace by position": (lambda g, x: g.call_function(F.dropout, (x, 0.5, True, True)), "dropout writes"),
    "rows that are normed": (
        lambda g, x: g.call_function(F.embedding, (x, x), {"max_norm": 1.0}),
        "embedding writes in place",
    ),
    "an overload": (lambda g, x: g.call_function(torch.ops.aten.add_.Tensor, (x, x)), "writes in place"),
    "a packet": (lambda g, x: g.call_function(torch.ops.aten.copy_, (x, x)), "writes in place"),
    "an operation that its name alone says it of": (
        lambda g, x: g.call_function(torch.ops.inductor.resize_storage_bytes_.default, (x, 0)),
        "writes in place",
    ),
    "an overload with out": (
        lambda g, x: g.call_function(torch.ops.aten.add.out, (x, x), {"out": x}),
        "writes in place",
    ),
    "a kernel": (
        lambda g, x: g.call_function(triton_kernel_wrapper_mutation, (), {"kwargs": {"x": x}}),
        "in place",
    ),
    "a body": (lambda g, x: g.call_function(wrap, (body(g, inplace=True), x)), "wrap writes in place"),
    "a function that is not known": (lambda g, x: g.call_function(rand_like, (x,)), "writes in place"),
    "a function that Dynamo closes over": (
        lambda g, x: g.call_function(trampoline, (x,)),
        "trampoline writes in place",
    ),
    "NumPy": (lambda g, x: g.call_function(numpy_to_tensor_wrapper(numpy.copyto), (x, x)), "writes in place"),
    "a module": (lambda g, x: g.call_module("bump", (x,)), "bump writes in place"),
    "statistics": (
        lambda g, x: g.call_function(F.batch_norm, (valued(g), valued(g), x), {"training": True}),
        "batch_norm writes in place",
    ),
}


def check_between(nodes: list[fx.Node], last: fx.Node) -> None:
    writes.check_between(nodes, last, "here and there", Modes(last.graph), writes.effects(last.graph))


@pytest.mark.parametrize("name", BETWEEN)
def test_between(name: str) -> None:
    other, reason = BETWEEN[name]
    first, last = calls(fx.Graph(), "between", other)
    with pytest.raises(Rejected, match=reason):
        check_between([first, last], last)
    for place in ("before", "after"):
        first, last = calls(fx.Graph(), place, other)
        check_between([first, last], last)


def test_gradients_that_are_switched() -> None:
    """What is switched off and on again in between does not count; another state of an operand does."""

    def switched(graph: fx.Graph, *states: bool) -> None:
        for state in states:
            graph.call_function(torch._C._set_grad_enabled, (state,))

    for states in ((False,), (False, True)):
        first, last = calls(fx.Graph(), "between", lambda g, _, states=states: switched(g, *states))
        first.meta["example_value"] = torch.zeros(3)
        if states[-1]:
            check_between([first], last)
            continue
        with pytest.raises(Rejected, match="grad mode changes between here and there"):
            check_between([first], last)
        first.meta["example_value"] = torch.arange(3)
        check_between([first], last)


def test_modes_of_a_node_that_was_added() -> None:
    """They are those of its place."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    inside = graph.call_method("exp", (x,))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    graph.output(graph.call_method("exp", (x,)))
    modes = Modes(graph)
    with graph.inserting_after(inside):
        added = graph.call_method("neg", (x,))
    with graph.inserting_before(graph.output_node()):
        last = graph.call_method("neg", (x,))
    assert [modes.at(node).gradients for node in (inside, added, last)] == [False, False, True]


def chained(graph: fx.Graph, *steps: Any) -> list[fx.Node]:
    """x and calls of methods, each on the one before."""
    nodes = [valued(graph)]
    for step in steps:
        nodes.append(graph.call_method(step, (nodes[-1],)))
        nodes[-1].meta["example_value"] = torch.zeros(3)
    return nodes


def test_dead_readers() -> None:
    """Pure operations that nobody uses, and those that only they use, read nothing."""
    graph = fx.Graph()
    x, copy, root = chained(graph, "clone", "sqrt")
    taken = graph.call_function(operator.getitem, (x, 0))
    taken.meta["example_value"] = torch.zeros(())
    assert liveness.readers(x) == []
    graph.output(root)
    assert liveness.readers(x) == [copy]
    liveness.erase_dead_readers([x])
    assert list(x.users) == [copy]


@pytest.mark.parametrize("call", [
    lambda g, x: g.call_method("add_", (x, 1)),
    lambda g, x: g.call_function(operator.setitem, (x, 0, 1)),
    lambda g, x: g.call_function(F.dropout, (x,)),
    lambda g, x: g.call_method("bernoulli", (x,)),
    lambda g, x: g.call_function(rand_like, (x,)),
    lambda g, x: g.call_method("item", (x,)),
    lambda g, x: g.call_function(wrap, (body(g, inplace=False), x)),
    lambda g, x: g.call_function(torch._assert_async, (x,)),
])  # fmt: skip
def test_readers_that_do_something(call: Any) -> None:
    """What writes, draws, checks or may do anything reads its operand, whether its result is used or not."""
    graph = fx.Graph()
    x = valued(graph)
    node = call(graph, x)
    node.meta["example_value"] = 1.0 if node.target == "item" else torch.zeros(3)
    assert liveness.readers(x) == [node]


def prim_to_local(x: Any) -> Any:
    """As Dynamo closes over the arguments of a DTensor's method that are no tensors."""
    return x


prim_to_local.__module__ = "torch._dynamo.variables.tensor"


def test_what_is_no_write() -> None:
    def reads(graph: fx.Graph, x: fx.Node) -> None:
        graph.call_method("__matmul__", (x, x))
        graph.call_method("add", (x, 1))
        graph.call_function(F.relu, (x, False))
        graph.call_function(F.embedding, (x, x))
        graph.call_function(F.batch_norm, (x, valued(graph), valued(graph)), {"training": True})
        graph.call_function(prim_to_local, (x,))
        graph.call_function(numpy_attr_wrapper, (x, "T"))
        for keyword in (operator.and_, operator.or_, operator.not_, operator.is_):
            graph.call_function(keyword, (x, x))
        graph.call_function(torch.ops.aten.add, (x, x))
        graph.call_function(torch.ops.aten.sort, (x,))
        graph.call_function(torch.chain_matmul, (x, x))
        graph.call_function(torch.ops.aten.mm.default, (x, x))
        graph.call_function(wrap, (body(graph, inplace=False), x))

    first, last = calls(fx.Graph(), "between", reads)
    check_between([first], last)


def test_all_that_is_written() -> None:
    """Functions of torch write to more than their first argument."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("p", "grad", "momentum")]
    step = graph.call_function(torch._fused_sgd_, tuple([node] for node in nodes), {"lr": 0.1})
    assert writes.written(step) == [nodes[0], nodes[1], nodes[2]]


@pytest.mark.parametrize("what", ["operand", "view", "other"])
def test_kept(what: str) -> None:
    """An operation that keeps its operands is not put where one is overwritten behind it."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), valued(graph)
    x.meta["example_value"] = torch.zeros(3)
    graph.call_method("add_", (x, 1))
    last = graph.call_function(torch.mul, (x, 2))
    view = graph.call_method("view", (x, -1))
    view.meta["example_value"] = x.meta["example_value"].view(-1)
    graph.call_function(F.relu, ({"operand": x, "view": view, "other": y}[what], True))
    if what == "other":
        writes.check_kept([x], last, writes.effects(graph))
    else:
        with pytest.raises(Rejected, match="relu overwrites an operand that is saved"):
            writes.check_kept([x], last, writes.effects(graph))
