"""A few of each kind through all of Inductor: code generation, backward, modes."""

from __future__ import annotations

import torch

from inductor_fusions import config, testing
from tests.attention.support import qkv, scored


def test_compiled_autograd() -> None:
    """The backward is compiled as a whole, at run time."""
    q, k, v = qkv()
    fn = scored(lambda s: s * 0.3)
    with config.patch(policy="always"), torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(lambda: fn(q, k, v).square().sum().backward(), backend="aot_eager")
        compiled()
    found = [t.grad for t in (q, k, v)]
    expected = torch.autograd.grad(fn(q, k, v).square().sum(), (q, k, v))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_second_derivative_is_refused_or_right() -> None:
    """torch.compile itself refuses a double backward; nothing of ours makes it silently wrong."""
    q, k, v = qkv()
    fn = scored(lambda s: s * 0.3)
    with config.patch(policy="always"):
        torch._dynamo.reset()
        out = torch.compile(fn, backend=testing.AfterPasses([]))(q, k, v)
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        try:
            (second,) = torch.autograd.grad(grad.square().sum(), q)
        except RuntimeError:
            return
    (first,) = torch.autograd.grad(fn(q, k, v).square().sum(), q, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(first.square().sum(), q)[0])
