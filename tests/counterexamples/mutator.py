"""Near misses made by a machine: one detail of a graph is changed.

Dynamo's graph of a function is taken and one node of it is mutated; a mutant is compiled with the fusions
like any other model. It may be fused or not; its outputs and gradients must be right.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from inductor_fusions.checking.runs import Float64Mode, cast, copied

#: What hides a key.
LOWEST = torch.finfo(torch.float32).min / 64

Change = Callable[[fx.Node], None]

_SWAPPED = {
    "lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "tril": "triu", "triu": "tril", "and_": "or_",
    "add": "sub", "sub": "add", "mul": "truediv", "truediv": "mul",
}  # fmt: skip


#: Activations, and what is put in their place.
_REPLACED = {"silu": ("gelu", "mish"), "gelu": ("silu", "relu"), "relu": ("silu", "relu6")}


def name_of(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def set_argument(index: int | str, value: Any) -> Change:
    def change(node: fx.Node) -> None:
        if isinstance(index, str):
            node.kwargs = {**node.kwargs, index: value}
        else:
            node.args = (*node.args[:index], value, *node.args[index + 1 :])

    return change


def swap_arguments(node: fx.Node) -> None:
    node.args = (node.args[1], node.args[0], *node.args[2:])


def retarget(node: fx.Node) -> None:
    name = _SWAPPED[name_of(node)]
    node.target = (
        name if isinstance(node.target, str) else getattr(operator, name, None) or getattr(torch, name)
    )


def returned(node: fx.Node) -> None:
    """One more user."""
    (output,) = node.graph.find_nodes(op="output")
    output.args = ((*output.args[0], node),)


def after(target: Any, *args: Any) -> Change:
    """An operation on the result of a node, whose users read what it gives."""

    def change(node: fx.Node) -> None:
        with node.graph.inserting_after(node):
            new = node.graph.create_node(
                "call_method" if isinstance(target, str) else "call_function", target, (node, *args)
            )
        node.replace_all_uses_with(new, lambda user: user is not new)

    return change


def laid_out_otherwise(node: fx.Node) -> None:
    """The same tensor with other strides."""
    users = list(node.users)
    with node.graph.inserting_after(node):
        turned = node.graph.call_method("transpose", (node, 0, -1))
    with node.graph.inserting_after(turned):
        copied = node.graph.call_method("clone", (turned,), {"memory_format": torch.contiguous_format})
    with node.graph.inserting_after(copied):
        back = node.graph.call_method("transpose", (copied, 0, -1))
    for user in users:
        user.replace_input_with(node, back)


def through(dtype: torch.dtype) -> Change:
    """The value as it is in another dtype, and back."""

    def change(node: fx.Node) -> None:
        after("to", node.meta["example_value"].dtype)(node)
        (back,) = [user for user in node.users if user.target == "to"]
        with node.graph.inserting_before(back):
            back.args = (node.graph.call_method("to", (node, dtype)), *back.args[1:])

    return change


def only(dim: int) -> Change:
    """The first of a dim alone, which broadcasts."""
    return after(operator.getitem, (Ellipsis, slice(0, 1), *[slice(None)] * (-1 - dim)))


def overwritten_through_an_alias(node: fx.Node) -> None:
    """Behind the first user, who may have read it or hold another view of it."""
    user = next(iter(node.users))
    with node.graph.inserting_before(user):
        alias = node.graph.call_method("view_as", (node, node))
    with node.graph.inserting_after(user if user.op != "output" else alias):
        node.graph.call_method("mul_", (alias, 0.5))


def overwritten_at_the_end(node: fx.Node) -> None:
    (output,) = node.graph.find_nodes(op="output")
    with node.graph.inserting_before(output):
        node.graph.call_method("mul_", (node, 0.5))


def numbers(node: fx.Node) -> Iterator[tuple[str, Change]]:
    """Every number among the arguments, changed."""
    places = [*enumerate(node.args), *node.kwargs.items()]
    for index, value in places:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        hides = isinstance(value, float) and value < -1e4
        if hides and name_of(node) == "where" and not isinstance(node.args[1], fx.Node):
            continue  # an addend that raises keys: docs/attention.md lists its gradients as not kept
        for other in (
            (value + 1, value - 1, -value) if isinstance(value, int) else (value * 1.7, -value, -2.0)
        ):
            if other != value:
                yield f"argument {index} is {other}", set_argument(index, other)


def rearranged(node: fx.Node) -> Iterator[tuple[str, Change]]:
    """Every list among the arguments, such as an index, in another order, or with an entry twice."""

    def arrange(index: int, first: int) -> Change:
        # Not `set_argument`: entries are nodes of the graph that is changed.
        def change(node: fx.Node) -> None:
            entries = tuple(node.args[index])
            set_argument(index, (*entries[first : first + len(entries) - 1], entries[0]))(node)

        return change

    for index, value in enumerate(node.args):
        if isinstance(value, (list, tuple)) and len(value) > 1:
            yield f"argument {index} in another order", arrange(index, 1)
            yield f"argument {index} ends as it begins", arrange(index, 0)


def reads(index: int, name: str) -> Change:
    """Another tensor as an argument."""

    def change(node: fx.Node) -> None:
        (other,) = [n for n in node.graph.nodes if n.name == name]
        node.args = (*node.args[:index], other, *node.args[index + 1 :])

    return change


def others(node: fx.Node) -> Iterator[tuple[str, Change]]:
    """Every tensor among the arguments, in place of which another one of its shape and dtype is read."""
    before = list(itertools.takewhile(lambda n: n is not node, node.graph.nodes))
    for index, argument in enumerate(node.args):
        mine = value_of(argument)
        for other in before if mine is not None else ():
            its = value_of(other)
            if (
                other is not argument
                and its is not None
                and (its.shape, its.dtype) == (mine.shape, mine.dtype)
            ):
                yield f"argument {index} is {other.name}", reads(index, other.name)


def narrower(node: fx.Node) -> None:
    """A linear without the last column of its input and of its weight: of another rank, say."""
    x, weight = node.args[:2]
    with node.graph.inserting_before(node):
        parts = [node.graph.call_function(operator.getitem, (t, (..., slice(0, -1)))) for t in (x, weight)]
    node.args = (*parts, *node.args[2:])


def narrow_weight(node: fx.Node) -> None:
    """A weight that is part of a wider matrix."""
    weight = node.args[1]
    with node.graph.inserting_before(node):
        wide = node.graph.call_function(torch.cat, ([weight, weight], 1))
        columns = value_of(weight).shape[1]
        part = node.graph.call_function(operator.getitem, (wide, (slice(None), slice(0, columns))))
    node.args = (node.args[0], part, *node.args[2:])


def value_of(node: Any) -> Any:
    """The fake tensor of a node, or None."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def of_an_input(node: fx.Node) -> Iterator[tuple[str, Change]]:
    """Changes of an input that others do not have: what holds it may change it between two uses."""
    if value_of(node).is_floating_point():
        yield "laid out otherwise", laid_out_otherwise
        yield "overwritten through an alias", overwritten_through_an_alias
        yield "overwritten at the end", overwritten_at_the_end


def mutations(node: fx.Node) -> Iterator[tuple[str, Change]]:
    """What can be changed at a node."""
    name, value = name_of(node), value_of(node)
    if node.op == "placeholder" and value is not None and node.users:
        yield from of_an_input(node)
    if node.op not in ("call_function", "call_method") or value is None:
        return
    yield from numbers(node)
    yield from rearranged(node)
    yield from others(node)
    if name == "linear":
        yield "without the last column", narrower
        yield "a weight that is part of another", narrow_weight
    if name in _REPLACED:
        for other in _REPLACED[name]:
            yield f"is {other}", lambda n, other=other: setattr(n, "target", getattr(F, other))
    if name == "gelu":
        yield "by tanh", set_argument("approximate", "tanh")
    if name in _SWAPPED and len(node.args) == 2:
        yield f"is {_SWAPPED[name]}", retarget
    if len(node.args) > 1 and all(isinstance(a, fx.Node) for a in node.args[:2]) and name != "where":
        yield "arguments exchanged", swap_arguments
    if name == "add":
        yield "with alpha", set_argument("alpha", 0.3)
    if name == "permute":
        for dims in itertools.islice(itertools.permutations(range(value.dim())), 1, None, 3):
            yield f"by {dims}", lambda n, d=dims: setattr(n, "args", (n.args[0], *d))
    if name == "scaled_dot_product_attention":
        yield "is_causal", lambda n: setattr(n, "kwargs", {**n.kwargs, "is_causal": True, "attn_mask": None})
        yield "no scale", lambda n: setattr(n, "kwargs", {k: v for k, v in n.kwargs.items() if k != "scale"})
    yield "also returned", returned
    yield from of_values(value)


def of_values(value: torch.Tensor) -> Iterator[tuple[str, Change]]:
    """What can be done to a result."""
    if value.is_floating_point():
        yield "cloned", after("clone")
        yield "detached", after("detach")
        yield "laid out otherwise", laid_out_otherwise
        yield "flipped", after("flip", -1)
        yield "clamped", after("clamp", -0.5)
        yield "overwritten at the end", overwritten_at_the_end
        yield "scaled in place", after("mul_", 0.5)
        yield "overwritten through an alias", overwritten_through_an_alias
        for dtype in {torch.float64, torch.bfloat16, torch.float32} - {value.dtype}:
            yield f"through {dtype}", through(dtype)
        yield "in float64 from here on", after("double")
        if value.dtype != torch.float32:
            yield "in float32 from here on", after("float")
    elif value.dtype == torch.bool:
        yield "inverted", after("logical_not")
        yield "rolled", after("roll", 1, -1)
        yield "a dim more", after("unsqueeze", 0)
    for dim in range(-value.dim(), 0):
        if value.shape[dim] > 1:
            yield f"first of dim {dim}", only(dim)
    if value.dim() == 4:
        yield "batch and heads exchanged", after("transpose", 0, 1)
        yield "transposed", after("transpose", -2, -1)


def graph_of(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Dynamo's graph of a function, and its inputs in the order of that graph."""
    found: list[Any] = []

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            found.append((graph, [a.detach().requires_grad_(a.requires_grad) for a in args]))
            return graph(*args)

        return run

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    return found[0]


def mutants(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> Iterator[tuple[str, fx.GraphModule, list[torch.Tensor]]]:
    """Every mutant of a function: what was changed, the mutant, its inputs."""
    graph, inputs = graph_of(function, inputs)
    for index, node in enumerate(graph.graph.nodes):
        for text, change in mutations(node):
            mutant = copy.deepcopy(graph)
            chosen = next(itertools.islice(mutant.graph.nodes, index, None))
            change(chosen)
            mutant.recompile()
            yield f"{node.name} ({name_of(node)}): {text}", mutant, inputs


def runs(mutant: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a mutant is a program at all, also in float64, and gives numbers."""
    try:
        wide = cast((*inputs,), torch.float64)
        with Float64Mode():  # a cast makes no copy there: what is written to may be an input then
            mutant(*copied(wide, True))
        copies = copied((*inputs,), True)
        outputs = mutant(*copies)
        if any(x.requires_grad for x in inputs):
            sum(x.double().sum() for x in outputs if x.requires_grad).backward()
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False
    return all(bool(x.isfinite().all()) for x in outputs)


def verify(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    judge: Callable[[fx.GraphModule, list[torch.Tensor]], object],
    chosen: Callable[[int], bool] = lambda index: True,
) -> int:
    """Judge the mutants of a function.

    Args:
        function, inputs: what is mutated.
        judge: takes a mutant and its inputs, and raises where it comes out wrong.
        chosen: the numbers of the mutants that are judged.

    Returns:
        How many were judged.

    Raises:
        AssertionError: with each mutant that is wrong.
    """
    wrong, count = [], 0
    for index, (text, mutant, values) in enumerate(mutants(function, inputs)):
        if not chosen(index) or not runs(mutant, values):
            continue
        count += 1
        try:
            judge(mutant, values)
        except Exception as error:
            wrong.append(f"{text}: {type(error).__name__}: {error}")
    assert not wrong, f"{len(wrong)} of {count} mutants\n" + "\n\n".join(wrong)
    return count
