"""Materialises tensors captured by flex attention that Inductor cannot lower otherwise.

Inductor writes what leads to a captured tensor into the body of the kernel, element by element. Where that
reads a buffer whose strides are not settled yet (a cumulative sum, a matrix product, whatever has several
readers), it raises "convert FlexibleLayout to FixedLayout first". An `as_strided` with the strides that a
value has anyway settles them. Such a value is in memory without it as well, so nothing is copied.

The query is settled as well: the template for short queries reads its strides before they are.

This is no fusion: it belongs to the calls of flex attention, forward and backward, that fusions have made,
and has to hold for each of them. `kernel_defects` settles the queries of the user's own.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from .. import _inductor, reporting
from .._inductor import hint
from ..graph import products
from ..graph.builder import Builder
from ..graph.products import tensor

aten = torch.ops.aten

#: Positions of the captured tensors, of score_mod and mask_mod, in the calls.
_FORWARD, _BACKWARD = (7, 8), (12, 13)
#: A captured value that so many scores share is computed once, not once for each score.
REUSE = 8

#: Devices whose kernel reads nothing but the captured tensors themselves, and fails where one is inlined.
_READS_BUFFERS = frozenset({"cpu"})

_RESHAPES = frozenset({aten.reshape.default, aten.view.default})
#: What is computed from its own index, and views that read it at few places.
_RANGES = frozenset({torch.ops.prims.iota.default, aten.arange.start_step})
_NARROWING = frozenset({aten.select.int, aten.slice.Tensor})
#: What is read at an index, in the body of a kernel, beside operations on single elements.
_INLINED = frozenset(
    {
        aten.clone.default, aten.constant_pad_nd.default, aten.embedding.default, aten.gather.default,
        aten.index.Tensor, torch.ops.prims.convert_element_type.default,
    }
)  # fmt: skip


def pin(graph: fx.Graph) -> int:
    """Settle the strides of what leads to captured tensors.

    Args:
        graph: of aten operations, changed in place.

    Returns:
        How many values were settled.
    """
    positions = {_inductor.flex_attention_op(): _FORWARD, _inductor.flex_backward_op(): _BACKWARD}
    settled: dict[fx.Node, fx.Node] = {}
    for call in list(graph.nodes):
        if call.op != "call_function" or not is_ours(call):
            continue
        if call.target is _inductor.flex_attention_op():
            settle_query(call, settled)
        for position in positions.get(call.target, ()):
            q, k = (products.value(node) for node in call.args[:2])
            scores = hint(q.shape[0] * q.shape[1]) * hint(q.shape[2]) * hint(k.shape[2])
            least = math.inf if q.device.type in _READS_BUFFERS else scores / REUSE
            for captured in call.args[position] if len(call.args) > position else ():
                if isinstance(captured, fx.Node) and tensor(captured) is not None:
                    _settle(graph, call, captured, least, settled)
    return len(settled)


def is_ours(call: fx.Node) -> bool:
    """Whether a fusion has made a call, which is the user's own otherwise."""
    return reporting.TAG in call.meta.get("custom", {})


def query_of(call: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The value that the query of a call is, or is a view of, and who reads it; None where it is settled."""
    user: fx.Node = call
    node: Any = call.args[0]
    while isinstance(node, fx.Node) and (_is_view(node) or node.target is operator.getitem):
        if _is_settled(node):
            return None
        user, node = node, node.args[0]
    if not isinstance(node, fx.Node) or node.op != "call_function" or tensor(node) is None:
        return None
    return node, user


def settle_query(call: fx.Node, settled: dict[fx.Node, fx.Node]) -> None:
    """Settle the value that the query of a call is, or is a view of.

    torch/_inductor/kernel/flex/flex_decoding.py groups the heads of the query by its strides, which may
    change afterwards where Inductor has not settled them: its values were wrong then (seen on 2.11).
    """
    found = query_of(call)
    if found is None:
        return
    node, user = found
    if node not in settled:
        settled[node] = _as_strided(node)
    if user is call:
        call.update_arg(0, settled[node])
    else:
        user.replace_input_with(node, settled[node])


def _settle(
    graph: fx.Graph, first: fx.Node, captured: fx.Node, least: float, settled: dict[fx.Node, fx.Node]
) -> None:
    """Settle what one captured tensor is computed from, as far as it is written into the kernel.

    What has no more than `least` elements is settled in any case. A range of which one place is read is
    settled as well: Inductor writes that place as a number without the dims of a tile, and then raises, or
    Triton does (seen on 2.11 and 2.13).
    """
    waiting, seen = [(first, captured, False)], {(first, False)}
    while waiting:
        user, node, narrowed = waiting.pop()
        if node in settled:
            user.replace_input_with(node, settled[node])
            continue
        if node.op != "call_function" or _is_settled(node):
            continue
        narrowed = narrowed or node.target in _NARROWING
        if not _tensors(node):
            if node.target in _RANGES and (narrowed or hint(products.value(node).numel()) == 1):
                settled[node] = _as_strided(node)
                user.replace_input_with(node, settled[node])
            continue
        viewed = _is_view(node) and not (least == math.inf and _may_copy(node))
        if not viewed and (
            not _is_inlined(node) or len(node.users) > 1 or hint(products.value(node).numel()) <= least
        ):
            settled[node] = _as_strided(node)
            user.replace_input_with(node, settled[node])
        elif (node, narrowed) not in seen:
            seen.add((node, narrowed))
            waiting += [(node, each, narrowed) for each in _tensors(node)]


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [each for each in node.all_input_nodes if tensor(each) is not None]


def _is_settled(node: fx.Node) -> bool:
    return node.target is aten.as_strided.default


def _is_view(node: fx.Node) -> bool:
    if node.target in _RESHAPES:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(each.alias_info is not None for each in schema.returns)


def _may_copy(view: fx.Node) -> bool:
    """Whether a view is no view of the buffer for Inductor, which copies what it is then."""
    source = tensor(view.args[0])
    return view.target in _RESHAPES and source is not None and not _inductor.is_dense(source)


def _is_inlined(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _INLINED


def _as_strided(node: fx.Node) -> fx.Node:
    """The same value, which has to be in memory with the strides that it has."""
    build, source, value = Builder(node.next, node), node, products.value(node)
    if not _inductor.is_dense(value):
        source = build.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        value = products.value(source)

    def number(size: Any, target: Any, dim: int) -> Any:
        return size if isinstance(size, int) else build.given(size, target, source, dim)

    sizes = [number(size, aten.sym_size.int, dim) for dim, size in enumerate(value.shape)]
    strides = [number(step, aten.sym_stride.int, dim) for dim, step in enumerate(value.stride())]
    return build.call(aten.as_strided.default, source, sizes, strides)
