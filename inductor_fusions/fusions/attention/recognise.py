"""Finds attention in Dynamo's torch-level graph by what it means.

Every softmax is an anchor. From it the graph is read upwards to the product of queries and keys, and
downwards to the product with the values, into the normal form

    out = dropout(softmax(scale * q @ k^T + sum(biases), where fills do not hide)) @ v

with, in between, functions of a score (`Stage`: the softcap is one) and an attention sink. Whatever stands on
the way and is not part of that form rejects the site, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...fusion import Rejected
from . import torch_ops
from .masks import Affine, Interpreter, is_fill
from .operands import Operand, product, same_shape
from .torch_ops import CASTS, COPIES, VIEWS, Op, read, tensor

_PRODUCTS = frozenset({"matmul", "bmm", "einsum"})
_SOFTMAXES = frozenset({"softmax", "_softmax"})
#: Operations through which a softmax may still reach a product; only to tell attention from other softmaxes.
_BETWEEN = CASTS | COPIES | VIEWS | torch_ops.TRANSPOSES | {
    "dropout", "mul", "div", "add", "expand", "where", "masked_fill", "getitem", "slice", "narrow",
    "nan_to_num",
}  # fmt: skip


@dataclass(frozen=True)
class Term:
    """Something between the product and the softmax that acts on the scores.

    Attributes:
        node: a tensor broadcastable to the scores of its stage: a bias, or the condition of a fill.
        lead: leading dims of the scores where it is applied.
        factor: what a bias is multiplied by.
        fill: None for a bias; for a fill the number that replaces the score.
        hides: whether a fill replaces scores where its condition is true.
        floor: the scores are clamped to this afterwards, which makes -inf finite.
        depth: for a bias that is 0 where a key is seen and one number elsewhere: that number.
    """

    node: fx.Node
    lead: tuple[Any, ...]
    factor: float = 1.0
    fill: float | None = None
    hides: bool = True
    floor: float | None = None
    depth: float | None = None


@dataclass(frozen=True)
class Stage:
    """A function of the scores on their way to the softmax: function(scale * scores + sum(terms)).

    Attributes:
        scale, scalers, terms: as in `Attention`, before the function.
        function: name in `SCORE_FUNCTIONS`, or "mul", "div" (by `operand`), "where" (`operand` is the
            condition under which `numbers[0]` replaces a score), "where_not".
        numbers: arguments of the function after the score.
        operand: a tensor that varies over queries or keys.
    """

    scale: float
    scalers: list[tuple[str, fx.Node, tuple[Any, ...]]]
    terms: list[Term]
    function: str
    numbers: tuple[float | None, ...] = ()
    operand: Term | None = None


#: A backward computes weights anew from the logsumexp, which must not lose the digits of the scores.
LARGEST_SCORE = 1e3

#: Functions of one score, of which a kernel can be told.
SCORE_FUNCTIONS = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "abs": torch.abs,
    "exp": torch.exp,
    "clamp": torch.clamp,
    "pow": torch.pow,
}


@dataclass(frozen=True)
class Sink:
    """A column concatenated to the scores before the softmax and dropped after it.

    Attributes:
        term: the column: its node, leading dims and factor.
        first: whether it comes before the keys.
    """

    term: Term
    first: bool


@dataclass
class Attention:
    """One attention in the normal form.

    Attributes:
        q, k, v: operands of shape (*lead, length, dim); leads of k and v broadcast to that of q.
        stages: functions of the scores, in order; what follows is applied after the last one.
        scale: number that the scores are multiplied by.
        scalers: tensors, constant over queries and keys, that q is multiplied ("mul") or divided
            ("div") by, with the lead of their stage.
        terms: biases and fills, from the product to the softmax.
        sink: a logit of each row that takes weight and has no value.
        below_sink: number of terms that are applied before the sink is there.
        lead: leading dims of the product; `softmax_lead` and `out_lead` those at the softmax and at
            the product with v.
        out_dims: the result (*out_lead, q_len, v_dim) is permuted by this to give `output`.
        chain: the nodes that the site consists of, each used by the next one only.
        readers: nodes that read the shape or dtype of the scores, not their values.
    """

    q: Operand
    k: Operand
    lead: tuple[Any, ...]
    softmax: fx.Node
    product: fx.Node
    scale: float = 1.0
    scalers: list[tuple[str, fx.Node, tuple[Any, ...]]] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    sink: Sink | None = None
    below_sink: int = 0
    dropout: float = 0.0
    v: Operand | None = None
    output: fx.Node | None = None
    softmax_lead: tuple[Any, ...] = ()
    out_lead: tuple[Any, ...] = ()
    out_dims: tuple[int, ...] = ()
    chain: list[fx.Node] = field(default_factory=list)
    readers: list[fx.Node] = field(default_factory=list)

    def read_on_the_way(self) -> Iterator[fx.Node]:
        """Every tensor that acts on the scores."""
        parts: list[Stage | Attention] = [*self.stages, self]
        for part in parts:
            yield from (term.node for term in part.terms)
            yield from (node for _, node, _ in part.scalers)
        yield from (stage.operand.node for stage in self.stages if stage.operand is not None)
        if self.sink is not None:
            yield self.sink.term.node


def softmaxes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Every softmax whose result reaches a product: the candidates for attention."""
    for node in graph.nodes:
        op = read(node)
        if op is not None and op.name in _SOFTMAXES and not op.inplace and _reaches_product(node):
            yield node


def _reaches_product(start: fx.Node, limit: int = 64) -> bool:
    frontier, seen = [start], {start}
    while frontier and len(seen) < limit:
        node = frontier.pop()
        for user in node.users:
            op = read(user)
            if op is None or user in seen:
                continue
            if op.name in _PRODUCTS:
                return True
            if op.name in _BETWEEN:
                seen.add(user)
                frontier.append(user)
    return False


def recognise(softmax: fx.Node, interpreter: Interpreter) -> Attention:
    """Read the attention around `softmax`.

    Raises:
        Rejected: with the first thing that is not part of the normal form.
    """
    op = read(softmax)
    assert op is not None
    scores = tensor(op.input)
    dim = op["dim"]
    if scores is None or not isinstance(dim, int):
        raise Rejected("the softmax has no fixed dim")
    if dim % scores.dim() != scores.dim() - 1:
        raise Rejected(f"the softmax is over dim {dim} of {scores.dim()}, not over the keys")
    if scores.dim() < 2:
        raise Rejected("the scores have one dim")
    upwards = _Upwards(interpreter)
    site = upwards.walk(op.input, softmax, 1.0, [])
    site = replace(site, softmax=softmax, softmax_lead=tuple(scores.shape[:-2]), readers=upwards.readers)
    site.chain.append(softmax)
    site.chain.extend(upwards.row_maxima)
    if site.sink is not None and len(site.terms) > site.below_sink:
        raise Rejected("a mask or a bias is added to an attention sink as well")
    _downwards(site)
    own = {*site.chain, site.output}
    for reader in site.readers:
        if reader not in own and not own.issuperset(reader.users):
            raise Rejected(f"the scores are used elsewhere, by {reader.name}")
    return site


#: Operations that read only the shape, dtype and device of their first argument.
_LIKE = frozenset("full_like zeros_like ones_like empty_like new_full new_zeros new_ones new_tensor".split())


def reads_metadata(user: fx.Node, node: fx.Node) -> bool:
    """Whether `user` reads the shape or dtype of `node` and none of its values."""
    op = read(user)
    if op is None:
        return False
    if op.name in ("type_as", "to", "view_as", "reshape_as", "expand_as"):
        return op.input is not node
    return op.name in _LIKE or op.name in ("size", "dim", "sym_size", "_assert_tensor_metadata")


class _Upwards:
    """Reads the scores from the softmax up to the product of q and k."""

    def __init__(self, interpreter: Interpreter) -> None:
        self.interpreter = interpreter
        self.readers: list[fx.Node] = []
        self.row_maxima: set[fx.Node] = set()  # subtracted again, which a softmax does not see

    def walk(
        self, node: Any, user: fx.Node, factor: float, scalers: list[tuple[str, fx.Node, tuple[Any, ...]]]
    ) -> Attention:
        """The attention whose scores `node` holds, seen by `user`, as far as the softmax's input.

        Args:
            factor: numbers by which the scores are multiplied further down.
            scalers: the same for tensors.
        """
        op, scores = read(node), tensor(node)
        if op is None or scores is None or scores.dim() < 2:
            raise Rejected("no product of queries and keys was found above the softmax")
        for other in node.users:
            if (other is user and not reads_metadata(other, node)) or other in self.row_maxima:
                continue
            if not reads_metadata(other, node):
                raise Rejected(f"the scores are used elsewhere, by {other.name}")
            self.readers.append(other)
        if not scores.is_floating_point():
            raise Rejected("the scores are not floating point")
        lead = tuple(scores.shape[:-2])
        if op.name in _PRODUCTS:
            return self._product(op, lead, factor, scalers)
        step = getattr(self, f"_{op.name}", None)
        if step is None and (op.name in CASTS or op.name in COPIES):
            step = self._through
        elif step is None and op.name in VIEWS:
            step = self._view
        if step is None:
            raise Rejected(f"{op.name} stands between the product of q and k and the softmax")
        site: Attention = step(op, lead, factor, scalers)
        site.chain.append(node)
        return site

    def _up(self, op: Op, scores: Any, factor: float, scalers: Any) -> Attention:
        return self.walk(scores, op.node, factor, scalers)

    def _through(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        return self._up(op, op.input, factor, scalers)

    def _view(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        before, after = tensor(op.input), tensor(op.node)
        if (
            before is None
            or after is None
            or before.dim() < 2
            or not same_shape(before.shape[-2:], after.shape[-2:])
        ):
            raise Rejected(f"{op.name} changes the query or key dim of the scores")
        return self._up(op, op.input, factor, scalers)

    def _dropout(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        if _dropout_p(op) != 0.0:
            raise Rejected("dropout is applied to the scores, before the softmax")
        return self._up(op, op.input, factor, scalers)

    def _neg(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        return self._up(op, op.input, -factor, scalers)

    def _function(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        """A function of one score, such as the tanh of a softcap."""
        arguments = [op["exponent"]] if op.name == "pow" else []
        numbers = tuple(self._number(argument) for argument in arguments)
        if None in numbers or op.name == "exp" or op.input is op["exponent"]:
            raise Rejected(f"{op.name} stands between the product of q and k and the softmax")
        return self._stage(op, op.input, op.name, numbers, None, factor, scalers)

    _tanh = _sigmoid = _relu = _abs = _pow = _function

    def _stage(
        self, op: Op, scores: Any, function: str, numbers: tuple[float | None, ...], operand: Term | None,
        factor: float, scalers: Any,
    ) -> Attention:  # fmt: skip
        if scalers:
            raise Rejected(f"a tensor scale is applied after {op.name}")
        site = self._up(op, scores, 1.0, [])
        if site.sink is not None:
            raise Rejected(f"{op.name} is applied to an attention sink")
        stage = Stage(site.scale, site.scalers, site.terms, function, numbers, operand)
        site.stages.append(stage)
        site.scale, site.scalers, site.terms = factor, [], []
        return site

    def _cat(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        parts, dim = op["tensors"], torch_ops.concrete(op["dim"] or 0)
        result = tensor(op.node)
        if not isinstance(parts, (list, tuple)) or len(parts) != 2 or result is None:
            raise Rejected("the scores are concatenated with more than one tensor")
        if not isinstance(dim, int) or dim % result.dim() != result.dim() - 1 or scalers:
            raise Rejected("the scores are concatenated over another dim than the keys")
        first, second = (tensor(part) for part in parts)
        if first is None or second is None:
            raise Rejected("the scores are concatenated with something that is no tensor")
        before = known_true(first.shape[-1] == 1) and not known_true(second.shape[-1] == 1)
        scores, sink = (parts[1], parts[0]) if before else (parts[0], parts[1])
        column = tensor(sink)
        if column is None or not known_true(column.shape[-1] == 1) or column.dim() < 2:
            raise Rejected("the scores are concatenated with more than one column")
        site = self._up(op, scores, factor, [])
        if site.sink is not None:
            raise Rejected("the scores have two attention sinks")
        site.sink = Sink(Term(sink, lead, factor=factor), before)
        site.below_sink = len(site.terms)
        return site

    def _mul(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        return self._scaled(op, [(op.input, op["other"]), (op["other"], op.input)], lead, factor, scalers)

    def _div(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        if op["rounding_mode"] is not None:
            raise Rejected("the scores are divided with rounding")
        return self._scaled(op, [(op.input, op["other"])], lead, factor, scalers)

    def _scaled(self, op: Op, sides: Any, lead: Any, factor: float, scalers: Any) -> Attention:
        def try_side(scores: Any, other: Any) -> Attention:
            number = self._number(other)
            if number is not None:
                if op.name == "div" and number == 0:
                    raise Rejected("the scores are divided by zero")
                return self._up(op, scores, factor / number if op.name == "div" else factor * number, scalers)
            if isinstance(torch_ops.value(other), (torch.SymFloat, torch.SymInt)):
                return self._up(op, scores, factor, [*scalers, (op.name, other, lead)])
            scale = tensor(other)
            if scale is None:
                raise Rejected("the scale is neither a number nor a tensor")
            if any(not known_true(size == 1) for size in scale.shape[-2:]):
                varying = Term(other, lead)
                return self._stage(op, scores, op.name, (), varying, factor, scalers)
            if not scale.is_floating_point() and scale.dim() > 0:
                raise Rejected("the scores are scaled by a tensor of integers")
            return self._up(op, scores, factor, [*scalers, (op.name, other, lead)])

        return self._either(op, sides, try_side)

    def _number(self, other: Any) -> float | None:
        """A number, or a tensor that the graph makes from a number."""
        found = torch_ops.concrete(other)
        if isinstance(found, (int, float)) and not isinstance(found, bool):
            return float(found)
        if tensor(other) is None:
            return None
        known = self.interpreter.read(other)
        if isinstance(known, Affine) and known.is_constant and isinstance(known.const, (int, float)):
            return float(known.const)
        return None

    def _either(self, op: Op, sides: list[tuple[Any, Any]], attempt: Any) -> Attention:
        """Try each (scores, other) side that has the shape of the result; the first that works.

        Where none does, the reason of the side that holds the longest chain is told.
        """
        result, misses = tensor(op.node), []
        for scores, other in sides:
            value = tensor(scores)
            if value is None or result is None or not same_shape(value.shape, result.shape):
                continue
            try:
                return attempt(scores, other)  # type: ignore[no-any-return]
            except Rejected as miss:
                misses.append(miss)
        found = [m for m in misses if "no product" not in m.reason]
        raise (found or misses or [Rejected("the scores are broadcast by an operation on them")])[0]

    def _add(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        return self._biased(
            op, [(op.input, op["other"], 1), (op["other"], op.input, 0)], 1.0, lead, factor, scalers
        )

    def _sub(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        return self._biased(op, [(op.input, op["other"], 1)], -1.0, lead, factor, scalers)

    def _biased(self, op: Op, sides: Any, sign: float, lead: Any, factor: float, scalers: Any) -> Attention:
        alpha = torch_ops.concrete(op["alpha"]) if op["alpha"] is not None else 1
        if not isinstance(alpha, (int, float)):
            raise Rejected("the bias is added with a symbolic alpha")
        second = {id(scores): which for scores, _, which in sides}

        def try_side(scores: Any, other: Any) -> Attention:
            if sign < 0 and alpha == 1 and self._is_row_maximum(other, scores):
                return self._up(op, scores, factor, scalers)
            # add(x, y, alpha) is x + alpha * y: with the scores second, alpha scales them.
            bias_factor, score_factor = (sign * alpha, 1.0) if second[id(scores)] else (1.0, float(alpha))
            site = self._up(op, scores, factor * score_factor, scalers)
            number = torch_ops.concrete(other)
            if isinstance(number, (int, float)):
                return site  # the softmax does not see what is added everywhere
            if scalers:
                raise Rejected("a tensor scale is applied after a bias")
            if tensor(other) is None:
                raise Rejected("what is added to the scores is no tensor")
            site.terms.append(Term(other, lead, factor=factor * bias_factor))
            return site

        return self._either(op, [(scores, other) for scores, other, _ in sides], try_side)

    def _is_row_maximum(self, node: Any, scores: Any) -> bool:
        """Whether a node holds the largest score of each row, and serves for nothing else."""
        own, current = [], node
        while isinstance(current, fx.Node):
            op = read(current)
            if op is None or len(current.users) != 1:
                return False
            own.append(current)
            if op.name in ("amax", "max"):
                dim, keep = op["dim"], op["keepdim"]
                if op.name == "max" and dim is None:  # x.max(-1, True)
                    dim, keep = op["other"], keep if not op.rest else op.rest[0]
                dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
                result = tensor(node)
                last = isinstance(dim, int) and result is not None and dim % result.dim() == result.dim() - 1
                if op.input is not scores or not last or keep is not True:
                    return False
                self.row_maxima.update(own)
                return True
            picks = op.name == "getattr" and op["name"] == "values"
            picks |= op.name == "getitem" and op["index"] == 0
            if not picks and op.name != "detach":
                return False
            current = op.input
        return False

    def _where(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        if op["other"] is None:
            raise Rejected("where with one argument")

        def try_side(scores: Any, other: Any) -> Attention:
            hides = scores is op["other"]
            return self._filled(op, scores, op["condition"], other, hides, lead, factor, scalers)

        return self._either(op, [(op.input, op["other"]), (op["other"], op.input)], try_side)

    def _masked_fill(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        return self._filled(op, op.input, op["mask"], op["value"], True, lead, factor, scalers)

    def _filled(
        self,
        op: Op,
        scores: Any,
        condition: Any,
        fill: Any,
        hides: bool,
        lead: Any,
        factor: float,
        scalers: Any,
    ) -> Attention:
        number = self._number(fill)
        if number is None:
            raise Rejected("masked scores are replaced by a tensor that is not a known number")
        mask = tensor(condition)
        if mask is None or mask.dtype != torch.bool:
            raise Rejected("the condition of a mask is no boolean tensor")
        if not is_fill(number * factor) and not abs(number * factor) <= LARGEST_SCORE:
            raise Rejected(f"masked scores are replaced by {number * factor:g}, in which others drown")
        if not is_fill(number * factor):
            function = "where" if hides else "where_not"
            return self._stage(op, scores, function, (number,), Term(condition, lead), factor, scalers)
        if scalers:
            raise Rejected("a tensor scale is applied after a mask")
        site = self._up(op, scores, factor, scalers)
        site.terms.append(Term(condition, lead, fill=number * factor, hides=hides))
        return site

    def _clamp(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        floor, ceiling = (None if op[name] is None else self._number(op[name]) for name in ("min", "max"))
        if (floor is None) != (op["min"] is None) or (ceiling is None) != (op["max"] is None):
            raise Rejected("the scores are clamped to tensors")
        if ceiling is not None or floor is None or not is_fill(floor * factor):
            return self._stage(op, op.input, "clamp", (floor, ceiling), None, factor, scalers)
        return self._floored(op, op.input, floor, factor, scalers)

    def _maximum(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        floor = self._number(op["other"])
        if floor is None:
            raise Rejected("the scores are clamped to a tensor")
        if not is_fill(floor * factor):
            return self._stage(op, op.input, "clamp", (floor, None), None, factor, scalers)
        return self._floored(op, op.input, floor, factor, scalers)

    def _floored(self, op: Op, scores: Any, floor: float, factor: float, scalers: Any) -> Attention:
        """max(scores, a number so low that only hidden scores are below it)."""
        site = self._up(op, scores, factor, scalers)
        low = floor * factor
        site.terms = [
            replace(t, fill=max(t.fill, low)) if t.fill is not None else replace(t, floor=low)
            for t in site.terms
        ]
        return site

    _max = _maximum
    _clamp_min = _clamp_max = _clamp

    def _baddbmm(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        beta, alpha = (
            torch_ops.concrete(op[name]) if op[name] is not None else 1 for name in ("beta", "alpha")
        )
        if not isinstance(beta, (int, float)) or not isinstance(alpha, (int, float)):
            raise Rejected("baddbmm with a symbolic alpha or beta")
        if scalers and beta != 0:
            raise Rejected("a tensor scale is applied after a bias")
        site = self._operands(op, op["batch1"], op["batch2"], lead, factor * alpha, scalers)
        if beta != 0:
            site.terms.append(Term(op.input, lead, factor=factor * beta))
        return site

    def _product(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        if op.node.kwargs.get("out") is not None:
            raise Rejected("the product writes to a given tensor (out=)")
        if op.name == "einsum":
            q, k = _einsum_scores(op)
            site = self._site(op, q, k, lead, factor, scalers)
        else:
            site = self._operands(op, op.input, op["other"], lead, factor, scalers)
        site.chain.append(op.node)
        return site

    def _operands(self, op: Op, left: Any, right: Any, lead: Any, factor: float, scalers: Any) -> Attention:
        q, kt = (Operand.of(n) if isinstance(n, fx.Node) else None for n in (left, right))
        if q is None or kt is None or q.value.dim() < 2 or kt.value.dim() < 2:
            raise Rejected("an operand of the product of q and k is no matrix")
        return self._site(op, q, _transposed(kt), lead, factor, scalers)

    def _site(self, op: Op, q: Operand, k: Operand, lead: Any, factor: float, scalers: Any) -> Attention:
        return Attention(
            q=q, k=k, lead=lead, softmax=op.node, product=op.node, scale=factor, scalers=list(scalers)
        )


def _transposed(operand: Operand) -> Operand:
    """The operand with its last two dims swapped; a transpose of the graph is taken back."""
    op = read(operand.node)
    if op is not None and not operand.steps:
        dims = (
            torch_ops.permutation(op)
            if op.name in torch_ops.TRANSPOSES
            else torch_ops.transposed_attribute(op)
        )
        swap = list(range(operand.value.dim()))
        swap[-1], swap[-2] = swap[-2], swap[-1]
        base = Operand.of(op.input) if dims is not None and isinstance(op.input, fx.Node) else None
        if dims is not None and base is not None:
            return base.permute([dims[d] for d in swap])
    return operand.then("permute", *_swapped(operand.value.dim()))


def _swapped(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


def _dropout_p(op: Op) -> float:
    """Probability with which a dropout drops now: 0 in evaluation."""
    training = op["training"] if op["training"] is not None else True
    p = op["p"] if op["p"] is not None else 0.5
    if not training:
        return 0.0
    if not isinstance(p, (int, float)) or not isinstance(training, bool):
        raise Rejected("dropout with a probability that is not a number")
    return float(p)


def _downwards(site: Attention) -> None:
    """Read from the softmax down to the product with the values, into `site`."""
    node, dropped = site.softmax, False
    while True:
        users = [u for u in node.users if not reads_metadata(u, node)]
        site.readers.extend(u for u in node.users if reads_metadata(u, node))
        if len(users) != 1:
            other = next((u for u in users if (op := read(u)) is None or op.name not in _PRODUCTS), users[-1])
            raise Rejected(
                f"the attention weights are used elsewhere, by {other.name}",
                "do not ask for the weights (output_attentions=False, need_weights=False)",
            )
        user = users[0]
        op = read(user)
        if op is None:
            raise Rejected("the attention weights are returned")
        if op.name in _PRODUCTS:
            break
        if op.inplace and op.name != "dropout":
            raise Rejected(f"{op.name}_ changes the attention weights")
        if op.input is not node:
            raise Rejected(f"{op.name} stands between the softmax and the product with v")
        if site.sink is not None and not dropped and _drops_column(op, site.sink.first):
            dropped = True
            site.chain.append(user)
            node = user
            continue
        before, after = tensor(node), tensor(user)
        if op.name == "dropout":
            p = _dropout_p(op)
            if p and site.dropout:
                raise Rejected("two dropouts follow the softmax")
            site.dropout = site.dropout or p
        elif op.name in VIEWS or op.name == "expand":
            if before is None or after is None or not same_shape(before.shape[-2:], after.shape[-2:]):
                raise Rejected(f"{op.name} changes the query or key dim of the weights")
            if op.name == "expand" and not same_shape(before.shape, after.shape):
                raise Rejected("the attention weights are expanded")
        elif op.name in CASTS:
            if after is None or not after.is_floating_point():
                raise Rejected("the attention weights are cast to integers")
        elif op.name not in COPIES:
            raise Rejected(f"{op.name} stands between the softmax and the product with v")
        site.chain.append(user)
        node = user
    if site.sink is not None and not dropped:
        raise Rejected("the scores are concatenated with a column that stays among the weights")
    weights = tensor(node)
    assert weights is not None
    site.output = user
    site.out_lead = tuple(weights.shape[:-2])
    if op.node.kwargs.get("out") is not None:
        raise Rejected("the product with v writes to a given tensor (out=)")
    if op.name == "einsum":
        site.v, site.out_dims = _einsum_output(op, node)
    else:
        if op.input is not node:
            raise Rejected("the attention weights are the right operand of their product")
        site.v = Operand.of(op["other"]) if isinstance(op["other"], fx.Node) else None
        if site.v is None or site.v.value.dim() < 2 or op["other"] is node:
            raise Rejected("the product of the weights is not with a matrix of values")
        result = tensor(user)
        assert result is not None
        if result.dim() != weights.dim():
            raise Rejected("the product with v broadcasts the weights")
        site.out_dims = tuple(range(result.dim()))
    result = tensor(user)
    if result is None or not known_true(product(result.shape) == product(
        (*site.out_lead, weights.shape[-2], site.v.shape[-1])
    )):  # fmt: skip
        raise Rejected("the product with v broadcasts the weights")


def _drops_column(op: Op, first: bool) -> bool:
    """Whether an operation is `weights[..., :-1]`, or `weights[..., 1:]` for the first column."""
    before = tensor(op.input)
    wanted = slice(1, None, None) if first else slice(None, -1, None)
    if before is None:
        return False
    if op.name == "getitem":
        index = op["index"] if isinstance(op["index"], tuple) else (op["index"],)
        whole = all(i is Ellipsis or i == slice(None) for i in index[:-1])
        return whole and (index[0] is Ellipsis or len(index) == before.dim()) and index[-1] == wanted
    if op.name == "narrow":
        dim, start, length = op["dim"], op["start"], op["length"]
        last = isinstance(dim, int) and dim % before.dim() == before.dim() - 1
        return last and start == int(first) and known_true(length == before.shape[-1] - 1)
    return False


# -- einsum ---------------------------------------------------------------------------------------


def _letters(op: Op) -> tuple[str, str, str, Any, Any]:
    equation = op["equation"]
    operands = op.rest
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not operands and isinstance(op.args.get("tensors"), (list, tuple)):
        operands = tuple(op.args["tensors"])
    if not isinstance(equation, str) or len(operands) != 2 or "..." in equation or "->" not in equation:
        raise Rejected("an einsum of this form is not read")
    inputs, result = equation.replace(" ", "").split("->")
    first, _, second = inputs.partition(",")
    if any(len(set(part)) != len(part) for part in (first, second, result)):
        raise Rejected("an einsum that repeats an index")
    return first, second, result, operands[0], operands[1]


def _arranged(node: fx.Node, letters: str, wanted: str) -> Operand:
    """The operand with its dims in the order `wanted`; letters that it lacks become dims of size 1."""
    operand = Operand.of(node)
    if operand is None or operand.value.dim() != len(letters):
        raise Rejected("an operand of an einsum has other dims than its letters")
    present = [c for c in wanted if c in letters]
    operand = operand.permute([letters.index(c) for c in present])
    if len(present) == len(wanted):
        return operand
    sizes = iter(operand.shape)
    return operand.reshape([next(sizes) if c in letters else 1 for c in wanted])


def _einsum_scores(op: Op) -> tuple[Operand, Operand]:
    first, second, result, left, right = _letters(op)
    if len(result) < 2:
        raise Rejected("the scores have one dim")
    row, column, lead = result[-2], result[-1], result[:-2]
    if row not in first:
        first, second, left, right = second, first, right, left
    summed = [c for c in first if c in second and c not in result]
    if (
        len(summed) != 1
        or row not in first or row in second
        or column not in second or column in first
        or set(first) - {row, summed[0]} - set(lead)
        or set(second) - {column, summed[0]} - set(lead)
    ):  # fmt: skip
        raise Rejected(f"einsum {op['equation']!r} is no product of queries and keys")
    return _arranged(left, first, lead + row + summed[0]), _arranged(right, second, lead + column + summed[0])


def _einsum_output(op: Op, weights: fx.Node) -> tuple[Operand, tuple[int, ...]]:
    first, second, result, left, right = _letters(op)
    if left is right:
        raise Rejected("the attention weights are multiplied with themselves")
    if left is not weights:
        first, second, left, right = second, first, right, left
    lead, row, column = first[:-2], first[-2], first[-1]
    free = [c for c in second if c not in first]
    if (
        len(free) != 1
        or column not in second or column in result or row in second
        or set(result) != set(lead) | {row, free[0]}
    ):  # fmt: skip
        raise Rejected(f"einsum {op['equation']!r} is no product of weights and values")
    natural = lead + row + free[0]
    value = _arranged(right, second, lead + column + free[0])
    return value, tuple(natural.index(c) for c in result)
