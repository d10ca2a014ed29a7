"""Graphs that stock Inductor takes for attention, and silently computes as such (pytorch#196468, #195320)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import inductor_fusions
from devtools import cuda_codegen
from inductor_fusions import config, reporting, testing
from inductor_fusions.fusions import stock_misfires
from tests.support.errors import relative

pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")

#: Versions of torch whose patterns misread the cases below.
MISFIRES = ("2.11", "2.12", "2.13", "2.14")

#: A torch whose patterns misread them, whatever this one does.
rewritten = mock.patch.object(stock_misfires, "patterns_ignore_constants", lambda: True)

#: The permutation that brings heads forward, which stock's patterns take every other one for.
HEADS = (0, 2, 1, 3)


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Random leaves."""
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def four(size: int = 4) -> list[torch.Tensor]:
    """q, k, v and a bias of sizes so equal that a wrong reading has the right shape."""
    return tensors(*[(2, size, 8, 8)] * 4)


def written_out(scores: Any, dim: Any) -> Any:
    e = torch.exp(scores - scores.amax(dim, keepdim=True))
    return e / e.sum(dim, keepdim=True)


def attention(q: Any, k: Any, v: Any, dim: int = -1) -> Any:
    return torch.softmax(q @ k / 3.0, dim=dim) @ v


#: name -> (function, inputs, number of sites that are rewritten)
CASES: dict[str, tuple[Callable[..., Any], Callable[[], Any], int]] = {
    "softmax over the queries": (lambda q, k, v, b: attention(q, k.mT, v, -2), four, 1),
    "softmax over the heads": (lambda q, k, v, b: attention(q, k.mT, v, 1), four, 1),
    "softmax over the batch": (lambda q, k, v, b: attention(q, k.mT, v, 0), four, 1),
    "softmax over the queries, written out": (
        lambda q, k, v, b: written_out(q @ k.mT / 3.0, -2) @ v, four, 1,
    ),
    "softmax over queries and keys": (
        lambda q, k, v, b: written_out(q @ k.mT / 3.0, (-2, -1)) @ v, four, 1,
    ),
    "addition with a factor": (
        lambda q, k, v, b: torch.softmax(torch.add(q @ k.mT / 3.0, b, alpha=0.3), -1) @ v, four, 1,
    ),
    "addition with a factor, in place": (
        lambda q, k, v, b: torch.softmax((q @ k.mT / 3.0).add_(b, alpha=2), -1) @ v, four, 1,
    ),
    "k not transposed": (lambda q, k, v, b: attention(q, k.permute(0, 1, 2, 3), v), four, 1),
    "k not transposed, all sizes equal": (  # pytorch#195282: stock raises
        lambda q, k, v: attention(q, k.permute(0, 1, 2, 3), v), lambda: tensors(*[(8, 8, 8, 8)] * 3), 1,
    ),
    "k turned otherwise, 3-D": (
        lambda q, k, v: torch.bmm(torch.softmax(torch.bmm(q, k.permute(2, 0, 1)), -1), v),
        lambda: tensors(*[(8, 8, 8)] * 3), 1,
    ),
    "k permuted by (0, 2, 1, 3), not transposed": (
        lambda q, k, v, b: attention(q.transpose(1, 2), k.permute(0, 2, 1, 3), v.transpose(1, 2)),
        lambda: four(8), 1,
    ),
    "k permuted by (1, 0, 2), 3-D": (
        lambda q, k, v: torch.bmm(torch.softmax(torch.bmm(q, k.permute(1, 0, 2)), -1), v),
        lambda: tensors(*[(8, 8, 8)] * 3), 1,
    ),
    "q turned otherwise": (
        lambda q, k, v, b: attention(q.permute(0, 3, 2, 1), k.transpose(1, 2).mT, v.transpose(1, 2)),
        lambda: four(8), 1,
    ),
    "v turned otherwise": (
        lambda q, k, v, b: attention(q.transpose(1, 2), k.transpose(1, 2).mT, v.permute(0, 3, 2, 1)),
        lambda: four(8), 1,
    ),
    "k turned twice": (
        lambda q, k, v, b: attention(q.transpose(1, 2), k.permute(0, 3, 2, 1).mT, v.transpose(1, 2)),
        lambda: four(8), 1,
    ),
    "keywords, k not transposed": (
        lambda q, k, v, b: torch.matmul(
            other=v, input=torch.softmax(torch.matmul(q, other=torch.permute(dims=(0, 1, 2, 3), input=k)), -1)
        ),
        four, 1,
    ),
    "keywords, 3-D": (
        lambda q, k, v: torch.bmm(
            input=torch.softmax(input=torch.bmm(mat2=torch.permute(k, dims=(1, 0, 2)), input=q), dim=-1),
            mat2=v,
        ),
        lambda: tensors(*[(8, 8, 8)] * 3), 1,
    ),
    "keywords, addition with a factor": (
        lambda q, k, v, b: (
            torch.softmax(torch.add(alpha=0.3, other=b, input=torch.matmul(q, k.mT) / 3.0), -1) @ v
        ),
        four, 1,
    ),
    "k not transposed, a number times it": (
        lambda q, k, v, b: attention(q, 0.5 * k.permute(0, 1, 2, 3), v), four, 1,
    ),
    "behind a product with a bias, as BLOOM has it": (
        lambda q, k, v, b: (
            torch.softmax(b.flatten(0, 1).baddbmm(
                batch1=q.flatten(0, 1), batch2=k.flatten(0, 1).mT, alpha=0.3
            ), -1).view_as(b) @ v + attention(q, k.mT, v, -2)
        ),
        four, 1,
    ),
    "attention": (lambda q, k, v, b: torch.softmax(q @ k.mT / 3.0 + b, -1) @ v, four, 0),
    "attention, heads brought forward": (
        lambda q, k, v, b: attention(q.transpose(1, 2), k.permute(0, 2, 1, 3).mT, v.movedim(2, 1)),
        four, 0,
    ),
}  # fmt: skip
NAMES = list(CASES)

#: The same with a divisor that the patterns of torch 2.11 take for sqrt(head_dim).
DIVIDED: dict[str, Callable[..., Any]] = {
    "scores": lambda q, k, v, b: torch.softmax(q @ k.mT / 3.0 + b, -1) @ v,
    "scores, in place": lambda q, k, v, b: torch.softmax((q @ k.mT).div_(3.0) + b, -1) @ v,
    "by a tensor": lambda q, k, v, b: torch.softmax(q @ k.mT / (b.abs().sum() + 1) + b, -1) @ v,
    "upcast": lambda q, k, v, b: torch.softmax((q @ k.mT / 3.0 + b).float(), -1).type_as(q) @ v,
    "q": lambda q, k, v, b: (
        torch.softmax((q.transpose(1, 2) / 3.0) @ k.transpose(1, 2).mT, -1) @ v.transpose(1, 2)
    ),
    "keywords": lambda q, k, v, b: (
        torch.softmax(torch.div(other=3.0, input=torch.matmul(q, other=k.mT)) + b, -1) @ v
    ),
    "heads behind": lambda q, k, v, b: (
        torch.softmax((q.transpose(1, 2) @ k.transpose(1, 2).mT).div(3.0), -1) @ v.transpose(1, 2)
    ),
    "by sqrt(head_dim), a tensor": lambda q, k, v, b: (
        torch.softmax(q @ k.mT / torch.full([], v.size(-1) ** 0.5, dtype=v.dtype) + b, -1) @ v
    ),
    "by sqrt(head_dim), the root of a tensor": lambda q, k, v, b: (
        torch.softmax(q @ k.mT / torch.sqrt(torch.tensor(8.0)) + b, -1) @ v
    ),
    "by sqrt(head_dim)": lambda q, k, v, b: torch.softmax(q @ k.mT / math.sqrt(8) + b, -1) @ v,
}


@pytest.mark.parametrize("name", DIVIDED)
@rewritten
def test_divisor(name: str) -> None:
    """As Inductor compiles it, and what is rewritten where the patterns ignore the divisor."""
    torch.manual_seed(0)
    inputs = four(8)
    run = testing.capture(DIVIDED[name], *inputs, train=False, policy="profitable")
    true = DIVIDED[name](*[x.detach().double() for x in inputs])
    assert relative(run.outputs, true) < 1e-6
    ignored = mock.patch.object(stock_misfires, "patterns_ignore_the_scale", lambda: True)
    with ignored, config.patch(attention=False):
        run = testing.capture(DIVIDED[name], *inputs, backend=testing.EAGER_AFTER_PASSES)
    assert relative(run.outputs, true) < 1e-6
    assert len(run.fused) == (not name.startswith("by sqrt(head_dim)"))


@rewritten
def test_divided_input() -> None:
    """A bias of the caller that is divided as well: the placeholders of the graph stay together."""

    def scores(b: Any, q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(b / 2.0 + q @ k.mT / 3.0, -1) @ v

    inputs = four(8)
    ignored = mock.patch.object(stock_misfires, "patterns_ignore_the_scale", lambda: True)
    with ignored, config.patch(attention=False):
        run = testing.capture(scores, *inputs, backend=testing.EAGER_AFTER_PASSES)
    assert relative(run.outputs, scores(*[x.detach().double() for x in inputs])) < 1e-6
    assert len(run.fused) == 2
    ops = [node.op for node in run.graphs[0].graph.nodes]
    assert ops == sorted(ops, key=lambda op: op != "placeholder")


#: Versions of torch whose patterns raise at a tensor, and those that were seen not to.
RAISE, READ = ("2.12", "2.13", "2.14"), ("2.15",)


@pytest.mark.skipif(not torch.__version__.startswith(RAISE + READ), reason="another torch")
def test_divisor_that_is_a_tensor() -> None:
    """Rewritten where stock raises, and nowhere else."""
    function, inputs = DIVIDED["by a tensor"], four(8)
    true = function(*[x.detach().double() for x in inputs])
    stock = functools.partial(testing.capture, function, *inputs, policy="profitable")
    with config.patch(stock_misfires=False, attention=False):
        if torch.__version__.startswith(RAISE):
            with pytest.raises(RuntimeError, match="Optional"):
                stock()
        else:
            assert relative(stock().outputs, true) < 1e-6
    with config.patch(attention=False):
        run = stock()
    assert relative(run.outputs, true) < 1e-6
    assert len(run.fused) == torch.__version__.startswith(RAISE)


def errors(name: str, train: bool, **options: Any) -> tuple[float, testing.Capture]:
    """The worst error of output and gradients against float64, and the run."""
    function, make, _ = CASES[name]
    torch.manual_seed(0)
    inputs = make()
    run = testing.capture(function, *inputs, train=train, policy="profitable", **options)
    doubles = [x.detach().double().requires_grad_(train) for x in inputs]
    true = function(*doubles)
    found = [relative(run.outputs, true.detach())]
    if train:
        grads = torch.autograd.grad(true, doubles, run.cotangents[0].double(), allow_unused=True)
        found += [relative(run.grads[str(i)], g) for i, g in enumerate(grads) if g is not None]
    return max(found), run


@pytest.mark.parametrize("name", NAMES)
def test_inference(name: str) -> None:
    """As Inductor compiles it, under the default policy."""
    worst, _ = errors(name, train=False)
    assert worst < 1e-6


@pytest.mark.parametrize("name", ["softmax over the queries", "k not transposed", "addition with a factor"])
def test_training(name: str) -> None:
    worst, _ = errors(name, train=True)
    assert worst < 1e-6


@pytest.mark.skipif(not torch.__version__.startswith(MISFIRES), reason="this torch has other patterns")
@pytest.mark.parametrize("name", [
    "softmax over the heads",
    "k not transposed",
    "addition with a factor",
    pytest.param(
        "k permuted by (1, 0, 2), 3-D",
        marks=pytest.mark.skipif(torch.__version__.startswith("2.14"), reason="2.14 checks permutations"),
    ),
])  # fmt: skip
def test_stock_is_wrong(name: str) -> None:
    """Without the rewrite the result is wrong, so that the tests above can fail."""
    with config.patch(stock_misfires=False, attention=False):
        worst, run = errors(name, train=False)
    assert worst > 0.1 and not run.sites
    with config.patch(attention=False):
        worst, run = errors(name, train=False)
    assert worst < 1e-6 and len([site for site in run.fused if "division" not in site.kernel]) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_training_all(name: str) -> None:
    with config.patch(attention=False):
        worst, _ = errors(name, train=True)
    assert worst < 1e-6


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", NAMES)
@rewritten
def test_equal(name: str, dynamic: bool | None) -> None:
    """The rewritten graph itself, forward and backward, and what the report says."""
    with config.patch(attention=False):
        worst, run = errors(name, train=True, backend=testing.EAGER_AFTER_PASSES, dynamic=dynamic)
    assert worst < 1e-6
    sites = [site for site in run.sites if "division" not in site.kernel]
    count = CASES[name][2]
    if name == "addition with a factor, in place" and torch.__version__.startswith("2.11"):
        count = 0  # Dynamo multiplies alpha out
    sites = [site for site in sites if "copy" not in site.kernel]  # of what leaves
    assert [site.fusion for site in sites] == ["stock_misfires"] * count
    assert all(site.verdict == "fused" and site.source for site in run.sites)


@rewritten
def test_dtypes() -> None:
    """A factor of an operand that the addition casts, and a softmax that casts."""

    def scores(q: Any, k: Any, v: Any, b: Any) -> Any:
        added = torch.add(q @ k.mT, b, alpha=2)
        return torch.softmax(added, 1, dtype=torch.float64).to(v.dtype) @ v

    q, k, v, _ = four()
    bias = torch.randint(-3, 3, (2, 4, 8, 8))
    with config.patch(attention=False):
        run = testing.capture(scores, q, k, v, bias, backend=testing.EAGER_AFTER_PASSES)
    assert len(run.fused) == 2
    torch.testing.assert_close(run.outputs, scores(q, k, v, bias).detach())


#: Factors of scores that are masked before, of which no pattern of stock takes any for attention.
FACTORS: dict[str, Callable[..., Any]] = {
    "a number": lambda q, k, v, b: torch.softmax((q @ k.mT).where(b > 0, -1e36) * 0.7, 1) @ v,
    "a tensor": lambda q, k, v, b: torch.softmax((q @ k.mT).where(b > 0, -1e36) * v.mean(), 0) @ v,
    "a divisor": lambda q, k, v, b: torch.softmax((q @ k.mT).where(b > 0, -1e36) / 3.0, -1) @ v,
    "a divisor, over the heads": lambda q, k, v, b: (
        torch.softmax((q @ k.mT).where(b > 0, -1e36) / v.mean(), 1) @ v
    ),
}


@pytest.mark.parametrize("name", FACTORS)
@rewritten
def test_factor_of_the_scores(name: str) -> None:
    """Inductor computes (x - max) * factor as without the rewrite: a multiply-add has inf in masked rows."""
    inputs = [x.detach() for x in four(8)]

    def kernels(rewrite: bool) -> list[str]:
        torch._dynamo.reset()
        with config.patch(stock_misfires=rewrite, attention=False), reporting.isolated() as sites:
            code = cuda_codegen.generate(FACTORS[name], inputs)
        assert len([site for site in sites if site.verdict == "fused"]) == rewrite * (1 + ("over" in name))
        # Behind the name and the arguments: the name lists the views.
        return [kernel.source.rpartition("xnumel =")[2] for kernel in code.kernels]

    with mock.patch.object(stock_misfires, "patterns_ignore_the_scale", lambda: True):
        found, stock = kernels(True), kernels(False)
    assert found and all(found) and found == stock


def test_not_between_products() -> None:
    """A softmax over another dim that is no part of an attention is left as it is."""

    def function(x: Any, w: Any) -> Any:
        return torch.softmax(x, 0).sum(0), torch.add(x, w, alpha=2), torch.softmax(x @ w, 1)

    run = testing.capture(function, *tensors((4, 4, 4), (4, 4, 4)), backend=testing.EAGER_AFTER_PASSES)
    assert not [site for site in run.sites if site.fusion == "stock_misfires"]


def test_in_vmap() -> None:
    def function(x: Any) -> Any:
        return torch.vmap(lambda q: torch.softmax(q @ q.mT, 0) @ q)(x)

    (x,) = tensors((2, 3, 4, 4))
    run = testing.capture(function, x, backend=testing.EAGER_AFTER_PASSES)
    torch.testing.assert_close(run.outputs, function(x).detach())
    assert not [site for site in run.sites if site.verdict == "failed"]


def test_toggle_is_listed() -> None:
    assert "INDUCTOR_FUSIONS_STOCK_MISFIRES" in inductor_fusions.config.variables()
