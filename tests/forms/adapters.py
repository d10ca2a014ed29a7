"""Adapters as libraries write them, with a frozen base: what comes between A and B, merges, slices, norms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .linear_form import form, forms, low_rank

X = (2, 48, 64)
#: x, the base, A and B of rank 8, as `F.linear` takes them.
LORA = (X, "frozen 128x64", (8, 64), (128, 8))


def of_addition(added: Any) -> Any:
    """What is added to the base, a function of the input, A, B, and of what else there is."""
    return lambda x, w, a, b, *further: F.linear(x, w) + added(x, a, b, *further)


forms(*LORA, of=of_addition)(
    # Python's `sum` adds the first one to 0.
    mean_of_adapters_by_sum=(
        lambda x, a, b, c, d: sum(F.linear(F.linear(x, p), q) for p, q in ((a, b), (c, d))) / 2,
        (8, 64), (128, 8),
    ),
    # One scale for each rank.
    lycoris_module_scale=(lambda x, a, b, scalar: F.linear(F.linear(x, a) * scalar, b), (8,)),
    # Singular values between both, a count of ranks below.
    adalora=(
        lambda x, a, b, e, ranknum: (x @ (a * e[:, None]).T @ b.T) * 16 / (ranknum.abs() + 1e-5), (8,), (1,),
    ),
    # Vectors between A and B, and behind B.
    vera=(lambda x, a, b, d, e: e * F.linear(d * F.linear(x, a), b), (8,), (128,)),
    # One batch for several adapters: a mask of samples.
    adapter_of_some_samples=(
        lambda x, a, b, which: F.linear(F.linear(x, a), b) * (which == 1).to(x.dtype)[:, None, None],
        lambda: torch.tensor([0, 1]),
    ),
    adapter_of_some_tokens=(
        lambda x, a, b, seen: F.linear(F.linear(x, a), b) * 2.0 * seen,
        lambda: torch.arange(96).view(2, 48, 1) % 5 > 0,
    ),
    # AdapterHub's parallel adapters: an activation between both.
    adapter_activation=lambda x, a, b: F.linear(F.relu(F.linear(x, a)), b) * 4.0,
    # Its gate, a factor of shape (1,).
    adapterhub_gate=(lambda x, a, b, gate: F.linear(F.linear(x, a), b) * 2.0 * gate, (1,)),
)  # fmt: skip


@form(*LORA)
def loralib_linear(x: Any, w: Any, a: Any, b: Any) -> Any:
    """Transposed operands and `@`."""
    result = F.linear(x, w)
    return result + (x @ a.transpose(0, 1) @ b.transpose(0, 1)) * 2.0


@form(*LORA)
def loralib_merged_weight(x: Any, w: Any, a: Any, b: Any) -> Any:
    """minLoRA, PEFT's ParamWrapper: a parametrization adds the adapter to the weight."""
    return F.linear(x, w + (b @ a).view(w.shape) * 2.0)


@form(*LORA, ())
def lycoris_difference_of_weights(x: Any, w: Any, a: Any, b: Any, scalar: Any) -> Any:
    """LoCon: a second linear, whose weight is what the merge changes."""
    base = w.detach()
    merged = base + (b @ a).view(w.shape) * scalar * 0.5
    return F.linear(x, w) + F.linear(x, merged - base)


@form(*LORA, left=(2, 2), reasons=("no-base", "no-base"))
def adapter_and_a_number(x: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(x, w) * 0.5, F.linear(F.linear(x, a), b) + 1


@form((2, 12, 64), (8, 64), (128, 8), (128,), left=(1, 1), reasons=("no-base", "no-base"))
def linear_of_two_factors(x: Any, a: Any, b: Any, c: Any) -> Any:
    """A compressed weight: no adapter, whatever else reads it."""
    return F.softmax(F.gelu(F.linear(F.linear(x, a), b, c)), -1)


forms(*LORA, of=of_addition, reasons=("", "used-elsewhere"))(
    # The gradient of the factor reads the product that the gradient of the input adds to the base.
    input_times_a_number_of_each_sample=(lambda x, a, b, s: F.linear(F.linear(x * s, a), b), (2, 1, 1)),
    input_times_a_vector=(lambda x, a, b, s: F.linear(F.linear(x * s, a), b), (64,)),
)


_NOT_ADDED = ("no product of a base",) * 2


@form((2, 12, 64), (8, 64), (128, 8), (128,), left=(1, 1), reasons=_NOT_ADDED)
def time_steps_of_a_state_space(x: Any, a: Any, b: Any, c: Any) -> Any:
    """One function reads the second linear, which is several operations later."""
    return F.softplus(F.linear(F.linear(x, a), b, c))


@form(*LORA)
def weight_of_the_adapter(x: Any, w: Any, a: Any, b: Any) -> Any:
    """A and B are multiplied first."""
    return x @ w.t() + x @ (a.t() @ b.t()) * 2.0


@form(*LORA, (128, 8), (8, 64), left=(2, 2), reasons=("merged", "merged"))
def loha(x: Any, w: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Two products multiply each other: their rank is not low."""
    return F.linear(x, w) + F.linear(x, (b @ a) * (c @ d))


@form(*LORA, random=True)
def kohya_dropout(x: Any, w: Any, a: Any, b: Any) -> Any:
    """A dropout behind the down-projection."""
    lx = F.dropout(F.linear(x, a), 0.1, torch.is_grad_enabled())
    return F.linear(x, w) + F.linear(lx, b) * 1.0 * 0.5


@form(*LORA, (128,), random=True)
def kohya_bias(x: Any, w: Any, a: Any, b: Any, c: Any) -> Any:
    """The base has a bias."""
    lx = F.dropout(F.linear(x, a), 0.1, torch.is_grad_enabled())
    return F.linear(x, w, c) + F.linear(lx, b) * 0.5


@form(X, "frozen 64x128", (64, 8), (8, 128))
def adapter_by_einsum(x: Any, w: Any, a: Any, b: Any) -> Any:
    """As models that come from JAX write their linears."""
    narrow = torch.einsum("bni,ir->bnr", x, a)
    return torch.einsum("bni,io->bno", x, w) + torch.einsum("bnr,ro->bno", narrow, b) * 2.0


@form(*LORA, (8, 64), (128, 8), lambda: torch.rand(2, 48, 2).bfloat16())
def mixture_of_adapters(x: Any, w: Any, a: Any, b: Any, c: Any, d: Any, gate: Any) -> Any:
    """A router gives each token a number for each adapter."""
    result = F.linear(x, w)
    for i, (down, up) in enumerate(((a, b), (c, d))):
        result = result + gate[..., i : i + 1] * F.linear(F.linear(x, down), up) * 2.0
    return result


_MIXTURE = (X, "frozen 128x64", (3, 8, 64), (3, 128, 8))


def _experts(x: Any, a: Any, b: Any) -> Any:
    return torch.einsum("bser,eor->bseo", torch.einsum("bsd,erd->bser", x, a), b)


forms(*_MIXTURE, of=of_addition, reasons=("limit", "limit"))(
    weighed_sum_of_adapters=(lambda x, a, b, gate: (gate[..., None] * _experts(x, a, b)).sum(2), (2, 48, 3)),
    mean_of_adapters=lambda x, a, b: _experts(x, a, b).mean(2),
)
forms(*_MIXTURE, of=of_addition, left=(2, 2), reasons=("limit", "limit"))(
    sum_of_a_batch_of_adapters=lambda x, a, b: (x.flatten(0, 1) @ a.mT @ b.mT).sum(0).view(2, 48, 128),
)


@form(*LORA, (128, 8), (2, 64), left=(1, 1))
def hydra(x: Any, w: Any, a: Any, b: Any, d: Any, router: Any) -> Any:
    """One A and several Bs, each with a number for each token."""
    gates, narrow = F.linear(x, router).softmax(-1), F.linear(x, a)
    return F.linear(x, w) + gates[:, :, :1] * F.linear(narrow, b) + gates[:, :, 1:] * F.linear(narrow, d)


@form(*LORA, (48, 128), left=(1, 1), reasons=("multiplied by a tensor", "used-elsewhere"))
def adapter_times_a_matrix(x: Any, w: Any, a: Any, b: Any, gate: Any) -> Any:
    return F.linear(x, w) + F.linear(F.linear(x, a), b) * gate


@form(*LORA, (4, 1), left=(1, 1), reasons=("multiplied by a tensor", "used-elsewhere"))
def adapter_times_gates_of_heads(x: Any, w: Any, a: Any, b: Any, gate: Any) -> Any:
    """Heads are columns viewed apart: a last dim of size 1 is none of rows."""
    up = F.linear(F.linear(x, a), b).view(2, 48, 4, 32) * gate
    return F.linear(x, w) + up.view(2, 48, 128)


@form(*LORA, (8,))
def delora(x: Any, w: Any, a: Any, b: Any, strength: Any) -> Any:
    """The narrow result is normalised by the norms of the columns."""
    scaling = strength / (a.norm(dim=1) * b.norm(dim=0)).clamp(min=1e-4)
    return F.linear(x, w) + F.linear(F.linear(x, a) * scaling, b)


@form(X, "frozen 64x64", (8, 64), (64, 8), left=(1, 1))
def bottleneck(x: Any, w: Any, a: Any, b: Any) -> Any:
    """Houlsby's adapter behind a linear: what it is added to is what it reads."""
    y = F.linear(x, w)
    return y + F.linear(F.gelu(F.linear(y, a)), b)


@form(*LORA, random=True)
def dropout_in_front(x: Any, w: Any, a: Any, b: Any) -> Any:
    """By `@` with transposed matrices."""
    return F.linear(x, w) + F.dropout(x, 0.1, torch.is_grad_enabled()) @ a.t() @ b.t()


def dora_scale(w: Any, a: Any, b: Any, m: Any) -> Any:
    return m / torch.linalg.norm(w + 0.5 * (b @ a), dim=1).detach()


@form(*LORA, (128,), left=(1, 1))
def dora_torchtune(x: Any, w: Any, a: Any, b: Any, m: Any) -> Any:
    base, lora = F.linear(x, w), F.linear(F.linear(x, a), b) * 0.5
    scale = dora_scale(w, a, b, m)
    return (scale - 1) * base + scale * lora + base


@form(*LORA, (128,), left=(1, 1))
def dora_peft(x: Any, w: Any, a: Any, b: Any, m: Any) -> Any:
    result = F.linear(x, w)
    scale = dora_scale(w, a, b, m).view(1, -1)
    return result + ((scale - 1) * result + scale * F.linear(F.linear(x, a), b) * 0.5)


@form(*LORA, (128,), (128,), left=(1, 1))
def dora_peft_bias(x: Any, w: Any, a: Any, b: Any, m: Any, c: Any) -> Any:
    """The vector does not multiply the bias, which is taken away first."""
    result = F.linear(x, w, c)
    scale = dora_scale(w, a, b, m).view(1, -1)
    return result + ((scale - 1) * (result - c) + scale * F.linear(F.linear(x, a), b) * 0.5)


@form(*LORA, (128,), (128,), left=(1, 1))
def dora_of_the_bias(x: Any, w: Any, a: Any, b: Any, m: Any, c: Any) -> Any:
    """The vector multiplies the bias as well."""
    scale = dora_scale(w, a, b, m)
    return scale * F.linear(x, w, c) + scale * (F.linear(F.linear(x, a), b) * 0.5)


@form(*LORA, (128,), (128,), left=(2, 2))
def dora_of_half_the_bias(x: Any, w: Any, a: Any, b: Any, m: Any, c: Any) -> Any:
    result, scale = F.linear(x, w, c), dora_scale(w, a, b, m)
    return scale * (result - c * 0.5) + scale * F.linear(F.linear(x, a), b)


@form(*LORA, (128,), (128,), left=(1, 1))
def dora_in_place(x: Any, w: Any, a: Any, b: Any, m: Any, c: Any) -> Any:
    result = F.linear(x, w)
    scale = dora_scale(w, a, b, m).view(1, -1)
    result += (scale - 1) * F.linear(x, w)
    result += (scale * F.linear(F.linear(x, a), b)) * 0.5
    result += c.view(1, -1).expand_as(result)
    return result


@form(*LORA, (128,), left=(2, 2), reasons=("", "used-elsewhere"))
def dora_whose_linear_is_overwritten(x: Any, w: Any, a: Any, b: Any, m: Any) -> Any:
    """By a name that is read again."""
    result, scale = F.linear(x, w), dora_scale(w, a, b, m)
    view = result[0]
    result += (scale - 1) * F.linear(x, w)
    result += scale * F.linear(F.linear(x, a), b)
    return result, view.sum()


@form(*LORA, (128,), left=(1, 1))
def dora_nvlabs(x: Any, w: Any, a: Any, b: Any, m: Any) -> Any:
    scale = dora_scale(w, a, b, m).view(1, -1)
    org = F.linear(x, w)
    return org + (scale - 1) * org + scale * (F.linear(F.linear(x, a), b) * 0.5)


QKV = (X, "frozen 192x64", (8, 64), (64, 8), (8, 64), (64, 8))


@form(*QKV)
def litgpt_cat(x: Any, w: Any, aq: Any, bq: Any, av: Any, bv: Any) -> Any:
    """Adapters of q and v on one linear of q, k and v, by `cat` with zeros."""
    q, v = F.linear(F.linear(x, aq), bq), F.linear(F.linear(x, av), bv)
    return F.linear(x, w) + torch.cat([q, torch.zeros_like(q), v], -1) * 2.0


@form(*QKV)
def litllama_padded(x: Any, w: Any, aq: Any, bq: Any, av: Any, bv: Any) -> Any:
    """Zeros are put around each part."""
    q, v = F.linear(F.linear(x, aq), bq), F.linear(F.linear(x, av), bv)
    return F.linear(x, w) + 2.0 * (F.pad(q, (0, 128)) + F.pad(v, (128, 0)))


@form(*QKV, random=True)
def kohya_split_dims(x: Any, w: Any, aq: Any, bq: Any, av: Any, bv: Any) -> Any:
    """As FLUX's fused projections are trained."""
    lxs = [
        F.linear(F.dropout(F.linear(x, a), 0.1, torch.is_grad_enabled()), b)
        for a, b in ((aq, bq), (av, bv), (aq, bv))
    ]
    return F.linear(x, w) + torch.cat(lxs, dim=-1) * 0.5


@form(X, (128, 64), (128,), X, (128, 64))
def sum_with_bias(x: Any, u: Any, c: Any, y: Any, v: Any) -> Any:
    """Two linears of two inputs, one with a bias: conditioning of diffusion models."""
    return F.linear(x, u, c) + F.linear(y, v)


@form(X, "frozen 128x64", "frozen 8x64", "frozen 128x8", (8, 8), left=(1, 1))
def lora_xs(x: Any, w: Any, a: Any, b: Any, r: Any) -> Any:
    """A and B are frozen, and a square matrix between both is trained."""
    return F.linear(x, w) + F.linear(F.linear(F.linear(x, a), r), b) * 2.0


@form(*LORA, (12, 8), (8, 12), left=(2, 2))
def wider_between(x: Any, w: Any, a: Any, b: Any, r: Any, t: Any) -> Any:
    """Not square: a small network."""
    return F.linear(x, w) + F.linear(F.linear(F.linear(F.linear(x, a), r), t), b)


@form((2, 64, 48), "frozen 128x64", "frozen 8x64", (128, 8), left=(1, 1), reasons=("rows of the input",) * 2)
def frozen_a_of_channels(x: Any, w: Any, a: Any, b: Any) -> Any:
    """LoRA-FA on tokens of a convolution."""
    x = x.transpose(1, 2)
    return F.linear(x, w) + F.linear(F.linear(x, a), b)


@form(X, "frozen 64x64", "frozen 64x64", (24, 64), (64, 8), (64, 16))
def packed_a_of_two_linears(x: Any, q: Any, k: Any, a: Any, b: Any, c: Any) -> Any:
    """One skinny GEMM for the adapters of several linears, whose columns are read where they are."""
    first, second = F.linear(x, a).split([8, 16], dim=-1)
    return F.linear(x, q) + F.linear(first, b) * 2.0, F.linear(x, k) + F.linear(second, c) * 2.0


@form(*LORA, (8, 128))
def packed_a_behind_an_activation(x: Any, w: Any, a: Any, b: Any, c: Any) -> Any:
    first, second = F.linear(x, torch.cat([a, a * 2])).chunk(2, dim=-1)
    return F.linear(x, w) + F.linear(F.silu(first), b) + second @ c


#: x, the base, A of a mean and a variance for each of 8 ranks, B, and the vectors behind A and B.
PVERA = (X, "frozen 128x64", "frozen 16x64", "frozen 128x8", (16,), (128,))


@form(*PVERA, reasons=("wider rows", ""))
def pvera(x: Any, w: Any, a: Any, b: Any, d: Any, e: Any) -> Any:
    """PEFT's: the mean alone; in inference torch makes a batch of products with B."""
    mean, _ = (d * F.linear(x, a)).chunk(2, dim=-1)
    return F.linear(x, w) + e * F.linear(mean, b)


@form(*PVERA, "frozen 2x48x8")
def pvera_drawn(x: Any, w: Any, a: Any, b: Any, d: Any, e: Any, drawn: Any) -> Any:
    """Both parts of the columns are read."""
    mean, variance = (d * F.linear(x, a)).chunk(2, dim=-1)
    return F.linear(x, w) + e * F.linear(mean + drawn * torch.exp(0.5 * variance), b)


@form(*LORA[:2], (16, 64), (128, 8), (16,), (128,))
def pvera_of_trained_matrices(x: Any, w: Any, a: Any, b: Any, d: Any, e: Any) -> Any:
    mean, variance = (d * F.linear(x, a)).chunk(2, dim=-1)
    return F.linear(x, w) + e * F.linear(mean + torch.exp(0.5 * variance), b)


@form((4, 48, 64), "frozen 4x64x128", (4, 128, 64))
def batch_of_sums(x: Any, w: Any, v: Any) -> Any:
    return torch.bmm(x, w + v.mT)


class Peft(nn.Module):
    """PEFT's LoRA on one linear, in evaluation and training."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 128)
        self.base.requires_grad_(False)
        self.a, self.b = low_rank(64, 128, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        result = self.base(x)
        return result + self.b(self.a(self.dropout(x.to(self.a.weight.dtype)))) * 2.0


form(X, random=True)(Peft)


@form(*LORA, (2, 8))
def kohya_rank_dropout(x: Any, w: Any, a: Any, b: Any, drawn: Any) -> Any:
    """Ranks of a sample are dropped: a mask of (samples, rank) for all tokens."""
    lx = F.linear(x, a) * (drawn > 0.2).to(x.dtype).unsqueeze(1)
    return F.linear(x, w) + F.linear(lx, b) * (0.5 / 0.8)
