"""What is done to scores: scales and biases of queries, keys and heads, marks, sums of two products."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .form import QKV, form, forms, scored, some

einsum = torch.einsum


def slopes(dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(9.0) * torch.tensor([0.5, 0.3, 0.2, 0.1])[:, None]).to(dtype)


def of_scores(change: Any) -> Any:
    """An attention whose scores are changed in front of the softmax."""
    return lambda q, k, v, *further: change(scored(q, k), *further).softmax(-1) @ v


def of_products(change: Any) -> Any:
    """The same of products without their scale."""
    return lambda q, k, v, *further: change(q @ k.mT, *further).softmax(-1) @ v


forms(*QKV, of=of_scores)(
    # As RAD-TTS: the logsumexp is a number of each row.
    log_softmax_and_a_prior=(
        lambda s, prior: s.log_softmax(-1) + torch.log(prior + 1e-8), lambda: torch.rand(2, 1, 9, 9),
    ),
    # The softmax does not see it, and its gradient is zero.
    bias_of_queries=(lambda s, bias: s + bias, (4, 9, 1)),
    # It absorbs the scores.
    mask_of_queries=lambda s: s + torch.where(torch.arange(9) < 3, -1e9, 0.0)[:, None],
)  # fmt: skip
forms(*QKV, of=of_scores, fused=0, reasons=("in-between",))(
    scores_mixed_by_einsum=(lambda s, mix: einsum("bhij,hg->bgij", s, mix), (4, 4)),
    scores_of_mixed_heads=(lambda s, mix: (s.permute(0, 2, 3, 1) @ mix).permute(0, 3, 1, 2), (4, 4)),
    log_softmax_over_the_queries=lambda s: s.log_softmax(-2),
    function_of_log_softmax=lambda s: s.log_softmax(-1).tanh(),
    scores_normed_by_layer=lambda s: torch.nn.functional.layer_norm(s, (9,)),
)
forms(*QKV, of=of_products, fused=0, reasons=("flex attention",))(
    temperatures_of_pairs=(lambda s, temperature: s * temperature, (2, 4, 9, 9)),
    temperatures_of_biased_keys=(lambda s, t, bias: (s + bias) * t, (2, 4, 1, 9), (4, 9, 9)),
    temperatures_of_biased_queries=(lambda s, t, bias: (s + bias) * t, (2, 4, 9, 1), (4, 9, 9)),
)


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


def without_keys(scores: Any) -> Any:
    """One query of the second sample sees no key."""
    hidden = torch.zeros(2, 1, 9, 9, dtype=torch.bool).index_fill(-1, torch.tensor([3, 4]), True)
    hidden[1, :, 2] = True
    return scores.masked_fill(hidden, -1e9)


@form(*QKV, (9, 9), fused=0, reasons=("empty-rows",))
def log_softmax_of_rows_without_keys(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """The logsumexp takes the fill away, so such a row has the weights of the bias."""
    return (without_keys(scored(q, k)).log_softmax(-1) + bias).softmax(-1) @ v


@form(*QKV, (9, 9), fused=0, reasons=("empty-rows",))
def bias_behind_the_largest_score_of_fills(q: Any, k: Any, v: Any, bias: Any) -> Any:
    s = without_keys(scored(q, k))
    return (s - s.amax(-1, keepdim=True) + bias).softmax(-1) @ v


@form(*QKV, (9, 9))
def bias_in_front_of_the_largest_score(q: Any, k: Any, v: Any, bias: Any) -> Any:
    s = without_keys(scored(q, k) + bias)
    return (s - s.amax(-1, keepdim=True)).softmax(-1) @ v


forms(*QKV, of=of_scores)(
    # As CogView: what is the same for all queries is the same for each.
    less_the_largest_of_heads=lambda s: s - s.amax((-1, -2), keepdim=True).detach(),
    less_the_mean_of_samples=lambda s: s - s.mean((1, 2, 3), keepdim=True),
)
forms(*QKV, of=of_scores, fused=0, reasons=("used-elsewhere",))(
    less_the_logsumexp_of_heads=lambda s: s - s.logsumexp((-1, -2), keepdim=True),
    less_the_largest_of_queries_and_heads=lambda s: s - s.amax((1, 2), keepdim=True),
)


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


@form(*QKV, (4, 9, 9), (4, 1, 1))
def temperatures_of_biased_heads(q: Any, k: Any, v: Any, bias: Any, temperature: Any) -> Any:
    """The bias takes the scale as well."""
    scores = (q @ k.mT + bias) * temperature.exp()
    return (scores / torch.sqrt(temperature[0].abs() + 1)).softmax(-1) @ v


@form(*((8, 9, 8),) * 3, (8, 9, 9), ())
def temperature_behind_baddbmm(q: Any, k: Any, v: Any, bias: Any, temperature: Any) -> Any:
    return (torch.baddbmm(bias, q, k.mT) * temperature.exp()).softmax(-1) @ v


@form((2, 9, 16), (2,), parts=lambda: dict(keys=nn.Linear(16, 12), values=nn.Linear(12, 16, bias=False)))
def scaled_linear_of_keys(net: Any, x: Any, temperature: Any) -> Any:
    """A memory whose linear has a bias of keys, with a learned temperature."""
    return net.values((net.keys(x) * temperature[0]).softmax(-1))


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


@form(*QKV, (2, 4, 9, 3, 5))
def features_and_vectors(q: Any, k: Any, v: Any, vectors: Any) -> Any:
    """Both by the same weights; the result of one is changed before the values of the other are there."""
    w = scored(q, k).softmax(-1)
    x = (w @ v).transpose(1, 2).flatten(2)
    x += 1
    return x, einsum("bhij,bhjcd->bihcd", w, vectors.relu())


@form((2, 9, 8), (2, 9, 8), (2, 9, 8), (2, 9, 3), lambda: torch.rand(2, 1, 9) > 0.4)
def features_and_coordinates(q: Any, k: Any, v: Any, x: Any, hidden: Any) -> Any:
    """The rows of one sample are fully masked."""
    hidden = hidden | (torch.arange(2) == 1)[:, None, None]
    w = scored(q, k).masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0)
    return w @ v, w.bmm(x) - x


def marked(seen: torch.Tensor) -> torch.Tensor:
    """Drawn marks on lower triangles: one row is fully masked."""
    return torch.ones(9, 9).tril() * (seen & (torch.arange(9) != 3)[:, None]).float()


forms(*QKV, lambda: torch.rand(2, 1, 9, 9) > 0.4, fused=0, reasons=("through mul",), of=of_scores)(
    # The number is added where another mask hides.
    scores_times_other_marks=lambda s, seen: s * marked(seen) - 1e4 * torch.ones(9, 9).triu(1),
)


@form(*QKV, lambda: torch.rand(2, 1, 9, 9) > 0.4)
def scores_times_marks(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """As the first GPT-2 has its mask: what is hidden is multiplied by 0 and gets a number."""
    b = marked(seen)
    return (scored(q, k) * b - 1e4 * (1 - b)).softmax(-1) @ v


@form(*QKV, lambda: torch.rand(2, 1, 9, 9) > 0.4, fused=0, reasons=("through mul",))
def scores_times_twice_the_marks(q: Any, k: Any, v: Any, seen: Any) -> Any:
    b = marked(seen)
    return (scored(q, k) * (2 * b) - 1e4 * (1 - b)).softmax(-1) @ v


@form(*QKV, (2, 4, 9, 8), fused=3)
def scores_added_to_those_of_the_next_layer(q: Any, k: Any, v: Any, x: Any) -> Any:
    """Uni-Mol adds them in place: the new ones are overwritten, not those that are added."""
    scores, total = None, x
    for _ in range(3):
        made = scored(total + q, k)
        if scores is not None:
            made += scores
        scores, total = made, made.softmax(-1) @ v
    return total


@form(*QKV, fused=0, reasons=("used-elsewhere",) * 2)
def scores_that_the_next_layer_overwrites(q: Any, k: Any, v: Any) -> Any:
    scores = scored(q, k)
    x = scores.softmax(-1) @ v
    scores += scored(x, k)
    return scores.softmax(-1) @ v


def of_a_mask_like(make: Any) -> Any:
    """An attention whose mask is made by what `make` gives of the scores, of which it reads no value."""
    return lambda q, k, v: (torch.triu(make(s := scored(q, k)), 1) + s).softmax(-1) @ v


forms(*QKV, of=of_a_mask_like)(
    mask_by_new=lambda s: s.new([-1e9]).expand(9, 9).clone(),
    mask_by_new_of_a_size=lambda s: s.new(9, 9).fill_(-1e9),
    mask_by_new_empty=lambda s: s.new_empty(9, 9).fill_(-1e9),
    mask_like_data=lambda s: s.data.new_full((9, 9), -1e9),
    mask_like_detached_scores=lambda s: torch.full_like(s.detach(), -1e9),
    mask_of_the_size_of_data=lambda s: torch.full((s.data.shape[-1],) * 2, -1e9),
)


@form((3, 9, 8), (3, 9, 8), (3, 9, 8), fused=0, reasons=("in-between",))
def softmax_written_into_the_scores(q: Any, k: Any, v: Any) -> Any:
    """As optimised Stable Diffusion does it to save memory."""
    scores = scored(q, k)
    scores[:] = scores.softmax(-1)
    return scores @ v


@form((3, 9, 8), (3, 9, 8), (3, 9, 8), fused=0, reasons=("in-between",) * 2)
def softmax_of_halves_written_into_the_scores(q: Any, k: Any, v: Any) -> Any:
    scores = scored(q, k)
    scores[1:] = scores[1:].softmax(-1)
    scores[:1] = scores[:1].softmax(-1)
    return scores @ v


@form((2, 9, 16), (32, 16), (2, 4, 8, 8), fused=0, reasons=("no-product",))
def heads_of_a_linear(x: Any, w: Any, v: Any) -> Any:
    """Memory slots of several heads."""
    return torch.nn.functional.linear(x, w).view(2, 9, 4, 8).transpose(1, 2).softmax(-1) @ v


@form((2, 9, 12), (2, 9, 16), (1, 12), fused=0, reasons=("no-product",))
def linear_of_rows_viewed_as_samples(x: Any, values: Any, w: Any) -> Any:
    """Attention of image captioning (bottom-up, top-down)."""
    weights = torch.nn.functional.linear(x.view(-1, 12), w).view(2, 9).softmax(1)
    return torch.bmm(weights.unsqueeze(1), values)
