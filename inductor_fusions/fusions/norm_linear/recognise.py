"""Reads an RMSNorm, however it is written, in a graph of aten operations.

    x * rsqrt(mean(x * x) + eps) * gain

Models also write it as a division by a root, by a power, or by `x.norm()`. A `clamp` of the latter is the
root of the larger one of mean and eps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...fusion import Rejected
from ...graph import torch_ops
from ...graph.dims import is_over_last
from ...graph.products import (
    CASTS,
    DIV,
    MUL,
    RESHAPES,
    is_factor,
    is_floating,
    is_pointwise,
    same_sizes,
    scaled,
    through,
)
from ...operands import holds, value
from ...reasons import Reason

aten = torch.ops.aten

_ADD = (aten.add.Tensor, aten.add.Scalar)
#: What norms are looked for by.
MEANS = (aten.mean.dim, aten.sum.dim_IntList, aten.var.correction, aten.var_mean.correction)
OTHER_NORM = (
    "kernels divide an input by the root of the mean of its squares, and this norm does something else"
)


@dataclass
class Norm:
    """`scale * x * rsqrt(mean(x * x) + eps) * (gain + shift)` over the last dim.

    Attributes:
        result: the last node of it, which may have other casts in between.
        clamps: whether the root is that of the larger one of mean and eps, and not of their sum.
        gain: a vector, or None.
        why: why no kernel computes it; None if one does.
    """

    x: fx.Node
    result: fx.Node
    eps: float = 0.0
    clamps: bool = False
    scale: float = 1.0
    gain: fx.Node | None = None
    shift: float = 0.0
    why: Rejected | None = None


@dataclass
class _Root:
    """`factor * (inner * mean(x * x) + eps) ** power` of each row; or with the larger one of both.

    Attributes:
        power: 1 in front of the root.
        lifted: whether a number is added to the root: that is another norm.
    """

    inner: float
    eps: float = 0.0
    clamps: bool = False
    power: float = 1.0
    factor: float = 1.0
    lifted: bool = False

    def read(self, node: fx.Node) -> bool:
        """Take an operation on it in; whether it is one of these."""
        op, by_number = torch_ops.read(node), scaled(node)
        name = "" if op is None else op.name
        if by_number is not None and by_number[1] > 0:
            self._scale(by_number[1])
        elif self.power == 1 and _power_of(node):
            self.power = _power_of(node)
        elif name == "reciprocal" and self.power != 1:
            self.power, self.factor = -self.power, 1 / self.factor
        elif name in ("add", "clamp", "clamp_min"):
            return self._bound(node, name == "add")
        else:
            return False
        return True

    def _scale(self, number: float) -> None:
        if self.power == 1:
            self.inner, self.eps = self.inner * number, self.eps * number
        else:
            self.factor *= number

    def _bound(self, node: fx.Node, adds: bool) -> bool:
        """Take in a number that is added, or that is the least value."""
        inner, number = _shifted(node) if adds else (node, _least(node))
        if number == 0 and inner is not node:
            return True  # an eps of 0
        if not number > 0 or self.eps or self.lifted:
            return False
        self.clamps = not adds
        if self.power == 1:
            self.eps = number
        elif self.power == 0.5 and not adds:  # max(c * sqrt(m), n) = c * sqrt(max(m, (n / c)^2))
            self.eps = (number / self.factor) ** 2
        elif self.power == 0.5:
            self.lifted = True
        else:
            return False
        return True


def norm_of(total: fx.Node) -> Norm | None:
    """Read a norm by the mean, or the sum, of its squares, or by its variance; None of anything else.

    Casts may round to the dtype of the input: what they round is kept exact.
    """
    op = torch_ops.read(total)
    if op is None or not is_over_last(op):
        return None
    if op.name not in ("mean", "sum"):
        return _other_norm(total, op.input)
    square = total.all_input_nodes[0]
    squared = _squared(square)
    if squared is None:
        return None
    x = through(squared, CASTS)
    width = value(x).shape[-1]
    if not isinstance(width, int):
        return None
    root, node = _Root(1.0 if op.name == "mean" else width), total
    inside = [square, total, *_between(squared, x)]
    while len(node.users) == 1:  # Where another node reads the mean, the kernel of that stays.
        (user,) = node.users
        if not (_is_of_rows(user, x) or root.read(user)):
            return _applied(root, node, x, inside) or _other_norm(total, x)
        inside.append(user)
        node = user
    return None


def _is_of_rows(node: fx.Node, x: fx.Node) -> bool:
    """Whether a node casts the number of each row, gives it a last dim, or expands it to the row."""
    if node.target in CASTS:
        return True
    if node.target is not aten.expand.default and node.target not in RESHAPES:
        return False
    return same_sizes(value(node).shape[:-1], value(x).shape[:-1])


def _applied(root: _Root, node: fx.Node, x: fx.Node, inside: list[fx.Node]) -> Norm | None:
    """The norm that multiplies its input by what its root is, or divides it by that.

    Args:
        node: the root.
        inside: the nodes up to it.
    """
    (product,) = node.users
    wide = [each for each in product.all_input_nodes if each is not node]
    divides = product.target in DIV and product.args[1] is node
    if len(wide) != 1 or root.power != (0.5 if divides else -0.5) or not (divides or product.target in MUL):
        return None
    if not same_sizes(value(node).shape[:-1], value(x).shape[:-1]) or through(wide[0], CASTS) is not x:
        return None
    inside = [*inside, product, *_between(wide[0], x)]
    if not all(holds(value(each).dtype, value(x).dtype) for each in inside):
        return None
    factor = 1 / root.factor if divides else root.factor
    eps, scale = root.eps / root.inner, factor / math.sqrt(root.inner)
    scale = 1.0 if math.isclose(scale, 1.0, rel_tol=torch.finfo(torch.float32).eps) else scale
    found = Norm(x, product, eps, root.clamps, scale)
    if root.lifted:
        found.why = Reason.NORM.rejected(
            "eps is added to the root of the mean of the squares, not to the mean"
        )
    if root.clamps and eps < torch.finfo(torch.float32).tiny:
        found.why = Reason.RANGE.rejected("the square of the smallest norm is 0 in float32")
    while _extend(found):
        pass
    return found if value(found.result).dtype == value(found.x).dtype else None


def _other_norm(node: fx.Node, x: fx.Node) -> Norm | None:
    """Another norm of x, by its mean of squares or its variance; None of anything else."""
    if node.target is aten.var_mean.correction:
        node = next((user for user in node.users if user.args[1:] == (0,)), node)
    behind = [node, *_pointwise_behind(node)]
    if not any(map(_power_of, behind)) or not same_sizes(value(behind[-1]).shape, value(x).shape):
        return None
    return Norm(x, behind[-1], why=Reason.NORM.rejected(OTHER_NORM))


def _power_of(node: fx.Node) -> float:
    """0.5 of a square root, -0.5 of its reciprocal, 0 of anything else."""
    op = torch_ops.read(node)
    if op is not None and op.name == "pow":
        return next((power for power in (0.5, -0.5) if node.args[1:] == (power,)), 0.0)
    return {"sqrt": 0.5, "rsqrt": -0.5}.get("" if op is None else op.name, 0.0)


def _pointwise_behind(node: fx.Node) -> list[fx.Node]:
    """The pointwise operations of which each alone reads the one in front of it."""
    found: list[fx.Node] = []
    while len(node.users) == 1 and is_pointwise(next(iter(node.users))):
        (node,) = node.users
        found.append(node)
    return found


def _extend(norm: Norm) -> bool:
    """Add what alone reads the result: a cast, a slice of all, or the product with a number or a vector."""
    dtype = value(norm.x).dtype
    if len(norm.result.users) != 1:
        return False
    (user,) = norm.result.users
    if not is_floating(user) or not holds(value(user).dtype, dtype):
        return False
    others = [node for node in user.all_input_nodes if node is not norm.result]
    takes_all = user.target is aten.slice.Tensor and same_sizes(value(user).shape, value(norm.result).shape)
    by_number = scaled(user)
    if user.target in CASTS or takes_all or by_number is not None:
        norm.result, norm.scale = user, norm.scale * (by_number[1] if by_number is not None else 1.0)
        return True
    if user.target not in MUL or norm.gain is not None or len(others) != 1:
        return False
    vector, shift = _shifted(through(others[0], CASTS))
    gain = through(vector, CASTS)
    if not is_floating(gain) or not same_sizes(value(gain).shape, value(norm.x).shape[-1:]):
        return False
    if not all(holds(value(node).dtype, value(gain).dtype, dtype) for node in _between(others[0], gain)):
        return False
    norm.result, norm.gain, norm.shift = user, gain, shift
    return True


def _between(node: fx.Node, source: fx.Node) -> list[fx.Node]:
    """A node and those in front of it, up to its source."""
    found = []
    while node is not source:
        found.append(node)
        (node,) = node.all_input_nodes
    return [*found, source]


def _shifted(node: Any) -> tuple[Any, float]:
    """A tensor and the number that is added to it, 0 if there is none."""
    if isinstance(node, fx.Node) and node.target in _ADD and len(node.args) == 2 and not node.kwargs:
        for inner, number in (node.args, node.args[::-1]):
            if isinstance(inner, fx.Node) and is_factor(number):
                return inner, float(number)
    return node, 0.0


def _least(node: fx.Node) -> float:
    """The number that a tensor is not less than, 0 if there is none."""
    bounds = [*node.args[1:], *node.kwargs.values()]
    return float(bounds[0]) if bounds and is_factor(bounds[0]) and bounds[1:] in ([], [None]) else 0.0


def _squared(node: fx.Node) -> fx.Node | None:
    """What a node is the square of."""
    is_square = node.target is aten.pow.Tensor_Scalar and node.args[1] == 2
    if is_square or (node.target is aten.mul.Tensor and node.args[0] is node.args[1]):
        return node.all_input_nodes[0]
    return None
