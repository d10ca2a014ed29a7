"""Where attention may stand: checkpoints, nested regions, exported graphs, loops, graph breaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from inductor_fusions import reporting, testing
from tests.attention.support import (
    BATCH,
    HEADS,
    KV_LEN,
    LOWEST,
    Q_LEN,
    additive,
    cases,
    check,
    flex_everywhere,
    qkv,
    rand,
    sdpa,
    unfused,
    visible,
)


def attend(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) * 0.3
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, dim=-1) @ v


def causal_mask(q, k):
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, LOWEST)


# -- checkpoint -----------------------------------------------------------------------------------


def test_checkpoint() -> None:
    mask = additive(visible(BATCH, 1, Q_LEN, KV_LEN))
    fn = lambda q, k, v, m: checkpoint(attend, q, k, v, m, use_reentrant=False)  # noqa: E731
    check(fn, (*qkv(), mask))


def test_checkpoint_of_a_function_of_the_scores() -> None:
    def capped(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(torch.tanh(q @ k.mT * 0.3), -1) @ v

    with flex_everywhere():
        check(lambda *args: checkpoint(capped, *args, use_reentrant=False), qkv(), kernel="flex, tanh")


def test_checkpoint_of_a_layer() -> None:
    """The mask is made outside, and is causal: what the body sees is a placeholder."""

    def fn(q, k, v):
        mask = causal_mask(q, k)
        q = q + checkpoint(attend, q, k, v, mask, use_reentrant=False)
        return q + checkpoint(attend, q, k, v, mask, use_reentrant=False)

    check(fn, qkv(9, 9), fused=2, kernel="is_causal")


def weights_of(q: Any, k: Any) -> Any:
    return torch.softmax(q @ k.transpose(-2, -1), -1)


def exponentials_of(q: Any, k: Any) -> Any:
    s = q @ k.transpose(-2, -1)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


@pytest.mark.parametrize("weights", [weights_of, exponentials_of])
@pytest.mark.parametrize("depth", [1, 2])
def test_weights_that_leave_a_checkpoint(weights: Any, depth: int) -> None:
    """The product with v is outside; a softmax without a product behind it is not reported."""

    def inside(q: Any, k: Any, depth: int) -> Any:
        if depth == 0:
            return weights(q, k)
        return checkpoint(inside, q, k, depth - 1, use_reentrant=False)

    unfused(lambda q, k, v: inside(q, k, depth) @ v, qkv(), "weights")
    assert not check(lambda q, k: inside(q, k, depth).sin(), qkv()[:2], fused=0).sites


def test_scores_from_outside_of_a_checkpoint() -> None:
    def inside(s: Any, v: Any, b: Any) -> Any:
        return torch.softmax(b + s, -1) @ v

    fn = lambda q, k, v, b: checkpoint(inside, q @ k.transpose(-2, -1), v, b, use_reentrant=False)  # noqa: E731
    unfused(fn, (*qkv(), rand(Q_LEN, KV_LEN)), "computed outside of the region")


def test_checkpoint_that_overwrites_what_it_made() -> None:
    """Symbolic sizes are inputs of the body too, but they are not in memory."""

    def body(q, k, v, mask):
        q = q * 2.0
        q += q.shape[-2]
        return attend(q, k, v, mask)

    def fn(q, k, v):
        mask = causal_mask(q, k)
        q = checkpoint(body, q, k, v, mask, use_reentrant=False)
        return checkpoint(body, q, k, v, mask, use_reentrant=False)

    check(fn, qkv(9, 9), fused=2, kernel="is_causal", dynamic=True)


def test_checkpoint_with_a_mask_that_is_not_causal() -> None:
    """The operand bound to the body's placeholder is another one in each call."""

    def fn(q, k, v, mask):
        q = q + checkpoint(attend, q, k, v, causal_mask(q, k), use_reentrant=False)
        return q + checkpoint(attend, q, k, v, mask, use_reentrant=False)

    mask = additive(visible(9, 9))
    seen = check(fn, (*qkv(9, 9), mask), fused=2)
    assert sum("is_causal" in site.kernel for site in seen.sites) <= 1


# -- nested regions -------------------------------------------------------------------------------


@torch.compiler.nested_compile_region
def nested(q, k, v, mask):
    return attend(q, k, v, mask)


@torch.compiler.nested_compile_region
def nested_causal(q, k, v):
    return attend(q, k, v, causal_mask(q, k))


@pytest.mark.parametrize("backend", [testing.EAGER_AFTER_PASSES, "inductor"])
def test_nested_region(backend: str) -> None:
    mask = additive(visible(BATCH, 1, Q_LEN, KV_LEN))
    check(lambda q, k, v, m: nested(q, k, v, m) * 2.0, (*qkv(), mask), backend=backend)


def test_nested_region_called_twice() -> None:
    """Its body is shared by both calls: what is proved of one call's mask does not hold for the other."""

    def fn(q, k, v, mask):
        q = nested(q, k, v, causal_mask(q, k))
        return nested(q, k, v, mask)

    # PyTorch differentiates a region that is called twice only where Inductor compiles it.
    inputs = (*qkv(9, 9), additive(visible(9, 9)))
    check(fn, inputs, fused=None, train=False)
    check(fn, inputs, fused=None, backend="inductor")
    check(lambda q, k, v: nested_causal(nested_causal(q, k, v), k, v), qkv(9, 9), fused=None, train=False)


def test_nested_region_that_is_causal() -> None:
    check(nested_causal, qkv(9, 9), kernel="is_causal")


# -- other surroundings ---------------------------------------------------------------------------


def test_no_grad_inside() -> None:
    def fn(q, k, v):
        with torch.no_grad():
            first = attend(q, k, v)
        return first + attend(q, k, v)

    check(fn, qkv(), fused=2)


def test_inference_mode() -> None:
    def fn(q, k, v):
        with torch.inference_mode():
            return attend(q * 1.0, k * 1.0, v * 1.0)

    check(fn, qkv(), train=False)


def test_operand_from_outside_of_inference_mode() -> None:
    """The rewrite would add a view of it, which torch cannot trace there."""

    def fn(q, k, v):
        transposed = k.transpose(-1, -2) * 1.0
        with torch.inference_mode():
            found = torch.softmax(q @ transposed * 0.3, -1) @ v
        return found * 1.0

    check(fn, qkv(grad=False), fused=0, reason="mode", train=False)


def test_another_default_device() -> None:
    """Inputs on the CPU are what counts, not where torch makes tensors by default."""
    inputs = qkv()
    with torch.device("meta"):
        check(attend, inputs, kernel="sdpa")


def test_graph_break_inside() -> None:
    """Half of an attention in each graph."""

    def fn(q, k, v):
        scores = q @ k.transpose(-2, -1)
        torch._dynamo.graph_break()
        return torch.softmax(scores * 0.3, dim=-1) @ v

    check(fn, qkv(), fused=0)


def test_detached() -> None:
    check(lambda q, k, v: attend(q.detach(), k, v) + attend(q, k.detach(), v.detach()), qkv(), fused=2)


def test_detached_weights() -> None:
    """No gradient through the scores: an SDPA would let one through."""
    check(lambda q, k, v: torch.softmax(q @ k.mT * 0.3, dim=-1).detach() @ v, qkv(), fused=None)


def test_detached_scores() -> None:
    check(lambda q, k, v: torch.softmax((q @ k.mT).detach() * 0.3, dim=-1) @ v, qkv(), fused=None)


def test_fill_without_gradient() -> None:
    def fn(q, k, v, mask):
        scores = q @ k.mT * 0.3
        with torch.no_grad():
            scores.masked_fill_(mask, LOWEST)
        return torch.softmax(scores, dim=-1) @ v

    check(fn, (*qkv(), ~visible(Q_LEN, KV_LEN)), fused=None)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return attend(q, k, v)

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        return grad * q.sum(), grad.sum() * k, grad.sum() * v


def test_autograd_function() -> None:
    """A body with a gradient of its own."""
    q, k, v = qkv(9, 9)
    check(lambda q, k, v: Function.apply(q, k, v), (q, k, v), fused=None, slack=64.0)


class FlashByHand(torch.autograd.Function):
    """Saves the weights for a backward that its author wrote."""

    @staticmethod
    def forward(ctx, q, k, v):
        weights = torch.softmax(q @ k.mT * 0.3, dim=-1)
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx, grad):
        q, k, v, weights = ctx.saved_tensors
        products = grad @ v.mT
        scores = weights * (products - (products * weights).sum(-1, keepdim=True)) * 0.3
        return scores @ k, scores.mT @ q, weights.mT @ grad


def test_autograd_function_that_saves_the_weights() -> None:
    """The products of its backward are no attention."""
    seen = check(lambda q, k, v: FlashByHand.apply(q, k, v), qkv(9, 9), fused=0, reason="for its backward")
    assert len(seen.sites) == 1, seen.sites


def test_graph_without_shapes() -> None:
    """A graph of `symbolic_trace`, given to Inductor by hand."""
    from torch._inductor.compile_fx import compile_fx

    inputs = [x.detach() for x in qkv()]
    traced = torch.fx.symbolic_trace(lambda q, k, v: torch.softmax(q @ k.mT * 0.3, dim=-1) @ v)
    with reporting.isolated(keep=False) as sites, torch.no_grad():
        compile_fx(traced, inputs, inner_compile=lambda gm, *_, **__: lambda given: gm(*given))
    assert ["does not say what shapes" in site.reason for site in sites] == [True]


def test_conditional() -> None:
    def fn(flag, q, k, v):
        return torch.cond(flag, lambda q, k, v: attend(q, k, v), lambda q, k, v: attend(q, k, -v), (q, k, v))

    def plain(flag, q, k, v):
        return attend(q, k, v if flag else -v)

    for flag in (True, False):
        seen = check(fn, (torch.tensor(flag), *qkv()), fused=2, train=False, reference=plain)
        assert len(seen.sites) == 2, seen.sites


def test_loop() -> None:
    """The pass over its body alone leaves it to the pass over the whole graph."""

    def loop(q, k, v):
        def body(done, q):
            return done + 1, attend(q, k, v)

        return torch._higher_order_ops.while_loop(lambda done, q: done < 2, body, (torch.tensor(0), q))[1]

    inputs = qkv(grad=False)
    seen = check(loop, inputs, train=False, reference=lambda q, k, v: attend(attend(q, k, v), k, v))
    assert len(seen.sites) == 1, seen.sites


def layer(q: Any, k: Any, v: Any) -> Any:
    """The weights are asked for, so that one operation holds the attention."""
    weights = torch.arange(4 * 16 * 16.0).cos().view(4 * 16, 16)
    project, out, bias = weights[:48], weights[48:], weights[0, :].expand(3, 16).flatten()
    given = (x.transpose(0, 1) for x in (q, k, v))
    return nn.functional.multi_head_attention_forward(
        *given, 16, 2, project, bias, None, None, False, 0.0, out, bias[:16]
    )[0]


@pytest.mark.parametrize("inner", [attend, layer])
@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0)])
def test_map_over_batch(inner: Any, dims: tuple[int | None, ...]) -> None:
    """Of all operands, or of one, while the others are the same for each sample."""

    def fn(*operands: Any) -> Any:
        given = [x if d == 0 else x[0] for x, d in zip(operands, dims, strict=True)]
        return torch.vmap(inner, in_dims=dims)(*given)

    check(fn, qkv(), fused=0, reason="transform")


def test_same_tensor_thrice() -> None:
    check(lambda x: attend(x, x, x), (rand(BATCH, HEADS, 9, 16),))


# -- exported graphs ------------------------------------------------------------------------------


class Whole(nn.Module):
    def __init__(self, change=None) -> None:
        super().__init__()
        self.change = change

    def forward(self, q, k, v, mask):
        scores = torch.matmul(q, k.transpose(-1, -2)) / 4.0
        scores = self.change(scores, mask) if self.change else scores + mask
        return torch.matmul(nn.functional.dropout(torch.softmax(scores, dim=-1), 0.1, self.training), v)


EXPORTED = {
    "add": None,
    "masked_fill": lambda s, m: s.masked_fill(m < 0, LOWEST),
    "where": lambda s, m: torch.where(m < 0, LOWEST, s),
    "in place": lambda s, m: s.mul_(0.5).add_(m),
    "upcast": lambda s, m: (s + m).float(),
}


@cases(EXPORTED)
def test_exported(case) -> None:
    """aten operations with their overloads, through torch.export."""
    q, k, v = qkv(grad=False)
    mask = additive(visible(BATCH, 1, Q_LEN, KV_LEN))
    module = torch.export.export(Whole(case).eval(), (q, k, v, mask)).module()
    reference = Whole(None if case is EXPORTED["upcast"] else case).eval()
    check(module, (q, k, v, mask), train=False, reference=reference)


def test_exported_and_decomposed() -> None:
    q, k, v = qkv(grad=False)
    mask = additive(visible(BATCH, 1, Q_LEN, KV_LEN))
    program = torch.export.export(Whole().eval(), (q, k, v, mask)).run_decompositions()
    check(program.module(), (q, k, v, mask), train=False, fused=None, reference=Whole().eval())


def test_exported_sdpa() -> None:
    class Call(nn.Module):
        def forward(self, q, k, v):
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(q, k))

    inputs = qkv(9, 9, grad=False)
    module = torch.export.export(Call(), inputs).module()
    seen = check(module, inputs, train=False, kernel="is_causal", reference=Call())
    assert sdpa(seen.ours).kwargs["is_causal"] is True
