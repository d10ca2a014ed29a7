"""Gates that multiply tensors beside each other: they are only reported."""

from __future__ import annotations

from torch import fx

from ...graph.concatenation import joined
from ...graph.products import CASTS, RESHAPES, through
from ...operands import value
from ...reasons import Reason, Said
from .unsupported import factors_of, share_input, side_of

_OF_PARTS = Reason.LIMIT(
    "what the gate multiplies is put together of several tensors (as in MambaOut), and the kernel supports "
    "one linear"
)


def of_joined(root: fx.Node) -> tuple[frozenset[fx.Node], Said] | None:
    """A gate and the `cat` that it multiplies, with a linear of its input, and why they are left."""
    factors = factors_of(root)
    for factor, argument in (factors, factors[::-1]):
        whole = through(factor, RESHAPES | CASTS) if isinstance(factor, fx.Node) else None
        parts, dim = joined(whole)
        if whole is None or not parts or dim != value(whole).dim() - 1:
            continue
        gate = side_of(argument)
        if gate is None or len(gate.ends) != 1:
            continue
        for part in parts:
            side = side_of(part)
            if side is not None and len(side.ends) == 1 and share_input(gate.end, side.end):
                return frozenset({gate.part or gate.end, whole}), _OF_PARTS
    return None
