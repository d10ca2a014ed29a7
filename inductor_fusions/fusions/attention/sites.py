"""The candidates of a graph: hand-written attentions and calls of SDPA."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true, suppress_guards
from ...effects import modes
from ...effects.derivatives import REVERSE
from ...effects.inplace import inputs
from ...effects.liveness import erase_dead_readers, is_pure
from ...fusion import Candidate, Rejected, Reported
from ...graph import torch_ops
from ...graph.facts import recording
from ...operands import check_kind, is_differentiated, text
from ...reasons import Reason, like
from . import emit, kernels, savings, structure
from .canonical import canonicalise, own_heads
from .decode import plan as decode
from .empty_rows import check_empty_rows
from .masks import may_hide_rows
from .normal_form import Attention, Result, Term
from .operands import Operand
from .problem import Problem, check_not_empty, check_sizes, same_problem_shapes
from .recognise import reaches_product, recognise
from .remembered import remembered, storage_of
from .scope import Scope
from .short import terms as short
from .structure import MASK_FILL, Structure


def hand_written(scope: Scope, weights: fx.Node | None) -> Candidate | None:
    """The attention around a softmax, by the node that holds its result; None if no product is behind it."""
    if weights is None or weights in scope.weights:
        return None
    scope.weights.add(weights)
    if reaches_product(weights):
        return HandWritten(scope, weights)
    if not reaches_product(weights, scope.outside):
        return None
    leaves = Reason.WEIGHTS.rejected(
        "the product with v is outside of the region, such as a checkpoint, that computes the weights",
        "compute the product with v in the same region",
    )
    return Reported(weights, leaves, {"scores": _text(weights)})


class HandWritten(Candidate):
    """A hand-written attention around a softmax.

    Args:
        beside: other softmaxes on the same scores, which are asked about already.
    """

    choice: kernels.KernelChoice

    def __init__(self, scope: Scope, softmax: fx.Node, beside: tuple[fx.Node, ...] = ()) -> None:
        self.scope, self.anchor, self.beside = scope, softmax, beside
        self.site: Attention | None = None
        self.ahead: list[fx.Node] = []

    def describe(self) -> dict[str, str]:
        return {"scores": _text(self.anchor)}

    def guard(self) -> None:
        check_kind(torch_ops.tensor(self.anchor))
        state = self.scope.modes.at(self.anchor)
        with suppress_guards(self.scope.fake_mode), modes.asking(state), torch.no_grad():
            site = self.site = recognise(self.anchor, self.scope.interpreter, self.beside)
            self.ahead = self._computed_ahead(site)
            self.scope.check_modes([*site.chain, *site.outputs, *self.ahead])
            state = self.scope.modes.at(site.output)
            self.scope.derivatives.check(site.outputs)
            values = [result.v.node for result in site.results]
            inputs = [site.q.node, site.k.node, *values, *site.read_on_the_way()]
            own = {*site.chain, *site.outputs}
            for node in own:
                for target in self.scope.mutations.targets(node):
                    if target not in own:
                        raise Reason.OVERWRITTEN.rejected(
                            f"the scores, or a value computed from them, overwrite {target.name}"
                        )
            for node in inputs:
                first = self.scope.mutations.first_reader(node, own) or site.product
                if self.scope.mutations.between(node, first, site.outputs[-1], ignore=own):
                    raise Reason.OVERWRITTEN.rejected(
                        f"{node.name} is overwritten before the attention reads it"
                    )
            with self.scope.interpreter.reading(site.output):
                problem = canonicalise(site, self.scope.interpreter)
            check_sizes(problem)
            if not same_problem_shapes(problem):
                raise Reason.SHAPES.rejected("the shapes of q, k and v do not match")
            problem.transformed = state.within(*REVERSE)
            problem.autocast = dict(state.autocast).get(problem.q.value.device.type) is not None
            if not problem.autocast:
                self._check_dtypes(site)
            check_empty_rows(problem, site)
            self.choice = kernels.choose(problem)
        check_sizes(problem)  # what held above becomes guards
        for partner in site.partners:
            self._check_partner(partner, site)

    def _check_partner(self, softmax: fx.Node, site: Attention) -> None:
        """Leave scores that two softmaxes read, unless both become attentions: they are in memory anyway."""
        try:
            HandWritten(self.scope, softmax, (*self.beside, self.anchor, *site.partners)).guard()
        except Rejected as miss:
            said = like(miss.reason, f"another softmax also reads the scores: {miss.reason}")
            raise type(miss)(said, miss.hint) from None

    def _computed_ahead(self, site: Attention) -> list[fx.Node]:
        """What computes values of later products behind the first one, and may as well be in front of it."""
        found: set[fx.Node] = set()
        frontier = [result.v.node for result in site.results]
        while frontier:
            node = frontier.pop()
            if node in found or node < site.output:
                continue
            read = inputs(node)
            between = self.scope.mutations.between
            if node in site.outputs:
                raise Reason.WEIGHTS.rejected(
                    "the attention weights are also used by another product, whose values are computed from "
                    "the result of the first one"
                )
            if not is_pure(node) or any(between(r, site.output, node) for r in read):
                raise Reason.WEIGHTS.rejected(
                    "the attention weights are also used by another product, and "
                    f"{node.name} may have another value before the first one"
                )
            found.add(node)
            frontier += read
        return sorted(found)

    def _check_dtypes(self, site: Attention) -> None:
        """A product of two dtypes raises in eager mode; fake tensors may allow it."""
        read = map(torch_ops.read, (site.output, *reversed(site.chain)))
        product = next(op.node for op in read if op is not None and op.name in torch_ops.PRODUCTS)
        both = map(torch_ops.tensor, inputs(product))
        if len({each.dtype for each in both if each is not None}) > 1:
            raise Reason.MIXED_DTYPES.rejected("the attention weights and the values have different dtypes")

    def savings(self) -> dict[str, int]:
        assert self.site is not None
        return savings.of_hand_written(self.choice.problem, self.site.product)

    def rewrite(self) -> str:
        assert self.site is not None
        site, output = self.site, self.site.output
        erase_dead_readers([*site.chain, *site.readers])
        for node in self.ahead:
            output.prepend(node)
        nodes = [site.product, *site.chain, *site.outputs]
        return _replace(
            self.scope, self.choice, output, [*site.chain, *site.readers, *site.outputs],
            lambda: remembered(nodes, self.scope.fake_mode),
        )  # fmt: skip


class SdpaCall(Candidate):
    """A call of scaled_dot_product_attention, whose mask may say less than it costs."""

    choice: kernels.KernelChoice

    def __init__(self, scope: Scope, call: fx.Node) -> None:
        self.scope, self.anchor = scope, call

    @property
    def op(self) -> torch_ops.Op:
        """The call, with the arguments that it has now."""
        op = torch_ops.read(self.anchor)
        assert op is not None
        return op

    def describe(self) -> dict[str, str]:
        given = {name: self.op[name] for name in ("query", "key", "value", "attn_mask")}
        return {name: _text(node) for name, node in given.items() if node is not None}

    def guard(self) -> None:
        check_kind(torch_ops.tensor(self.anchor))
        self.scope.derivatives.check([self.anchor])
        state = self.scope.modes.at(self.anchor)
        with suppress_guards(self.scope.fake_mode), modes.asking(state), torch.no_grad():
            with self.scope.interpreter.reading(self.anchor):
                problem = self._problem()
            check_sizes(problem)
            self.choice = kernels.choose(problem, self.call)
        check_sizes(problem)  # what held above becomes guards

    def _problem(self) -> Problem:
        op, out = self.op, torch_ops.tensor(self.anchor)
        if out is None:
            raise Reason.NOT_A_TENSOR.rejected(_NO_TENSOR)
        q, k, v = _operands(op)
        given = (op[name] for name in ("dropout_p", "is_causal"))
        dropout, causal = (0 if each is None else torch_ops.concrete(each) for each in given)
        if not isinstance(dropout, (int, float)) or not isinstance(causal, (bool, int)):
            raise Reason.NOT_A_TENSOR.rejected("dropout_p or is_causal is not a constant")
        mask, causal = op["attn_mask"], bool(causal)
        shape = (*q.shape[:-1], k.shape[-2])
        term = _term(mask, shape)
        changed, trains = False, is_differentiated([self.anchor], [q.node, k.node, v.node])
        if term is not None and not causal:
            left = structure.remaining([term], shape[2:], self.scope.interpreter, trains)
            if not left:
                term, mask, causal, changed = None, None, left is None, True
        k, v = (operand.expand((q.shape[0], *operand.shape[1:])) for operand in (k, v))
        few_k, few_v = k, v
        if known_true(q.shape[1] == k.shape[1]):
            few_k, few_v = own_heads(k, v, q.shape[:2], self.scope.mutations, self.anchor)
        problem = Problem(
            q=q, k=few_k, v=few_v, full_k=k, full_v=v, scale=op["scale"], dropout=float(dropout),
            causal=causal, terms=[], dtype=out.dtype, attn_mask=mask,
            results=[Result(self.anchor, v, shape[:2], tuple(out.shape), tuple(range(out.dim())))],
            train=trains,
            structure=None if term is None else self._structure(term, shape, trains),
            version=self.scope.mutations.last,
            transformed=self.scope.modes.at(self.anchor).within(*REVERSE),
        )  # fmt: skip
        check_not_empty(problem)
        self.was_grouped = bool(op["enable_gqa"])
        changed = changed or known_true(few_k.shape[1] != k.shape[1])
        self.call = kernels.Call(changed, self._as_short(problem, term))
        others = self.call.short is None and bool(decode.refused(problem))
        if not changed and problem.structure is None and others:
            raise Reason.CHOSEN.left_to_stock(kernels.why_as_it_is(problem))
        return problem

    def _as_short(self, problem: Problem, term: Term | None) -> Problem | None:
        """The problem as the kernel for short attention takes it, if it does.

        Where a mask hides every key of a row, SDPA gives zeros and that kernel does not: they are put there
        for a boolean mask, and another one that may do so is left to SDPA.
        """
        if problem.causal and not known_true(problem.q.shape[2] == problem.k.shape[2]):
            return None
        if problem.attn_mask is not None and term is None:
            return None
        if term is not None:
            boolean, operand = term.fill is not None, _padded(term)
            if not boolean and may_hide_rows(term.node):
                return None
            problem = replace(
                problem,
                attn_mask=None,
                zeros=(operand, False) if boolean else None,
                terms=[(replace(term, fill=MASK_FILL) if boolean else term, operand)],
                structure=None,
                overwritten=self.scope.mutations.touch,
                version=self.scope.mutations.last,
            )
        return None if short.refused(problem) else problem

    def _structure(self, term: Term, shape: tuple[Any, ...], trains: bool) -> Structure | None:
        """The mask as a predicate."""
        mask = torch_ops.tensor(term.node)
        if mask is None or (trains and mask.requires_grad):
            return None
        interpreter, graph = self.scope.interpreter, self.scope.graph
        found = structure.find([(term, _padded(term))], shape, interpreter, graph, _padded, trains)
        return None if found is None or found.visible is True else found

    def savings(self) -> dict[str, int]:
        return savings.of_sdpa_call(self.choice.problem, self.op["attn_mask"])

    def rewrite(self) -> str:
        op = self.op
        kept = [op[name] for name in ("query", "key", "value")]
        mask = torch_ops.tensor(op["attn_mask"])
        # SDPA converts a boolean mask, and keeps the result.
        if self.choice.kernel == "sdpa" or (mask is not None and mask.dtype != torch.bool):
            kept.append(op["attn_mask"])
        return _replace(
            self.scope, self.choice, self.anchor, [self.anchor], lambda: {*map(storage_of, kept)},
            self.was_grouped,
        )  # fmt: skip


def _replace(
    scope: Scope, choice: kernels.KernelChoice, output: fx.Node, chain: list[fx.Node],
    kept: Callable[[], set[object]], grouped: bool = False,
) -> str:  # fmt: skip
    """Emit a kernel in the place of `output`, and erase a chain of nodes.

    Args:
        kept: gives the memory that eager keeps for the backward of the site.
        grouped: whether k and v keep their own heads in any case.
    """
    with suppress_guards(scope.fake_mode), modes.asking(scope.modes.at(output)):
        with recording(scope.graph) as journal:
            scope.emitter(choice.problem, output).emit(choice.kernel, choice.grouped or grouped)
        if choice.problem.train:
            scope.keep(journal.added(), functools.cache(kept))
    emit.erase_chain(scope.graph, chain)
    return choice.text


_NO_TENSOR = "an argument of scaled_dot_product_attention is not a tensor"


def _operands(op: torch_ops.Op) -> tuple[Operand, Operand, Operand]:
    """q, k and v of a call of SDPA, of 4 dims that fit."""
    given = (op[name] for name in ("query", "key", "value"))
    q, k, v = (Operand.of(node) if isinstance(node, fx.Node) else None for node in given)
    if q is None or k is None or v is None:
        raise Reason.NOT_A_TENSOR.rejected(_NO_TENSOR)
    if q.value.dim() != 4 or k.value.dim() != 4 or v.value.dim() != 4:
        raise Reason.NO_KERNEL.left_to_stock("the operands of scaled_dot_product_attention are not 4-D")
    for own in (k.shape, v.shape):
        fit = [known_true(own[d] == 1) or known_true(own[d] == q.shape[d]) for d in (0, 1)]
        if not fit[0] or not (fit[1] or op["enable_gqa"]):
            raise Reason.NO_KERNEL.left_to_stock(
                "an SDPA call has more samples or heads of keys than of queries"
            )
    return q, k, v


def _term(mask: Any, shape: Sequence[Any]) -> Term | None:
    """The mask of a call as one of a hand-written attention: where it hides a key, scores are -inf."""
    tensor = torch_ops.tensor(mask)
    if tensor is None:
        return None
    fill = -math.inf if tensor.dtype == torch.bool else None
    return Term(mask, tuple(shape[:2]), fill=fill, hides=False)


def _padded(term: Term) -> Operand:
    operand = Operand.of(term.node)
    assert operand is not None
    return operand.padded(4)


def _text(node: Any) -> str:
    tensor = torch_ops.tensor(node)
    return str(node) if tensor is None else text(tensor)
