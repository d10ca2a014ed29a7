"""The checks themselves: they fail where they should, and say why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import inductor_fusions
from inductor_fusions import config, reporting, testing
from inductor_fusions.checking import budget

BACKENDS = pytest.mark.parametrize("backend", [testing.EAGER_AFTER_PASSES, "inductor"])


def attention(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) * 0.3
    return torch.softmax(scores if mask is None else scores + mask, dim=-1) @ v


def refused(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1), dim=-1).square() @ v


def inputs(grad: bool = True) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 5, 8, requires_grad=grad) for _ in range(3)]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x, flag=False):
        q, k, v = self.qkv(x + self.shift).chunk(3, dim=-1)
        return {"out": attention(q, k, v), "length": torch.tensor(x.shape[1]), "none": None}


@BACKENDS
def test_capture(backend: str) -> None:
    q, k, v = inputs()
    run = testing.capture(attention, q, k, v, train=True, backend=backend)
    torch.testing.assert_close(run.outputs, attention(q, k, v).detach())
    assert not run.outputs.requires_grad
    assert [site.verdict for site in run.sites] == ["fused"]
    assert run.fused == run.sites
    (cotangent,) = run.cotangents
    expected = torch.autograd.grad(attention(q, k, v), (q, k, v), cotangent)
    assert list(run.grads) == ["0", "1", "2"]
    for found, grad in zip(run.grads.values(), expected, strict=True):
        torch.testing.assert_close(found, grad)
    assert q.grad is None


@pytest.mark.parametrize("function", [testing.capture, inductor_fusions.verify])
def test_unknown_policy(function: Any) -> None:
    """An argument that nobody understands is no default."""
    with pytest.raises(ValueError, match="policy must be profitable or always, not 'alway'"):
        function(attention, *inputs(), policy="alway")


@pytest.mark.parametrize(("function", "arguments", "says"), [
    (inductor_fusions.explain, (5,), "fn must be a function or a module, not int"),
    (inductor_fusions.verify, (5,), "fn must be a function or a module, not int"),
    (testing.check, (torch.sin, torch.ones(2)), "a sequence or a mapping, not a tensor"),
    (testing.assert_fusions, (torch.sin, torch.ones(2)), "a sequence or a mapping, not a tensor"),
    (testing.assert_close_to_eager, (torch.sin, torch.ones(2)), "a sequence or a mapping, not a tensor"),
])  # fmt: skip
def test_arguments_of_other_types(function: Any, arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        function(*arguments)


def test_capture_is_isolated() -> None:
    """Only the sites of this compile, each time anew; nothing of it stays."""
    for _ in range(2):
        run = testing.capture(attention, *inputs(), backend=testing.EAGER_AFTER_PASSES)
        assert len(run.sites) == 1
    assert len(reporting.report()) >= 2
    assert config.policy == "profitable"


def test_capture_leaves_inputs_alone() -> None:
    def fn(x, y):
        x.add_(1.0)
        return x @ y.mT

    x = torch.randn(4, 6)[:, ::2]
    y = torch.randn(3).expand(4, 3)
    before = x.clone()
    run = testing.capture(fn, x, y, backend=testing.EAGER_AFTER_PASSES)
    assert torch.equal(x, before)
    torch.testing.assert_close(run.outputs, (x + 1.0) @ y.mT)


def test_same_tensor_twice() -> None:
    """One tensor in two places is one leaf."""
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    run = testing.capture(attention, x, x, x, train=True, backend=testing.EAGER_AFTER_PASSES)
    (cotangent,) = run.cotangents
    (expected,) = torch.autograd.grad(attention(x, x, x), x, cotangent)
    torch.testing.assert_close(run.grads["0"], expected)


def test_capture_of_a_module() -> None:
    module, x = Layer(), torch.randn(2, 5, 8, requires_grad=True)
    run = testing.capture(module, x, train=True, backend=testing.EAGER_AFTER_PASSES)
    assert list(run.grads) == ["0", "qkv.weight", "qkv.bias"]
    assert [tensor.shape for tensor in run.tensors] == [(2, 5, 8), ()]
    assert all(p.grad is None for p in module.parameters())
    run = testing.capture(module, x=x, train=True, backend=testing.EAGER_AFTER_PASSES)
    assert list(run.grads) == ["x", "qkv.weight", "qkv.bias"]


def test_calls() -> None:
    run = testing.capture(attention, *inputs(), backend=testing.EAGER_AFTER_PASSES)
    assert len(run.calls("scaled_dot_product_attention")) == 1
    assert run.calls("softmax") == []


def test_assert_fusions() -> None:
    cheap = {"backend": testing.EAGER_AFTER_PASSES}
    testing.assert_fusions(attention, inputs(), **cheap)
    testing.assert_fusions(attention, dict(zip("qkv", inputs(), strict=True)), {"attention": 1}, **cheap)
    testing.assert_fusions(refused, inputs(), {}, **cheap)
    with pytest.raises(AssertionError) as caught:
        testing.assert_fusions(refused, inputs(), **cheap)
    message = str(caught.value)
    assert "expected {'attention': 1}" in message
    (row,) = [line.split() for line in message.splitlines() if "rejected  " in line]
    assert row[:4] == ["1", "attention", "rejected", "square"]
    assert "square is between" in message
    assert "in refused" in message
    with pytest.raises(AssertionError, match="expected"):
        testing.assert_fusions(attention, inputs(), {}, **cheap)


@BACKENDS
def test_check(backend: str) -> None:
    seen = testing.check(attention, inputs(), backend=backend)
    assert set(seen.errors) == {"output[0]", "0", "1", "2"}
    assert all(0.0 < mine < 1e-5 for mine, _ in seen.errors.values())
    assert [site.verdict for site in seen.sites] == ["fused"]
    assert seen.stock.sites == []


def test_check_of_a_module() -> None:
    module = Layer()
    seen = testing.check(module, (torch.randn(2, 5, 8),), backend=testing.EAGER_AFTER_PASSES, slack=4.0)
    assert {"qkv.weight", "qkv.bias"} <= set(seen.errors)
    assert module.qkv.weight.dtype == torch.float32
    half = testing.check(
        module, (torch.randn(2, 5, 8),), dtype=torch.bfloat16, backend=testing.EAGER_AFTER_PASSES
    )
    assert half.ours.tensors[0].dtype == torch.bfloat16
    assert module.qkv.weight.dtype == torch.float32


@pytest.mark.parametrize(("fn", "options", "message"), [
    (attention, {"fused": 0}, "1 sites were fused, expected 0"),
    (refused, {}, "0 sites were fused, expected 1"),
    (refused, {"fused": 0, "reason": "no such reason"}, "no site was left with the reason"),
    (attention, {"kernel": "is_causal"}, "has a kernel without 'is_causal'"),
])  # fmt: skip
def test_check_of_sites(fn, options, message: str) -> None:
    with pytest.raises(AssertionError) as caught:
        testing.check(fn, inputs(), backend=testing.EAGER_AFTER_PASSES, **options)
    assert message in str(caught.value)
    assert "sites:" in str(caught.value)


def wrong(graph: torch.fx.Graph, scale: float) -> None:
    """A pass that changes the scale of every SDPA call."""
    for node in graph.nodes:
        if "scaled_dot_product_attention" in node.name:
            node.kwargs = {**node.kwargs, "scale": scale}


def with_wrong_scale(scale: float, *args, **options) -> testing.Checked:
    from torch._inductor import config as inductor

    saved = inductor.pre_grad_custom_pass
    held = saved if isinstance(saved, list) else [saved]
    inductor.pre_grad_custom_pass = [*held, lambda graph: wrong(graph, scale)]
    try:
        return testing.check(*args, **{"backend": testing.EAGER_AFTER_PASSES, **options})
    finally:
        inductor.pre_grad_custom_pass = saved


def test_check_of_errors() -> None:
    """A wrong result fails, and so does a slightly worse one; the message has every error."""
    with_wrong_scale(0.3, attention, inputs())
    for scale in (0.25, 0.30001):
        with pytest.raises(AssertionError) as caught:
            with_wrong_scale(scale, attention, inputs())
        message = str(caught.value)
        for name in ("output[0]: error", "gradient of 0: error", "gradient of 1: error", "budget"):
            assert name in message
    with_wrong_scale(0.30001, attention, inputs(), slack=1e3)


def test_errors_of_several_runs() -> None:
    """One that is over budget by chance is not, among others; one that is always is; so is NaN."""

    def error(ours: float, stock: float) -> budget.Error:
        allowed = 1.5 * stock
        return budget.Error("output[0]", False, ours, stock, allowed, "" if ours <= allowed else "over")

    by_chance = [[error(1.6, 1.0)], [error(0.9, 1.0)], [error(1.1, 1.2)], [error(1.0, 0.8)]]
    assert not budget.problems(budget.pooled(by_chance))
    always = [[error(1.6, 1.0)], [error(1.6, 1.0)], [error(2.0, 1.2)], [error(1.4, 0.9)]]
    assert "output[0]: error 1.66e+00" in budget.problems(budget.pooled(always))[0]
    assert budget.problems(budget.pooled([[error(1.0, 1.0)], [error(float("nan"), 1.0)]]))
    assert budget.problems(budget.pooled([[error(1.0, -1.0)]] * 4))  # below 0: nothing is right
    integers = budget.Error("output[1]", False, 0.0, 0.0, 0.0, "output[1] is not that of stock")
    found = budget.pooled([[error(1.0, 1.0)], [error(1.0, 1.0), integers]])
    assert budget.problems(found) == ["output[1] is not that of stock"]


def test_an_error_over_budget_is_judged_again() -> None:
    """On other samples, which are asked for only then; stock is run first."""
    asked: list[tuple[str, int]] = []

    def run(name: str, *errors: float) -> Callable[[int], budget.Values]:
        def at(sample: int) -> budget.Values:
            asked.append((name, sample))
            return budget.Values(torch.ones(4) + errors[min(sample, len(errors) - 1)], {})

        return at

    def problems(*errors: float) -> list[str]:
        asked.clear()
        return budget.problems(budget.judge(run("ours", *errors), run("stock", 1e-3), run("true", 0.0)))

    assert not problems(1.4e-3)
    assert asked == [("stock", 0), ("ours", 0), ("true", 0)]
    assert not problems(1.6e-3, 1e-3)
    assert [sample for name, sample in asked if name == "ours"] == list(range(budget.SAMPLES))
    assert problems(1.4e-3, 1e-2) == []  # the others are not asked for
    assert problems(1.6e-3, 1.6e-3) and problems(float("nan"), 1e-3)


def test_check_of_nan() -> None:
    """NaN is in no budget."""
    with pytest.raises(AssertionError, match="error nan"):
        with_wrong_scale(float("nan"), attention, inputs())


def test_vanishing_gradient() -> None:
    """A gradient that is zero in exact arithmetic is not compared in relative terms."""
    mask = torch.randn(5, 1, requires_grad=True)  # the same for all keys
    seen = testing.check(attention, (*inputs(), mask), backend=testing.EAGER_AFTER_PASSES)
    assert all(error < 1e-6 for error in seen.errors["3"])


def test_reference_is_exact() -> None:
    """Casts to lower precision are not those of the reference."""

    def fn(q, k, v):
        weights = torch.softmax((q @ k.mT).float(), -1, dtype=torch.float32).to(torch.bfloat16).to(v.dtype)
        return weights @ v + torch.zeros(8) + torch.ones(8, dtype=torch.float16).half().float()

    seen = testing.check(fn, inputs(), fused=None, backend=testing.EAGER_AFTER_PASSES)
    ours, stock = seen.errors["output[0]"]
    assert stock > 1e-4
    assert ours <= 1.5 * stock
    assert torch.get_default_dtype() == torch.float32


def test_integer_outputs() -> None:
    """They are those of stock."""
    fn = lambda q, k, v: (attention(q, k, v), torch.arange(3), q.shape[0])  # noqa: E731
    testing.check(fn, inputs(), backend=testing.EAGER_AFTER_PASSES)


def test_a_fusion_that_raises_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    from inductor_fusions.fusions.attention import sites

    def raises(self) -> str:
        raise RuntimeError("broken")

    monkeypatch.setattr(sites.HandWritten, "rewrite", raises)
    with pytest.raises(AssertionError, match="a fusion raised: RuntimeError"):
        testing.check(attention, inputs(), fused=0, backend=testing.EAGER_AFTER_PASSES)
