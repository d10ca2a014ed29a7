"""Which pairwise dot products become one operation, and what it computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from inductor_fusions import testing
from inductor_fusions.fusions import dot_interaction
from inductor_fusions.fusions.dot_interaction import check_kernel
from inductor_fusions.fusions.dot_interaction.op import DOT_INTERACTION
from tests.attention.support import rand
from tests.dot_interaction.forms import GIVEN, LI, LJ, SAMPLES, SPELLINGS, TRIANGLES, D, F, own, products
from tests.dot_interaction.left_alone import OTHERS
from tests.support.modules import Module

pytestmark = pytest.mark.usefixtures("any_device")


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return rand(SAMPLES, D), rand(SAMPLES, F, D)


check = partial(testing.check, backend=testing.EAGER_AFTER_PASSES, slack=4.0)

OPERATIONS = {"transposed first": (rand(SAMPLES, D), rand(SAMPLES, F, 3))}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    """Fused; outputs and all gradients."""
    run = check(SPELLINGS[name], OPERATIONS.get(name) or operands())
    assert run.ours.fused[0].fusion == "dot_interaction"


def test_features_that_change() -> None:
    check(SPELLINGS["lists"], operands(), dynamic=True, fused=0, reason="is symbolic")


def test_samples_that_change_are_not_measured() -> None:
    """Features from one linear, so that their number and width are those of its weight."""

    def tables(net: Any, x: Any) -> Any:
        t = net.linear(x).view(-1, F, D)
        i, j = torch.tril_indices(F, F, -1)
        return torch.cat([x, products(t)[:, i, j]], 1)

    model, reason = Module(tables, {"linear": nn.Linear(D, F * D)}), "the number of samples is symbolic"
    check(model, (rand(SAMPLES, D),), dynamic=True, policy="profitable", fused=0, reason=reason)


def test_features_are_used_elsewhere() -> None:
    """They are read, not consumed."""
    check(lambda x, t: (torch.cat([x, products(t)[:, LI, LJ]], 1), t.sum(), x * t[:, 0]), operands())


@pytest.mark.parametrize(("kernel", "name"), [
    *(("dot_pairs", name) for name in GIVEN), *(("dot_interaction", name) for name in TRIANGLES),
])  # fmt: skip
def test_kernel(kernel: str, name: str) -> None:
    """One takes the pairs as a tensor, the other knows them; outputs and all gradients."""
    run = check((GIVEN if kernel == "dot_pairs" else TRIANGLES)[name], operands())
    assert run.ours.fused[0].kernel == kernel


@pytest.mark.parametrize("name", ["a buffer", "two gathers"])
def test_given_pairs_in_full(name: str) -> None:
    check(GIVEN[name], operands(), backend="inductor")


def test_a_cell_that_is_none() -> None:
    """As eager mode raises, so does the gather that makes the cells."""
    with pytest.raises((IndexError, RuntimeError)):
        testing.capture(lambda t, i: products(t)[:, i, i], operands()[1].detach(), torch.tensor([0, F]))


def test_index_of_one_number() -> None:
    """No pairs; the search reads the index all the same, and must not raise."""
    run = testing.capture(
        lambda x, i: x.log_softmax(-1).gather(1, i[None, None]),
        torch.randn(1, 8),
        torch.tensor(3),
        backend=testing.EAGER_AFTER_PASSES,
    )
    assert not run.sites


SQUARE = {"another transpose", "permuted"}


@pytest.mark.parametrize("name", OTHERS)
def test_left_alone(name: str) -> None:
    fn, reason = OTHERS[name]
    inputs = (rand(F, F), rand(F, F, F)) if name in SQUARE else operands()
    check(fn, inputs, fused=0, reason=reason)


@pytest.mark.parametrize("factor", [0.0, float("inf")])
def test_products_that_become_infinite(factor: float) -> None:
    """All of their gradients are NaN, also those of products that are not selected."""

    def divided(x: Any, t: Any) -> Any:
        return (products(t) / factor)[:, LI, LJ]

    assert not testing.capture(divided, *operands(), backend=testing.EAGER_AFTER_PASSES).fused


@pytest.mark.parametrize("rows", [lambda t: t.unbind(1), lambda t: [t[:, i] for i in range(F)]])
def test_a_loop_over_pairs_is_reported_once(rows: Callable[..., Any]) -> None:
    def weighted(x: Any, t: Any) -> Any:
        features, total = rows(t), 0.0
        for i in range(1, F):
            for j in range(i):
                total = total + (features[i] * features[j]).sum(-1) * (i + j)
        return total

    run = check(weighted, operands(), fused=0, reason="one by one")
    assert len(run.sites) == 1, run.sites


@pytest.mark.parametrize("select", [lambda z, m: z[:, m], torch.masked_select], ids=["index", "select"])
def test_selected_by_a_mask(select: Any) -> None:
    """How many there are depends on data: Dynamo breaks the graph there, unless it is told not to."""

    def fn(x: Any, t: Any) -> Any:
        return select(products(t), torch.ones(F, F, dtype=torch.bool).tril(-1)).sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(fn, operands(), fused=0, reason="by a mask", train=False)
    assert len(check(fn, operands(), fused=0, reason="returns all products").sites) == 1


def test_indices_that_are_inputs() -> None:
    def fn(x: Any, t: Any, i: Any, j: Any) -> Any:
        return torch.cat([x, products(t)[:, i, j]], 1)

    check(fn, (*operands(), torch.tensor(LI), torch.tensor(LJ)))


def test_overwritten_afterwards() -> None:
    """Where the dense features alone are trained, stock keeps nothing of the others."""

    def fn(x: Any, t: Any) -> Any:
        y = torch.cat([x, products(t)[:, LI, LJ]], 1)
        t.zero_()
        return y

    x, t = operands()
    seen = testing.capture(fn, x, t.detach(), train=True)
    assert not seen.fused and "overwrites an operand" in seen.sites[0].reason


def written(into: Callable[..., Any], between: bool = True) -> Callable[..., Any]:
    """Pairs of features, and a write to what `into` gives, behind the products or in front of them."""

    def fn(x: Any, t: Any, other: Any, i: Any, j: Any) -> Any:
        t, z = t * 1.0, None
        if between:
            z = products(t)
        into(t, other, j).index_copy_(0, torch.tensor([1]), into(t, other, j)[:1] * 1)
        return torch.cat([x, (products(t) if z is None else z)[:, i, j]], 1)

    return fn


def indices() -> tuple[torch.Tensor, ...]:
    return rand(2, 3).detach(), torch.tensor(LI), torch.tensor(LJ)


@pytest.mark.parametrize("between", [False, True], ids=["in front", "between"])
def test_another_tensor_is_overwritten(between: bool) -> None:
    """What is read stays as it is; features may be overwritten before they are read."""
    check(written(lambda t, other, j: other, between), (*operands(), *indices()))
    if not between:
        check(written(lambda t, other, j: t.detach(), between), (*operands(), *indices()))


@pytest.mark.parametrize("into", [lambda t, other, j: t.detach(), lambda t, other, j: j], ids=["t", "j"])
def test_what_is_read_is_overwritten(into: Callable[..., Any]) -> None:
    reason = "index_copy_ writes in place between the features and the pairs"
    check(written(into), (*operands(), *indices()), fused=0, reason=reason, train=False)


def test_index_that_is_overwritten_behind_the_pairs() -> None:
    """The operation would read it where the concatenation is."""

    def fn(x: Any, t: Any, other: Any, i: Any, j: Any) -> Any:
        pairs = products(t)[:, i, j]
        j.zero_()
        return torch.cat([x, pairs], 1)

    check(fn, (*operands(), *indices()), fused=0, reason="zero_ writes in place", train=False)


def test_autocast() -> None:
    """The products are made in another dtype than the features have."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run = testing.capture(SPELLINGS["lists"], *operands(), backend=testing.EAGER_AFTER_PASSES)
    assert [site.reason for site in run.sites] == ["the operands have different dtypes, or autocast is on"]


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (torch.func.grad, "inside torch.func.grad"),
        (torch.func.jacrev, "inside torch.func.grad"),
        (torch.func.jacfwd, "forward-mode derivative"),
    ],
)
def test_transforms(transform: Callable[..., Any], reason: str) -> None:
    """The basis of a Jacobian is written in place: that is not why."""

    def fn(x: Any, t: Any) -> Any:
        return transform(lambda t: products(t)[:, LI, LJ].sin().sum())(t)

    check(fn, operands(), fused=0, reason=reason, train=False)


def test_cpu() -> None:
    with mock.patch.object(dot_interaction, "check_kernel", check_kernel):
        check(SPELLINGS["reference"], operands(), fused=0, reason="on the CPU")


@pytest.mark.parametrize(
    ("gain", "samples", "dense", "fused"),
    [(1.5, 6, True, 1), (1.5, 12, True, 1), (1.5, 24, True, 0), (0.9, 6, True, 0), (1.5, 6, False, 0)],
)
def test_what_is_measured_decides(
    gain: float, samples: int, dense: bool, fused: int, shelf: Callable[..., None]
) -> None:
    row = {"dtype": "float32", "train": True, "features": F, "width": D, "dense": dense, "samples": samples}
    shelf(on="cpu", cpu={"dot_interaction": [{**row, "gain": gain, "tiles": [2, 2, 1, 1]}]})
    run = check(SPELLINGS["lists"], operands(), policy="profitable", fused=fused)
    assert ("measure" in run.sites[0].kernel) if fused else ("measured" in run.sites[0].reason)


@pytest.mark.parametrize(("pairs", "fused"), [(10, 1), (8, 0)])
def test_concatenations_that_stock_has_in_memory(pairs: int, fused: int, shelf: Callable[..., None]) -> None:
    row = {"dtype": "float32", "train": True, "features": F, "width": D, "dense": False, "samples": SAMPLES}
    shelf(
        on="cpu", cpu={"dot_interaction": [{**row, "pairs": "gathered", "gain": 1.5, "tiles": [2, 2, 1, 1]}]}
    )

    def fn(x: Any, t: Any) -> Any:
        features = own(t)
        p, q = (torch.cat([features[k] for k in side[:pairs]], 1) for side in (LI, LJ))
        return (p * q).sum(-1)

    check(fn, operands(), policy="profitable", fused=fused, reason=None if fused else "tensors of their own")


def test_arguments_that_do_not_fit() -> None:
    x, t = operands()
    for bad in ((t, x[1:]), (t, x.double()), (x, x), (t.long(), None), (t, t)):
        with pytest.raises((ValueError, RuntimeError)):
            DOT_INTERACTION(*bad, None, False, False, [])
    with pytest.raises(ValueError, match="an int64 vector"):
        DOT_INTERACTION(t, x, torch.tensor([1.0]), False, False, [])


@pytest.mark.gpu
@pytest.mark.parametrize("given", [False, True], ids=["triangle", "given"])
@pytest.mark.parametrize("samples", [1, 128, 513])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu(given: bool, samples: int, width: int, dtype: torch.dtype) -> None:
    """The kernels, as Inductor launches them."""
    x, t = rand(samples, width), rand(samples, 27, width)

    def fn(x: Any, t: Any) -> Any:
        i, j = torch.tril_indices(27, 27, -1, device=t.device)
        if given:
            i, j = j.repeat(2), i.repeat(2)  # each pair is there twice
        return torch.cat([x, products(t)[:, i, j]], 1)

    inputs = [(value.detach() / 4).cuda().requires_grad_() for value in (x, t)]
    check(fn, inputs, dtype=dtype, backend="inductor")
