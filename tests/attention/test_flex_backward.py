"""The backward of flex attention as matrix products."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from devtools import cuda_codegen
from inductor_fusions import _inductor, config, decisions
from inductor_fusions.decisions import tables
from inductor_fusions.driver import matching
from inductor_fusions.fusion import LeftToStock
from inductor_fusions.fusions.attention import flex_backward
from inductor_fusions.graph import inlined
from tests.attention.support import cases, flex_everywhere
from tests.support.errors import relative

B, H, KV, S, D = 2, 4, 2, 300, 16
#: No divisor of S.
CHUNK = 128
#: The joint graph of a score_mod is traced in the dtype of q, and rounds the gradient to it.
LIMIT = 5e-4


def indices() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(S)[:, None], torch.arange(S)[None, :]


def attend(q, k, v, seen, function=lambda s: s):
    k, v = (t.repeat_interleave(H // KV, 1) for t in (k, v))
    scores = function(q @ k.mT * 0.3)
    lowest = torch.finfo(torch.float16).min
    return torch.softmax(scores.masked_fill(~seen, lowest), -1) @ v


def softcap(q, k, v, data):
    i, j = indices()
    return attend(q, k, v, j <= i, lambda s: torch.tanh(s / 2.0) * 2.0)


def window(q, k, v, data):
    i, j = indices()
    return attend(q, k, v, (j <= i) & (j > i - 70), lambda s: torch.tanh(s / 2.0) * 2.0)


def prefix(q, k, v, data):
    i, j = indices()
    return attend(q, k, v, (j <= i) | (j < 40))


def padding(q, k, v, data):
    i, j = indices()
    return attend(q, k, v, (j <= i) & (data[:, None, None, :] != 0))


def inputs(dtype=torch.float16):
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, S, h, D, dtype=dtype).transpose(1, 2) for h in (H, KV, KV))
    return [t.detach().requires_grad_() for t in (q, k, v)] + [torch.ones(B, S, dtype=torch.long)]


def compute(case):
    """Gradients by the products, in double, of inputs rounded to half precision; and by autograd."""
    found = {}

    def change(graph):
        for candidate in matching.candidates(flex_backward.FUSION, graph):
            candidate.guard()
            found["candidate"] = candidate

    chunked = mock.patch.object(decisions, "flex_backward", lambda **_: CHUNK)
    with flex_everywhere("flex"), chunked, config.patch(flex_backward=False):
        cuda_codegen.generate(case, inputs(), train=True, run=False, change=change)
    candidate = found["candidate"]
    q, k, v, data = inputs(torch.float64)
    out = case(q, k, v, data)
    cotangent = torch.randn_like(out)
    exact = torch.autograd.grad(out, (q, k, v), cotangent)
    return candidate, (q.detach(), k.detach(), v.detach(), out.detach(), cotangent), exact


def logsumexp(case, q, k, v, data) -> torch.Tensor:
    """The logsumexp of the scores of a case, in powers of two."""
    scores = {}

    def softmax(x, dim):
        scores["lse"] = torch.logsumexp(x, dim)
        return original(x, dim)

    original = torch.softmax
    with mock.patch.object(torch, "softmax", softmax):
        case(q, k, v, data)
    return scores["lse"] / torch.log(torch.tensor(2.0, dtype=torch.float64))


def gradients(candidate, q, k, v, out, lse, grad_out, grad_lse):
    given = replace(
        candidate.given, q=q, k=k, v=v, out=out, lse=lse, grad_out=grad_out, grad_lse=grad_lse,
        score_captured=(), mask_captured=(),
    )  # fmt: skip
    return flex_backward.Products(given, candidate.mods).gradients(candidate.chunk, candidate._keys)


@cases({"softcap": softcap, "window": window, "prefix": prefix})
def test_gradients(case) -> None:
    """dq, dk and dv of grouped heads, by chunks that do not divide the length."""
    candidate, (q, k, v, out, cotangent), exact = compute(case)
    lse = logsumexp(case, q, k, v, None).float()
    single = [t.float() for t in (q, k, v, out)]
    found = gradients(candidate, *single, lse, cotangent.float(), None)
    for mine, true in zip(found, exact, strict=True):
        assert relative(mine, true) < LIMIT


def test_gradient_of_the_logsumexp() -> None:
    """A sink reads the logsumexp, and its gradient comes back through it."""
    candidate, (q, k, v, out, cotangent), _ = compute(softcap)
    lse = logsumexp(softcap, q, k, v, None).float()
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    weight = torch.randn_like(lse)
    total = (softcap(q, k, v, None) * cotangent).sum() + (logsumexp(softcap, q, k, v, None) * weight).sum()
    exact = torch.autograd.grad(total, (q, k, v))
    single = [t.detach().float() for t in (q, k, v, out)]
    found = gradients(candidate, *single, lse, cotangent.float(), weight)
    for mine, true in zip(found, exact, strict=True):
        assert relative(mine, true) < LIMIT


def test_masked_keys_are_left_out() -> None:
    """A chunk reads the keys of its window, and no others."""
    candidate, *_ = compute(window)
    assert candidate._keys(0, 127) == (0, 128)
    assert candidate._keys(256, 299) == (128, 300)
    assert 0.1 < candidate._visible() < 0.4


BOUNDS = {
    "and": (lambda i, j: (j <= i) & (j > i - 70), True, False),
    "or": (lambda i, j: (j < i - 500) | (j > i + 500), False, False),
    "not": (lambda i, j: ~(j > i), True, False),
    "a factor of a sum": (lambda i, j: torch.add(j, i, alpha=-1) <= 0, True, True),
    "bits": (lambda i, j: (i & 7) >= (j & 7), True, True),
    "a product": (lambda i, j: i * 2 >= j, True, False),
    "a product that may be wide": (lambda i, j: i * 3 >= j, True, True),
    "a distance": (lambda i, j: (i - j).abs() < 70, True, False),
    "rounded indices": (lambda i, j: i.half() >= j.half(), True, True),
    "a sum of conditions": (lambda i, j: ((j >= 0) + (i >= 0)) == (i >= -5), True, True),
}


@cases(BOUNDS)
def test_bounds(case) -> None:
    """What is not known to be hidden counts as seen: near the diagonal, and far above it."""
    function, near, far = case
    mask = make_fx(lambda b, h, i, j: function(i, j))(*[torch.tensor(0) for _ in range(4)])
    seen = flex_backward.predicate(mask)
    assert flex_backward.may_be_true(seen, (200, 299), (200, 299)) is near
    assert flex_backward.may_be_true(seen, (0, 99), (200, 299)) is far


def test_data_is_left_to_the_template() -> None:
    """A mask that is data may hide whole blocks, which only the template sees."""
    with pytest.raises(Exception, match="the mask depends on data"):
        compute(padding)


def trace_on_cpu(fn, values, mode):
    """Traced with fakes of the CPU, and moved: without CUDA, torch cannot copy a fake tensor of it."""
    with mode:
        values = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in values]
    moved, _ = cuda_codegen.on_cuda(_inductor.trace_decomposed(fn, values, mode), values)
    return moved


@cases({"softcap": softcap, "window": window})
def test_graph(case) -> None:
    """The rewritten graph has products in place of the template, and compiles for a GPU."""
    rewritten = []

    def change(graph):
        for candidate in list(matching.candidates(flex_backward.FUSION, graph)):
            candidate.guard()
            rewritten.append(candidate.rewrite())
            graph.lint()

    chunked = mock.patch.object(decisions, "flex_backward", lambda **_: CHUNK)
    traced = mock.patch.object(inlined, "trace_decomposed", trace_on_cpu)
    with flex_everywhere("flex"), chunked, traced, config.patch(flex_backward=False):
        code = cuda_codegen.generate(case, inputs(), train=True, run=False, change=change)
    assert rewritten == [f"products in chunks of {CHUNK} queries"]
    (backward,) = [module for module in code.modules if module.is_backward]
    assert not any(kernel.is_template for kernel in backward.kernels)
    assert len([call for call in backward.extern_calls if "bmm" in call]) == 5 * 3
    assert _inductor.flex_backward_op() not in {node.target for node in backward.graph.nodes}


def test_nothing_measured() -> None:
    """Without a measurement the template stays."""
    reasons = []

    def change(graph):
        for candidate in matching.candidates(flex_backward.FUSION, graph):
            with pytest.raises(LeftToStock) as reason:
                candidate.guard()
            reasons.append(reason.value.reason)

    unknown = mock.patch.object(tables, "device_name", lambda device: "none")
    with flex_everywhere("flex"), mock.patch.object(tables, "load", lambda name: None), unknown:
        cuda_codegen.generate(softcap, inputs(), train=True, run=False, change=change)
    assert reasons == ["Inductor's flex attention template is at least as fast at this shape, as measured"]
