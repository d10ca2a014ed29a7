"""Keeps Inductor's own attention patterns from graphs that they read wrongly.

Those patterns ignore some constants of the operations that they match: the dim of a softmax, the order of a
permutation, `alpha` of an addition, a divisor. A graph that differs from attention in nothing but such a
constant is replaced by attention, and the result is silently wrong (pytorch#196468, #195320). Each of them is
brought here to an equal form that means to the pattern what it means to everybody else:

| graph | equal form |
|---|---|
| `softmax(x, dim)`, not over the last dim | over the last dim, between two transposes |
| `e / e.sum(dim, keepdim=True)`, not over the last dim | a sum without `keepdim`, then `unsqueeze` |
| `add(x, y, alpha=a)` | `add(x, a * y)` |
| q, k or v permuted otherwise than by the pattern | several permutations, the last ones as it assumes them |
| `scores / c`, or `q / c`, where c is not sqrt(head_dim) (torch 2.11) | `-(-scores / c)` |
| the same where c is a tensor (before torch 2.15) | `-(-scores / c)` |

Views cost nothing, and a factor is computed in the kernel of the addition. Only what lies between two matrix
products is touched, and attention that is fused before has none of it left.

torch 2.13 also has patterns (29 and 30) for what SDPA is decomposed to where no backend takes it: where the
last dim of q, k or v is not in order in memory, or v has another head dim, or the mask takes a gradient. They
ignore the permutations of q, k and v as well, so those of every SDPA call are brought to that form.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .._inductor import (
    computing_fakes,
    fake_mode_of,
    is_batched,
    known_true,
    patterns_ignore_the_scale,
    patterns_match_decomposed_sdpa,
    patterns_take_tensors_for_numbers,
    suppress_guards,
)
from ..fusion import Candidate, Fusion, Rejected
from ..operands import tensor

#: How far from a softmax its two products are looked for.
REACH = 24

_PRODUCTS = {"matmul", "bmm", "__matmul__", "einsum", "mm", "baddbmm"}
#: What may stand between a permutation and the product that reads it, and leaves its dims where they are.
_TRANSPARENT = {"contiguous", "clone", "expand", "to", "float", "half", "bfloat16", "mul", "truediv", "div"}
_PERMUTES = {"transpose", "permute", "swapaxes", "swapdims", "t", "movedim", "moveaxis", "getattr"}
#: Attributes that transpose, as operations (torch 2.15).
_ATTRIBUTES = {"numpy_T": "T", "mT": "mT", "mH": "mH", "matrix_H": "H"}
#: The dims that stock's patterns take every permutation to have: heads brought forward, k transposed.
_HEADS = (0, 2, 1, 3)
_SDPA = "scaled_dot_product_attention"


def name_of(node: Any) -> str:
    """The operation of a call node, in whatever spelling, or ""."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return ""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.split("::")[1]
    else:
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name.strip("_") if name != "__matmul__" else "matmul"


def nearest_product(node: fx.Node, neighbours: Callable[[fx.Node], Sequence[fx.Node]]) -> fx.Node | None:
    """The nearest matrix product upwards or downwards of `node`, within `REACH` nodes."""
    seen, edge = {node}, [node]
    while edge and len(seen) < REACH:
        following: list[fx.Node] = []
        for each in edge:
            for other in neighbours(each):
                if name_of(other) in _PRODUCTS:
                    return other
                if other not in seen:
                    seen.add(other)
                    following.append(other)
        edge = following
    return None


def inputs_of(node: fx.Node) -> list[fx.Node]:
    return list(node.all_input_nodes)


def users_of(node: fx.Node) -> list[fx.Node]:
    return list(node.users)


class Respelled(Candidate):
    """An operation that is written in another way.

    Args:
        anchor: the node.
        source: its input.
    """

    def __init__(self, anchor: fx.Node, source: Any) -> None:
        self.anchor, self.source = anchor, source

    def guard(self) -> None:
        if is_batched(tensor(self.anchor)):
            raise Rejected("inside torch.vmap, whose values have a hidden dim")

    def replace(self, result: fx.Node) -> None:
        """Put `result`, which is the same tensor, in the place of the anchor."""
        if result is not self.source:
            result.meta = dict(self.anchor.meta)
        self.anchor.replace_all_uses_with(result)
        self.anchor.graph.erase_node(self.anchor)

    def dtype_option(self) -> dict[str, Any]:
        """`dtype=` where the result has another dtype than the input."""
        before, after = tensor(self.source), tensor(self.anchor)
        assert before is not None and after is not None
        return {} if before.dtype == after.dtype else {"dtype": after.dtype}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node at the insertion point, with its value."""
        node = self.anchor.graph.create_node(
            "call_method" if isinstance(target, str) else "call_function", target, args, kwargs
        )
        mode = fake_mode_of(self.anchor.graph)
        given = fx.map_arg((args, kwargs), lambda n: n.meta.get("example_value", n.meta.get("val")))
        with suppress_guards(mode), torch.no_grad(), computing_fakes(mode):
            function = getattr(torch.Tensor, target) if isinstance(target, str) else target
            result = function(*given[0], **given[1])
        key = "val" if "val" in self.anchor.meta else "example_value"
        node.meta = {**self.anchor.meta, key: result}
        return node

    def rewrite(self) -> str:
        raise NotImplementedError


class Softmax(Respelled):
    """A softmax that is not over the last dim."""

    def __init__(self, anchor: fx.Node, source: Any, dim: int) -> None:
        super().__init__(anchor, source)
        self.dim = dim

    def rewrite(self) -> str:
        with self.anchor.graph.inserting_before(self.anchor):
            turned = self.call("transpose", self.source, self.dim, -1)
            weights = self.call(torch.softmax, turned, -1, **self.dtype_option())
            self.replace(self.call("transpose", weights, self.dim, -1))
        return f"softmax over dim {self.dim} between transposes"


class Sum(Respelled):
    """The sum of a softmax that is written out, not over the last dim."""

    def __init__(self, anchor: fx.Node, source: Any, dims: tuple[int, ...]) -> None:
        super().__init__(anchor, source)
        self.dims = dims

    def rewrite(self) -> str:
        with self.anchor.graph.inserting_before(self.anchor):
            result = self.call(torch.sum, self.source, list(self.dims), **self.dtype_option())
            for dim in self.dims:
                result = self.call("unsqueeze", result, dim)
            self.replace(result)
        return f"sum over dims {list(self.dims)} without keepdim"


class Alpha(Respelled):
    """An addition with a factor for its second operand."""

    def guard(self) -> None:
        super().guard()
        if tensor(self.anchor) is None or len(self.anchor.args) + ("other" in self.anchor.kwargs) != 2:
            raise Rejected("the operands of the addition are not known")

    def rewrite(self) -> str:
        node = self.anchor
        operands: list[Any] = [*node.args, node.kwargs.get("other")]
        first, other = operands[:2]
        alpha: Any = node.kwargs["alpha"]
        added, result = tensor(other), tensor(node)
        assert result is not None
        with node.graph.inserting_before(node):
            if added is not None and added.dtype != result.dtype:  # add casts first
                other = self.call("to", other, result.dtype)
            scaled = self.call(operator.mul, other, alpha) if isinstance(other, fx.Node) else other * alpha
        node.args = (first, scaled)
        node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("alpha", "other")}
        return "alpha multiplied out"


class Divisor(Respelled):
    """A division of the scores, or of q, that a pattern would take for one by sqrt(head_dim)."""

    def guard(self) -> None:
        super().guard()
        self.source = self.anchor.args[0] if self.anchor.args else None  # those before may have replaced it
        if not isinstance(self.source, fx.Node) or self.anchor.kwargs or len(self.anchor.args) != 2:
            raise Rejected("the operands of the division are not known")
        if name_of(self.anchor) == "itruediv" or str(self.anchor.target).endswith("_"):
            if len(self.source.users) > 1 or name_of(self.source) not in _PRODUCTS:
                raise Rejected("the scores are divided in place, and something else may read them")

    def rewrite(self) -> str:
        with self.anchor.graph.inserting_before(self.anchor):
            turned = self.call(operator.neg, self.source)
            divided = self.call(operator.truediv, turned, self.anchor.args[1])
            self.replace(self.call(operator.neg, divided))
        return "negated, divided, negated"


class Permutation(Respelled):
    """A permutation of q, k or v that the pattern would take for another one."""

    def __init__(self, anchor: fx.Node, source: fx.Node, steps: list[tuple[int, ...]]) -> None:
        super().__init__(anchor, source)
        self.steps = steps

    def rewrite(self) -> str:
        result = self.source
        with self.anchor.graph.inserting_before(self.anchor):
            for dims in self.steps:
                result = self.call("permute", result, dims)
            self.replace(result)
        return f"permuted by {' then '.join(map(str, self.steps)) or 'nothing'}"


def permutation_of(node: fx.Node) -> tuple[fx.Node, tuple[int, ...]] | None:
    """(input, dims) of a transpose or permute of any spelling: result dim i is input dim `dims[i]`."""
    name = name_of(node)
    if name not in {*_PERMUTES, *_ATTRIBUTES} or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    before, result = tensor(source), tensor(node)
    if before is None or result is None or before.dim() != result.dim():
        return None
    attribute = str(node.args[1]) if name == "getattr" else _ATTRIBUTES.get(name)
    if name == "getattr" and attribute not in _ATTRIBUTES.values():
        return None
    # Asked of a tensor whose sizes tell its dims apart.
    probe = torch.empty(tuple(range(2, 2 + before.dim())), device="meta")
    try:
        turned: Any = getattr(probe, attribute) if attribute is not None else None
        if turned is None:
            function: Any = getattr(torch.Tensor, name)
            turned = function(probe, *node.args[1:], **node.kwargs)
    except (TypeError, RuntimeError, AttributeError):
        return None
    return source, tuple(size - 2 for size in turned.shape)


def composed(first: tuple[int, ...], then: tuple[int, ...]) -> tuple[int, ...]:
    """One permutation for two in a row."""
    return tuple(first[i] for i in then)


def inverse(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dims.index(i) for i in range(len(dims)))


def permutations_of(
    operand: Any, copied: bool = True
) -> tuple[fx.Node, fx.Node, list[tuple[int, ...]]] | None:
    """(last node, input, steps) of the permutations, in a row, of an operand of a product or of SDPA.

    Args:
        operand: the operand.
        copied: whether what lies behind them may lay it out anew.
    """
    node = operand
    while isinstance(node, fx.Node) and permutation_of(node) is None:
        below = node.args[0] if node.args else None
        before, after = tensor(below), tensor(node)
        if before is None or after is None or before.dim() != after.dim():
            return None
        if name_of(node) not in _TRANSPARENT:
            return None
        if not copied and not all(map(_same, before.stride(), after.stride())):
            return None
        node = below
    if not isinstance(node, fx.Node):
        return None
    steps: list[tuple[int, ...]] = []
    source = node
    while (found := permutation_of(source)) is not None:
        source = found[0]
        steps.insert(0, found[1])
    return (node, source, steps) if len(steps[0]) in (3, 4) else None


def _same(one: Any, other: Any) -> bool:
    return known_true(one == other)


def factor(product: fx.Node, index: int) -> Any:
    """An operand of a product of two matrices, where it is one."""
    return (
        product.args[index] if name_of(product) in ("matmul", "bmm") and len(product.args) > index else None
    )


def permuted(product: fx.Node, output: fx.Node) -> Iterator[Candidate]:
    """The permutations of q, k and v that a pattern would read wrongly. Every pattern wants one of k."""
    if permutations_of(factor(product, 1)) is None:
        return
    for node, index, is_key in ((product, 0, False), (product, 1, True), (output, 1, False)):
        yield from respelled(factor(node, index), transposed=is_key)


def permuted_for(call: fx.Node) -> Iterator[Candidate]:
    """The permutations of q, k and v of an SDPA call, which transposes k itself.

    A copy is left: no pattern has one in front of what SDPA is decomposed to.
    """
    for index, name in enumerate(("query", "key", "value")):
        operand = call.args[index] if len(call.args) > index else call.kwargs.get(name)
        result = tensor(operand)
        if result is not None and result.dim() == 4:
            yield from respelled(operand, transposed=False, copied=False)


def respelled(operand: Any, transposed: bool, copied: bool = True) -> Iterator[Candidate]:
    """The permutations of one operand, where its pattern would take them for others.

    Args:
        operand: what a product or SDPA reads.
        transposed: whether the pattern has the transpose of k among them.
        copied: as for `permutations_of`.
    """
    found = permutations_of(operand, copied)
    if found is None:
        return
    last, source, steps = found
    rank = len(steps[0])
    identity = tuple(range(rank))
    known: list[tuple[int, ...]] = [_HEADS] if rank == 4 else []
    if transposed:
        known.append((*identity[:-2], rank - 1, rank - 2))
    whole = identity
    for dims in steps:
        whole = composed(whole, dims)
    wanted = standard(whole, known, identity)
    if steps != wanted:
        yield Permutation(last, source, wanted)


def divided(softmax: fx.Node, product: fx.Node, ignored: bool) -> Iterator[Candidate]:
    """Divisions of the scores, and of q, by something else than sqrt(head_dim).

    Args:
        softmax, product: what they lie between.
        ignored: whether patterns ignore the divisor. Those that read it take a tensor for a number, and
            raise (pytorch#191203, before torch 2.15): there it is divisions by tensors alone.
    """
    q = product.args[1 if name_of(product) in ("einsum", "baddbmm") else 0] if product.args else None
    read = tensor(q)
    size = read.shape[-1] if read is not None else None
    for node in (*between(softmax, product), q):
        if name_of(node) not in ("div", "truediv", "itruediv", "true_divide", "divide"):
            continue
        assert isinstance(node, fx.Node)
        by = node.args[1] if len(node.args) > 1 else node.kwargs.get("other")
        if isinstance(by, fx.Node) and tensor(by) is None:
            continue  # a symbolic number, which no pattern has
        if not ignored:
            if isinstance(by, fx.Node):
                yield Divisor(node, None)
            continue
        number = constant(by)
        if number is None or not isinstance(size, int) or not math.isclose(number, size**0.5, rel_tol=1e-6):
            yield Divisor(node, None)


def constant(number: Any) -> float | None:
    """A number, also where it is wrapped in a tensor, and the square root of one."""
    if isinstance(number, (int, float)):
        return float(number)
    if name_of(number) == "full" and len(number.args) > 1:
        return constant(number.args[1])
    if name_of(number) in ("tensor", "scalar_tensor", "to", "sqrt") and number.args:
        inner = constant(number.args[0])
        root = name_of(number) == "sqrt"
        return inner if not root else None if inner is None or inner < 0 else math.sqrt(inner)
    return None


def standard(
    whole: tuple[int, ...], known: list[tuple[int, ...]], identity: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """`whole` as steps of which the last ones are those of `known`, as many as the pattern may see."""
    steps: list[tuple[int, ...]] = []
    rest = whole
    for last in reversed(known):
        if rest == identity:
            break
        # rest = before, then last
        rest = composed(rest, inverse(last))
        steps.insert(0, last)
    return steps if rest == identity else [rest, *steps]


def candidates(graph: fx.Graph) -> Iterator[Candidate]:
    """What stock's patterns would read wrongly: around each softmax between two products, and before SDPA."""
    calls_are_misread = patterns_match_decomposed_sdpa()
    for node in list(graph.nodes):
        if name_of(node) == _SDPA and calls_are_misread:
            yield from permuted_for(node)
        found = reduction_of(node)
        if found is None:
            continue
        source, dims, rank = found
        product, output = nearest_product(node, inputs_of), nearest_product(node, users_of)
        if product is None or output is None:
            continue
        for each in between(node, product):
            if name_of(each) in ("add", "iadd") and each.kwargs.get("alpha", 1) != 1:
                yield Alpha(each, None)
        divisions, ignored = [], patterns_ignore_the_scale()
        if ignored or patterns_take_tensors_for_numbers():
            divisions = list(divided(node, product, ignored))
        yield from permuted(product, output)
        if dims != (rank - 1,):
            yield Sum(node, source, dims) if name_of(node) == "sum" else Softmax(node, source, dims[0])
        yield from divisions


def reduction_of(node: fx.Node) -> tuple[fx.Node, tuple[int, ...], int] | None:
    """(input, dims, rank) of a softmax, or of the sum of one that is written out."""
    name = name_of(node)
    if name not in ("softmax", "special_softmax", "sum"):
        return None
    source = node.args[0] if node.args else node.kwargs.get("input")
    before = tensor(source)
    if not isinstance(source, fx.Node) or before is None or before.dim() < 3 or tensor(node) is None:
        return None
    given = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    if name == "sum":
        keeps = node.kwargs.get("keepdim", node.args[2] if len(node.args) > 2 else False)
        if name_of(source) != "exp" or keeps is not True:
            return None
    dims = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if not dims or not all(isinstance(dim, int) for dim in dims):
        return None
    return source, tuple(sorted(dim % before.dim() for dim in dims)), before.dim()


def between(node: fx.Node, product: fx.Node) -> list[fx.Node]:
    """The nodes that lead from a product to `node`, the latter left out."""
    found: list[fx.Node] = []
    edge = [node]
    while edge and len(found) < REACH:
        for other in edge.pop().all_input_nodes:
            if other is not product and other not in found and name_of(other) not in _PRODUCTS:
                found.append(other)
                edge.append(other)
    return found


FUSION = Fusion(
    name="stock_misfires",
    stage="pre_grad",
    summary="graphs that stock's attention patterns misread, to equal ones that they do not",
    recognise=candidates,
    after=("attention",),
)
