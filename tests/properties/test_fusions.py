"""What holds of every fusion: numbers, its twin, changing sizes, strides, checkpoints, bits, its toggle."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from torch._dynamo import eval_frame

from inductor_fusions import config
from inductor_fusions.block_mm import op
from inductor_fusions.fusions import ALL
from tests.block_mm.support import Run, differentiate
from tests.cases.fusions import CASES, Case
from tests.fuzz.judge import as_kernels
from tests.support.on_a_gpu import compiled, judge

EVERY = pytest.mark.parametrize("name", CASES)
OF_ANY_SIZE = pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.rows])
#: Of the leading dims, at each call.
SIZES = (24, 20), (60, 7), (35, 12)


def results(
    call: Callable[..., Any], inputs: Sequence[torch.Tensor], function: Any = None
) -> list[torch.Tensor | None]:
    """Outputs and gradients, in training where an input takes one."""
    train = any(x.requires_grad for x in inputs)
    with torch.set_grad_enabled(train):
        found = call(*inputs)
        outputs = list(found) if isinstance(found, tuple) else [found]
        return [*outputs, *(differentiate(function or call, inputs, outputs) if train else ())]


def run(function: Callable[..., Any], inputs: Sequence[torch.Tensor], **toggles: Any) -> tuple[Any, Run]:
    """The results of a function as on a GPU, and what was made of it."""
    with compiled(function, **toggles) as (call, seen):
        found = results(call, inputs, function)
    return found, seen


def fused(case: Case, seen: Run) -> int:
    return seen.fused(case.fusion)


def same(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether results differ by no more than another order of the same sums explains."""
    return all(
        x is y or float((x.double() - y.double()).detach().norm()) <= 0.02 * float(y.detach().double().norm())
        for x, y in zip(found, wanted, strict=True)
    )


def test_every_fusion_has_a_row() -> None:
    """But those that change no operation of the user's: they mend what stock would make of it."""
    without = {fusion.name for fusion in ALL} - {case.fusion for case in CASES.values()}
    assert without == {"stock_misfires", "flex_backward", "kernel_defects"}


@EVERY
def test_numbers(name: str) -> None:
    """Fused, and right: outputs and gradients."""
    case = CASES[name]
    sites = judge(case.function, case.inputs(), case.early)
    assert case.fusion in {site.fusion for site in sites if site.verdict == "fused"}, sites


@EVERY
def test_twin(name: str) -> None:
    """With one detail changed it is left alone, for its reason, and right."""
    case = CASES[name]
    inputs = [x.detach() for x in case.inputs()]
    sites = [site for site in judge(case.twin, inputs, case.early) if site.fusion == case.fusion]
    assert not [site for site in sites if site.verdict == "fused"], sites
    assert {case.reason.code} <= {site.code for site in sites} if case.reason else not sites, sites


@EVERY
def test_switched_off(name: str) -> None:
    """By its toggle: no site of it is even looked for."""
    case = CASES[name]
    with config.patch(**{case.fusion.removesuffix("_input"): False}):
        sites = judge(case.function, case.inputs(), case.early)
    assert not [site for site in sites if site.fusion == case.fusion]


@pytest.mark.parametrize("name", [name for name in CASES if name != "attention"])  # keeps a GPU's generator
def test_checkpointed(name: str) -> None:
    """A body that is run again in the backward is fused as well, and gives the same."""
    case = CASES[name]
    inputs = case.inputs()
    plain, _ = run(case.function, inputs)
    again, seen = run(partial(checkpoint, case.function, use_reentrant=False), inputs)
    assert fused(case, seen) and same(again, plain)


#: A program's constants are no indices that a graph shows; a merged adapter is fused in training alone.
NOT_EXPORTED = ("pairs", "every_pair", "merged")


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_EXPORTED])
def test_exported(name: str) -> None:
    """As torch.export gives it, in operations of aten, and without gradients."""
    case = CASES[name]
    inputs = [x.detach() for x in case.inputs()]
    module = Model(replace(case, rows=tuple(range(len(inputs)))), inputs).eval()
    found, seen = run(torch.export.export(module, tuple(inputs)).module(), inputs)
    assert fused(case, seen) and same(found, results(case.function, inputs))


@EVERY
def test_the_same_bits_twice(name: str) -> None:
    """Deterministic algorithms are asked for, and the fusion is used all the same."""
    case = CASES[name]
    inputs = case.inputs()
    torch.use_deterministic_algorithms(True)
    try:
        (first, seen), (second, _) = (run(case.function, inputs) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert fused(case, seen)
    assert all(x is y or torch.equal(x, y) for x, y in zip(first, second, strict=True))


class Model(nn.Module):
    """A function of some inputs, of which the others are parameters, whose sizes are known."""

    def __init__(self, case: Case, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.case = case
        fixed = {str(i): x for i, x in enumerate(inputs) if i not in case.rows}
        self.held = nn.ParameterDict({i: nn.Parameter(x.detach(), x.requires_grad) for i, x in fixed.items()})

    def forward(self, *given: torch.Tensor) -> Any:
        left = iter(given)
        count = len(given) + len(self.held)
        return self.case.function(
            *[next(left) if i in self.case.rows else self.held[str(i)] for i in range(count)]
        )


def called(case: Case, how: str, enabled: bool) -> tuple[Run, list[int], list[Any]]:
    """What calls with each of the sizes made: graphs, the guards of each compile, results."""
    torch.manual_seed(0)
    inputs = case.inputs()
    model, found = Model(case, inputs), []
    dynamic = True if how == "dynamic" else None
    with compiled(model, dynamic, fullgraph=True, enabled=enabled) as (call, seen):
        for sizes in SIZES:
            given = []
            for i in case.rows:
                x = inputs[i]
                shape = (*sizes[-case.dims :], *x.shape[case.dims :])
                made = torch.randn(shape).to(x.dtype) if x.is_floating_point() else torch.randint(9, shape)
                given.append(made.requires_grad_(x.requires_grad))
                if how == "marked":  # raises where one of them is specialised
                    torch._dynamo.mark_dynamic(given[-1], tuple(range(case.dims)))
                torch._dynamo.mark_static(given[-1], tuple(range(case.dims, made.dim())))
            found += results(call, given, model)
        entries = eval_frame._debug_get_cache_entry_list(Model.forward.__code__)
        guards = [str(entry.guard_manager).count("_GUARD:") for entry in entries]
    return seen, guards, found


@pytest.mark.parametrize("how", ["dynamic", "marked", "found out"])
@OF_ANY_SIZE
def test_sizes_that_change(name: str, how: str) -> None:
    """No more graphs, guards and recompiles than without the fusions, and right results."""
    case = CASES[name]
    (ours, own_guards, found), (stock, guards, wanted) = (called(case, how, on) for on in (True, False))
    assert fused(case, ours) and not any(site.verdict == "fused" for site in stock.sites)
    assert len(ours.graphs) == len(stock.graphs)
    assert len(own_guards) == len(guards) == (2 if how == "found out" else 1)
    assert all(x <= y for x, y in zip(own_guards, guards, strict=True)) and same(found, wanted)


LAYOUTS = "whole", "turned", "part", "every second row", "expanded"


def laid_out(x: torch.Tensor, rows: int, how: str) -> torch.Tensor:
    """A leaf like another one, with other rows, and with other strides."""
    shape = (rows, *x.shape[1:])
    if not x.is_floating_point():
        return torch.randint(9, (2 * rows, *x.shape[1:]))[::2]
    made = {
        "whole": lambda: torch.randn(shape),
        "turned": lambda: torch.randn(shape[::-1]).permute(*reversed(range(len(shape)))),
        "part": lambda: torch.randn(*shape[:-1], shape[-1] + 8)[..., 3 : 3 + shape[-1]],
        "every second row": lambda: torch.randn(2 * rows, *shape[1:])[::2],
        "expanded": lambda: torch.randn(1, *shape[1:]).expand(shape),
    }[how]()
    return made.to(x.dtype).detach().requires_grad_(x.requires_grad)


@OF_ANY_SIZE
def test_other_strides_and_sizes(name: str) -> None:
    """One graph for inputs laid out otherwise than when it was traced, and of other sizes, also of no row."""
    case = CASES[name]
    values = case.inputs()
    kernels = mock.patch.object(op, "composite", partial(as_kernels, op.composite))
    with kernels, compiled(case.function) as (call, seen):
        for rows, how in itertools.product((100, 7, 32), LAYOUTS):
            given = [laid_out(x, rows, how) if i in case.rows else x for i, x in enumerate(values)]
            for i in case.rows:
                torch._dynamo.maybe_mark_dynamic(given[i], 0)
            wide = [x.double() if x.is_floating_point() else x for x in (x.detach() for x in given)]
            wide = [x.requires_grad_(y.requires_grad) for x, y in zip(wide, given, strict=True)]
            runs = results(call, given), results(case.function, given), results(case.function, wide)
            for ours, eager, exact in zip(*runs, strict=True):
                if exact is None:
                    continue
                assert ours.shape == eager.shape and ours.dtype == eager.dtype
                far, allowed = (float((t.double() - exact).detach().norm()) for t in (ours, eager))
                eps = torch.finfo(ours.dtype).eps
                assert far <= 2 * allowed + 8 * eps * float(exact.detach().norm()), (rows, how, far, allowed)
    assert fused(case, seen), seen.sites


@OF_ANY_SIZE
def test_rows_that_depend_on_values(name: str) -> None:
    """Their number is not known before the graph runs, and nothing may ask for it."""
    case = CASES[name]
    inputs = [x.detach() for x in case.inputs()]

    def some(chosen: torch.Tensor, *given: torch.Tensor) -> Any:
        places = chosen.nonzero()[:, 0]
        return case.function(*[x[places] if i in case.rows else x for i, x in enumerate(given)])

    given = [torch.arange(inputs[case.rows[0]].shape[0]) % 3 > 0, *inputs]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found, _ = run(some, given)
    assert same(found, results(some, given))


@OF_ANY_SIZE
def test_no_rows(name: str) -> None:
    """What is computed of nothing is as in eager mode."""
    case = CASES[name]
    inputs = [laid_out(x, 0, "whole") if i in case.rows else x for i, x in enumerate(case.inputs())]
    found, seen = run(case.function, inputs)
    assert not [site for site in seen.sites if site.verdict == "failed"]
    for x, y in zip(found, results(case.function, inputs), strict=True):
        assert x is y or (torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num()))
