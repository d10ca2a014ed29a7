"""Down-projections that cast their input to float32 or apply dropout, before autograd.

PEFT's adapters are float32 beside a base of 16 bits. Autograd then keeps the widened input for the gradient
of A, twice the memory of the input that is there. After autograd, what is saved cannot be changed. So
`F.linear(x.to(torch.float32), A)` becomes one operation here, which keeps x.

Behind a dropout autograd keeps the dropped input beside its mask. `F.linear(F.dropout(x, p), A)` becomes one
operation that keeps x and the mask. The mask is drawn in the place of the dropout, as the decomposition of
`native_dropout` in torch/_decomp/decompositions.py draws it. Random numbers keep their order, so the same
seed gives the same mask.

Under autocast both linears of an adapter round their operands to 16 bits. Nothing is widened in memory then.
But the dropped input is kept as before: the operation keeps x and the mask, and reads A as autocast rounds
it.

The sum with the base is float32 as well, and cast to 16 bits. Its gradient is rounded to them and widened
again. Where Inductor takes that out, the gradient is in memory in both dtypes. An operation that only marks
the rounded sum, until the fusion of adapters reads the graph, prevents it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import fx

from ..._inductor import Match, drops_narrow_casts, known_true
from ...decisions.problems import FEW_ROWS
from ...effects import liveness
from ...effects.inplace import overwritten
from ...effects.liveness import are_read_elsewhere, readers
from ...effects.scope import DynamoScope
from ...fusion import Candidate, Fusion
from ...graph.builder import Builder
from ...graph.dims import permuted_by
from ...graph.torch_ops import CASTS, dropout_p, forms, linear_of, read
from ...layouts.keeping import Keeping
from ...operands import (
    check_device,
    check_kind,
    check_random_numbers,
    known_size,
    tensor,
    text,
    tokens_of,
    value,
)
from ...reasons import Reason
from . import narrow, profit
from .adapters import is_low_rank
from .op import LORA_DOWN, ROUNDED


@dataclass(frozen=True)
class InputSite:
    """`F.linear(x.to(torch.float32), a)`, with a dropout behind the cast or in its place.

    Attributes:
        linear: the node that is replaced.
        between: what is between the input and the linear, from the input on: a cast, a dropout, or both.
        x: the input.
        a: the weight.
        drop: the dropout, or None.
    """

    linear: fx.Node
    between: tuple[fx.Node, ...]
    x: fx.Node
    a: fx.Node
    drop: fx.Node | None

    @property
    def chance(self) -> float:
        """The probability with which the dropout drops."""
        assert self.drop is not None
        op = read(self.drop)
        assert op is not None
        return dropout_p(op)


class Inputs(DynamoScope):
    """A graph, and what is known of it once the first down-projection is found."""

    @functools.cached_property
    def keeping(self) -> Keeping:
        """The values of the graph that may change."""
        return Keeping(self.graph)


def _read(node: fx.Node) -> InputSite | None:
    """A down-projection that another linear reads."""
    found = _linear(node)
    if found is None or not _ups(node):
        return None
    inside, a = _made(found[0]), found[1]
    drop = inside if _is_dropout(inside) else None
    dropped = read(drop)
    wide = inside if dropped is None else _made(dropped.input)
    x = _widened(wide)
    between = tuple(each for each in (wide if x is not None else None, drop) if each is not None)
    x = wide if x is None and drop is not None else x
    if not isinstance(x, fx.Node) or not _is_adapter(x, wide, a):
        return None
    assert isinstance(a, fx.Node)
    return InputSite(node, between, x, a, drop)


def _made(node: Any) -> Any:
    """The node that made a value, before writes in place, which the guard checks."""
    while isinstance(node, fx.Node) and (before := overwritten(node)) is not None:
        node = before
    return node


def _is_dropout(node: Any) -> TypeGuard[fx.Node]:
    """Whether a node drops elements at random, each with a probability that is a number."""
    op = read(node)
    if op is None or op.name != "dropout" or op.inplace:
        return False
    chance, training = op.args.get("p", 0.5), op.args.get("training", True)
    return isinstance(chance, float) and 0 < chance < 1 and training is True


def _linear(node: Any, biased: bool = False) -> tuple[Any, Any] | None:
    """Input and weight of a linear: `F.linear(x, w)`, or a product with a transposed matrix, `x @ w.t()`.

    Args:
        node: a node of Dynamo's graph, or another value.
        biased: whether it may have a bias.
    """
    found = linear_of(node)
    if found is None or not (biased or found[3] is None):
        return None
    x, weight, by_rows, _ = found
    turned = weight if by_rows else permuted_by(weight, [1, 0])
    return None if turned is None else (x, turned)


def _reads(node: fx.Node, x: fx.Node) -> bool:
    """Whether a node is a linear, with a bias or without, of x."""
    found = _linear(node, biased=True)
    return found is not None and found[0] is x


def _ups(down: fx.Node) -> list[fx.Node]:
    """The linears, with a bias or without, that read the result of a down-projection."""
    return [user for user in down.users if _reads(user, down)]


def _widened(node: Any) -> fx.Node | None:
    """The 16-bit tensor that a float32 tensor was cast from, or None."""
    op, found = read(node), tensor(node)
    if op is None or found is None or found.dtype != torch.float32 or op.name not in CASTS:
        return None
    x = tensor(op.input)
    if x is None or x.dtype != torch.bfloat16 or x.device != found.device or x.dim() < 2:
        return None
    return op.input if isinstance(op.input, fx.Node) else None


def _rounded_sum(up: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """The cast to a dtype of the sum that a float32 product is added to, if nothing else reads that."""
    node = up
    while len(read_by := readers(node)) == 1:
        (user,) = read_by
        op, found = read(user), tensor(user)
        if op is None or found is None:
            return None
        if op.name in CASTS:
            return user if found.dtype == dtype and op.input is node else None
        if op.name not in ("add", "mul") or found.dtype != torch.float32:
            return None
        node = user
    return None


def _is_adapter(x: fx.Node, read: fx.Node, a: Any) -> bool:
    """Whether a weight is a narrow matrix that is trained, and multiplied as it is by what reads x."""
    weight, value, wide = tensor(a), tensor(x), tensor(read)
    if weight is None or value is None or wide is None or weight.dim() != 2 or not weight.requires_grad:
        return False
    return weight.dtype == wide.dtype and is_low_rank(*weight.shape)


class AdapterInput(Candidate):
    """A down-projection of a widened or dropped input."""

    def __init__(self, scope: Inputs, site: InputSite) -> None:
        self.scope, self.site, self.anchor = scope, site, site.linear
        self.kernel = ""
        self.cast: torch.dtype | None = None  # what autocast rounds operands to, where it is on

    def describe(self) -> dict[str, str]:
        found = {"input": text(tensor(self.site.x)), "adapter": text(tensor(self.site.a))}
        return found | ({"dropout": f"{self.site.chance:g}"} if self.site.drop is not None else {})

    def guard(self) -> None:
        site, scope = self.site, self.scope
        x, a, out = value(site.x), value(site.a), value(site.linear)
        check_kind(x, a, out)
        cast = self.cast = dict(scope.modes.at(site.linear).autocast).get(x.device.type)
        if out.dtype != (a.dtype if cast is None else cast) or (cast is not None and x.dtype != cast):
            raise Reason.MIXED_DTYPES.rejected("the operands have different dtypes")
        if cast is not None and site.drop is None:
            raise Reason.NOT_FASTER.left_to_stock(
                "under autocast no input is stored in float32, so there is nothing to save"
            )
        if site.drop is not None:
            if are_read_elsewhere([site.drop], [site.linear]):
                raise Reason.USED_ELSEWHERE.rejected("the result of the dropout is also read elsewhere")
            check_random_numbers()
        where = "the cast and the linear" if site.drop is None else "the dropout and the linear"
        scope.check_replaced(site.between, site.linear, where, [site.x, site.a])
        check_device(x)
        tokens: Any = 1
        for size in x.shape[:-1]:
            tokens = tokens * size
        rows, rank, inner = known_size(tokens), int(a.shape[0]), int(x.shape[-1])
        if site.drop is None:
            shape = narrow.Shape(inner, rows, (rank,), "t", x.dtype, a.dtype)
            self.kernel = profit.narrow_kernel(shape, tokens_of(tokens), x.device)
            return
        outer = value(_ups(site.linear)[0])
        problem = profit.Dropped(tokens_of(tokens), inner, int(outer.shape[-1]), rank, x.dtype, out.dtype)
        self.kernel = profit.kernel(problem, x.device)

    def rewrite(self) -> str:
        x = value(self.site.x)
        site = self.site = replace(self.site, x=self._kept())
        old = site.linear
        arguments: tuple[Any, ...] = (site.a,)
        if site.drop is not None:
            kept = self._mask(site.drop)
            arguments = self._as_read(site.a), kept, 1 / (1 - site.chance)
        new = Builder(old).given(tensor(old), LORA_DOWN, site.x, *arguments)
        liveness.replace(old, new, site.between)
        for up in _ups(new) if drops_narrow_casts() and self.cast is None else ():
            self._mark(_rounded_sum(up, x.dtype))
        return self.kernel

    def _kept(self) -> fx.Node:
        """The input, or a copy if the caller may change it: eager saves what is computed from it.

        All linears that read the input read the copy, which is made in front of the first of them, so that
        their fusions see one input.
        """
        source, first = self.site.x, (*self.site.between, self.site.linear)[0]

        def reads(user: fx.Node) -> bool:
            return _reads(user, source) and self.scope.keeping.is_same_at(source, user, first)

        x = self.scope.keeping.kept(source, min((first, *filter(reads, source.users))))
        if x is not source:
            source.replace_all_uses_with(x, delete_user_cb=reads)
        return x

    def _as_read(self, a: fx.Node) -> fx.Node:
        """A weight as autocast rounds it."""
        held = tensor(a)
        if self.cast is None or held is None or held.dtype == self.cast:
            return a
        rounded = Builder(self.site.linear).call(torch.ops.aten.to.dtype, a, self.cast)
        value(rounded).requires_grad_(held.requires_grad)
        return rounded

    def _mask(self, drop: fx.Node) -> fx.Node:
        """The mask of a dropout, drawn in its place."""
        inside = value(drop)
        build = Builder(drop)
        drawn = build.call(torch.rand_like, self.site.x, dtype=inside.dtype)
        return build.call(torch.gt, drawn, self.site.chance)

    def _mark(self, rounded: fx.Node | None) -> None:
        if rounded is None or any(user.target is ROUNDED for user in rounded.users):
            return
        marked = Builder(rounded.next, rounded, tuple(rounded.meta)).given(tensor(rounded), ROUNDED, rounded)
        rounded.replace_all_uses_with(marked, delete_user_cb=lambda user: user is not marked)


FUSION = Fusion(
    name="lora_input",
    stage="pre_grad",
    summary="adapters save their input for the backward without casting it to float32 and without dropout",
    scope=Inputs,
)


@FUSION.anchor(lambda: forms("linear", "matmul"))
def down_projection(scope: Inputs, match: Match) -> Candidate | None:
    """A down-projection of a widened or dropped input that is trained."""
    site = _read(match.output_node())
    return AdapterInput(scope, site) if site is not None and not _is_of_a_pair(site) else None


def _is_of_a_pair(site: InputSite) -> bool:
    """Whether nothing is kept for a backward, and so few rows get a pair of kernels that cast x."""
    x, out = value(site.x), value(site.linear)
    # Inside a transform of torch.func, a gradient is recorded where a value does not require one.
    kept = torch.is_grad_enabled() or out.requires_grad
    return not kept and known_true(x.numel() <= FEW_ROWS * x.shape[-1])
