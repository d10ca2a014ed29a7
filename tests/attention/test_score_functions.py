"""Functions of a score between the product and the softmax: the softcap, and whatever else is pointwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from inductor_fusions import config
from tests.attention.support import (
    BATCH,
    HEADS,
    KV_LEN,
    LOWEST,
    Q_LEN,
    TRAIN,
    capture,
    cases,
    check,
    code_for_a_gpu,
    counted,
    flex_everywhere,
    qkv,
    rand,
    scored,
    through_flex,
    unfused,
    visible,
)

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
    "hardtanh": lambda s: torch.nn.functional.hardtanh(s, -0.5, 0.4) * 3.0,
    "hardtanh, its defaults": lambda s: torch.nn.functional.hardtanh(s * 2.0),
    "hardtanh, module": lambda s: nn.Hardtanh(-0.5, 0.5)(s),
    "hardtanh in place": lambda s: torch.nn.functional.hardtanh_(s * 2.0, max_val=0.3),
    "square": lambda s: s.pow(2.0),
    # Halved: a backward from the logsumexp has an error of eps times it, and cubes of large scores are large.
    "cube": lambda s: (s * 0.5) ** 3,
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


def test_fully_masked_rows() -> None:
    """Their value, the mean of v, and its gradients are those of the unfused graph."""
    mask = visible(2, 1, Q_LEN, KV_LEN)
    mask[0, :, 2] = False
    with flex_everywhere():
        fill = scored(lambda s, m: (torch.tanh(s / 3.0) * 3.0).masked_fill(~m, LOWEST))
        check(fill, (*qkv(), mask), kernel="flex")


def test_learned_decay() -> None:
    """Scores times a matrix that varies over queries and keys, with its gradient.

    Scores are scaled, as for the cube above.
    """
    through_flex(scored(lambda s, d: s * 0.5 * d), (*qkv(), rand(HEADS, Q_LEN, KV_LEN)))
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


def test_small_head_dim() -> None:
    with flex_everywhere():
        unfused(scored(torch.tanh), qkv(dim=8), "head dims of at least 16")


def test_dropout() -> None:
    def fn(q, k, v):
        weights = torch.softmax(torch.tanh(q @ k.mT), dim=-1)
        return torch.nn.functional.dropout(weights, 0.5) @ v

    with flex_everywhere(), config.patch(stock_misfires=False):
        run = capture(fn, *qkv(), train=True, policy="always")
    assert [s.reason for s in run.sites] == [
        "the scores pass through tanh, and flex attention has no dropout"
    ]


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


def raised_in_part(s, m):
    """Some of the scores are raised above the largest one, which was computed before."""
    largest = s.detach().max()
    s[..., :3] += 5.0
    return torch.clamp(s - largest, max=0.5)


def raised_behind_the_maximum(s, m):
    lower = s - s.max()
    lower[..., :3] += 5.0
    return torch.clamp(lower, max=0.5)


SHIFTED = {
    "a maximum of lower scores before a ceiling": raised_in_part,
    "a ceiling behind raised scores": raised_behind_the_maximum,
    "a number before tanh": lambda s, m: torch.tanh(s * 0.25 + 2.0) * 3.0,
    "the maximum before tanh": lambda s, m: torch.tanh(s - s.amax(-1, keepdim=True)) * 3.0,
    "a number before a product": lambda s, m: (s + 2.0) * m,
    "a number before a fill that shows": lambda s, m: torch.where(m > 0, s + 2.0, 0.3),
    "a number before a clamp": lambda s, m: torch.clamp(s + 2.0, max=1.0),
    "the maximum before a ceiling below it": lambda s, m: torch.clamp(s - s.amax(-1, True), max=-0.5),
    "the mean before a ceiling": lambda s, m: torch.clamp(s - s.mean(-1, True), max=0.1),
    "another maximum before a ceiling": lambda s, m: torch.clamp(s - (s * 0.5).amax(-1, True), max=0.1),
    "the maximum of a sum before a ceiling": lambda s, m: torch.clamp(s - (s - m).max(), min=-9e4, max=0.1),
    "the maximum before a floor above the ceiling": lambda s, m: torch.clamp(s - s.max(), min=2.0, max=1.0),
    "a product before a ceiling": lambda s, m: torch.clamp((s - s.amax(-1, True)) * -2.0, max=0.5),
}


@cases(SHIFTED)
@TRAIN
def test_shift_before_a_function(case, train: bool) -> None:
    """What is added to all scores of a row cancels in a softmax, and in nothing else."""
    with flex_everywhere():
        check(scored(case), [*qkv(), rand(Q_LEN, KV_LEN, grad=False)], fused=None, train=train, slack=4.0)


BOUNDED = {
    "of each row": lambda s: torch.clamp(s - s.amax(-1, keepdim=True), -5e4, 5e4),
    "of all": lambda s: torch.clamp(s - s.max(), min=-5e4, max=0.0),
    "twice": lambda s: (s - s.max()).clamp_max(5e4).mT.contiguous().clamp(min=-5e4).mT.clamp(max=1e3),
    "of a dim": lambda s: torch.clamp(s - s.max(-1).values[..., None], max=5e4),
}


@cases(BOUNDED)
@TRAIN
def test_ceiling_above_the_largest_score(case, train: bool) -> None:
    """It changes nothing, so that what is subtracted cancels."""
    seen = check(scored(lambda s, m: case(s)), [*qkv(), rand(1, grad=False)], train=train, slack=4.0)
    assert [site.kernel for site in seen.sites] == ["sdpa"]


def test_only_the_bias_learns() -> None:
    """No gradient flows into q, k and v, and the kernel is one of training all the same."""
    inputs = [*qkv(grad=False), rand(HEADS, Q_LEN, KV_LEN)]
    through_flex(scored(lambda s, b: torch.tanh(s + b) * 2.0), inputs, slack=4.0)


#: The gradient of a scale is a sum of thousands of terms of both signs, and much smaller than they are.
SUMMED = 64.0
SHAPES = [(), (1,), (1, 1, 1, 1), (HEADS, 1, 1), (BATCH, 1, 1, 1)]


@pytest.mark.parametrize("grad", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensor_scale_after_a_function(shape: tuple[int, ...], grad: bool) -> None:
    cap = (torch.rand(shape) + 1.0).requires_grad_(grad)
    through_flex(scored(lambda s, t: torch.tanh(s / t) * t), (*qkv(), cap), slack=SUMMED)
    through_flex(scored(lambda s, t: torch.tanh(s) * 4.0 / t), (*qkv(), cap), slack=SUMMED)


def test_tensor_scales_between_functions() -> None:
    fn = scored(lambda s, t, u, m: (torch.sigmoid(torch.tanh(s) * t + m) * u * 2.0) / t)
    inputs = (*qkv(), torch.rand(HEADS, 1, 1), torch.tensor(2.0), torch.randn(Q_LEN, KV_LEN))
    through_flex(fn, inputs, slack=8.0)


def test_tensor_scale_after_a_mask() -> None:
    """It may make a fill of a number that is a score as it stands."""
    fn = scored(lambda s, t, m: s.masked_fill(m < 0, -900.0) * t)
    with flex_everywhere():
        unfused(fn, (*qkv(), torch.tensor(50.0), torch.randn(Q_LEN, KV_LEN)), "scale")


@pytest.mark.parametrize("shape", [(), (1, 1, 1, 1)], ids=str)
def test_learned_number_before_a_function(shape: tuple[int, ...]) -> None:
    """Mods must index what takes a gradient: a number has no dim for it."""
    through_flex(scored(lambda s, b: torch.tanh(s + b) * 2.0), (*qkv(), rand(*shape)), slack=SUMMED)


class Capped(nn.Module):
    """A softcap that is an attribute: a symbolic float where sizes are dynamic. As Gemma-2's."""

    def __init__(self, cap: float = 5.0) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, q, k, v):
        q, k, v = (t.view(*t.shape[:2], HEADS, 16).transpose(1, 2) for t in (q, k, v))
        scores = torch.tanh(q @ k.mT / self.cap) * self.cap
        keys, rows = torch.arange(k.shape[2]), torch.arange(q.shape[2])
        return torch.softmax(scores.masked_fill(keys > rows[:, None], torch.finfo(q.dtype).min), -1) @ v


def rows_of_heads(length: int = 13, grad: bool = True) -> tuple[torch.Tensor, ...]:
    return tuple(rand(2, length, HEADS * 16, grad=grad) for _ in range(3))


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softcap_attribute(dynamic: bool | None, dtype: torch.dtype) -> None:
    with flex_everywhere("flex"):
        for train in (False, True):
            check(
                Capped(), rows_of_heads(), dynamic=dynamic, train=train, dtype=dtype,
                kernel="flex, tanh, block mask: causal",
            )  # fmt: skip


def test_softcap_attribute_that_changes() -> None:
    """The number is read anew in each call, and no graph is made for it."""
    counts = []
    for enabled in (False, True):
        model = Capped()
        compiled, counter = counted(model)
        with flex_everywhere("flex"), config.patch(policy="always", enabled=enabled), torch.no_grad():
            for model.cap in (5.0, 0.5, 2.0):
                inputs = rows_of_heads(grad=False)
                torch.testing.assert_close(compiled(*inputs), model(*inputs))
        counts.append(counter.frame_count)
    assert counts[0] == counts[1], counts


def test_softcap_attribute_is_lowered() -> None:
    """Compiled for a GPU, forward and backward, with a symbolic cap."""
    inputs = tuple(t.detach().half().requires_grad_() for t in rows_of_heads(200))
    with flex_everywhere("flex"), config.patch(strict=True):
        code = code_for_a_gpu(Capped(), inputs, train=True, dynamic=True)
    for module in code.modules:
        assert any(kernel.is_template and "flex_attention" in kernel.name for kernel in module.kernels)
