"""Sizes, scales and dropouts at the end of their range: nothing to see, no weight that is left."""

from __future__ import annotations

import contextlib
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inductor_fusions import config, explain, reporting, testing
from tests.attention.support import (
    capture,
    cases,
    check,
    flex_everywhere,
    qkv,
    scored,
    sdpa,
    short_everywhere,
    unfused,
)
from tests.support.errors import relative

EVERYWHERE: dict[str, Any] = {
    "sdpa": contextlib.nullcontext,
    "flex": lambda: flex_everywhere("flex"),
    "short": short_everywhere,
}
SCALES = (-0.3, 0.0, -1.0)


def scales(run: testing.Checked, kernel: str) -> list[float]:
    """The scale of each fused call."""
    if kernel == "sdpa":
        return [sdpa(run.ours).kwargs.get("scale", 1.0)]
    name = "flex_attention" if kernel == "flex" else "short_attention.default"
    return [call.args[5] for call in run.ours.calls(name)]


#: A kernel, what is said of it, and what is done to the scores with a scale.
SCALED: dict[str, tuple[str, str, Any]] = {
    **{kernel: (kernel, kernel, lambda s, scale: s * scale) for kernel in EVERYWHERE},
    "a causal mask": (
        "sdpa", "is_causal",
        lambda s, scale: (s * scale).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf),
    ),
    "before a function": ("flex", "flex", lambda s, scale: torch.tanh(s * scale) * -2.0),
}  # fmt: skip


@pytest.mark.parametrize("scale", SCALES)
@cases(SCALED)
def test_scale_of_scores(case: tuple[str, str, Any], scale: float) -> None:
    """Kernels are given a positive scale: flash and cuDNN attention return NaN for another one."""
    kernel, said, change = case
    with EVERYWHERE[kernel]():
        run = check(scored(lambda s: change(s, scale)), qkv(7, 7 if said == "is_causal" else 13), kernel=said)
    assert scales(run, kernel) and all(each > 0 for each in scales(run, kernel))


@pytest.mark.parametrize("scale", SCALES)
def test_scale_of_a_call(scale: float) -> None:
    """A call that loses its mask."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, torch.ones(7, 13, dtype=torch.bool), scale=scale)

    run = check(fn, qkv())
    assert sdpa(run.ours).kwargs["attn_mask"] is None and all(each > 0 for each in scales(run, "sdpa"))


@pytest.mark.parametrize("scale", SCALES)
def test_scale_and_fully_masked_rows(scale: float) -> None:
    """What gives these rows their value and gradient multiplies by the scale too."""

    def fn(q: Any, k: Any, v: Any, pad: Any) -> Any:
        return torch.softmax((q @ k.mT * scale).masked_fill(pad, -1e9), -1) @ v

    pad = torch.zeros(2, 1, 7, 13, dtype=torch.bool)
    pad[1, :, 2:4] = True
    check(fn, (*qkv(), pad))
    added = lambda q, k, v, m: torch.softmax(q @ k.mT * scale + m, -1) @ v  # noqa: E731
    check(added, (*qkv(), torch.zeros(pad.shape).masked_fill(pad, -1e9)))


@cases({
    "written out": lambda q, k, v: F.dropout(torch.softmax(q @ k.mT * 0.3, -1), 1.0) @ v,
    "in a call": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, torch.ones(7, 13, dtype=torch.bool), dropout_p=1.0
    ),
})  # fmt: skip
def test_dropout_of_one(case: Any) -> None:
    unfused(case, qkv(), "dropout")


#: Sizes of q, k and v as (batch, heads, q_len, kv_len, dim, v_dim).
EMPTY = {
    "no sample": (0, 3, 7, 13, 16, 16), "no head": (2, 0, 7, 13, 16, 16), "no query": (2, 3, 0, 13, 16, 16),
    "no key": (2, 3, 7, 0, 16, 16), "no dim": (2, 3, 7, 13, 0, 16), "no value": (2, 3, 7, 13, 16, 0),
}  # fmt: skip


def sized(b: int, h: int, m: int, n: int, d: int, e: int, grad: bool = True) -> tuple[torch.Tensor, ...]:
    shapes = ((b, h, m, d), (b, h, n, d), (b, h, n, e))
    return tuple(torch.randn(shape).requires_grad_(grad) for shape in shapes)


@cases(EMPTY)
def test_empty(case: tuple[int, ...]) -> None:
    masked = lambda q, k, v: F.scaled_dot_product_attention(  # noqa: E731
        q, k, v, torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool), scale=0.3
    )
    for fn, grad in product((scored(lambda s: s * 0.3), masked), (True, False)):
        backend = "inductor" if grad is (fn is masked) else testing.EAGER_AFTER_PASSES
        unfused(fn, sized(*case, grad=grad), "is empty", backend=backend)


#: The smallest that are not.
SMALLEST = {
    "one of each": (1, 1, 1, 1, 1, 1),
    "one query": (2, 3, 1, 13, 16, 16),
    "one key": (2, 3, 7, 1, 16, 16),
    "one dim": (2, 3, 7, 13, 1, 1),
}


@cases(SMALLEST)
def test_smallest(case: tuple[int, ...]) -> None:
    check(scored(lambda s: s * 0.3), sized(*case))
    with short_everywhere():
        check(scored(lambda s: s * 0.3), sized(*case), kernel="short")


def test_multihead_attention() -> None:
    """One operation to Dynamo, which calls SDPA where nothing reads the weights."""
    layer, dropped = (torch.nn.MultiheadAttention(16, 2, batch_first=True, dropout=p) for p in (0.0, 1.0))
    for own, batch, reason in ((layer, 2, None), (layer, 0, "is empty"), (dropped, 2, "dropout with p = 1")):
        run = capture(lambda x, own=own: own(x, x, x)[0], torch.randn(batch, 5, 16), policy="always")
        (site,) = run.sites
        assert reason in site.reason if reason else site.verdict == "fused"


def test_size_that_may_be_nothing_later() -> None:
    """The length of a slice: fused while there is one, and eager's result where there is none."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        q = q[:, :, 2:]
        return torch.softmax(q @ k.mT * 0.3, -1) @ v

    compiled = torch.compile(fn, backend="inductor", dynamic=True)
    with testing.config.patch(policy="always", strict=True), testing.reporting.isolated() as sites:
        for length in (9, 7, 2, 3, 12, 0):
            inputs = sized(2, 3, length, 13, 16, 16, grad=False)
            torch.testing.assert_close(compiled(*inputs), fn(*inputs))
    verdicts = [site.verdict for site in sites]
    assert verdicts[0] == "fused" and "rejected" in verdicts, sites


@pytest.mark.parametrize("asserted", [False, True])
def test_size_that_depends_on_data(asserted: bool) -> None:
    def fn(q: Any, k: Any, v: Any, keep: Any) -> Any:
        at = keep.nonzero()[:, 0]
        if asserted:
            torch._check(at.shape[0] >= 1)
        return torch.softmax(q[:, :, at] @ k.mT * 0.3, -1) @ v

    inputs = (*qkv(grad=False), torch.tensor([True, False, True, True, False, True, True]))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        if asserted:
            check(fn, inputs, fused=None)
        else:
            unfused(fn, inputs, "may be 0")


#: How a number is read from a tensor and becomes a size, and whether the attention is fused all the same.
READ: dict[str, tuple[Any, bool]] = {
    "keys": (lambda q, k, v, n: scores(q, k[:, :, :n]).softmax(-1) @ v[:, :, :n], False),
    "queries": (lambda q, k, v, n: scores(q.narrow(2, 0, n), k).softmax(-1) @ v, False),
    "only a factor": (lambda q, k, v, n: scores(q * n, k).softmax(-1) @ v, True),
    "only a mask": (
        lambda q, k, v, n: scores(q, k).masked_fill(torch.arange(k.shape[2]) >= n, -1e9).softmax(-1) @ v, True
    ),
}  # fmt: skip


@pytest.mark.parametrize("count", [4, 1])
@cases(READ)
def test_size_that_is_read_from_a_tensor(case: tuple[Any, bool], count: int) -> None:
    """Dynamo guards on the number, and AOTAutograd reads another one that may be 0."""
    attention, fused = case

    def fn(q: Any, k: Any, v: Any, count: Any) -> Any:
        count = count.item()
        torch._check(count >= 0)
        torch._check(count <= q.shape[2])
        return attention(q, k, v, count)

    inputs = (*qkv(grad=False), torch.tensor(count))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        if fused:
            check(fn, inputs, train=False)
        else:
            unfused(fn, inputs, "read from a tensor", train=False)


#: Attention by indices that depend on data, how many there are at least, and why it is left.
FROM_DATA: dict[str, tuple[Any, int, str]] = {
    "maybe no queries": (lambda q, k, v, at: scores(q[:, :, at], k).softmax(-1) @ v, 0, "may be 0"),
    "some queries": (lambda q, k, v, at: scores(q[:, :, at], k).softmax(-1) @ v, 1, ""),
    "some keys": (
        lambda q, k, v, at: scores(q, k[:, :, at]).softmax(-1) @ v[:, :, at], 1, "a size that depends on data"
    ),
    "some samples, with a bias": (
        lambda q, k, v, at: (scores(q[at], k[at]) + q[0, 0, :, :16]).softmax(-1) @ v[at], 1, ""
    ),
}  # fmt: skip


def scores(q: Any, k: Any) -> Any:
    return q @ k.mT * 0.3


@pytest.mark.parametrize("kernel", ["auto", "short"])
@cases(FROM_DATA)
def test_sizes_that_depend_on_data_on_a_gpu(case: tuple[Any, int, str], kernel: str) -> None:
    """The backends of SDPA ask for lengths, cuDNN whether there is one key, and may raise."""
    attention, least, reason = case

    def fn(q: Any, k: Any, v: Any, keep: Any) -> Any:
        at = keep.nonzero()[:, 0]
        torch._check(at.shape[0] >= least)
        return attention(q, k, v, at)

    inputs = (*(torch.empty(16, 4, 16, 64, dtype=torch.float16) for _ in "qkv"), torch.ones(16).bool())
    captured = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with captured, testing.config.patch(policy="always", attention_kernel=kernel):
        (site,) = explain(fn, *inputs, gpu="nvidia_h100")
    assert reason in site.reason if reason else site.verdict == "fused", site


def test_keys_that_share_a_mean() -> None:
    """The gradient of q is as exact as that of SDPA, whose backward reads an output rounded to 16 bits."""
    q, k, v, grad = (torch.randn(10, 4, length, 8) for length in (7, 3, 3, 7))
    q, k, v, grad = (x.to(torch.bfloat16) for x in (q, 1 + 0.1 * k, 1 + 0.1 * v, grad))

    def gradient(fn: Any, dtype: torch.dtype) -> torch.Tensor:
        given = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        fn(*given).backward(grad.to(dtype))
        assert given[0].grad is not None
        return given[0].grad

    def unfused(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.mT * 0.3, dim=-1) @ v

    exact = gradient(unfused, torch.float64)
    compiled = torch.compile(unfused, backend=testing.AfterPasses([]))
    with config.patch(policy="always"), reporting.isolated() as sites:
        ours = relative(gradient(compiled, torch.bfloat16), exact)
    called = partial(F.scaled_dot_product_attention, scale=0.3)
    assert [site.verdict for site in sites] == ["fused"]
    assert ours == pytest.approx(relative(gradient(called, torch.bfloat16), exact), rel=0.05)
