"""What lies around a softmax: the products of an attention, and the nodes in between."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ...inplace import arguments, inputs, readers

#: How far from a softmax its two products are looked for.
REACH = 24
#: Matrix products, with the names of their two operands and the place of the first one.
PRODUCTS = {
    "matmul": (0, "input", "other"), "bmm": (0, "input", "mat2"), "mm": (0, "input", "mat2"),
    "baddbmm": (1, "batch1", "batch2"), "einsum": (1, "", ""),
}  # fmt: skip


def name_of(node: Any) -> str:
    """The operation of a call node, in whatever spelling, or ""."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return ""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.split("::")[1]
    else:
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name.strip("_")


def spellings(*names: str) -> list[Any]:
    """Every function, method and operator of torch that `name_of` gives one of these names."""
    found: list[Any] = []
    for name in (*names, *(f"_{name}" for name in names)):
        for container in (torch, F, torch.special, torch._C._nn, operator, torch.Tensor, torch.ops.aten):
            found += [getattr(container, name)] if hasattr(container, name) else []
        found += [name] if hasattr(torch.Tensor, name) else []
    return found


def argument(node: fx.Node, index: int, name: str = "input") -> Any:
    """An argument of a call, by its place or by its name; None where it is not given."""
    args, kwargs = arguments(node)
    return args[index] if len(args) > index else kwargs.get(name)


def factors(product: fx.Node) -> tuple[Any, Any]:
    """The two operands of a matrix product."""
    start, first, second = PRODUCTS[name_of(product)]
    return argument(product, start, first), argument(product, start + 1, second)


def nearest_product(node: fx.Node, neighbours: Callable[[fx.Node], Sequence[fx.Node]]) -> fx.Node | None:
    """The nearest matrix product upwards or downwards of `node`, within `REACH` nodes."""
    seen, edge = {node}, [node]
    while edge and len(seen) < REACH:
        following: list[fx.Node] = []
        for each in edge:
            for other in neighbours(each):
                if name_of(other) in PRODUCTS:
                    return other
                if other not in seen:
                    seen.add(other)
                    following.append(other)
        edge = following
    return None


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """The neighbours upwards."""
    return inputs(node)


def users_of(node: fx.Node) -> list[fx.Node]:
    """The neighbours downwards."""
    return readers(node)


def between(node: fx.Node, product: fx.Node) -> list[fx.Node]:
    """The nodes that lead from a product to `node`, the latter left out."""
    found: list[fx.Node] = []
    edge = [node]
    while edge and len(found) < REACH:
        for other in inputs(edge.pop()):
            if other is not product and other not in found and name_of(other) not in PRODUCTS:
                found.append(other)
                edge.append(other)
    return found
