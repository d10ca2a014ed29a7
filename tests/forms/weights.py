"""What is done to scores and weights in other words than those of the library."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .form import Form, collector

WEIGHTS: dict[str, Form] = {}
form = collector(WEIGHTS)
einsum = torch.einsum
QKV = ((2, 4, 9, 8),) * 3


def scored(q: Any, k: Any) -> Any:
    return q @ k.mT * 8**-0.5


def slopes(dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(9.0) * torch.tensor([0.5, 0.3, 0.2, 0.1])[:, None]).to(dtype)


@form(*QKV)
def narrow_bias_scaled_with_the_scores(q: Any, k: Any, v: Any) -> Any:
    """Slopes in bfloat16 on scores in float32; the scale of both comes last."""
    scores = (q @ k.mT + slopes(torch.bfloat16)[None, :, None]) * 8**-0.5
    causal = torch.full((9, 9), float("-inf")).triu(1)
    return (scores + causal).softmax(-1) @ v


@form(*QKV, fused=0, reasons=("rounded",))
def scores_rounded_with_the_bias(q: Any, k: Any, v: Any) -> Any:
    scores = ((q @ k.mT).bfloat16() + slopes(torch.bfloat16)[None, :, None]) * 8**-0.5
    return scores.float().softmax(-1) @ v


@form(*QKV, (4, 4), fused=0, reasons=("in-between",))
def scores_of_mixed_heads(q: Any, k: Any, v: Any, mix: Any) -> Any:
    scores = ((q @ k.mT * 8**-0.5).permute(0, 2, 3, 1) @ mix).permute(0, 3, 1, 2)
    return scores.softmax(-1) @ v


@form(*QKV, (4, 4), fused=0, reasons=("in-between",))
def scores_mixed_by_einsum(q: Any, k: Any, v: Any, mix: Any) -> Any:
    return einsum("bhij,hg->bgij", scored(q, k), mix).softmax(-1) @ v


@form((2, 2, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8), fused=1, reasons=("no-product",))
def distances_behind_an_attention(q: Any, k: Any, v: Any) -> Any:
    """The product of the attention in front is none of the second softmax."""
    x = scored(q, k).softmax(-1) @ v
    x = torch.nn.functional.layer_norm(x, (8,))
    return (-torch.cdist(x, x)).softmax(-1) @ v


@form(*QKV, (4, 4))
def queries_of_mixed_heads(q: Any, k: Any, v: Any, mix: Any) -> Any:
    """The same product in front of the scores."""
    q = (q.permute(0, 2, 3, 1) @ mix).permute(0, 3, 1, 2)
    return (q @ k.mT * 8**-0.5).softmax(-1) @ v


def exponentials(q: Any, k: Any) -> Any:
    s = scored(q, k)
    return torch.exp(s - torch.max(s, dim=-1, keepdim=True)[0])


@form(*QKV)
def softmax_by_exponentials(q: Any, k: Any, v: Any) -> Any:
    e = exponentials(q, k)
    return torch.matmul(e / torch.sum(e, dim=-1, keepdim=True), v)


@form((2, 9, 4, 8), (2, 13, 4, 8), (2, 13, 4, 8), lambda: torch.rand(2, 13) > 0.4)
def exponentials_of_masked_scores(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """Padding, a maximum that takes no gradient, a sum without its dim, dims of einsum in another order."""
    s = einsum("bihd,bjhd->bhij", q, k) * 8**-0.5
    s = s.masked_fill(~seen[:, None, None], -1e9)
    e = (s - s.detach().amax(-1, keepdim=True)).exp()
    return einsum("bhij,bjhd->bihd", e / e.sum(-1).unsqueeze(-1), v)


@form(*QKV)
def exponential_of_log_softmax(q: Any, k: Any, v: Any) -> Any:
    return torch.log_softmax(scored(q, k), dim=-1).exp() @ v


@form(*QKV)
def exponential_beside_logsumexp(q: Any, k: Any, v: Any) -> Any:
    s = scored(q, k)
    return torch.exp(s - torch.logsumexp(s, dim=-1, keepdim=True)) @ v


@form(*QKV, fused=0, reasons=("range",))
def exponentials_as_they_are(q: Any, k: Any, v: Any) -> Any:
    e = scored(q, k).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@form(*QKV, fused=0, reasons=("range",))
def exponentials_less_the_largest_of_queries(q: Any, k: Any, v: Any) -> Any:
    s = scored(q, k)
    e = (s - s.amax(-2, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@form(*QKV, fused=0, reasons=("in-between",))
def exponentials_over_more_than_their_sum(q: Any, k: Any, v: Any) -> Any:
    e = exponentials(q, k)
    return (e / (e.sum(-1, keepdim=True) + 0.1)) @ v


@form(*QKV, fused=0, reasons=("in-between",))
def exponentials_times_a_mask(q: Any, k: Any, v: Any) -> Any:
    e = exponentials(q, k) * torch.ones(9, 9).tril()
    return (e / (e.sum(-1, keepdim=True) + 1e-6)) @ v


@form(*QKV)
def exponentials_divided_behind_the_product(q: Any, k: Any, v: Any) -> Any:
    e = exponentials(q, k)
    return (e @ v) / e.sum(-1, keepdim=True)


@form(*QKV, lambda: torch.rand(2, 9) > 0.4)
def sums_beside_the_product(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """As online softmax is taught: the sum has no dim, and a small number is added to it."""
    s = einsum("bhid,bhjd->bhij", q * 8**-0.5, k).masked_fill(~seen[:, None, None], -1e9)
    e = (s - s.max(dim=-1).values.unsqueeze(-1)).exp()
    total = e.sum(dim=-1) + 1e-9
    return einsum("bhij,bhjd->bhid", e, v) / total[..., None]


@form(*QKV, fused=0, reasons=("in-between",))
def product_over_more_than_the_sum(q: Any, k: Any, v: Any) -> Any:
    e = exponentials(q, k)
    return (e @ v) / (e.sum(-1, keepdim=True) + 0.1)


@form(*QKV, fused=0, reasons=("in-between",))
def product_divided_in_part(q: Any, k: Any, v: Any) -> Any:
    e = exponentials(q, k)
    out = e @ v
    return out / e.sum(-1, keepdim=True) + out


@form(*QKV, fused=0, reasons=("in-between",))
def nan_to_num_of_exponentials(q: Any, k: Any, v: Any) -> Any:
    e = exponentials(q, k)
    return (torch.nan_to_num(e) @ v) / e.sum(-1, keepdim=True)


@form(*QKV)
def exponentials_over_hardly_more_than_their_sum(q: Any, k: Any, v: Any) -> Any:
    e = exponentials(q, k)
    return (e / (1e-8 + e.sum(-1, keepdim=True)).clamp(min=1e-6)) @ v


@form(*QKV)
def exponentials_computed_twice(q: Any, k: Any, v: Any) -> Any:
    s = scored(q, k)
    s = s - s.amax(-1, keepdim=True)
    return (s.exp() / s.exp().sum(dim=-1, keepdim=True)) @ v


@form(*QKV, fused=0, reasons=("weights",))
def exponentials_that_are_returned(q: Any, k: Any, v: Any) -> Any:
    e = exponentials(q, k)
    return (e / e.sum(-1, keepdim=True)) @ v, e


@form(*QKV, fused=0, reasons=("no-product",))
def exponentials_over_the_queries(q: Any, k: Any, v: Any) -> Any:
    s = scored(q, k)
    e = (s - s.amax(-2, keepdim=True)).exp()
    return (e / e.sum(-2, keepdim=True)) @ v


def some() -> torch.Tensor:
    return torch.tensor([[True] * 9, [True] * 5 + [False] * 4])


def padded(q: Any, k: Any, seen: Any, fill: float = -1e9) -> Any:
    return scored(q, k).masked_fill(~seen[:, None, None], fill).softmax(-1)


@form(*QKV, some)
def weights_times_the_mask(q: Any, k: Any, v: Any, seen: Any) -> Any:
    return (seen[:, None, None].float() * padded(q, k, seen)) @ v


@form(*QKV, lambda: torch.rand(2, 1, 9, 9) > 0.4)
def weights_times_a_boolean_mask(q: Any, k: Any, v: Any, seen: Any) -> Any:
    return (torch.where(seen, scored(q, k), torch.tensor(-3e4)).softmax(-1) * seen) @ v


@form(*QKV, fused=0, reasons=("mean is between",))
def weights_averaged_over_heads(q: Any, k: Any, v: Any) -> Any:
    return scored(q, k).softmax(-1).mean(1) @ v[:, 0]


@form((2, 9, 8), (2, 9, 8), (2, 4, 9, 8), fused=0, reasons=("broadcast",))
def one_map_for_all_heads(q: Any, k: Any, v: Any) -> Any:
    return (q @ k.mT).softmax(-1)[:, None] @ v


@form(*QKV, fused=0, reasons=("used-elsewhere",))
def logsumexp_that_is_returned(q: Any, k: Any, v: Any) -> Any:
    """As hashing attention combines its rounds."""
    s = scored(q, k)
    total = torch.logsumexp(s, dim=-1, keepdim=True)
    return torch.exp(s - total) @ v, total


@form(*QKV, lambda: torch.tensor([[False] * 9, [True] * 9]))
def no_key_and_weights_times_the_mask(q: Any, k: Any, v: Any, seen: Any) -> Any:
    return (padded(q, k, seen) * seen[:, None, None].to(q.dtype)) @ v


@form(*QKV, some, fused=0, reasons=("empty-rows",))
def infinite_fill_times_the_mask(q: Any, k: Any, v: Any, seen: Any) -> Any:
    return (padded(q, k, seen, -float("inf")) * seen[:, None, None].to(q.dtype)) @ v


@form(*QKV, some)
def weights_times_another_mask(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """The values lose what the weights lose for all queries."""
    return (scored(q, k).softmax(-1) * seen[:, None, None].float()) @ v


@form(*QKV, some)
def one_of_two_masks_again(q: Any, k: Any, v: Any, seen: Any) -> Any:
    scores = scored(q, k).masked_fill(torch.ones(9, 9).triu(1).bool(), -1e9)
    hidden = ~seen[:, None, None]
    return scores.masked_fill(hidden, -1e9).softmax(-1).masked_fill(hidden, 0.0) @ v


@form(*QKV, lambda: torch.tensor([[False] * 9, [True] * 5 + [False] * 4]))
def masked_weights_normalised_again(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """The sum is 1 already, or 0."""
    w = padded(q, k, seen) * seen[:, None, None].to(q.dtype)
    return (w / w.sum(-1, keepdim=True).clamp(min=1e-9)) @ v


@form((4, 2, 5, 8), (4, 2, 9, 8), (4, 2, 9, 8), lambda: torch.tensor([[False] * 9, [True] * 5 + [False] * 4]))
def weights_assigned_zero(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """Routing: heads first, hidden scores and then their weights are assigned, the latter in a copy."""
    scores = 8**-0.5 * torch.matmul(q, k.transpose(2, 3))
    hidden = ~seen.view(1, 2, 1, 9).expand_as(scores)
    scores[hidden] = float("-inf")
    weights = torch.softmax(scores, dim=-1).clone()
    weights[hidden] = 0
    return torch.matmul(weights, v)


@form(*QKV, lambda: torch.rand(2, 4, 9, 9) > 0.3, fused=0, reasons=("mask",))
def other_weights_assigned_zero(q: Any, k: Any, v: Any, hidden: Any) -> Any:
    weights = scored(q, k).softmax(dim=-1).clone()
    weights[hidden] = 0
    return weights @ v


@form(*QKV, some, fused=0, reasons=("weights",))
def weights_assigned_another_number(q: Any, k: Any, v: Any, seen: Any) -> Any:
    weights = padded(q, k, seen).clone()
    weights[~seen[:, None, None].expand_as(weights)] = 0.1
    return weights @ v


@form(*QKV, some)
def masked_weights_normalised_by_function(q: Any, k: Any, v: Any, seen: Any) -> Any:
    w = padded(q, k, seen).masked_fill(~seen[:, None, None], 0.0)
    return torch.nn.functional.normalize(w, p=1, dim=-1) @ v


@form(*QKV)
def weights_normalised_again(q: Any, k: Any, v: Any) -> Any:
    w = scored(q, k).softmax(-1)
    return (w / (w.sum(-1, keepdim=True) + 1e-3)) @ v


@form(*QKV, some, fused=0, reasons=("empty-rows",))
def masked_weights_over_a_sum_that_may_be_zero(q: Any, k: Any, v: Any, seen: Any) -> Any:
    w = padded(q, k, seen) * seen[:, None, None].to(q.dtype)
    return (w / w.sum(-1, keepdim=True)) @ v


@form(*QKV, some, fused=0, reasons=("mask",))
def normalised_behind_another_mask(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """What is left of the weights is another softmax, which may underflow."""
    w = scored(q, k).softmax(-1) * seen[:, None, None].to(q.dtype)
    return (w / (w.sum(-1, keepdim=True) + 1e-9)) @ v


@form(*QKV, fused=0, reasons=("weights",))
def weights_normalised_over_the_queries(q: Any, k: Any, v: Any) -> Any:
    w = scored(q, k).softmax(-1)
    return (w / (w.sum(-2, keepdim=True) + 1e-9)) @ v


@form(*QKV, (4, 1, 1), fused=0, reasons=("in-between",))
def gated_weights_normalised_again(q: Any, k: Any, v: Any, gate: Any) -> Any:
    w = scored(q, k).softmax(-1) * torch.sigmoid(gate)
    return (w / (w.sum(-1, keepdim=True) + 1e-3)) @ v


@form(*QKV, lambda: torch.rand(9, 9) > 0.3, fused=0, reasons=("mask",))
def weights_times_a_mask_of_pairs(q: Any, k: Any, v: Any, seen: Any) -> Any:
    return (scored(q, k).softmax(-1) * seen.float()) @ v


@form(*QKV, lambda: torch.tensor([[2] * 9, [1] * 5 + [0] * 4]))
def weights_times_counts(q: Any, k: Any, v: Any, count: Any) -> Any:
    return (padded(q, k, count > 0) * count[:, None, None].float()) @ v


@form(*((2, 4, 9, 8),) * 4, (2, 4, 9, 16), (1,), fused=0, reasons=("differential attention",) * 2)
def difference_of_weights(q1: Any, k1: Any, q2: Any, k2: Any, v: Any, factor: Any) -> Any:
    return (scored(q1, k1).softmax(-1) - factor * scored(q2, k2).softmax(-1)) @ v


@form(*QKV, fused=0, reasons=("differential attention",))
def difference_of_heads(q: Any, k: Any, v: Any) -> Any:
    w = scored(q, k).softmax(-1).view(2, 2, 2, 9, 9)
    return (w[:, :, 0] - 0.8 * w[:, :, 1]) @ v[:, :2]


@form(*((2, 4, 9, 8),) * 4, (2, 4, 9, 16), (1,), fused=2)
def difference_of_results(q1: Any, k1: Any, q2: Any, k2: Any, v: Any, factor: Any) -> Any:
    return scored(q1, k1).softmax(-1) @ v - factor * (scored(q2, k2).softmax(-1) @ v)


@form(*QKV, fused=0, reasons=("no-product",))
def weights_and_values_by_elements(q: Any, k: Any, v: Any) -> Any:
    return (scored(q, k).softmax(-1).unsqueeze(-1) * v.unsqueeze(2)).sum(3)


@form(*QKV, (4, 1, 1), lambda: torch.tensor([[True] * 9, [True] * 5 + [False] * 4]))
def weights_times_gates_of_heads_and_queries(q: Any, k: Any, v: Any, gate: Any, seen: Any) -> Any:
    """What is the same for all keys goes behind the product; so does a scale that comes after the softmax."""
    weights = padded(q, k, seen) / 8**0.5 * torch.sigmoid(gate)
    return (weights * seen[:, None, :, None]) @ v


@form((2, 9, 4, 8), (2, 9, 4, 8), (2, 9, 4, 8), (4,))
def gates_of_heads_that_come_last(q: Any, k: Any, v: Any, gate: Any) -> Any:
    weights = einsum("bqhd,bkhd->bqkh", q, k).softmax(2) * gate
    return einsum("bqkh,bkhd->bqhd", weights, v)


@form(*QKV, (9,))
def weights_times_a_gate_of_keys(q: Any, k: Any, v: Any, gate: Any) -> Any:
    return (scored(q, k).softmax(-1) * gate) @ v


@form(*QKV, (9, 9), fused=0, reasons=("in-between",))
def weights_times_a_gate_of_pairs(q: Any, k: Any, v: Any, gate: Any) -> Any:
    return (scored(q, k).softmax(-1) * gate) @ v


@form((2, 16, 4, 5))
def channels_least_alike(x: Any) -> Any:
    """DANet's attention of channels: the scores are subtracted from the largest of their row."""
    q = x.flatten(2)
    energy = torch.bmm(q, q.permute(0, 2, 1))
    energy = torch.max(energy, -1, keepdim=True)[0].expand_as(energy) - energy
    return torch.bmm(torch.softmax(energy, dim=-1), q).view(x.shape)


@form((2, 16, 20), fused=0, reasons=("used-elsewhere",))
def channels_less_the_largest_of_columns(q: Any) -> Any:
    energy = torch.bmm(q, q.permute(0, 2, 1))
    return torch.bmm(torch.softmax(energy.amax(-2, keepdim=True) - energy, dim=-1), q)


@form(*QKV, (2, 4, 9, 1))
def temperatures_of_queries(q: Any, k: Any, v: Any, temperature: Any) -> Any:
    return (q @ k.mT * temperature).softmax(-1) @ v


@form((2, 4, 9, 8), (2, 1, 9, 8), (2, 1, 9, 8), (2, 4, 1, 9), some)
def temperatures_of_keys(q: Any, k: Any, v: Any, temperature: Any, seen: Any) -> Any:
    """Heads of queries share keys, but not their temperatures."""
    return (q @ k.mT * temperature).masked_fill(~seen[:, None, None], -1e9).softmax(-1) @ v


@form(*QKV)
def cosines_of_queries_and_keys(q: Any, k: Any, v: Any) -> Any:
    """Divided by the length of each query and of each key."""
    return (q @ k.mT / q.norm(dim=-1).unsqueeze(-1) / k.norm(dim=-1).unsqueeze(-2) * 5).softmax(-1) @ v


@form((2, 9, 8), (2, 9, 8), (2, 9, 8), (2, 9, 1), (2, 1, 9))
def temperatures_expanded_to_pairs(q: Any, k: Any, v: Any, rows: Any, columns: Any) -> Any:
    scores = rows.repeat(1, 1, 9) * (q @ k.mT) * columns.expand(-1, 9, -1)
    return scores.softmax(-1) @ v


@form(*QKV, (2, 4, 9, 9), fused=0, reasons=("flex attention",))
def temperatures_of_pairs(q: Any, k: Any, v: Any, temperature: Any) -> Any:
    return (q @ k.mT * temperature).softmax(-1) @ v


@form(*QKV, (2, 4, 1, 9), (4, 9, 9), fused=0, reasons=("flex attention",))
def temperatures_of_biased_keys(q: Any, k: Any, v: Any, temperature: Any, bias: Any) -> Any:
    return ((q @ k.mT + bias) * temperature).softmax(-1) @ v


@form(*QKV, (4, 9, 9), (4, 1, 1))
def temperatures_of_biased_heads(q: Any, k: Any, v: Any, bias: Any, temperature: Any) -> Any:
    """The bias takes the scale as well."""
    scores = (q @ k.mT + bias) * temperature.exp()
    return (scores / torch.sqrt(temperature[0].abs() + 1)).softmax(-1) @ v


@form(*((8, 9, 8),) * 3, (8, 9, 9), ())
def temperature_behind_baddbmm(q: Any, k: Any, v: Any, bias: Any, temperature: Any) -> Any:
    return (torch.baddbmm(bias, q, k.mT) * temperature.exp()).softmax(-1) @ v


@form((2, 9, 16), (2,))
class ScaledLinearOfKeys(nn.Module):
    """A memory whose linear has a bias of keys, with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(16, 12), nn.Linear(12, 16, bias=False)

    def forward(self, x: Any, temperature: Any) -> Any:
        return self.values((self.keys(x) * temperature[0]).softmax(-1))


@form(*QKV, (2, 4, 9, 1), (4, 9, 9), fused=0, reasons=("flex attention",))
def temperatures_of_biased_queries(q: Any, k: Any, v: Any, temperature: Any, bias: Any) -> Any:
    return ((q @ k.mT + bias) * temperature).softmax(-1) @ v


@form(*QKV, (4, 9, 1))
def bias_of_queries(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """The softmax does not see it, and its gradient is zero."""
    return (scored(q, k) + bias).softmax(-1) @ v


@form(*QKV)
def mask_of_queries(q: Any, k: Any, v: Any) -> Any:
    """The scores drown in it."""
    return (scored(q, k) + torch.where(torch.arange(9) < 3, -1e9, 0.0)[:, None]).softmax(-1) @ v


@form(*QKV)
def mask_before_a_scale_of_tensors(q: Any, k: Any, v: Any) -> Any:
    """The square root of a number is a number, and a mask may come before it."""
    scores = torch.where(torch.ones(9, 9).tril().bool(), q @ k.mT, torch.finfo(q.dtype).min)
    return (scores / torch.sqrt(torch.tensor(8.0))).softmax(-1) @ v


@form(*QKV)
def scores_less_their_mean(q: Any, k: Any, v: Any) -> Any:
    """A softmax sees no number that is the same for a row, or for all."""
    s = scored(q, k)
    s = s - s.mean(-1, keepdim=True)
    return (s - s.max()).softmax(-1) @ v


@form(*QKV, fused=0, reasons=("range",))
def masked_scores_less_their_least(q: Any, k: Any, v: Any) -> Any:
    """All visible scores of a row are equal then, up to rounding."""
    s = scored(q, k).masked_fill(~torch.ones(9, 9).tril().bool(), torch.finfo(q.dtype).min)
    return (s - s.amin(-1, keepdim=True)).softmax(-1) @ v


@form(*QKV, fused=0, reasons=("range",))
def exponentials_less_the_largest_of_all(q: Any, k: Any, v: Any) -> Any:
    s = scored(q, k)
    e = torch.exp(s - s.max())
    return (e / e.sum(-1, keepdim=True)) @ v


@form(*QKV, fused=0, reasons=("in-between",))
def scores_normed_by_layer(q: Any, k: Any, v: Any) -> Any:
    s = scored(q, k)
    return torch.nn.functional.layer_norm(s, (9,)).softmax(-1) @ v


@form(*QKV, fused=0, reasons=("sub is between",))
def weights_less_their_mean(q: Any, k: Any, v: Any) -> Any:
    w = scored(q, k).softmax(-1)
    equal = torch.ones_like(w) / 9
    return (equal + 1.5 * (w - equal)) @ v


@form(*QKV, fused=0, reasons=("no-product", "differential attention"))
def weights_mixed_with_distances(q: Any, k: Any, v: Any) -> Any:
    """The softmax of distances has no product."""
    at = torch.arange(9.0)
    near = (-(at[:, None] - at).abs()[None] * torch.ones(4, 1, 1)).softmax(-1)
    return (0.7 * scored(q, k).softmax(-1) + 0.3 * near) @ v


@form((2, 5, 16), (2, 9, 16), fused=0, reasons=("used-elsewhere", "another dim than the softmax"))
def weights_of_both_sides(a: Any, b: Any) -> Any:
    """BiDAF and QANet: the weights of one side times those of the other."""
    s = a @ b.mT
    rows, columns = s.softmax(2), s.softmax(1)
    return torch.cat([rows @ b, (rows @ columns.mT) @ a], -1)


@form((2, 9, 16), (16,), lambda: torch.rand(2, 9) > 0.4)
def pooled_by_a_vector(x: Any, query: Any, seen: Any) -> Any:
    """The learned query has one dim."""
    weights = torch.matmul(torch.tanh(x), query).masked_fill(~seen, -1e9).softmax(dim=1)
    return torch.bmm(weights.unsqueeze(1), x).squeeze(1)


@form((2, 9, 16), (16,), fused=0, reasons=("no-product",))
def chosen_by_a_vector(x: Any, query: Any) -> Any:
    """The softmax is over the samples."""
    return torch.matmul(x, query).softmax(dim=0).T @ x[:, 0]


@form((2, 9, 16), (16, 1), fused=0, reasons=("elementwise",))
def pooled_by_elements(x: Any, w: Any) -> Any:
    """The weights of tokens are as many as dims, of which one has size 1."""
    return ((x @ w).softmax(1) * x).sum(1)


@form(*QKV, fused=0, reasons=("overwritten",))
def exponentials_in_place(q: Any, k: Any, v: Any) -> Any:
    s = scored(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp_()
    return (e / e.sum(-1, keepdim=True)) @ v


@form((8, 9, 8), (8, 9, 8), (8, 9, 8), lambda: torch.tensor([9, 5]))
def queries_merged_with_samples(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    """A mask of (batch * queries, keys), as textbooks write it."""
    scores = torch.bmm(q, k.transpose(1, 2)) / 8**0.5
    shape = scores.shape
    lengths = torch.repeat_interleave(lengths, repeats=4, dim=0)
    rows, lengths = scores.reshape(-1, shape[-1]), torch.repeat_interleave(lengths, shape[1])
    seen = torch.arange(shape[-1], dtype=torch.float32)[None, :] < lengths[:, None]
    rows[~seen] = -1e6
    return torch.bmm(rows.reshape(shape).softmax(dim=-1), v)


@form((2, 9, 8), (2, 13, 8))
def softmax_of_merged_rows(q: Any, k: Any) -> Any:
    weights = torch.bmm(q, k.transpose(1, 2)).view(-1, 13).softmax(dim=1)
    return torch.bmm(weights.view(2, -1, 13), k)


@form((2, 9, 8), (2, 9, 8), fused=0, reasons=("in-between",))
def softmax_of_merged_rows_in_part(q: Any, k: Any) -> Any:
    weights = torch.bmm(q, k.transpose(1, 2)).view(-1, 9).relu().softmax(dim=1)
    return torch.bmm(weights.view(2, -1, 9), k)


@form((2, 9, 8), (2, 9, 8), fused=0, reasons=("no-product",))
def softmax_of_merged_keys(q: Any, k: Any) -> Any:
    """Each sample has one softmax over all of its pairs."""
    weights = torch.bmm(q, k.transpose(1, 2)).view(2, -1).softmax(dim=1)
    return torch.bmm(weights.view(2, 9, 9), k)


@form(*QKV)
def powers_of_two(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.mT * (8**-0.5 * 1.4426950408889634)
    powers = torch.exp2(scores - scores.amax(-1, keepdim=True))
    return (powers / powers.sum(-1, keepdim=True)) @ v


@form(*QKV, fused=0, reasons=("range",))
def powers_of_two_as_they_are(q: Any, k: Any, v: Any) -> Any:
    powers = torch.exp2(scored(q, k))
    return (powers / powers.sum(-1, keepdim=True)) @ v


def some_row_masked() -> torch.Tensor:
    mask = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) > 0.6
    mask[..., 0] = False
    mask[1, 0, 3] = True
    return mask


@form(*QKV, some_row_masked)
def nan_of_masked_rows_is_zero(q: Any, k: Any, v: Any, hidden: Any) -> Any:
    return torch.nan_to_num(scored(q, k).masked_fill(hidden, float("-inf")).softmax(-1)) @ v


@form(*QKV, some_row_masked)
def no_row_is_nan(q: Any, k: Any, v: Any, hidden: Any) -> Any:
    return scored(q, k).masked_fill(hidden, -1e9).softmax(-1).nan_to_num(0.0) @ v


@form(*QKV, lambda: torch.tensor([[True] * 3 + [False] * 6, [False] * 9]))
def nan_of_rows_of_two_fills(q: Any, k: Any, v: Any, padding: Any) -> Any:
    """Padding on the left beside a causal mask: the first queries see no key."""
    scores = scored(q, k).masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    scores = torch.where(~padding[:, None, None], scores, float("-inf"))
    return torch.nan_to_num(scores.softmax(-1)) @ v


@form(*QKV, some_row_masked, fused=0, reasons=("in-between",))
def nan_of_masked_rows_is_one(q: Any, k: Any, v: Any, hidden: Any) -> Any:
    return torch.nan_to_num(scored(q, k).masked_fill(hidden, float("-inf")).softmax(-1), nan=1.0) @ v


@form(
    *QKV, some_row_masked, lambda: torch.tensor([0.0] * 8 + [float("-inf")]), fused=0, reasons=("empty-rows",)
)
def nan_of_rows_of_two_masks(q: Any, k: Any, v: Any, hidden: Any, mask: Any) -> Any:
    return torch.nan_to_num((scored(q, k).masked_fill(hidden, float("-inf")) + mask).softmax(-1)) @ v


@form(*QKV, (2, 4, 9, 3, 5))
def features_and_vectors(q: Any, k: Any, v: Any, vectors: Any) -> Any:
    """Both by the same weights; the result of one is changed before the values of the other are there."""
    w = scored(q, k).softmax(-1)
    x = (w @ v).transpose(1, 2).flatten(2)
    x += 1
    return x, einsum("bhij,bhjcd->bihcd", w, vectors.relu())


@form((2, 9, 8), (2, 9, 8), (2, 9, 8), (2, 9, 3), lambda: torch.rand(2, 1, 9) > 0.4)
def features_and_coordinates(q: Any, k: Any, v: Any, x: Any, hidden: Any) -> Any:
    """One sample sees no key."""
    hidden = hidden | (torch.arange(2) == 1)[:, None, None]
    w = scored(q, k).masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0)
    return w @ v, w.bmm(x) - x


@form(*QKV, fused=0, reasons=("weights",))
def two_steps_along_the_same_weights(q: Any, k: Any, v: Any) -> Any:
    w = scored(q, k).softmax(-1)
    return w @ (w @ v)


@form(*QKV, (2, 4, 9, 8), fused=0, reasons=("weights",))
def values_overwritten_between_two_products(q: Any, k: Any, v: Any, u: Any) -> Any:
    u, w = u * 1, scored(q, k).softmax(-1)
    x = w @ v
    u.mul_(2)
    return x, w @ u.relu()


@form(*QKV, (2, 9, 9, 5), fused=0, reasons=("weights",))
def values_of_pairs(q: Any, k: Any, v: Any, pairs: Any) -> Any:
    """AlphaFold's points: values that depend on the query as well."""
    w = scored(q, k).softmax(-1)
    return w @ v, einsum("bhij,bijc->bihc", w, pairs)


@form((9, 16), (13, 16), (16, 16), fused=0, reasons=("no-product",))
def values_less_those_of_the_query(x: Any, candidates: Any, w: Any) -> Any:
    """TabR: candidates are weighed by their distance, and what they add depends on the query as well."""
    weights = (2 * x @ candidates.mT - candidates.square().sum(-1)).softmax(-1)
    return (weights.unsqueeze(1) @ ((x[:, None] - candidates) @ w)).squeeze(1)


def marked(seen: torch.Tensor) -> torch.Tensor:
    """Drawn marks on lower triangles: one query sees no key."""
    return torch.ones(9, 9).tril() * (seen & (torch.arange(9) != 3)[:, None]).float()


@form(*QKV, lambda: torch.rand(2, 1, 9, 9) > 0.4)
def scores_times_marks(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """As the first GPT-2 has its mask: what is hidden is multiplied by 0 and gets a number."""
    b = marked(seen)
    return (scored(q, k) * b - 1e4 * (1 - b)).softmax(-1) @ v


@form(*QKV, lambda: torch.rand(2, 1, 9, 9) > 0.4, fused=0, reasons=("through mul",))
def scores_times_other_marks(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """The number is added where another mask hides."""
    return (scored(q, k) * marked(seen) - 1e4 * torch.ones(9, 9).triu(1)).softmax(-1) @ v


@form(*QKV, lambda: torch.rand(2, 1, 9, 9) > 0.4, fused=0, reasons=("through mul",))
def scores_times_twice_the_marks(q: Any, k: Any, v: Any, seen: Any) -> Any:
    b = marked(seen)
    return (scored(q, k) * (2 * b) - 1e4 * (1 - b)).softmax(-1) @ v


@form(*QKV)
def softmax_with_zeros_of_its_own(q: Any, k: Any, v: Any) -> Any:
    """Softmax-n: a number of zeros in the sum, shifted as the scores are; one query sees no key."""
    s = scored(q, k).masked_fill(torch.ones(9, 9).tril(-2).bool().flip(0), -1e9)
    highest = s.max(dim=-1, keepdim=True).values
    e = torch.exp(torch.subtract(s, highest))
    zeros = torch.exp(torch.multiply(highest, -1)) * 2
    return (e / torch.add(e.sum(dim=-1, keepdim=True), zeros)) @ v


@form(*QKV)
def quiet_attention(q: Any, k: Any, v: Any) -> Any:
    """The largest is raised to the zero, and takes no gradient."""
    s = scored(q, k)
    m = s.detach().amax(-1, keepdim=True).clamp(min=0)
    e = torch.exp(s - m)
    return (e / ((-m).exp() + e.sum(-1, True))) @ v


@form(*QKV)
def zero_in_front_of_the_scores(q: Any, k: Any, v: Any) -> Any:
    """Made of a part of them."""
    s = scored(q, k)
    return torch.cat([torch.zeros_like(s[..., :1]), s], -1).softmax(-1)[..., 1:] @ v


@form(*QKV, fused=0, reasons=("not by their plain sum",))
def another_number_than_zero(q: Any, k: Any, v: Any) -> Any:
    s = scored(q, k)
    m = s.amax(-1, keepdim=True)
    e = torch.exp(s - m)
    return (e / (torch.exp(-2 * m) + e.sum(-1, keepdim=True))) @ v


@form(*QKV, fused=0, reasons=("which is not 1",))
def quiet_weights_normalised_again(q: Any, k: Any, v: Any) -> Any:
    s = scored(q, k)
    m = s.amax(-1, keepdim=True)
    e = torch.exp(s - m)
    w = e / (torch.exp(-m) + e.sum(-1, keepdim=True))
    return (w / w.sum(-1, keepdim=True)) @ v


@form(*QKV, fused=0, reasons=("are also used by",))
def returned_maximum(q: Any, k: Any, v: Any) -> Any:
    s = scored(q, k)
    m = s.amax(-1, keepdim=True)
    e = torch.exp(s - m)
    return (e / (torch.exp(-m) + e.sum(-1, keepdim=True))) @ v, m


@form((2, 16, 9), (9, 4), fused=0, reasons=("sums over another dim",))
def adjacency_of_learned_nodes(x: Any, nodes: Any) -> Any:
    """Rows of a softmax of a function of products, over which the product sums: no keys."""
    return einsum("bcv,vw->bcw", x, (nodes @ nodes.T).relu().softmax(1))


@form((4, 9, 8), (4, 9, 8), (4, 9, 8), fused=0, reasons=("in-between",))
def weights_replaced_by_those_of_another_prompt(q: Any, k: Any, v: Any) -> Any:
    """Parts of the batch are edited and concatenated."""
    kept, edited = (q @ k.mT).softmax(-1).chunk(2)
    return torch.cat([kept, 0.8 * kept + 0.2 * edited]) @ v


@form((4, 9, 8), (4, 9, 8), (4, 9, 8), fused=0, reasons=("in-between",))
def weights_skewed_by_padding(q: Any, k: Any, v: Any) -> Any:
    w = torch.nn.functional.pad((q @ k.mT).softmax(-1), (0, 9)).flatten(1)[:, :-9].view(4, 9, 17)
    return w[..., :9] @ v


@form((2, 4, 5, 9), (2, 4, 5, 9), fused=0, reasons=("mixed-dtypes",))
def weights_of_frequencies(q: Any, k: Any) -> Any:
    """Moduli of complex products, and complex values."""
    q, k = torch.fft.rfft(q), torch.fft.rfft(k)
    w = (q.mT @ k).abs().softmax(-1)
    return torch.fft.irfft(torch.complex(w, torch.zeros_like(w)) @ k.mT)


@form((2, 9, 16), (2, 13, 16), fused=0, reasons=("sums over another dim",))
def matching_normalised_in_turn(q: Any, k: Any) -> Any:
    """Sinkhorn: rows, then columns; the product sums over the dim that is not the last to be normalised."""
    s = einsum("bnd,bmd->bnm", q, k)
    s = s - s.logsumexp(2, keepdim=True)
    return (s - s.logsumexp(1, keepdim=True)).exp() @ k


@form((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8), (2, 9))
def weights_times_a_repeated_mask_of_queries(q: Any, k: Any, v: Any, tokens: Any) -> Any:
    """Ones where a token of the query is not padding, repeated for all keys."""
    seen = tokens.abs().sign()[:, None, :, None].repeat(1, 4, 1, 9)
    return ((q @ k.mT).softmax(-1) * seen) @ v


@form((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8), (2, 9), fused=0, reasons=("in-between",))
def weights_times_a_repeated_mask_that_is_changed(q: Any, k: Any, v: Any, tokens: Any) -> Any:
    seen = tokens.abs().sign()[:, None, :, None].repeat(1, 4, 1, 9)
    seen[..., 0] = 0.5
    return ((q @ k.mT).softmax(-1) * seen) @ v
