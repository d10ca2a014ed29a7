"""Functions of a score between the product and the softmax: the softcap, and whatever else is pointwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._inductor import cpu_vec_isa

from inductor_fusions import testing
from inductor_fusions.fusions.attention import flex
from tests.attention.support import (
    HEADS,
    KV_LEN,
    Q_LEN,
    cases,
    check,
    flex_everywhere,
    qkv,
    rand,
    scored,
    through_flex,
    unfused,
    visible,
)

LOWEST = torch.finfo(torch.float32).min

SOFTCAPS = {
    "tanh": lambda s, m: torch.tanh(s / 5.0) * 5.0,
    "tanh, method": lambda s, m: (s / 5.0).tanh() * 5.0,
    "tanh in place": lambda s, m: (s / 5.0).tanh_() * 5.0,
    "with a bias": lambda s, m: 5.0 * torch.tanh(s * 0.2) + m,
    "with a bias inside": lambda s, m: torch.tanh(s + m) * 3.0,
    "bias inside and outside": lambda s, m: torch.tanh((s + m) * 0.3) * 3.0 + 0.5 * m,
    "three steps": lambda s, m: (lambda t: torch.tanh(t) * 30.0)(s / 30.0) + m,
    "twice": lambda s, m: torch.tanh(2.0 * torch.tanh(s) + m) * 3.0,
    "with a mask": lambda s, m: (torch.tanh(s / 5.0) * 5.0).masked_fill(m < -0.7, LOWEST),
}


@cases(SOFTCAPS)
def test_softcap(case) -> None:
    bias = torch.randn(Q_LEN, KV_LEN)
    bias[:, 0] = 1.0  # each row sees its first key
    through_flex(scored(lambda s, m: case(s * 0.3, m)), (*qkv(), bias))


FUNCTIONS = {
    "sigmoid": lambda s: torch.sigmoid(s) * 4.0,
    "relu": torch.relu,
    "abs": torch.abs,
    "clamp": lambda s: torch.clamp(s, -0.5, 0.5),
    "clamp, one side": lambda s: s.clamp_max(0.3),
    "square": lambda s: s.pow(2.0),
    "cube": lambda s: s**3,
    "several": lambda s: torch.tanh(torch.relu(s) * 2.0).clamp(min=0.1) * 3.0,
}


@cases(FUNCTIONS)
def test_function(case) -> None:
    through_flex(scored(lambda s: case(s * 0.4)), qkv())


def test_dense_mask_and_softcap() -> None:
    """A mask that is data: it is read in the score_mod."""
    mask = visible(2, 1, Q_LEN, KV_LEN)
    through_flex(scored(lambda s, m: (torch.tanh(s / 3.0) * 3.0).masked_fill(~m, LOWEST)), (*qkv(), mask))
    through_flex(scored(lambda s, m: torch.tanh(s / 3.0) * 3.0 + torch.where(m, 0.0, LOWEST)), (*qkv(), mask))


def test_rows_that_see_no_key() -> None:
    """Their value, the mean of v, and its gradients are those of the unfused graph."""
    mask = visible(2, 1, Q_LEN, KV_LEN)
    mask[0, :, 2] = False
    with flex_everywhere():
        fill = scored(lambda s, m: (torch.tanh(s / 3.0) * 3.0).masked_fill(~m, LOWEST))
        check(fill, (*qkv(), mask), kernel="flex")


def test_learned_decay() -> None:
    """Scores times a matrix that varies over queries and keys, with its gradient."""
    through_flex(scored(lambda s, d: s * d), (*qkv(), rand(HEADS, Q_LEN, KV_LEN)))
    through_flex(scored(lambda s, d: s / (1.0 + d * d)), (*qkv(), rand(Q_LEN, KV_LEN)))


def test_gradient_of_a_bias() -> None:
    through_flex(scored(lambda s, b: torch.tanh(s * 0.2) * 5.0 + b), (*qkv(), rand(HEADS, Q_LEN, KV_LEN)))
    through_flex(scored(lambda s, b: torch.tanh(s * 0.2 + b) * 5.0), (*qkv(), rand(1, HEADS, 1, KV_LEN)))


def test_grouped_heads() -> None:
    def fn(q, k, v):
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        return torch.softmax(torch.tanh(q @ k.mT * 0.1) * 5.0, -1) @ v

    seen = through_flex(fn, qkv(heads=4, kv_heads=2))
    assert "enable_gqa" in seen.sites[0].kernel


def test_half_precision() -> None:
    fn = scored(lambda s: (torch.tanh((s * 0.3).float() / 5.0) * 5.0).to(s.dtype))
    for dtype in (torch.bfloat16, torch.float16):
        with flex_everywhere():
            check(fn, qkv(), dtype=dtype, kernel="flex")


def test_small_head_dim() -> None:
    with flex_everywhere():
        unfused(scored(torch.tanh), qkv(dim=8), "head dims from 16 on")


def test_dropout() -> None:
    def fn(q, k, v):
        weights = torch.softmax(torch.tanh(q @ k.mT), dim=-1)
        return torch.nn.functional.dropout(weights, 0.5) @ v

    with flex_everywhere():
        run = testing.capture(fn, *qkv(), train=True, policy="always", backend=testing.EAGER_AFTER_PASSES)
    assert [s.reason for s in run.sites] == ["a function of the scores (tanh): flex attention has no dropout"]


@pytest.fixture
def vector_code() -> Iterator[None]:
    """Inductor writes vector instructions; the other tests do without, which compiles faster."""

    def forget() -> None:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        for isa in cpu_vec_isa.supported_vec_isa_list:
            clear = getattr(type(isa).__bool__, "cache_clear", None)
            if clear is not None:
                clear()

    with torch._inductor.config.patch({"cpp.vec_isa_ok": None}):
        forget()
        yield
    forget()


BEHIND = {
    "a product": (lambda out, w: out.transpose(1, 2).flatten(2) @ w, True),
    "linear": (lambda out, w: torch.nn.functional.linear(out.transpose(1, 2).flatten(2), w.T), True),
    "a gate": (lambda out, w: out * out.new_full((), 2.0), False),
    "a sum": (lambda out, w: out + 1.0, False),
    "a sum of a view": (lambda out, w: out.transpose(1, 2) + 1.0, False),
}


@pytest.mark.parametrize("what", list(BEHIND))
@pytest.mark.usefixtures("vector_code")
def test_on_a_cpu(what: str) -> None:
    """Inductor's template for a CPU is used where nothing pointwise stands behind it."""
    change, fused = BEHIND[what]

    def fn(q, k, v, w):
        return change(torch.softmax(torch.tanh(q @ k.mT * 0.2) * 5.0, -1) @ v, w)

    inputs = (*qkv(grad=False), rand(HEADS * 16, 8, grad=False))
    reason = None if fused else "cannot be followed by pointwise operations"
    check(fn, inputs, train=False, fused=int(fused), reason=reason, backend="inductor")


def test_on_a_cpu_without_vector_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "flex_on_cpu", lambda: False)
    fn = scored(lambda s: torch.tanh(s / 5.0) * 5.0)
    unfused(fn, qkv(grad=False), "vector instructions", train=False)


def test_dynamic_shapes() -> None:
    """Batch and lengths are symbols; head dims are fixed, as models have them."""

    def fn(q, k, v):
        q, k, v = (t.view(*t.shape[:2], HEADS, 16).transpose(1, 2) for t in (q, k, v))
        return torch.softmax(torch.tanh(q @ k.mT / 5.0) * 5.0, -1) @ v

    with flex_everywhere():
        check(fn, tuple(rand(2, n, HEADS * 16) for n in (7, 13, 13)), dynamic=True, kernel="flex")


def test_overwritten_operand() -> None:
    """The scores were multiplied by the matrix as it was, and got the bias as it was."""

    def fn(q, k, v, decay):
        decay, bias = decay * 1.0, decay * 0.5
        scores = torch.tanh(q @ k.mT * 0.2 + bias) * decay
        decay.zero_()
        bias.zero_()
        return torch.softmax(scores, -1) @ v + decay.sum() + bias.sum()

    with flex_everywhere("flex"):
        check(fn, (*qkv(grad=False), rand(Q_LEN, KV_LEN, grad=False)), fused=None, train=False)


SHIFTED = {
    "a number before tanh": lambda s, m: torch.tanh(s * 0.25 + 2.0) * 3.0,
    "the maximum before tanh": lambda s, m: torch.tanh(s - s.amax(-1, keepdim=True)) * 3.0,
    "a number before a product": lambda s, m: (s + 2.0) * m,
    "a number before a fill that shows": lambda s, m: torch.where(m > 0, s + 2.0, 0.3),
    "a number before a clamp": lambda s, m: torch.clamp(s + 2.0, max=1.0),
}


@cases(SHIFTED)
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_shift_before_a_function(case, train: bool) -> None:
    """What is added to all scores of a row cancels in a softmax, and in nothing else."""
    with flex_everywhere():
        check(scored(case), [*qkv(), rand(Q_LEN, KV_LEN, grad=False)], fused=None, train=train, slack=4.0)


def test_only_the_bias_learns() -> None:
    """No gradient flows into q, k and v, and the kernel is one of training all the same."""
    inputs = [*qkv(grad=False), rand(HEADS, Q_LEN, KV_LEN)]
    through_flex(scored(lambda s, b: torch.tanh(s + b) * 2.0), inputs, slack=4.0)
