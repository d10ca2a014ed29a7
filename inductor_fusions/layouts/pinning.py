"""Materialises tensors captured by flex attention that Inductor cannot lower otherwise.

Inductor inlines the computation of a captured tensor into the kernel, element by element. The computation may
read a buffer whose strides are not fixed yet: a cumulative sum, a matrix product, a value with several
readers. Then Inductor raises "convert FlexibleLayout to FixedLayout first". An `as_strided` with the strides
that the value has anyway fixes them. Such a value is in memory in any case, so nothing is copied.

The strides of the query are fixed as well, because the template for short queries reads them too early.

What a fusion before autograd has pinned is looked at again, because torch may have changed what is behind it.

This is no fusion, because it is needed for every call of flex attention that a fusion has made, forward and
backward. `kernel_defects` does it for the queries of the user's own calls.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .. import _inductor, operands, tags
from .._inductor import hint, known_true
from ..effects.writes import memory_chain
from ..graph.builder import Builder
from ..operands import tensor

aten = torch.ops.aten

#: Positions of the captured tensors, of score_mod and mask_mod, in the calls.
_FORWARD, _BACKWARD = (7, 8), (12, 13)
#: A captured value that at least so many scores share is computed once, not once for each score.
REUSE = 8

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
    """Fix the strides of the values that captured tensors are computed from.

    Args:
        graph: of aten operations, changed in place.

    Returns:
        How many values were settled.
    """
    positions = {_inductor.flex_attention_op(): _FORWARD, _inductor.flex_backward_op(): _BACKWARD}
    settled: dict[fx.Node, fx.Node] = {}
    for call in list(graph.nodes):
        if call.op != "call_function" or not tags.is_ours(call):
            continue
        if call.target is _inductor.flex_attention_op():
            settle_query(call, settled)
        for position in positions.get(call.target, ()):
            q, k = (operands.value(node) for node in call.args[:2])
            scores = hint(q.shape[0] * q.shape[1]) * hint(q.shape[2]) * hint(k.shape[2])
            for captured in call.args[position] if len(call.args) > position else ():
                if isinstance(captured, fx.Node) and tensor(captured) is not None:
                    _settle(call, captured, scores / REUSE, settled)
    return len(settled)


def correct(graph: fx.Graph) -> int:
    """Have each `as_strided` that a fusion made before autograd read the values that it was made for.

    Inductor lowers it to a view of the buffer behind its input, whatever views are between. That buffer may
    be laid out otherwise: by now, where torch padded and cut a product (torch/_inductor/fx_passes/pad_mm.py),
    or later, where Inductor pads large strides (`comprehensive_padding`). It pads no value that an
    `as_strided` reads directly.

    Args:
        graph: of aten operations, whose values have the strides of now; changed in place.

    Returns:
        How many were changed.
    """
    changed = 0
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        if not tags.is_ours(node):
            continue
        found, wanted = (operands.value(each) for each in (node.args[0], node))
        steps = zip(wanted.shape, wanted.stride(), found.stride(), strict=True)
        *_, view, made = node, *memory_chain(node.args[0])
        if not all(known_true(size == 1) or known_true(step == old) for size, step, old in steps):
            node.update_arg(0, _dense_copy(node.args[0], node))
        elif view is not node and made.op == "call_function" and not _is_settled(made):
            view.replace_input_with(made, _as_strided(made))
        else:
            continue
        changed += 1
    return changed


def _dense_copy(source: Any, pinned: fx.Node) -> fx.Node:
    """A copy of a value, in memory as the dense strides of `pinned` say."""
    build, strides = Builder(pinned, pinned), operands.value(pinned).stride()
    order = sorted(range(len(strides)), key=lambda dim: -hint(strides[dim]))
    permuted = build.call(aten.permute.default, source, order)
    return build.call(aten.clone.default, permuted, memory_format=torch.contiguous_format)


def query_of(call: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The value that the query of a call is or views, and its reader; None if its strides are fixed."""
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
    """Fix the strides of the value that the query of a call is or views.

    torch/_inductor/kernel/flex/flex_decoding.py groups the heads of the query by its strides. If Inductor
    changes them afterwards, the results are wrong (seen on 2.11).
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


def _settle(first: fx.Node, captured: fx.Node, least: float, settled: dict[fx.Node, fx.Node]) -> None:
    """Fix the strides of the values that one captured tensor is computed from, as far as they are inlined.

    Values of at most `least` elements are fixed in any case. A range of which one place is read is fixed as
    well: Inductor writes that place as a number without the dims of a tile, and then Inductor or Triton
    raises (seen on 2.11 and 2.13).
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
            if node.target in _RANGES and (narrowed or hint(operands.value(node).numel()) == 1):
                settled[node] = _as_strided(node)
                user.replace_input_with(node, settled[node])
            continue
        if not _is_view(node) and (
            not _is_inlined(node) or len(node.users) > 1 or hint(operands.value(node).numel()) <= least
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


def _is_inlined(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _INLINED


def _as_strided(node: fx.Node) -> fx.Node:
    """The value as an `as_strided`, which fixes its strides."""
    build, source, value = Builder(node.next, node), node, operands.value(node)
    if not _inductor.is_dense(value):
        source = build.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        value = operands.value(source)

    def number(size: Any, target: Any, dim: int) -> Any:
        return size if isinstance(size, int) else build.given(size, target, source, dim)

    sizes = [number(size, aten.sym_size.int, dim) for dim, size in enumerate(value.shape)]
    strides = [number(step, aten.sym_stride.int, dim) for dim, step in enumerate(value.stride())]
    return build.call(aten.as_strided.default, source, sizes, strides)
