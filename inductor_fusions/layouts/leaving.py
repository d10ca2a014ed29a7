"""Outputs of a changed graph keep their strides and their aliasing.

A fused operation may give its result other strides than the nodes that it replaces, and then so may what is
computed from the result. AOTAutograd takes the strides that it traces for those that the caller sees. So if
such a value leaves the graph with other strides than Dynamo saw, it is copied to those strides. Inductor
fuses the copy into what computes the value. If the strides are equal, nothing is copied. Inside the graph,
layouts are free.

A fused operation may also save its result for its backward. If the caller gets that memory, it gets a copy
instead, because it may write to it. The gradients that its backward returns become contiguous.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .. import _inductor, tags
from .._inductor import fake_mode_of, hint, is_dense, known_true, range_of, suppress_guards, value_of
from ..effects.derivatives import takes_gradient
from ..effects.modes import name_of
from ..effects.writes import is_opaque, may_alias, memory, memory_chain, written
from ..graph.builder import Builder
from ..graph.facts import change
from ..graph.products import is_pointwise
from ..operands import is_row_major, tensor
from .copies import EVEN, OWN, dense_order

#: Operations whose results have strides that do not depend on those of the first operand.
_SETTLING = frozenset("linear bmm mm addmm baddbmm multi_head_attention_forward".split())
#: Operations whose results are always new memory. The result of another may be its operand or a view of it:
#: that of a dropout in evaluation, of `reshape`, `contiguous` and `to`.
_NEW = frozenset(
    "add sub mul div truediv rsub neg pow exp log sqrt rsqrt tanh sigmoid relu gelu silu sin cos abs clamp "
    "softmax log_softmax sum mean amax amin max min norm var std cat concat stack where masked_fill clone "
    "layer_norm rms_norm group_norm batch_norm matmul conv1d conv2d conv3d".split()
)
#: Operations whose results depend on the strides or the memory layout of an operand.
_STRIDED = frozenset(
    "as_strided stride storage_offset data_ptr is_contiguous unfold resize resize_as set "
    "untyped_storage".split()
)

#: Operations whose results keep the order of the dims of their operand in memory.
_SUMS = (torch.ops.aten.sum.dim_IntList, torch.ops.aten.mean.dim)
#: How many values are followed from a gradient to what computes it.
_MOST_STEPS = 64


def release(graph: fx.Graph) -> None:
    """Replace the copies in a graph after autograd by clones: Inductor removes those that are not needed.

    A copy stays in three cases: if autograd would take the value itself for a view, which the caller may not
    write to; if its strides depend on data, because Inductor chooses the layout of such an output
    (`GraphLowering.run_node`); and in front of a body, such as that of a `torch.cond`, because Inductor may
    lay out a clone as it likes, and compiles the body for the strides in the metadata (`ir.Conditional`).
    """
    for node in graph.find_nodes(op="call_function", target=OWN):
        if _is_a_view_to_autograd(node.args[0]) or _depends_on_data(tensor(node)) or _enters_a_body(node):
            continue
        node.target = torch.ops.aten.clone.default
        node.kwargs = {"memory_format": torch.contiguous_format}
    for node in graph.find_nodes(op="call_function", target=EVEN):
        node.target = torch.ops.aten.clone.default


def lay_out_gradients(graph: fx.Graph) -> None:
    """Make gradients contiguous that leave a backward in the order in memory that a fused operation wrote.

    The kernels of SDPA write them in the order (batch, queries, heads, head dim). Those of an unfused
    attention are results of products, and an `autograd.Function` of the caller may call `view` on them.
    Inductor fuses the copy into operations behind the kernel, element by element.
    """
    if not _inductor.is_backward(graph):
        return
    output = graph.output_node()
    for node in dict.fromkeys(leaves_of(output.args[0])):
        value = tensor(node)
        if value is None or not is_dense(value) or is_row_major(value) or not _is_of_ours(node):
            continue
        copy = Builder(output, node).call(
            torch.ops.aten.clone.default, node, memory_format=torch.contiguous_format
        )
        _inductor.replace_result(output, node, copy)


def _is_of_ours(node: fx.Node) -> bool:
    """Whether a value has the order in memory of one of several results of an operation that a fusion made.

    It is that result, a view or a sum of it, or computed element by element from it.
    """
    waiting = [node]
    for each in waiting:
        made = memory_chain(each)[-1]
        if made.target is operator.getitem and tags.is_ours(made.all_input_nodes[0]):
            return True
        if len(waiting) < _MOST_STEPS and (is_pointwise(made) or made.target in _SUMS):
            waiting += [operand for operand in made.all_input_nodes if operand not in waiting]
    return False


def _depends_on_data(value: torch.Tensor | None) -> bool:
    """Whether strides of a tensor have no value while the graph is compiled."""
    strides = () if value is None else value.stride()
    return any(not isinstance(each, int) and range_of(each) is None for each in strides)


def _is_a_view_to_autograd(node: Any) -> bool:
    """Whether autograd may take a value for a view although its strides are those of its memory.

    Inside higher-order operations, such as the one that keeps a random state for a checkpoint, autograd sees
    the views that kernels return; a kernel of attention returns one.
    """
    target = getattr(node, "target", None)
    while target is operator.getitem or (isinstance(target, torch._ops.OpOverload) and target.is_view):
        node = node.args[0]
        target = getattr(node, "target", None)
    return isinstance(target, torch._ops.HigherOrderOperator)


def _enters_a_body(node: fx.Node) -> bool:
    """Whether a higher-order operation takes a value or a view of it."""
    return any(
        _takes_a_body(user)
        or (isinstance(user.target, torch._ops.OpOverload) and user.target.is_view and _enters_a_body(user))
        for user in node.users
    )


def _takes_a_body(node: fx.Node) -> bool:
    """Whether a node calls a higher-order operation; flex attention has operands of any strides."""
    return (
        isinstance(node.target, torch._ops.HigherOrderOperator)
        and node.target is not _inductor.flex_attention_op()
    )


@dataclass(eq=False)
class _Base:
    """A value whose strides may have changed, and its views.

    Attributes:
        node: what made it; None where it is one of several results.
        kept: whether an operation saves its memory for the backward.
        leaves: whether its strides are seen outside.
        returned: whether the caller gets its memory.
        overwritten: whether it is written to.
        enters: whether the body of a higher-order operation takes it.
        ways: the users of `node` on the way to where it leaves.
    """

    node: fx.Node | None
    kept: bool
    leaves: bool = False
    returned: bool = False
    overwritten: bool = False
    enters: bool = False
    ways: set[fx.Node] = field(default_factory=set)


def settle(
    graph: fx.Graph, changed: Iterable[tuple[fx.Node, bool]], inlined: bool = False, strides: bool = True
) -> dict[Any, bool]:
    """Give what leaves the graph the strides that it had, and memory of its own.

    Args:
        graph: Dynamo's, changed in place. The values of its nodes are those from before it was changed.
        changed: the new nodes, each with whether an operation in front of it saves its memory for the
            backward.
        inlined: the graph is a body that is inlined into the graph that calls it: its outputs stay as they
            are.
        strides: whether strides may have changed; else only shared memory is copied.

    Returns:
        For an inlined body: the outputs whose strides changed, in the form of `changed`.
    """
    present = set(graph.nodes)
    sources = {node: kept for node, kept in changed if node in present}
    if not sources:
        return {}
    walk = _Walk(graph, sources, inlined, reshapes=strides)
    with suppress_guards(fake_mode_of(graph)):
        for base in walk.bases:
            if base.node is not None and (strides or (base.kept and base.returned)):
                _settle(graph, base, base.node)
    return walk.outputs


def is_returned(node: fx.Node) -> bool:
    """Whether the caller of a graph may get the memory of a value."""
    walk = _Walk(node.graph, {node: True}, False, reshapes=False)
    return not is_transformed(node.graph) and any(base.kept and base.returned for base in walk.bases)


class _Walk:
    """Follows values with changed strides to where they leave the graph, or to where strides do not matter.

    Args:
        reshapes: whether views on the way become reshapes.
    """

    def __init__(self, graph: fx.Graph, sources: dict[fx.Node, bool], inlined: bool, reshapes: bool) -> None:
        self.inlined, self.reshapes = inlined, reshapes
        self.bases: list[_Base] = []
        self.outputs: dict[int, bool] = {}
        self._base: dict[fx.Node, _Base] = {}
        for node in graph.nodes:
            if node in sources:
                self._add(node, sources[node])
            reached = [n for n in node.all_input_nodes if n in self._base]
            if reached:
                self._meet(node, reached)
        self._mark_ways(graph)

    def _add(self, node: fx.Node, kept: bool) -> None:
        base = _Base(node if tensor(node) is not None else None, kept)
        self.bases.append(base)
        self._base[node] = base

    def _meet(self, user: fx.Node, reached: list[fx.Node]) -> None:
        if user.op == "output":
            for i, node in enumerate(leaves_of(user.args[0])):
                if node in reached and self.inlined:
                    self.outputs[i] = self.outputs.get(i, False) or self._base[node].kept
                elif node in reached:
                    self._base[node].leaves = self._base[node].returned = True
            return
        overwritten = written(user)
        for node in reached:
            self._base[node].overwritten |= node in overwritten
            self._base[node].leaves |= _sees_strides(user, node)
            self._base[node].enters |= _takes_a_body(user)
        if user in self._base:
            return
        name = name_of(user).strip("_")
        if name == "view" and self.reshapes:
            _reshape_instead(user)
        if not _tensors(user) or name in _SETTLING or (name == "matmul" and _settles(user, reached)):
            return
        if overwritten and not any(node in overwritten for node in reached):
            return  # has the strides of what is written to
        # Where transforms of torch.func wrap values, memory alone does not tell.
        # Gradients too: with the layout that the backward of a fused operation gives them.
        new = (name in _NEW or takes_gradient(user)) and not overwritten
        for node in reached:
            if not new and _share(user, node) and self._base[node].node is not None:
                self._base[user] = self._base[node]
                return
        if any(_sees_strides(user, node) for node in reached):
            return  # has been given the strides that it had
        kept = not new and any(self._base[n].kept and _may_be(user, n) for n in reached)
        self._add(user, kept)

    def _mark_ways(self, graph: fx.Graph) -> None:
        leading: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            base = self._base.get(node)
            if base is None:
                continue
            for user in node.users:
                leaves = user in leading if self._base.get(user) is base else False
                if leaves or (user.op == "output" and not self.inlined) or _sees_strides(user, node):
                    leading.add(node)
                    if node is base.node:
                        base.ways.add(user)


def _settle(graph: fx.Graph, base: _Base, node: fx.Node) -> None:
    if not (base.leaves or base.overwritten):
        return
    how: Any = "contiguous"
    may_own = not is_transformed(graph)
    if base.kept and (base.returned or base.overwritten):
        how = OWN if base.returned and may_own else "clone"
    elif may_own and (base.enters or (base.returned and _depends_on_data(tensor(node)))):
        how = OWN
    # A copy for the caller is read by nobody else; a value that is overwritten stays one value for all
    # readers.
    ways = base.ways if base.kept and not base.overwritten else set(node.users)
    new = copied(node, node.next, how)
    if new is not node:
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user in ways)


def copied(node: fx.Node, before: fx.Node, how: Any) -> fx.Node:
    """A value with the strides of its fake value.

    Args:
        how: "clone" or OWN copy the value; "contiguous" copies it if its strides differ at run time.
    """
    value = tensor(node)
    assert value is not None
    order = dense_order(value)
    if order is None:
        if how == "contiguous":
            return node
        order = sorted(range(value.dim()), key=lambda dim: -hint(value.stride(dim)))
    build, last = Builder(before, node, ("stack_trace", "nn_module_stack")), node

    def call(method: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal last
        last = build.call(method, last, *args, **kwargs)

    turned = order != sorted(order)
    if turned:
        call("permute", *order)
    if how is OWN:
        call(OWN)
    elif how == "clone":
        call("clone", memory_format=torch.contiguous_format)
    else:
        call("contiguous")
        for dim in reversed(range(value.dim())):  # of which strides say nothing, and are seen all the same
            if known_true(value.shape[order[dim]] == 1):
                call("squeeze", dim)
                call("unsqueeze", dim)
    if turned:
        call("permute", *(order.index(dim) for dim in range(value.dim())))
    return last


def is_transformed(graph: fx.Graph) -> bool:
    """Whether a graph has transforms of torch.func, which have no rules for operations of this package."""
    return any(name_of(node).endswith("_increment_nesting") for node in graph.nodes)


def _sees_strides(user: fx.Node, node: fx.Node) -> bool:
    """Whether the result of a node may depend on the strides of an operand."""
    target = user.target
    if user.op == "call_module":
        return True
    if takes_gradient(user):
        return False
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _takes_a_body(user)
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        space = str(getattr(target, "_qualified_op_name", None) or target._schema.name).partition("::")[0]
        if space not in ("aten", "prims", "inductor_fusions"):
            return True
    if not isinstance(target, str) and is_opaque(target):
        return True
    if name_of(user).strip("_") in _STRIDED:
        return True
    result, value = tensor(user), tensor(node)
    # Bits that are read as those of another dtype.
    return result is not None and value is not None and result.dtype != value.dtype and _share(user, node)


def _settles(product: fx.Node, reached: list[fx.Node]) -> bool:
    """Whether the layout of a product is fixed; torch may transpose that of a matrix and a batch."""
    first = tensor(product.args[0]) if product.args else None
    return first is not None and (first.dim() > 2 or product.args[1] not in reached)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node gives."""
    value = value_of(node)
    many = value if isinstance(value, (tuple, list)) else [value]
    return [each for each in many if isinstance(each, torch.Tensor)]


def _share(one: fx.Node, other: fx.Node) -> bool:
    """Whether two values are, or may be, in the same memory."""
    ours, theirs = ([memory(value) for value in _tensors(node)] for node in (one, other))
    return any(may_alias(a, b) for a in ours for b in theirs)


def _may_be(result: fx.Node, operand: fx.Node) -> bool:
    """Whether the result of an operation that is not known may be its operand, by its dtype."""
    dtypes = [value.dtype for value in _tensors(operand)]
    return any(value.dtype in dtypes for value in _tensors(result))


def leaves_of(argument: Any) -> Iterator[Any]:
    """The leaves of nested tuples, lists and dicts, in order."""
    if isinstance(argument, dict):
        argument = list(argument.values())
    if isinstance(argument, (tuple, list)):
        for each in argument:
            yield from leaves_of(each)
    else:
        yield argument


def _reshape_instead(view: fx.Node) -> None:
    """A view may not exist with other strides."""
    if any(isinstance(each, torch.dtype) for each in (*view.args, *view.kwargs.values())):
        return
    if view.op == "call_method":
        change(view, "reshape")
    elif not isinstance(view.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        shape = view.kwargs["size"] if "size" in view.kwargs else view.args[1]
        change(view, torch.reshape, (view.args[0], shape), {})
