"""What holds of every fusion before autograd: numbers, and what happens to values between its halves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from inductor_fusions import config, testing
from inductor_fusions._inductor import fresh_compile
from inductor_fusions.reasons import Reason
from tests.cases.halves import CASES, Case
from tests.support.on_a_gpu import on_a_gpu

pytestmark = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def decided() -> Iterator[None]:
    """Every fusion decides as on a GPU."""
    with on_a_gpu():
        yield


def check(case: Case, fn: Callable[..., Any], fused: bool = True, **options: Any) -> testing.Checked:
    """The numbers are right, and the halves are one operation or are not."""
    grad = options.get("train", True)
    options = {"backend": testing.EAGER_AFTER_PASSES, "slack": 4.0, **options}
    seen = testing.check(fn, case.inputs(grad), fused=None, **options)
    assert [site.fusion for site in seen.ours.fused] == [case.fusion] * fused, seen.sites
    return seen


def left(case: Case, fn: Callable[..., Any], reason: Reason, **options: Any) -> None:
    """They are left alone for this reason."""
    seen = check(case, fn, fused=False, **options)
    assert reason.code in {site.code for site in seen.sites if site.fusion == case.fusion}, seen.sites


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers(case: Case, dtype: torch.dtype) -> None:
    check(case, case, dtype=dtype, slack=4.0 if dtype == torch.float32 else 1.0)


def test_code(case: Case) -> None:
    """As Inductor compiles it, forward and backward."""
    check(case, case, backend="inductor")


def test_what_nobody_uses(case: Case) -> None:
    """A copy that nobody uses reads nothing, and no_grad that is left again changes nothing."""

    def fn(*inputs: Any) -> Any:
        between = case.first(*inputs)
        with torch.no_grad():
            _ = between.clone()
        return case.rest(between, *inputs)

    check(case, fn)


def test_value_in_between_that_is_used(case: Case) -> None:
    def fn(*inputs: Any) -> Any:
        between = case.first(*inputs)
        return case.rest(between, *inputs), between.sum()

    left(case, fn, Reason.USED_ELSEWHERE)


def test_operand_that_is_overwritten_in_between(case: Case) -> None:
    def fn(x: Any, *others: Any) -> Any:
        x = x * 1.0
        between = case.first(x, *others)
        x.detach().add_(1.0)
        return case.rest(between, x, *others)

    left(case, fn, Reason.OVERWRITTEN, train=False)


def test_gradients_that_are_off_for_the_first(case: Case) -> None:
    """What is computed under no_grad passes none on; the operation would."""

    def fn(*inputs: Any) -> Any:
        with torch.no_grad():
            between = case.first(*inputs)
        return case.rest(between, *inputs) + sum(x.sum() for x in inputs if x.is_floating_point()) * 0.1

    left(case, fn, Reason.MODE)


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_transform_of_functions(case: Case, transform: str) -> None:
    """The operations have gradients for autograd, and none for torch.func; SDPA has one, and no tangent."""

    def fn(x: Any, *others: Any) -> Any:
        if transform == "grad":
            return torch.func.grad(lambda x: case(x, *others).square().sum())(x)
        return torch.func.jvp(lambda x: case(x, *others), (x,), (x.cos(),))

    if transform == "grad" and case.fusion == "attention":
        check(case, fn, train=False, slack=16.0)
    else:
        left(case, fn, Reason.TRANSFORM, train=False, slack=16.0)


@pytest.mark.parametrize("trained", [None, 0, 1, 2], ids=["all", "the first", "the second", "the third"])
def test_inputs_that_the_caller_changes(case: Case, trained: int | None) -> None:
    """Where eager mode keeps an input it raises; where it does not, gradients are as without the change."""
    places = range(len(case.shapes))
    wanted = places if trained is None else [trained]

    def gradients(fn: Any, changed: int) -> list[Any]:
        given = [
            x.detach().clone().requires_grad_(x.requires_grad and place in wanted)
            for place, x in enumerate(case.inputs())
        ]
        out = fn(*given)
        with torch.no_grad():
            given[changed].mul_(-3.0)
        out.square().sum().backward()
        return [x.grad for x in given]

    for changed in places:
        try:
            expected = gradients(case, changed)
        except RuntimeError:
            continue
        with fresh_compile(), config.patch(policy="always", strict=True):
            found = gradients(torch.compile(case.__call__), changed)
        for ours, eager in zip(found, expected, strict=True):
            assert (ours is None) == (eager is None)
            if eager is not None:
                torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-4)
