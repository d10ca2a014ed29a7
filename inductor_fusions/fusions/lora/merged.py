"""Adapters that are merged into a frozen weight in each step, before autograd: as two products.

    F.linear(x, w + s * (b @ a), c)    ->    F.linear(x, w, c) + s * F.linear(F.linear(x, a), b)

Autograd computes the gradient of the merged weight, one of three products of a step, and multiplies it by a
and b. As two products no such gradient is there, and no merged weight, which costs memory traffic in every
step. loralib, minLoRA and PEFT's ParamWrapper merge so. Others add a second linear, whose weight is
`s * (b @ a)`, or the same as a difference, `(w + s * (b @ a)) - w` (LyCORIS).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

from ... import config
from ..._inductor import Match, computed_by_function, freezes_weights, known_true
from ...decisions.tables import dtype_name
from ...effects.liveness import are_read_elsewhere, replace
from ...fusion import Candidate, Rejected, Reported
from ...graph.builder import Builder
from ...graph.search import reached
from ...graph.torch_ops import (
    CASTS,
    COPIES,
    TRANSPOSES,
    VIEWS,
    Op,
    linear_of,
    read,
    same_dtype_device,
    scaled_by,
)
from ...operands import check_device, check_kind, known_size, requires_grad, tensor, text, tokens_of, value
from ...reasons import Reason
from . import profit
from .adapters import is_low_rank
from .inputs import Inputs
from .second_product import made

#: Views of the merged matrix: they give it the shape that it has already.
_VIEWS = frozenset({"view", "reshape", "contiguous"})
#: What a weight is computed by from the product of an adapter: LoHa, LoKr, and DoRA among others.
_FROM = VIEWS | TRANSPOSES | CASTS | frozenset("add sub mul div neg contiguous getattr kron".split())
#: What makes a weight of those of an adapter that has no product of low rank (LoKr, FourierFT, SHiRA,
#: MergedLinear of loralib); or of the frozen weight, by a rotation of it (OFT, BOFT, HRA, Bone).
_MAKES = frozenset("kron block_diag conv1d index_put scatter scatter_add index_add".split())
_ROTATES = frozenset({"matmul", "bmm", "einsum", "baddbmm"})
_MOST_STEPS = 32


@dataclass(frozen=True)
class Merged:
    """A linear whose weight is `w + scale * factor * (b @ a)`.

    Attributes:
        between: what makes the weight, in order: the product of b and a first, the sum last.
        x, w, a, b: its operands; w may be None.
        bias: or None.
        scale: the product of the numbers.
        factor: a tensor of shape () by which the product is multiplied as well, or None.
        rows: whether it is `F.linear`; else `x @ (w + scale * (a @ b))`.
    """

    linear: fx.Node
    between: tuple[fx.Node, ...]
    x: fx.Node
    w: fx.Node | None
    a: fx.Node
    b: fx.Node
    bias: Any
    scale: float
    factor: fx.Node | None
    rows: bool


class _Delta(NamedTuple):
    """`scale * factor * (b @ a)`: the product, its operands, the nodes from it on, and the factors."""

    product: fx.Node
    b: Any
    a: Any
    between: list[fx.Node]
    scale: float
    factor: fx.Node | None


def _merged(node: fx.Node) -> Merged | None:
    found = linear_of(node)
    if found is None:
        return None
    x, weight, rows, bias = found
    total = read(weight)
    if total is None or (bias is not None and not rows):
        return None
    last: list[fx.Node] = []
    pairs = _sums(total)
    if total.name == "sub" and (inner := read(total.input)) is not None:  # w + d - w
        added = [(None, delta) for w, delta in _sums(inner) if w is total.only("input", "other")[1]]
        if added and not inner.inplace:
            pairs, last = [*pairs, *added], [inner.node]
    if total.name not in ("add", "sub", "addmm") and bias is None:
        pairs = [(None, _delta(weight, 1.0))]
        last, total = [], None
    for w, delta in pairs:
        if delta is None or (w is not None and not _fits(w, delta.product, requires_grad(node))):
            continue
        a, b = (delta.a, delta.b) if rows else (delta.b, delta.a)
        if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or not _is_narrow(a, b, rows):
            continue
        if w is None and bias is not None:
            continue
        sums = [*(last if w is None else []), *([total.node] if total is not None else [])]
        return Merged(node, (*delta.between, *sums), x, w, a, b, bias, delta.scale, delta.factor, rows)
    return None


def _sums(total: Op) -> list[tuple[fx.Node | None, _Delta | None]]:
    """Each matrix that an operation adds to a product, and that product."""
    pairs: list[tuple[Any, _Delta | None]] = []
    if total.name == "addmm":
        w, b, a, alpha = total.only("input", "mat1", "other", "alpha")
        scale = 1.0 if alpha is None else alpha
        if isinstance(scale, (int, float)):
            pairs.append((w, _Delta(total.node, b, a, [], scale, None)))
    elif total.name in ("add", "sub"):
        first, second = total.only("input", "other")
        pairs.append((first, _delta(second, -1.0 if total.name == "sub" else 1.0)))
        if total.name == "add":
            pairs.append((second, _delta(first, 1.0)))
    return [(w, delta) for w, delta in pairs if isinstance(w, fx.Node)]


def _delta(node: Any, scale: float) -> _Delta | None:
    """The product that is scaled and viewed."""
    between, factor = list[fx.Node](), None
    while (op := read(node)) is not None and not op.inplace:
        between.insert(0, op.node)
        if op.name == "matmul":
            left, right = op.only("input", "other")
            return _Delta(op.node, left, right, between, scale, factor)
        if op.name in _VIEWS or (op.name in CASTS and same_dtype_device(op)):
            node = op.input
            continue
        step = scaled_by(op)
        if step is not None:
            node, scale = step[0], scale * step[1]
            continue
        if op.name != "mul" or factor is not None:
            return None
        first, second = op.only("input", "other")
        one, other = tensor(first), tensor(second)
        if one is None or other is None or (one.dim() != 0) == (other.dim() != 0):
            return None
        node, factor = (first, second) if other.dim() == 0 else (second, first)
    return None


def _made(weight: fx.Node, is_linear: bool) -> str:
    """How an adapter makes a weight: from a product of two narrow matrices, or otherwise; "" if none does.

    Args:
        is_linear: whether it is known to be a weight. Others are matrices of features that are compared.
    """
    seen, waiting, how = set[fx.Node](), [weight], ""
    while waiting and len(seen) < _MOST_STEPS:
        node = waiting.pop()
        node = computed_by_function(node) or node
        op, value = read(node), tensor(node)
        if node in seen or op is None or value is None:
            continue
        seen.add(node)
        if op.name in ("matmul", "addmm"):
            left = tensor(op["mat1"] if op.name == "addmm" else op.input)
            if left is not None and value.dim() == 2 and is_low_rank(left.shape[-1], *value.shape):
                return f"from a product of rank {int(left.shape[-1])}"
        makes = op.name in _MAKES or op.name.startswith("fft_")
        if is_linear and (makes or (op.name in _ROTATES and _has_as_many(op, weight))):
            how = how or f"by {op.name}"
        elif is_linear and op.name in _ROTATES and _has_blocks(node):
            how = how or "by block_diag"
        if op.name in _FROM:
            waiting += node.all_input_nodes
        writes = (user.args for user in node.users if user.target is operator.setitem)
        waiting += [given for into, _, given in writes if into is node and isinstance(given, fx.Node)]
    return how


def _has_blocks(product: fx.Node) -> bool:
    """Whether one of the factors of a product is a block diagonal matrix, as in BOFT with permutations."""

    def factors(node: fx.Node) -> list[fx.Node]:
        op = read(node)
        passed = op is not None and op.name in _ROTATES | VIEWS | TRANSPOSES | CASTS | {"getitem"}
        return node.all_input_nodes if passed else []

    found = map(read, reached([product], factors, _MOST_STEPS))
    return any(op is not None and op.name == "block_diag" for op in found)


def _has_as_many(op: Op, weight: fx.Node) -> bool:
    """Whether an operand of a product is an input of the graph with as many elements, or a view of one."""
    whole = tensor(weight)
    for node in op.node.all_input_nodes:
        by = read(node)
        while by is not None and by.name in VIEWS | TRANSPOSES | CASTS | COPIES | {"detach"}:
            node = by.input
            by = read(node)
        held = tensor(node) if by is None else None
        if held is not None and whole is not None and known_true(held.numel() == whole.numel()):
            return True
    return False


def _fits(w: fx.Node, product: fx.Node, trains: bool) -> bool:
    """Whether a weight that is not trained has the shape of a product."""
    weight, delta = tensor(w), tensor(product)
    if weight is None or delta is None or (trains and weight.requires_grad):
        return False
    return weight.dim() == 2 and tuple(weight.shape) == tuple(delta.shape)


def _is_narrow(a: fx.Node, b: fx.Node, rows: bool) -> bool:
    down, up = tensor(a), tensor(b)
    if down is None or up is None or down.dim() != 2 or up.dim() != 2:
        return False
    return is_low_rank(*(down.shape if rows else down.shape[::-1]), up.shape[0 if rows else 1])


class MergedWeight(Candidate):
    """A linear whose adapter is merged."""

    def __init__(self, site: Merged, known: Inputs) -> None:
        self.site, self.known, self.anchor = site, known, site.linear
        self.note = ""

    def describe(self) -> dict[str, str]:
        named = ("input", self.site.x), ("weight", self.site.w), ("a", self.site.a)
        return {name: text(tensor(node)) for name, node in named}

    def guard(self) -> None:
        site, known = self.site, self.known
        nodes = (site.x, site.a, site.b, site.w, site.factor, *site.between, site.linear)
        found = [held for node in nodes if (held := tensor(node)) is not None]
        check_kind(*found)
        if any(each.dtype != found[0].dtype for each in found):
            raise Reason.MIXED_DTYPES.rejected("the operands have different dtypes, or autocast is on")
        if are_read_elsewhere(site.between, {*site.between, site.linear}):
            raise Reason.USED_ELSEWHERE.rejected("the merged weight is also used elsewhere")
        operands = [node for node in (site.x, site.w, site.a, site.b, site.factor) if node is not None]
        known.check_replaced(site.between, site.linear, "the merge and the linear", operands)
        check_device(found[0])
        if requires_grad(site.linear) and not (requires_grad(site.a) and requires_grad(site.b)):
            # Eager mode keeps the merged weight for the gradient of x, and not both of a and b: the caller
            # may change the other one before the backward.
            raise Reason.NOT_MEASURED.left_to_stock(
                "two products for a merged adapter are measured in training only where A and B are trained",
                "F.linear(x, w) + s * F.linear(F.linear(x, a), b)",
            )
        if not config.always():
            self.note = self.decided(found[0], found[-1])

    def decided(self, x: torch.Tensor, out: torch.Tensor) -> str:
        """A note on how much faster two products are.

        Raises:
            LeftToStock: they are not, or the problem is none that is measured.
        """
        if not out.requires_grad and freezes_weights():
            raise Reason.NOT_FASTER.left_to_stock("Inductor freezes the weights, and merges them once")
        site, a = self.site, value(self.site.a)
        sizes = x.shape[-1], out.shape[-1], a.shape[0 if site.rows else 1]
        key = {
            **dict(zip(("inner", "outer", "rank"), map(known_size, sizes), strict=True)),
            "base": site.w is not None, "train": out.requires_grad, "dtype": dtype_name(out.dtype),
        }  # fmt: skip
        return profit.merged(key, tokens_of(x.numel() // x.shape[-1]), out.device)

    def rewrite(self) -> str:
        site, old = self.site, self.site.linear
        make, out = Builder(old), tensor(old)
        times: Any = F.linear if site.rows else torch.matmul
        inner = make.call(times, site.x, site.a)
        if requires_grad(old):
            value(inner).requires_grad_()
        inside = site.factor is not None and value(inner).dtype != torch.float16
        if inside:  # the gradient of the factor needs the narrow result alone
            inner = made(make, operator.mul, inner, site.factor)
        up = make.given(out, times, inner, site.b)
        if site.scale != 1:
            up = make.given(out, operator.mul, up, site.scale)
        if site.factor is not None and not inside:
            up = make.given(out, operator.mul, up, site.factor)
        if site.w is not None:
            w = self.known.keeping.kept(site.w, old)  # eager keeps the merged weight
            base = make.given(out, times, site.x, w, *([site.bias] if site.rows else []))
            up = make.given(out, operator.add, base, up)
        replace(old, up, site.between)
        return f"two products{self.note}"


def merged_weight(scope: Inputs, match: Match) -> Candidate | None:
    """A linear with a weight that an adapter is added to, or that is computed from one otherwise."""
    node = match.output_node()
    site, found = _merged(node), linear_of(node)
    if site is not None:
        return MergedWeight(site, scope)
    x = None if found is None else tensor(found[0])
    how = _made(found[1], found[2] or x.dim() > 2) if found is not None and x is not None else ""
    if not how:
        return None
    why = Reason.MERGED(
        f"the weight is computed in each step {how}, in another form than a factor times a product of low "
        "rank, or that plus a frozen weight"
    )
    return Reported(node, Rejected(why, "in inference, compute the weight once"), {"input": text(x)})


def merged_convolution(scope: Inputs, match: Match) -> Candidate | None:
    """A convolution with a weight that is computed from an adapter."""
    node = match.output_node()
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    how = _made(weight, False) if isinstance(weight, fx.Node) else ""
    if not how:
        return None
    why = Reason.NO_MATRIX(
        f"the weight of a convolution is computed in each step {how}, and only linears are fused"
    )
    return Reported(
        node, Rejected(why, "in inference, compute the weight once"), {"weight": text(tensor(weight))}
    )
