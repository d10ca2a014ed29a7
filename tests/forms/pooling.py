"""One query for many keys: states of decoders, pooling, experts, memories of linears, media."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .form import form

einsum = torch.einsum


def lengths() -> torch.Tensor:
    return torch.tensor([13, 5])


@form((2, 16), (2, 13, 16), lengths)
def decoder_state_squeezed(state: Any, memory: Any, n: Any) -> Any:
    """Luong: one query for each sample, whose dim goes before the softmax and comes back."""
    scores = torch.bmm(memory, state.unsqueeze(2)).squeeze(2)
    scores = scores.masked_fill(torch.arange(13)[None] >= n[:, None], float("-inf"))
    return torch.bmm(torch.softmax(scores, 1).unsqueeze(1), memory).squeeze(1)


@form((2, 16), (2, 13, 16), lengths)
def decoder_state_by_index(state: Any, memory: Any, n: Any) -> Any:
    scores = (memory @ state[:, :, None])[:, :, 0] / 4
    scores = torch.where(torch.arange(13) < n[:, None], scores, -1e9)
    return (scores.softmax(-1)[:, None] @ memory)[:, 0]


@form((2, 9, 8), (2, 7, 8), (1, 24), fused=0, reasons=("keys of its own",))
def questions_of_a_context(context: Any, question: Any, w: Any) -> Any:
    """BiDAF: a linear scores each pair."""
    c = context[:, :, None].expand(-1, -1, 7, -1)
    q = question[:, None].expand(-1, 9, -1, -1)
    scores = F.linear(torch.cat([c, q, c * q], dim=-1), w).squeeze(-1)
    return scores.softmax(-1) @ question


@form((2, 13, 8), (2, 13, 8), (1, 8), (2, 13))
def decoder_state_by_a_linear(x: Any, memory: Any, w: Any, bias: Any) -> Any:
    scores = F.linear(torch.tanh(x), w).squeeze(-1) + bias
    return torch.bmm(scores.softmax(1)[:, None], memory).squeeze(1)


@form((2, 9, 8), (2, 9, 9, 8), (3, 8), fused=0, reasons=("keys of its own",))
def weights_of_pairs(v: Any, pairs: Any, w: Any) -> Any:
    """As AlphaFold 3: each row of the pairs is one of keys."""
    return (pairs @ w.T).permute(0, 3, 1, 2).softmax(-1) @ v[:, None]


@form((3, 8), (2, 9, 8), (2, 3, 9, 8), fused=0, reasons=("values of their own",))
def weights_of_experts(q: Any, k: Any, v: Any) -> Any:
    return (q @ k.mT).softmax(-1)[:, :, None] @ v


@form((2, 5, 9, 4, 8), (2, 9, 9, 16), (16, 4), fused=0, reasons=("values of their own",))
def weights_of_pairs_for_values_of_heads(m: Any, pairs: Any, w: Any) -> Any:
    """Boltz: the heads share the row of pairs that is their keys."""
    weights = (pairs @ w).permute(0, 3, 1, 2).softmax(-1)
    return einsum("bhij,bhsjd->bhsid", weights, m.permute(0, 3, 1, 2, 4))


@form((2, 5, 8), (2, 9, 8), fused=0, reasons=("used-elsewhere",))
def scores_normed_before_a_matrix_of_them(q: Any, c: Any) -> Any:
    s = torch.bmm(c, q.mT)
    s = s / (s.pow(2).sum(2, keepdim=True).sqrt() + 1e-8)
    return (s.mT.contiguous().view(-1, 9) * 4).softmax(-1).view(2, 5, 9) @ c


@form((8,), (2, 13, 8))
def pooling_by_a_learned_query(query: Any, x: Any) -> Any:
    return einsum("bn,bnd->bd", (einsum("d,bnd->bn", query, x) * 0.3).softmax(-1), x)


@form((2, 3, 8), (13, 2, 3, 8), (13, 2, 3, 8))
def pooling_of_heads_keys_first(q: Any, k: Any, v: Any) -> Any:
    return einsum("nbh,nbhd->bhd", (einsum("nbhd,bhd->nbh", k, q) * 0.3).softmax(0), v)


@form((2, 7, 16), (2, 7, 5, 16), (2, 7, 5, 3))
def neighbours_of_points(q: Any, k: Any, v: Any) -> Any:
    return einsum("bnk,bnkc->bnc", (einsum("bnd,bnkd->bnk", q, k) * 0.25).softmax(-1), v)


@form((2, 7, 16), (2, 7, 16), fused=0, reasons=("no-product",))
def points_with_themselves(q: Any, k: Any) -> Any:
    """Each row has a query of its own: nothing is shared."""
    return einsum("bn,bnd->bd", (einsum("bnd,bnd->bn", q, k) * 0.25).softmax(-1), k)


@form((2, 9, 16), (2, 1, 16))
class AdditiveAttention(nn.Module):
    """Bahdanau: a linear of one output is the query of all keys; a softmax does not see its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.state, self.score = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(8, 1)

    def forward(self, memory: Any, state: Any) -> Any:
        scores = self.score(torch.tanh(self.keys(memory) + self.state(state))).squeeze(-1)
        return torch.bmm(F.softmax(scores, dim=-1).unsqueeze(1), memory).squeeze(1)


@form((9, 4, 8), (9, 4, 8), (8,), lambda: torch.eye(9) > 0)
def attention_of_pairs_by_a_vector(left: Any, right: Any, a: Any, edges: Any) -> Any:
    """GATv2: heads come last, and the softmax is over the second of both nodes."""
    scores = F.leaky_relu(left[:, None] + right[None], 0.2) @ a
    return einsum("ijh,jhf->ihf", scores.masked_fill(~edges[..., None], -1e9).softmax(1), right)


@form((9, 16), (16,), (16,), fused=0, reasons=("no product of queries",))
def attention_of_sums_of_two_numbers(h: Any, a: Any, b: Any) -> Any:
    """GAT: products with a vector are a number of each node, and no scores."""
    return F.leaky_relu((h @ a)[:, None] + (h @ b)[None], 0.2).softmax(1) @ h


@form((2, 9, 16), (2, 7, 16), fused=0, reasons=("max is between the product",))
def most_alike_questions(context: Any, question: Any) -> Any:
    """BiDAF: the largest score of each word of the context."""
    scores = (context @ question.mT).max(2)[0]
    return scores.softmax(1).unsqueeze(1) @ context


@form((20, 16))
class PoolingOfInstances(nn.Module):
    """Gated pooling of a bag of instances, by three queries."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate, self.score = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        scores = self.score(torch.tanh(self.value(x)) * torch.sigmoid(self.gate(x)))
        return torch.mm(F.softmax(torch.transpose(scores, 1, 0), dim=1), x)


@form((2, 9, 16), (4, 16, 8), fused=0, reasons=("no-product",))
class ChoiceOfExperts(nn.Module):
    """Each token weighs experts of its own: nothing is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)

    def forward(self, x: Any, experts: Any) -> Any:
        return einsum("bne,bnef->bnf", self.router(x).softmax(-1), einsum("bnd,edf->bnef", x, experts))


@form((4, 9), fused=0, reasons=())
def entropy_of_a_categorical(logits: Any) -> Any:
    """It multiplies the probabilities by their logarithms, which it clamps: no weights and values."""
    return torch.distributions.Categorical(logits=logits, validate_args=False).entropy().mean()


@form((4, 9), (4, 9), fused=0, reasons=("no-product",))
def pooling_of_clamped_values(logits: Any, values: Any) -> Any:
    return (logits.softmax(-1) * values.clamp(min=0)).sum(-1)


class Memory(nn.Module):
    """Keys and values of a memory are the weights of two linears."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(16, 12), nn.Linear(12, 16, bias=bias)

    def forward(self, x: Any) -> Any:
        return self.values(F.softmax(self.keys(x) * 0.5, dim=-1))


form((2, 9, 16))(type("MemoryOfLinears", (Memory,), {}))


form((2, 9, 16), fused=0, reasons=("in-between",))(
    type("MemoryWithABias", (Memory,), {"__init__": lambda self: Memory.__init__(self, bias=True)})
)


@form((2, 9, 16), (2, 3, 16), lambda: torch.tensor([0, 1, 1, 1, 1, 2, 2, 3, 3]))
def media_in_front(x: Any, media: Any, count: Any) -> Any:
    """Each token attends to the medium before it; what stands in front of the first one gets nothing."""
    sim = einsum("bid,bjd->bij", x, media) * 0.25
    sim = sim.masked_fill(count[:, None] != torch.arange(1, 4), -torch.finfo(sim.dtype).max)
    sim = sim - sim.amax(dim=-1, keepdim=True).detach()
    return sim.softmax(-1).masked_fill((count == 0)[:, None], 0.0) @ media


@form((2, 9, 16), (2, 3, 16), lambda: torch.zeros(9, 3), fused=0, reasons=("empty-rows",))
def rows_that_a_mask_may_hide(x: Any, media: Any, mask: Any) -> Any:
    """It is not known whether the mask holds -inf, and the gradient of a kernel be NaN."""
    weights = (einsum("bid,bjd->bij", x, media) + mask).softmax(-1)
    return weights.masked_fill((torch.arange(9) < 2)[:, None], 0.0) @ media
