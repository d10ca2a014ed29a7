"""The fusions beside the other things that one does with a compiled model."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

import inductor_fusions
from inductor_fusions import config, testing
from tests import blocks
from tests.support.errors import assert_within_budget

pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled", "ignore::UserWarning")


def fused() -> int:
    return inductor_fusions.report().count("fused", "attention")


@pytest.fixture(autouse=True)
def always() -> Any:
    inductor_fusions.clear()
    with config.patch(policy="always"):
        yield


def quick(function: Any, **options: Any) -> Any:
    """Compiled without code generation."""
    return torch.compile(function, backend=testing.AfterPasses([]), **options)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and found
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_full_graph_and_training_steps() -> None:
    """Three steps of an optimizer, as Inductor compiles them."""
    ours, theirs = blocks.model(1), blocks.model(1)
    compiled = torch.compile(ours, fullgraph=True)
    for model, run in ((ours, compiled), (theirs, theirs)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            optimizer.zero_grad()
            run(blocks.batch(seed=step)).square().mean().backward()
            optimizer.step()
    assert_same(dict(ours.named_parameters()), dict(theirs.named_parameters()))
    assert fused() == 1


def test_gradient_accumulation() -> None:
    ours, theirs = blocks.model(), blocks.model()
    compiled = quick(ours)
    for seed in range(3):
        compiled(blocks.batch(seed=seed)).square().mean().backward()
        theirs(blocks.batch(seed=seed)).square().mean().backward()
    assert_same(gradients(ours), gradients(theirs))
    assert fused() == 2


def test_functional_transforms() -> None:
    """torch.func.grad over functional_call, and vmap, which is left alone.

    Where the parameters take gradients outside as well, so does the result: a second derivative.
    """
    model, x = blocks.model(1), blocks.batch(2)
    learning = dict(model.named_parameters())
    parameters = {name: each.detach() for name, each in learning.items()}

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    found = quick(torch.func.grad(loss))(parameters, x)
    assert_same(found, torch.func.grad(loss)(parameters, x))
    assert fused() == 1
    found = quick(torch.func.grad(loss))(learning, x)
    assert_same(found, torch.func.grad(loss)(learning, x))
    assert fused() == 1

    def each(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda one: model(one[None])[0])(x)

    torch.testing.assert_close(quick(each)(x), each(x), rtol=1e-4, atol=1e-5)
    assert not inductor_fusions.report().count("failed")


def test_after_inference_training() -> None:
    """One compiled model, used without gradients and then with them."""
    ours, theirs = blocks.model(), blocks.model()
    compiled = quick(ours)
    with torch.no_grad():
        compiled(blocks.batch())
    compiled(blocks.batch()).square().mean().backward()
    theirs(blocks.batch()).square().mean().backward()
    assert_same(gradients(ours), gradients(theirs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast(dtype: torch.dtype) -> None:
    def run(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        module = blocks.model()
        forward = quick(module) if model == "ours" else module
        with torch.autocast("cpu", dtype=dtype):
            out = forward(blocks.batch())
        out.float().square().mean().backward()
        return out, gradients(module)

    (ours, our_grads), (theirs, their_grads) = run("ours"), run("theirs")
    true = copy.deepcopy(blocks.model()).double()
    exact = true(blocks.batch().double())
    assert_within_budget(ours, theirs, exact)
    for name, grad in our_grads.items():
        torch.testing.assert_close(grad, their_grads[name], rtol=0.1, atol=2e-3)
    assert fused() == 2


def test_inputs_that_are_not_contiguous() -> None:
    model = blocks.model()
    compiled = quick(model)
    base = torch.randn(blocks.WIDTH, 6, blocks.LENGTH).permute(1, 2, 0)
    for x in (
        base,
        base[::2],
        base[:, :, :].transpose(0, 1).contiguous().transpose(0, 1),
        base[:1].expand(3, -1, -1),
    ):
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert fused() >= 2


def test_compiled_twice_and_nested() -> None:
    """A compiled model inside of another, and one function under two settings."""
    model, x = blocks.model(), blocks.batch()
    inner = quick(model.blocks[0])
    outer = quick(lambda x: inner(x) * 2)
    with torch.no_grad():
        torch.testing.assert_close(outer(x), model.blocks[0](x) * 2, rtol=1e-4, atol=1e-5)
        assert fused() == 1
        torch._dynamo.reset()
        with config.patch(attention=False):
            quick(model)(x)
        assert fused() == 1


def test_copied_and_pickled_models() -> None:
    """The passes leave nothing behind in a model."""
    import pickle

    model, x = blocks.model(1), blocks.batch()
    with torch.no_grad():
        quick(model)(x)
        again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert torch.equal(again(x), model(x))
    assert list(again.state_dict()) == list(model.state_dict())


def test_partial_functions_and_closures() -> None:
    model, x = blocks.model(1), blocks.batch()

    def scaled(factor: float, x: torch.Tensor) -> torch.Tensor:
        return model(x) * factor

    with torch.no_grad():
        torch.testing.assert_close(quick(functools.partial(scaled, 0.5))(x), model(x) * 0.5)
    assert fused() == 1
