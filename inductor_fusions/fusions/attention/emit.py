"""Writes the fused attention into the graph."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ... import config
from ..._inductor import known_true
from ...effects.writes import may_alias, storage, written
from ...graph import torch_ops
from ...graph.builder import Builder
from ...operands import same_shape
from . import empty_rows, flex, mask_builder, row_bias
from .decode import plan as decode
from .decode.op import DECODE_ATTENTION
from .mask_builder import Mask, MaskMemo, build_mask
from .normal_form import Result
from .operands import Operand
from .problem import Problem, Scaler, is_in_rows
from .short import terms
from .short.op import SHORT_ATTENTION
from .structure import Structure


class Emitter:
    """Replaces the output of one site by a fused call.

    Args:
        problem: the attention, as the kernel takes it.
        output: the node whose users read the result from now on.
        memo: masks built for earlier sites of this graph.
        changed: gets what is put into the graph, as `leaving.settle` takes it.
    """

    def __init__(
        self, problem: Problem, output: fx.Node, memo: MaskMemo, changed: list[tuple[fx.Node, bool]]
    ) -> None:
        self.problem, self.memo, self.changed = problem, memo, changed
        self.build = Builder(output)

    def emit(self, kernel: str, grouped: bool) -> None:
        """Insert the fused call and make it the value of the output.

        Args:
            kernel: "sdpa" lets SDPA choose its backend; "efficient" calls that backend, "row_bias" cuDNN
                with one row of biases; "flex" calls flex attention, "short" and "decode" the operations of
                this package.
            grouped: give k and v with their own heads (enable_gqa), not repeated.
        """
        build, mask = self.build, Mask(None)
        if kernel not in ("short", "row_bias") and (kernel != "flex" or self.problem.structure is None):
            mask = build_mask(build, self.problem, self.memo)
        q, k, v = self._operands(kernel, grouped)
        problem, correction = self.problem, None
        if mask.empty is not None and (mask.blocked or not problem.train):
            q = build.call(torch.where, mask.empty, 0.0, q)
        elif mask.empty is not None:
            if mask.cut is not None:
                q = build.call(torch.where, mask.cut, 0.0, q)
            hidden = build.call("detach", build.call(torch.where, mask.empty, q, 0.0))
            q = build.call(torch.sub, q, hidden)
            correction = self._empty_rows_gradient(self._scaled_by(hidden), k, v)
        if kernel != "sdpa":
            q, k, v = (build.to(t, problem.dtype) for t in (q, k, v))
        result = self._attention(kernel, q, k, v, mask, grouped)
        if correction is not None:
            result = build.call(torch.add, result, correction)
        by_predicate = kernel in ("flex", "row_bias") and problem.structure is not None
        if problem.zeros is not None and not by_predicate:
            seen = empty_rows.rows_with_a_key(build, problem, self.memo)
            result = build.call(torch.where, seen, result, 0.0)
        for scaler in problem.behind:
            result = _scaled(build, result, scaler)
        self._replace_results(result, kept=problem.train and kernel != "short")

    def _operands(self, kernel: str, grouped: bool) -> list[fx.Node]:
        """q, k and v with what scales them, in the order in memory that a kernel takes."""
        build, problem = self.build, self.problem
        q = self._scaled_operand(problem.q, problem.scalers)
        q, self.problem = _with_positive_scale(build, problem, q)
        k, v = problem.k if grouped else problem.full_k, problem.v if grouped else problem.full_v
        found = [
            q,
            self._scaled_operand(k, problem.key_scalers),
            self._scaled_operand(v, problem.value_scalers),
        ]
        if kernel in ("sdpa", "efficient", "row_bias"):
            found = [_in_rows(build, each) for each in found]
        return found

    def _scaled_operand(self, operand: Operand, scalers: list[Scaler]) -> fx.Node:
        node = operand.built(self.build)
        for scaler in scalers:
            node = self.build.to(_scaled(self.build, node, scaler), self.build.value(node).dtype)
        return node

    def _attention(
        self, kernel: str, q: fx.Node, k: fx.Node, v: fx.Node, mask: Mask, grouped: bool
    ) -> fx.Node:
        """The call of a kernel, on (batch, heads, queries, dim)."""
        if kernel == "short":
            return self._short(q, k, v)
        if kernel == "flex":
            return self._flex(q, k, v, mask.node)
        if kernel == "row_bias":
            return self._row_bias(q, k, v)
        if kernel == "decode":
            return self._decode(q, k, v, mask.node)
        if self.problem.sink is not None:
            k, v, mask = self._with_sink(k, v, mask)
        if kernel == "efficient":
            return self._efficient(q, k, v, mask.node)
        return self._sdpa(q, k, v, mask.node, grouped)

    def _replace_results(self, found: fx.Node, kept: bool) -> None:
        """Let parts of what is found, for values side by side, be the results of the products with v.

        Args:
            kept: whether the fused operation saves what it returns for its backward.
        """
        build, problem = self.build, self.problem
        column = 0
        for each in problem.results:
            part, width = found, each.v.shape[-1]
            if len(problem.results) > 1:
                part = build.call("narrow", found, -1, column, width)
                column += width
            self._replaced(part, each, kept)

    def _replaced(self, found: fx.Node, result: Result, kept: bool) -> None:
        """Let what is on (batch, heads, queries, dim) be the value of a result."""
        build = self.build
        original = torch_ops.value(result.node)
        if not same_shape(build.value(found).shape, result.shape):
            found = build.call("reshape", found, tuple(result.shape))
        if result.dims != tuple(range(len(result.dims))):
            found = build.call("permute", found, *result.dims)
        if not same_shape(build.value(found).shape, original.shape):
            found = build.call("reshape", found, tuple(original.shape))
        found = build.to(found, original.dtype)
        self.changed.append((found, kept and _is_kernels(found)))
        found.meta = {**result.node.meta, **{k: v for k, v in found.meta.items() if k != build.key}}
        result.node.replace_all_uses_with(found)

    def _short(self, q: fx.Node, k: fx.Node, v: fx.Node) -> fx.Node:
        """The masks one by one, in the order of the unfused graph: fully masked rows come out as there."""
        build, problem = self.build, self.problem
        masks, numbers = [], []
        for operand, number, negated in terms.masks(problem):
            mask = operand.built(build)
            masks.append(build.call(torch.logical_not, mask) if negated else mask)
            numbers.append(number)
        return build.call(
            SHORT_ATTENTION, q, k, v, masks, numbers, float(problem.first_scale), problem.causal
        )  # fmt: skip

    def _decode(self, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None) -> fx.Node:
        build, problem = self.build, self.problem
        tiles = decode.tiles(decode.shape_of(problem), problem.q.value.device)
        seen = mask_builder.seen_tiles(build, problem, self.memo, mask, build.value(k).shape[1], tiles[0])
        scale, queries = float(problem.first_scale), decode.most_queries(problem)
        return build.call(DECODE_ATTENTION, q, k, v, *seen, scale, problem.causal, queries, tiles)

    def _flex(self, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None) -> fx.Node:
        build, problem = self.build, self.problem
        sunk = problem.sink is not None
        result, stats = flex.emit(build, problem, self.memo.once, q, k, v, mask, sunk)
        if problem.sink is not None:
            # The sink takes sigmoid(sink - logsumexp) of each row. The rest of the row is not written as
            # sigmoid(logsumexp - sink): that is nearly 1, and what its gradient needs is lost in it.
            assert stats is not None
            sink = self._sink(torch.float32)
            taken = build.call(torch.sigmoid, build.call(torch.sub, sink, build.call("unsqueeze", stats, -1)))
            kept = build.call(torch.sub, result, build.call(torch.mul, result, taken))
            return build.to(kept, problem.dtype)
        structure = problem.structure
        if structure is None or structure.number is None or structure.never_empty:
            return result
        if config.empty_rows == "ignore":
            return result
        return self._with_empty_rows(structure, q, k, v, result)

    def _row_bias(self, q: fx.Node, k: fx.Node, v: fx.Node) -> fx.Node:
        build, problem = self.build, self.problem
        structure = problem.structure
        assert structure is not None
        row = mask_builder.row_of_biases(build, problem, self.memo)
        result = row_bias.emit(build, problem, q, k, v, row)
        if structure.never_empty or config.empty_rows == "ignore":
            return result
        if structure.number is None:
            empty = empty_rows.empty_rows(build, problem, self.memo, structure)
            return build.call(torch.where, empty, 0.0, result)
        return self._with_empty_rows(structure, q, k, v, result)

    def _sink(self, dtype: torch.dtype) -> fx.Node:
        """The sink on (batch, heads, q or 1, 1)."""
        build, problem = self.build, self.problem
        assert problem.sink is not None
        operand, factor = problem.sink
        sink = build.to(operand.built(build), dtype)
        return sink if factor == 1.0 else build.call(torch.mul, sink, factor)

    def _with_sink(self, k: fx.Node, v: fx.Node, mask: Mask) -> tuple[fx.Node, fx.Node, Mask]:
        """One more key that is zero, whose column of the mask is the sink, and whose value is zero."""
        build, problem = self.build, self.problem
        k, v = (build.call(torch.nn.functional.pad, t, (0, 0, 0, 1)) for t in (k, v))
        columns = problem.k.shape[2]
        sink = build.call("expand", self._sink(problem.dtype), (*problem.q.shape[:3], 1))
        node = mask.node
        if problem.causal:
            rows = build.call(torch.arange, problem.q.shape[2], device=problem.q.value.device)
            keys = build.call(torch.arange, columns, device=problem.q.value.device)
            node = build.call(torch.ge, build.call("unsqueeze", rows, -1), keys)
            node = build.call("view", node, 1, 1, problem.q.shape[2], columns)
        if node is None:
            node = build.call("new_zeros", sink, (1, 1, 1, 1))
        if build.value(node).dtype == torch.bool:
            node = build.call(torch.where, node, 0.0, -math.inf)
        node = build.call("expand", build.to(node, problem.dtype), (*problem.q.shape[:3], columns))
        return k, v, replace(mask, node=build.call(torch.cat, [node, sink], -1))

    def _with_empty_rows(
        self, structure: Structure, q: fx.Node, k: fx.Node, v: fx.Node, result: fx.Node
    ) -> fx.Node:
        """Fully masked rows hold the mean of the values, as equal weights give it."""
        build, problem = self.build, self.problem
        empty = empty_rows.empty_rows(build, problem, self.memo, structure)
        mean = build.call(torch.mean, v, -2, True)
        heads, shared = problem.q.shape[1], build.value(v).shape[1]
        if not known_true(heads == shared):
            mean = build.call("repeat_interleave", mean, heads // shared, 1)
        if problem.train and not structure.replaced:
            hidden = self._scaled_by(build.call(torch.where, empty, q, 0.0))
            fixed = build.call("detach", hidden)
            change = self._empty_rows_gradient(fixed, k, v)
            own = build.call(torch.sub, hidden, fixed)
            # Zeros through which the scores send a gradient to q.
            to_query = self._per_head(own, build.call("detach", self._score_change(k, v)))
            change = build.call(torch.add, change, to_query)
            mean = build.call(torch.add, mean, change)
        return build.call(torch.where, empty, mean, result)

    def _empty_rows_gradient(self, hidden: fx.Node, k: fx.Node, v: fx.Node) -> fx.Node:
        """Zeros of the result's shape, whose gradient into k is that of the fully masked rows.

        With equal weights 1 / n, the result of such a row changes with its scores s by
        sum_j (s_j / n) (v_j - mean(v)): linear in k, so one small matrix (k^T @ centred v / n) holds it
        for all rows. The gradient into q flows through the kernel: q - q.detach() is zero there. Nothing
        computes the zeros (`layouts/zeros.py`).

        Args:
            hidden: the queries of these rows times the scale, zeros elsewhere, detached.
            k, v: keys and values with their own heads or with those of q.
        """
        build = self.build
        matrix = self._score_change(k, v)
        zeros = build.call(torch.sub, matrix, build.call("detach", matrix))
        return self._per_head(hidden, zeros)

    def _scaled_by(self, queries: fx.Node) -> fx.Node:
        """Queries times the scale of the scores."""
        scale = self.problem.scale
        scale = float(self.problem.q.shape[-1]) ** -0.5 if scale is None else scale
        return self.build.call(torch.mul, queries, scale)

    def _score_change(self, k: fx.Node, v: fx.Node) -> fx.Node:
        """By what the result of a fully masked row changes with its scaled query: k^T (v - mean) / n."""
        build = self.build
        fixed = build.call("detach", v)
        centred = build.call(torch.sub, fixed, build.call(torch.mean, fixed, -2, True))
        share = build.call(torch.div, centred, self.problem.k.shape[2])
        return build.call(torch.matmul, build.call("transpose", k, -2, -1), share)

    def _per_head(self, rows: fx.Node, matrix: fx.Node) -> fx.Node:
        """rows @ matrix, where several heads of the rows may share one of the matrices."""
        build, problem = self.build, self.problem
        heads, shared = problem.q.shape[1], build.value(matrix).shape[1]
        if known_true(heads == shared):
            return build.call(torch.matmul, rows, matrix)
        batch, length, dim = problem.q.shape[0], problem.q.shape[2], problem.q.shape[3]
        rows = build.call("reshape", rows, (batch, shared, heads // shared * length, dim))
        found = build.call(torch.matmul, rows, matrix)
        return build.call("reshape", found, (batch, heads, length, problem.v.shape[-1]))

    def _efficient(self, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None) -> fx.Node:
        """Efficient attention called by name, because SDPA would choose another backend.

        As SDPA does it, the rows of the mask are laid out at multiples of 16.
        """
        build, problem = self.build, self.problem
        if mask is not None:
            columns = problem.k.shape[2]
            if build.value(mask).dtype == torch.bool:
                mask = build.call(torch.where, mask, 0.0, -math.inf)
            mask = build.to(mask, problem.dtype)
            extra = -columns % 16
            if not known_true(extra == 0):
                padded = build.call(torch.nn.functional.pad, mask, (0, extra))
                mask = build.call("narrow", padded, -1, 0, columns)
            mask = build.call("expand", mask, (*problem.q.shape[:3], columns))
        node = build.call(
            torch.ops.aten._scaled_dot_product_efficient_attention.default,
            q, k, v, mask, problem.train, problem.dropout, problem.causal, scale=problem.scale,
        )  # fmt: skip
        return build.call(operator.getitem, node, 0)

    def _sdpa(self, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None, grouped: bool) -> fx.Node:
        problem = self.problem
        kwargs: dict[str, Any] = {
            "attn_mask": mask,
            "dropout_p": problem.dropout,
            "is_causal": problem.causal and problem.sink is None,
        }
        if problem.scale is not None:
            kwargs["scale"] = problem.scale
        if grouped:
            kwargs["enable_gqa"] = True
        value = problem.q.value.new_empty((*problem.q.shape[:3], problem.v.shape[-1]), dtype=problem.dtype)
        return self.build.given(value, torch._C._nn.scaled_dot_product_attention, q, k, v, **kwargs)


def erase_chain(graph: fx.Graph, chain: list[fx.Node]) -> None:
    """Remove the nodes of a site that nobody reads any more, last first."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in sorted(set(chain), key=lambda n: -order.get(n, 0)):
        if not node.users and not _is_seen_in_memory(node):
            graph.erase_node(node)


def _is_seen_in_memory(writer: fx.Node) -> bool:
    """Whether a node that writes to memory has a reader behind it, by another name."""
    targets = [storage(target) for target in written(writer)]
    node = writer.next
    while targets and node.op != "root":
        if any(may_alias(storage(each), target) for each in node.all_input_nodes for target in targets):
            return True
        node = node.next
    return False


def _is_kernels(result: fx.Node) -> bool:
    """Whether a result may be in the memory that the kernel keeps for its backward."""
    while result.target in ("permute", "reshape", "contiguous", "narrow"):
        result = result.all_input_nodes[0]
    return result.target not in (torch.add, torch.sub, torch.where, "to")


def _scaled(build: Builder, node: fx.Node, scaler: Scaler) -> fx.Node:
    kind, operand = scaler
    by = operand.built(build) if isinstance(operand, Operand) else operand
    if kind in ("hide", "show"):
        return build.call(torch.where, by, *((0.0, node) if kind == "hide" else (node, 0.0)))
    if kind == "shift":
        return build.call(torch.add, node, build.call(torch.mul, by, 0.0))
    return build.call(torch.div if kind == "div" else torch.mul, node, by)


def _with_positive_scale(build: Builder, problem: Problem, q: fx.Node) -> tuple[fx.Node, Problem]:
    """Move the sign of the scale, or a scale of 0, into q, because kernels need a scale above 0.

    Flash and cuDNN attention give NaN for another one; the kernel for a CPU multiplies its -inf by it.
    """
    scale = problem.first_scale
    if not isinstance(scale, (int, float)):
        if not problem.causal:
            return q, problem  # of the user's own call
        q, positive = build.to(build.call(torch.mul, q, scale), build.value(q).dtype), 1.0
    elif scale > 0:
        return q, problem
    elif scale == 0:
        q, positive = build.call(torch.mul, q, 0.0), 1.0
    else:
        q, positive = build.call(torch.neg, q), -scale
    if not problem.stages:
        return q, replace(problem, scale=positive)
    (stage, biases, operand), *later = problem.stages
    return q, replace(problem, stages=[(replace(stage, scale=positive), biases, operand), *later])


def _in_rows(build: Builder, node: fx.Node) -> fx.Node:
    """The operand with its rows in order in memory: kernels of SDPA take no other ones.

    A dim of size 1 whose stride is odd gets the one that it has in a contiguous tensor. Efficient attention
    checks the alignment of each stride, also of those that are not used (aten/src/ATen/native/transformers/
    cuda/mem_eff_attention/kernel_forward.h, `check_supported`), and Inductor keeps them (`sdpa_constraint`).
    """
    if not is_in_rows(build.value(node)):
        return build.call("contiguous", node)
    for dim in reversed(range(build.value(node).dim() - 1)):
        value = build.value(node)
        if known_true(value.shape[dim] == 1) and not known_true(value.stride(dim) % 8 == 0):
            node = build.call("unsqueeze", build.call("squeeze", node, dim), dim)
    return node
