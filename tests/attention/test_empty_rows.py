"""Fully masked rows: their value, and the gradients that they send, are those of the unfused model.

A finite fill masks a key by adding so much that fill + score rounds to the fill. Where it masks all keys
of a query, all scores become equal, and the query gets the mean of the values. Left padding under a causal
mask makes such queries, and so does a padding mask over both queries and keys. Every loss here weighs all
rows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inductor_fusions import config
from tests.attention.support import (
    BATCH,
    INF,
    KV_LEN,
    LOWEST,
    TRAIN,
    capture,
    cases,
    check,
    flex_everywhere,
    qkv,
    rand,
    scored,
    unfused,
)

B, H, S = 3, 2, 9

DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def left_padding() -> torch.Tensor:
    """(B, S), False where padded: no key, three keys, all keys but one."""
    pad = torch.ones(B, S, dtype=torch.bool)
    pad[1, :3] = False
    pad[2, :8] = False
    return pad


def causal(pad: torch.Tensor) -> torch.Tensor:
    """(B, 1, S, S), True where a key is seen: causal, and not padded."""
    place = torch.arange(S)
    return (place <= place[:, None]) & pad[:, None, None, :]


def lowest(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).min


def finish(scores, v):
    return torch.softmax(scores, dim=-1) @ v


def with_mask(q, k, v, mask):
    return finish(q @ k.mT * 0.3 + mask, v)


def without_padded_samples(fn, padded: int = 0):
    """Whole samples of padding, under a mask with one row for all queries, send no gradient into q and k.

    Their values are kept; the loss leaves them out.
    """
    live = (torch.arange(B) != padded)[:, None, None, None]
    return lambda *inputs: fn(*inputs) * live


SPELLINGS = {
    "additive": lambda q, k, v, pad: finish(
        q @ k.mT * 0.3 + torch.zeros(B, 1, S, S, dtype=q.dtype).masked_fill(~causal(pad), lowest(q)), v
    ),
    "additive, where": lambda q, k, v, pad: finish(
        q @ k.mT * 0.3 + torch.where(causal(pad), 0.0, torch.tensor(lowest(q), dtype=q.dtype)), v
    ),
    "additive, float32": lambda q, k, v, pad: torch.softmax(
        (q @ k.mT * 0.3).to(torch.promote_types(q.dtype, torch.float32))
        + torch.where(causal(pad), 0.0, LOWEST).to(torch.promote_types(q.dtype, torch.float32)), -1
    ).to(v.dtype) @ v,
    "masked_fill": lambda q, k, v, pad: finish((q @ k.mT * 0.3).masked_fill(~causal(pad), lowest(q)), v),
    "masked_fill, 1e9": lambda q, k, v, pad: finish((q @ k.mT * 0.3).masked_fill(~causal(pad), -1e9), v),
    "masked_fill, 1e4": lambda q, k, v, pad: finish((q @ k.mT * 0.3).masked_fill(~causal(pad), -1e4), v),
    "where": lambda q, k, v, pad: finish(torch.where(causal(pad), q @ k.mT * 0.3, lowest(q)), v),
    "two fills": lambda q, k, v, pad: finish(
        (q @ k.mT * 0.3).masked_fill(~causal(torch.ones_like(pad)), lowest(q))
        .masked_fill(~pad[:, None, None, :], lowest(q)), v
    ),
    "two fills, other numbers": lambda q, k, v, pad: finish(
        (q @ k.mT * 0.3).masked_fill(~causal(torch.ones_like(pad)), -1e9)
        .masked_fill(~pad[:, None, None, :], -1e4), v
    ),
    "pad x pad": lambda q, k, v, pad: finish(
        (q @ k.mT * 0.3).masked_fill(~(pad[:, None, None, :] & pad[:, None, :, None]), lowest(q)), v
    ),
    "pad x pad of integers": lambda q, k, v, pad: finish(
        (q @ k.mT * 0.3).masked_fill(
            ~(pad.long()[:, None, None, :] * pad.long()[:, None, None, :].squeeze(-2).unsqueeze(-1)).bool(),
            lowest(q),
        ), v
    ),
    "padding alone": lambda q, k, v, pad: finish(
        q @ k.mT * 0.3
        + (1.0 - (pad & (torch.arange(B) > 0)[:, None]).to(q.dtype))[:, None, None] * lowest(q),
        v,
    ),
    "scale after the fill": lambda q, k, v, pad: finish((q @ k.mT).masked_fill(~causal(pad), -1e9) * 0.3, v),
    "clamped infinity": lambda q, k, v, pad: finish(
        (q @ k.mT * 0.3 + torch.where(causal(pad), 0.0, -INF).to(q.dtype)).clamp(min=lowest(q)), v
    ),
    "maximum of infinity": lambda q, k, v, pad: finish(
        torch.max(
            q @ k.mT * 0.3 + torch.where(causal(pad), 0.0, -INF).to(q.dtype),
            torch.tensor(lowest(q), dtype=q.dtype),
        ), v
    ),
}  # fmt: skip


@TRAIN
@DTYPE
@cases(SPELLINGS)
def test_spelling(case, dtype: torch.dtype, train: bool) -> None:
    if train and case is SPELLINGS["padding alone"]:
        case = without_padded_samples(case)
    check(case, (*qkv(S, S, batch=B, heads=H), left_padding()), dtype=dtype, train=train)


#: Each with a mask that is 1 where a key is seen. In float64, 1e9 does not absorb a score.
SUBTRACTED = {
    "number second": lambda s, m, big: s - (1.0 - m) * big,
    "number first": lambda s, m, big: s - big * (1 - m),
    "added": lambda s, m, big: s + (1.0 - m) * -big,
    "rsub": lambda s, m, big: s - torch.rsub(m, 1.0).to(s.dtype) * big,
    "the scale behind": lambda s, m, big: (s / 0.3 - (1.0 - m) * big) * 0.3,
    "where": lambda s, m, big: s - torch.where(m > 0, 0.0, big).to(s.dtype),
    "two": lambda s, m, big: s - (1.0 - m) * big - (1.0 - m) * big * 2.0,
    "divided": lambda s, m, big: s - (1.0 - m) / (1 / big),
}


@TRAIN
@DTYPE
@cases(SUBTRACTED)
def test_subtracted(case, dtype: torch.dtype, train: bool) -> None:
    def fn(q, k, v, mask, big=1e9):
        return finish(case(q @ k.mT * 0.3, mask, big), v)

    inputs = (*qkv(S, S, batch=B, heads=H), causal(left_padding()).float())
    check(fn, inputs, dtype=dtype, train=train, reference=lambda *args: fn(*args, big=1e300))


def test_subtracted_padding() -> None:
    def fn(q, k, v, mask, big=1e9):
        return finish(q @ k.mT * 0.3 - (1.0 - mask[:, None, None, :]) * big, v)

    inputs = (*qkv(S, S, batch=B, heads=H), left_padding().float())
    check(fn, inputs, kernel="mask: pad", reference=lambda *args: fn(*args, big=1e300))


RAISED = {
    "a mask": lambda s, m: s - m,
    "a mask, broadcast": lambda s, m: s - m[:, :1].expand(-1, 2, -1, -1),
    "ones at low numbers": lambda s, m: s - m * -1e9,
    "negated": lambda s, m: s - (1.0 - m) * -1e9,
    "high numbers": lambda s, m: -(s.neg() + m),
    "a factor that is not known": lambda s, m: s - m * (m[0, 0, 0, 0] + 1.0),
    "overwritten": lambda s, m: s - (m * 0.0).add_(m),
    "made low": lambda s, m: s - torch.zeros_like(m).masked_fill(m > 0, -2e9).add(m),
}


@cases(RAISED)
def test_keys_that_are_raised(case) -> None:
    """A mask that may raise keys absorbs the other scores, and the gradient into k would be lost."""
    fn = lambda q, k, v, m: finish(case(q @ k.mT * 0.3, m), v)  # noqa: E731
    inputs = (*qkv(S, S, batch=B, heads=H), -1e9 * causal(left_padding()).float())
    run = capture(fn, *inputs, train=True, policy="always")
    assert [site.code for site in run.sites] == ["range"], run.sites


@TRAIN
@DTYPE
@pytest.mark.parametrize("fill", [LOWEST, -1e30, -1e9], ids=str)
@pytest.mark.parametrize("shape", ["dense", "padding"])
def test_given_mask(shape: str, fill: float, dtype: torch.dtype, train: bool) -> None:
    """An additive mask from outside: what it hides is only known when it runs."""
    fill = max(fill, torch.finfo(dtype).min)
    seen = causal(left_padding())
    if shape == "padding":
        seen = left_padding()[:, None, None, :] & (torch.arange(B) > 0)[:, None, None, None]
    mask = torch.zeros(seen.shape).masked_fill(~seen, fill)

    def absorbed(q, k, v, mask):
        """In float64, -1e9 does not absorb a score."""
        return with_mask(q, k, v, mask.masked_fill(mask < 0, -1e300))

    fn = with_mask
    if train and shape == "padding":
        fn, absorbed = without_padded_samples(fn), without_padded_samples(absorbed)
    check(fn, (*qkv(S, S, batch=B, heads=H), mask), dtype=dtype, train=train, reference=absorbed)


@TRAIN
def test_fill_that_does_not_absorb_the_scores(train: bool) -> None:
    """-1e4 added in float32 leaves differences between the scores of a fully masked row."""
    mask = torch.zeros(B, 1, S, S).masked_fill(~causal(left_padding()), -1e4)
    check(with_mask, (*qkv(S, S, batch=B, heads=H), mask), train=train)


BIASED = {
    "bias, then mask": lambda s, m, b: s + b + m,
    "mask, then bias": lambda s, m, b: s + m + b,
    "joined": lambda s, m, b: s + (b + m),
    "bias, then fill": lambda s, m, b: (s + b).masked_fill(m < 0, LOWEST),
    "fill, then bias": lambda s, m, b: s.masked_fill(m < 0, LOWEST) + b,
    "fill and mask": lambda s, m, b: (s + b).masked_fill(torch.arange(S) < 2, LOWEST) + m,
}


@TRAIN
@cases(BIASED)
def test_bias(case, train: bool) -> None:
    """The mask absorbs a learned bias as well."""
    mask = torch.zeros(B, 1, S, S).masked_fill(~causal(left_padding()), LOWEST)
    if case is BIASED["fill and mask"]:
        mask = mask / 4.0  # two of the lowest number would be infinite
    # A fill and a mask that is added hide a row together: its gradients into q and k are not kept.
    live = torch.ones((), dtype=torch.bool)
    if train and case is BIASED["fill and mask"]:
        live = ((mask == 0) & (torch.arange(S) >= 2)).any(-1, keepdim=True)
    fn = lambda q, k, v, m, b: finish(case(q @ k.mT * 0.3, m, b), v) * live.to(v.dtype)  # noqa: E731
    check(fn, (*qkv(S, S, batch=B, heads=H), mask, rand(H, S, S)), train=train)


@TRAIN
@DTYPE
def test_grouped_heads(dtype: torch.dtype, train: bool) -> None:
    def fn(q, k, v, mask):
        k, v = (t.repeat_interleave(3, dim=1) for t in (k, v))
        return finish(q @ k.mT * 0.3 + mask, v)

    mask = torch.zeros(B, 1, S, S).masked_fill(~causal(left_padding()), torch.finfo(dtype).min)
    check(fn, (*qkv(S, S, batch=B, heads=6, kv_heads=2), mask), dtype=dtype, train=train, kernel="enable_gqa")


@TRAIN
def test_sizes(train: bool) -> None:
    """Cross-attention to a source that is padded whole, and values of another width."""
    mask = torch.zeros(B, 1, 1, 13)
    mask[1] = LOWEST
    mask[2, ..., :4] = LOWEST
    fn = without_padded_samples(with_mask, padded=1) if train else with_mask
    for sizes in (dict(), dict(v_dim=8), dict(q_len=1), dict(dim=24, v_dim=40)):
        check(fn, (*qkv(**{"q_len": 7, "batch": B, "heads": H, **sizes}), mask), train=train)


@TRAIN
@pytest.mark.parametrize("how", ["fill", "add"])
def test_infinite_fill(how: str, train: bool) -> None:
    """Rows hidden by -inf are NaN unfused. Nothing is promised of them; the others must be right."""

    def fn(q, k, v, mask):
        scores = q @ k.mT * 0.3
        scores = scores.masked_fill(~mask, -INF) if how == "fill" else scores + torch.where(mask, 0.0, -INF)
        return finish(scores, v)

    pad = left_padding()
    mask = causal(pad)
    run = capture(fn, *qkv(S, S, batch=B, heads=H, grad=False), mask)
    torch.manual_seed(0)
    live = mask.any(-1, keepdim=True).expand(B, H, S, 1)[..., 0]
    assert run.outputs[live].isfinite().all()
    mask = mask | ~mask.any(-1, keepdim=True)  # no row is empty: right, and with its gradients
    check(fn, (*qkv(S, S, batch=B, heads=H), mask), train=train)


# -- the setting ----------------------------------------------------------------------------------


def given() -> tuple[torch.Tensor, ...]:
    mask = torch.zeros(B, 1, S, S).masked_fill(~causal(left_padding()), LOWEST)
    return (*qkv(S, S, batch=B, heads=H), mask)


def test_stock() -> None:
    """Training stays unfused where such rows cannot be ruled out; inference does not."""
    with config.patch(empty_rows="stock"):
        check(with_mask, given(), fused=0, reason="empty-rows")
        check(with_mask, given(), train=False)
        check(lambda q, k, v, m: finish(q @ k.mT * 0.3, v), given())


def test_ignore() -> None:
    """The mask goes into the kernel as it is; rows that see a key are right."""
    inputs = given()
    with config.patch(empty_rows="ignore"):
        run = capture(with_mask, *inputs)
    assert not run.calls("amax")
    live = (inputs[3] == 0).any(-1)[:, 0][:, None].expand(B, H, S)
    torch.testing.assert_close(run.outputs[live], with_mask(*inputs)[live].detach())


def test_a_mask_that_hides_no_row_costs_nothing() -> None:
    """A learned bias, a causal mask: no row needs a second look."""

    def fn(q, k, v, bias):
        place = torch.arange(S)
        bias = bias + torch.where(place <= place[:, None], 0.0, -1e9)
        return finish(q @ k.mT * 0.3 + bias, v)

    run = capture(fn, *qkv(S, S), rand(3, S, S), train=True)
    assert len(run.fused) == 1

    run = capture(with_mask, *qkv(S, S), rand(3, S, S), train=True)
    assert not run.calls("amax")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_full_compile(dtype: torch.dtype) -> None:
    """As Inductor compiles it, forward and backward."""
    q, k, v, mask = given()
    check(with_mask, (q, k, v, mask.clamp(min=torch.finfo(dtype).min)), dtype=dtype, backend="inductor")


LEARNED = {
    "after a fill": lambda s, m, b: s.masked_fill(m, -1e9) + b,
    "beside an additive mask": lambda s, m, b: s + b + torch.where(m, -1e9, 0.0),
}


@cases(LEARNED)
def test_gradient_of_a_bias(case: Any) -> None:
    """In a row whose fill absorbs the scores, a gradient flows into what is added to them."""
    hidden = torch.rand(2, 1, 7, 1) > 0.5
    hidden[:, :, 0] = True
    inputs = [*qkv(), hidden, rand(3, 7, 13)]
    wanted = scored(case)(*inputs)
    (exact,) = torch.autograd.grad(wanted.sum(), inputs[-1])
    with flex_everywhere():
        run = capture(scored(case), *inputs, train=True, cotangents=[torch.ones_like(wanted)])
    torch.testing.assert_close(run.grads["4"], exact)


@TRAIN
def test_everything_is_hidden(train: bool) -> None:
    fn = scored(lambda s: s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool), -1e9))
    with flex_everywhere():
        check(fn, qkv(grad=train), train=train)


def trajectory(low: float) -> Any:
    """As decision transformers have it: a causal fill, and left padding that is added."""

    def fn(q: Any, k: Any, v: Any, seen: Any) -> Any:
        causal = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        scores = torch.where(causal, q @ k.mT * 0.3, torch.tensor(low))
        return torch.softmax(scores + (1.0 - seen.float())[:, None, None] * low, dim=-1) @ v

    return fn


def test_rows_that_a_fill_and_an_added_mask_hide_together() -> None:
    """Such a row has fills without a score beside scores less 10000: no bias of a kernel says that."""
    seen = torch.ones(BATCH, KV_LEN, dtype=torch.bool)
    seen[0, :5] = False
    inputs = (*qkv(KV_LEN, KV_LEN), seen)
    unfused(trajectory(-1e4), inputs, "range")
    unfused(trajectory(-1e4), inputs, "range", train=False)
    check(trajectory(-1e9), inputs, train=False)


def test_weights_by_a_logsumexp() -> None:
    """In a row of fills the logsumexp is the fill: each weight is 1, and not their mean."""

    def fn(q: Any, k: Any, v: Any, seen: Any) -> Any:
        scores = (q @ k.mT * 0.3).masked_fill(~seen, -1e9)
        return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v

    unfused(fn, (*qkv(S, S, batch=B), causal(left_padding())), "empty-rows")
    check(lambda q, k, v: fn(q, k, v, torch.ones(S, S, dtype=torch.bool).tril()), qkv(S, S))
