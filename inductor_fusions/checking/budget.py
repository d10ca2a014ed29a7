"""The error budget: the allowed error of a fused result against float64, relative to stock's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

#: An error may be this many times that of stock,
FACTOR = 1.5
#: plus this many eps of its dtype: one is for rounding the result itself.
SLACK = 1.0
#: In `verify()`, a gradient may have so many eps of float32 more: the backward of an attention recomputes the
#: weights from the logsumexp, and the rounding error of the logsumexp is relative to itself, not to the
#: weights.
RECOMPUTED = 4.0
#: A gradient whose norm is less than this share of the largest one is only rounding error.
VANISHING = 1e-6
#: If an error exceeds its budget, this many runs on nearby inputs are judged together.
SAMPLES = 4


@dataclass(frozen=True)
class Error:
    """How far one tensor is from float64.

    Attributes:
        name: "output[i]", or the name of a gradient.
        ours, stock: relative errors, in the Euclidean norm, with the fusions and without.
        budget: what `ours` may be.
        problem: what is wrong with it, or "".
    """

    name: str
    gradient: bool
    ours: float
    stock: float
    budget: float
    problem: str = ""


@dataclass(frozen=True)
class Values:
    """Outputs of a run, and gradients by name."""

    outputs: Any
    grads: Mapping[str, torch.Tensor | None]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of `outputs`, in order."""
        return [leaf for leaf in pytree.tree_leaves(self.outputs) if isinstance(leaf, torch.Tensor)]


def limit(stock: float, dtype: torch.dtype, factor: float = FACTOR, slack: float = SLACK) -> float:
    """What the relative error of a result of this dtype may be, where that of stock is `stock`."""
    return factor * stock + slack * torch.finfo(dtype).eps


def relative_error(x: torch.Tensor, true: torch.Tensor) -> float:
    """||x - true|| / ||true||, in float64; NaN stays NaN. Where the norm is zero, the distance itself."""
    return _error(x, true, _norm(true))


def compare(
    ours: Any, stock: Any, true: Any, factor: float = FACTOR, slack: float = SLACK, recomputed: float = 0.0
) -> list[Error]:
    """The error of every output and gradient, and its budget.

        ||x - ref|| / ||ref||  <=  factor * (the same for stock)  +  slack * eps(dtype of x)

    plus `recomputed * eps(float32)` for a gradient.

    A gradient that vanishes in exact arithmetic (that of a key's bias, say) is nothing but rounding in every
    run: its error is taken relative to the largest gradient, and its budget is that of the least exact
    tensor. What is not floating point must be that of stock.

    Args:
        ours, stock, true: runs with the fusions, without them, and in float64, each with the attributes
            `tensors` and `grads` of `Values`.

    Raises:
        AssertionError: where the outputs differ in number, shape or dtype.
    """
    rows = _paired(ours, stock, true)
    largest = max((_norm(z) for name, _, _, z in rows if name in ours.grads), default=0.0)
    measured = []
    for name, x, y, z in rows:
        gradient = name in ours.grads
        if not x.is_floating_point():
            problem = "" if torch.equal(x, y) else f"{name} is not that of stock"
            if problem:
                measured.append((name, gradient, x, math.nan, math.nan, False, problem))
            continue
        norm = _norm(z)
        vanishes = gradient and norm < VANISHING * largest
        norm = largest if vanishes else norm
        measured.append((name, gradient, x, _error(x, z, norm), _error(y, z, norm), vanishes, ""))
    largest_of_stock = max((row[4] for row in measured if not row[6]), default=0.0)
    found = []
    for name, gradient, x, mine, theirs, vanishes, problem in measured:
        if problem:
            found.append(Error(name, gradient, mine, theirs, 0.0, problem))
            continue
        allowed = largest_of_stock if vanishes else theirs
        budget = limit(allowed, x.dtype, factor, slack)
        budget += recomputed * torch.finfo(torch.float32).eps * gradient
        problem = _problem(name, gradient, mine, allowed, budget)
        found.append(Error(name, gradient, mine, theirs, budget, problem))
    return found


def judge(
    ours: Callable[[int], Any],
    stock: Callable[[int], Any],
    true: Callable[[int], Any],
    factor: float = FACTOR,
    slack: float = SLACK,
    recomputed: float = 0.0,
) -> list[Error]:
    """`compare`, where an error over budget may be chance, above all with few elements: it is judged again by
    the root mean square of this run and three more.

    Args:
        ours, stock, true: give the runs of a sample, as in `compare`, and are called in the order stock,
            ours, true. Sample 0 is what is asked about; the others have inputs near its own.
        factor, slack, recomputed: as in `compare`.

    Raises:
        AssertionError: where the outputs differ in number, shape or dtype.
    """

    def found(sample: int) -> list[Error]:
        unfused, fused = stock(sample), ours(sample)
        return compare(fused, unfused, true(sample), factor, slack, recomputed)

    errors = found(0)
    return pooled([errors, *map(found, range(1, SAMPLES))]) if problems(errors) else errors


def pooled(samples: Sequence[Sequence[Error]]) -> list[Error]:
    """The errors of runs on inputs near each other as one run's, which chance moves less.

    Errors are root mean squares, budgets are means.

    Args:
        samples: of each run what `compare` has found.
    """
    by_name: dict[str, list[Error]] = {}
    for error in (error for sample in samples for error in sample):
        by_name.setdefault(error.name, []).append(error)
    found = []
    for same in by_name.values():
        first = next((error for error in same if error.problem), same[0])
        if first.problem and not first.budget:  # not floating point
            found.append(first)
            continue
        squares = (sum(getattr(error, name) ** 2 for error in same) for name in ("ours", "stock"))
        mine, theirs = (math.sqrt(square / len(same)) for square in squares)
        allowed = sum(error.budget for error in same) / len(same)  # a square would lose the sign of a budget
        problem = _problem(first.name, first.gradient, mine, theirs, allowed)
        found.append(Error(first.name, first.gradient, mine, theirs, allowed, problem))
    return found


def worst(errors: Iterable[float]) -> float:
    """The largest of some errors. NaN is larger than all; `max` would pass over it."""
    return max(errors, key=lambda error: (error != error, error))


def problems(errors: Sequence[Error]) -> list[str]:
    """Descriptions of the errors that are over budget."""
    return [error.problem for error in errors if error.problem]


def _problem(name: str, gradient: bool, ours: float, stock: float, budget: float) -> str:
    """What is said of an error that is over its budget, also where it is NaN; else ""."""
    if ours <= budget:
        return ""
    what = f"gradient of {name}" if gradient else name
    return f"{what}: error {ours:.2e}, stock {stock:.2e}, budget {budget:.2e}"


def _paired(ours: Any, stock: Any, true: Any) -> list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(name, ours, stock, reference) of every output and gradient."""
    outputs = ours.tensors, stock.tensors, true.tensors
    if len({len(tensors) for tensors in outputs}) != 1:
        raise AssertionError(
            f"the runs have different numbers of outputs: {[len(tensors) for tensors in outputs]}"
        )
    found = []
    for i, (x, y, z) in enumerate(zip(*outputs, strict=True)):
        if x.shape != y.shape or x.dtype != y.dtype:
            raise AssertionError(
                f"output {i} is {x.dtype} {tuple(x.shape)}, but {y.dtype} {tuple(y.shape)} in stock"
            )
        found.append((f"output[{i}]", x, y, z))
    for name in ours.grads:
        triple = [run.grads[name] for run in (ours, stock, true)]
        shown = next((t for t in triple if t is not None), None)
        if shown is not None:
            x, y, z = (torch.zeros_like(shown) if t is None else t for t in triple)
            found.append((name, x, y, z))
    return found


def _norm(x: torch.Tensor) -> float:
    return float(x.detach().double().norm())


def _error(x: torch.Tensor, true: torch.Tensor, norm: float) -> float:
    """Distance from the reference, relative to `norm` unless that is zero."""
    distance = (x.detach().double() - true.detach().double()).norm()
    return float(distance) / (norm if norm > 0 and math.isfinite(norm) else 1.0)
