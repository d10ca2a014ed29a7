"""Copies results that stock's patterns save for their backward and the caller may overwrite."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from ..._inductor import is_wrapper, records_gradients
from ...fusion import Candidate
from ...layouts.leaving import is_returned, settle
from ...operands import tensor
from .equivalent import EquivalentRewrite


class Returned(EquivalentRewrite):
    """A result of which the caller gets a copy: Inductor drops it where nothing keeps the result."""

    reported = False

    def rewrite(self) -> str:
        settle(self.anchor.graph, [(self.anchor, True)], strides=False)
        return "the caller gets a copy of what may be kept"


def returned(output: fx.Node) -> Iterator[Candidate]:
    """The product with the values, where the caller gets its memory and takes gradients."""
    result = tensor(output)
    if result is None or result.dim() != 4 or is_wrapper(result):
        return  # patterns match four dims; DTensors have no rule for the copy
    if records_gradients(result) and is_returned(output):
        yield Returned(output)
