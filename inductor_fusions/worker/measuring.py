"""Compiles, checks and times stock's code and each supported kernel for a problem."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .. import config, decisions, reporting
from ..checking import budget
from ..decisions.problems import Row
from .case import Case, Tensors
from .clock import apart, interleave

#: If a call takes less, the host may be the bottleneck: then both clocks count.
SHORT_SECONDS = 1.5e-3
#: Configurations of a kernel that are tried beside the one that it gets without a measurement.
TRIALS = 3
ROUNDS = 12

Run = Callable[[], Tensors]
_numbers = itertools.count()


class NotFusedError(RuntimeError):
    """Nothing was fused in the function of a problem."""


def gains(
    case: Case, kernels: Sequence[str], device: str, alone: AbstractContextManager[None]
) -> dict[str, float]:
    """The speedup of each kernel of an attention over stock; 0 if its result is wrong.

    Kernels that do not take it are left out.
    """
    stock, runs = _stock(case), {}
    for kernel in kernels:
        if kernel in ("sdpa", "flex", "short", "row_bias"):
            try:
                runs[kernel] = _fused(case, {"attention_kernel": kernel}, kernel)
            except NotFusedError:
                continue
    with alone:
        times = _judged(case, stock, runs, device, both_clocks=True)
    return {kernel: round(gain, 3) for kernel, gain in times.items()}


def best(case: Case, device: str, alone: AbstractContextManager[None]) -> tuple[float, dict[str, list[Row]]]:
    """The gain of the fastest configuration over stock, 0 if all are wrong; and rows with the tiles of its
    kernels, by section."""
    stock, runs, made_of = _stock(case), {}, {}
    for number in range(1 + (TRIALS if case.varied else 0)):
        with decisions.trial(case.varied, number) as trial:
            run = _fused(case, {}, "")
        if trial.exhausted:
            break
        runs[str(number)], made_of[str(number)] = run, trial.rows
    with alone:
        found = _judged(case, stock, runs, device)
    name = max(found, key=lambda each: found[each])
    return round(found[name], 3), made_of[name]


def _stock(case: Case) -> Run:
    with config.patch(enabled=False):
        return _compiled(case.fn, case)


def _fused(case: Case, toggles: Mapping[str, Any], kernel: str) -> Run:
    """Compile and run the fused code.

    Raises:
        NotFusedError: there is none.
    """
    reporting.clear()
    with config.patch(enabled=True, policy="always", measure=False, **toggles):
        run = _compiled(case.fused or case.fn, case)
    sites = [site for site in reporting.report() if site.verdict == "fused"]
    if case.fused is None and not any(site.kernel.startswith(kernel) for site in sites):
        raise NotFusedError("; ".join(site.reason for site in reporting.report()) or "nothing was found")
    return run


def _compiled(fn: Callable[..., Tensors], case: Case) -> Run:
    """A function compiled for the operands of a case, with its backward if it has one."""
    compiled = torch.compile(apart(fn, f"measured_{next(_numbers)}"), dynamic=False)

    def run() -> Tensors:
        with torch.set_grad_enabled(bool(case.leaves)):
            outputs = compiled(*case.inputs)
            return [*outputs, *_gradients(outputs, case.leaves)]

    run()
    return run


def _gradients(outputs: Tensors, leaves: Sequence[torch.Tensor]) -> Tensors:
    if not leaves:
        return []
    made = [y for y in outputs if y.requires_grad]
    return list(torch.autograd.grad(made, leaves, [torch.ones_like(y) for y in made]))


def _judged(
    case: Case, stock: Run, runs: Mapping[str, Run], device: str, both_clocks: bool = False
) -> dict[str, float]:
    """The gain of each run; 0 if its error is over budget.

    With `both_clocks`, a short call gets the smaller of its gains by wall time and by device time, because
    the kernels of an attention may be launched differently. Products are launched alike: only device time
    counts.
    """
    right = {name: run for name, run in runs.items() if _is_right(case, stock, run)}
    wrong = dict.fromkeys(set(runs) - set(right), 0.0)
    if not right:
        return wrong
    return {**wrong, **_timed({"stock": stock, **right}, device, both_clocks)}


def _timed(runs: Mapping[str, Run], device: str, both_clocks: bool) -> dict[str, float]:
    times = []
    if device != "cuda" or both_clocks:
        times.append(interleave(runs, device, ROUNDS, 4e-3 if device == "cuda" else 2e-2))
    if not times or (device == "cuda" and min(each.median for each in times[0].values()) < SHORT_SECONDS):
        times.append(interleave(runs, device, ROUNDS, 2e-3, max_calls=20, run_ahead=True, cold=True))
    found = {}
    for name in runs:
        ratios = [each["stock"].median / each[name].median for each in times]
        spreads = [max(each["stock"].spread, each[name].spread) for each in times]
        # What may be chance counts as level.
        doubt = 1 - min(0.5, max(spreads) / math.sqrt(ROUNDS))
        ratio = min(ratios)
        found[name] = ratio if ratio < 1 else max(1.0, ratio * doubt)
    del found["stock"]
    return found


def _is_right(case: Case, stock: Run, run: Run) -> bool:
    """Whether outputs and gradients are about as exact as stock's."""
    exact, count = _exact(case)

    def values(found: Tensors) -> budget.Values:
        cut = [x.detach()[: z.shape[0]] for x, z in zip(found, exact, strict=True)]
        return budget.Values(cut[:count], {str(place): x for place, x in enumerate(cut[count:])})

    errors = budget.compare(values(run()), values(stock()), values(exact), recomputed=budget.RECOMPUTED)
    return not budget.problems(errors)


def _exact(case: Case) -> tuple[Tensors, int]:
    """Outputs and gradients in float64, of the first sample where samples are apart; how many outputs."""
    kept = {id(leaf) for leaf in case.leaves}
    wide: dict[int, torch.Tensor] = {}
    for x in case.inputs:
        own = x.detach()[:1] if case.samples else x.detach()
        wide[id(x)] = own.double() if x.is_floating_point() else own
        if id(x) in kept:
            wide[id(x)].requires_grad_()
    with torch.set_grad_enabled(bool(case.leaves)):
        outputs = case.fn(*(wide[id(x)] for x in case.inputs))
        exact = [*outputs, *_gradients(outputs, [wide[id(x)] for x in case.leaves])]
    return exact, len(outputs)
