"""One linear whose logits several losses read."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .linear_form import form
from .losses import HEAD, TWO


@form(*HEAD, (80,))
def two_vocabularies(h: Any, w: Any, y: Any, c: Any) -> Any:
    """Slices of the classes, each with a loss."""
    logits = F.linear(h, w, c)
    first = F.cross_entropy(logits[..., :48].reshape(-1, 48), y.view(-1) % 48)
    return first + F.cross_entropy(logits[..., 48:].reshape(-1, 32), y.view(-1) % 32)


@form(*HEAD)
def vocabularies_by_split(h: Any, w: Any, y: Any) -> Any:
    parts = F.linear(h, w).float().split([16, 40, 24], dim=-1)
    return sum(F.cross_entropy(part.flatten(0, 1), y.view(-1) % part.shape[-1]) for part in parts)


@form(*HEAD)
def vocabularies_by_chunk(h: Any, w: Any, y: Any) -> Any:
    first, second = F.linear(h, w).chunk(2, -1)
    scored = second.log_softmax(-1).gather(-1, y[..., None] % 40)
    return F.cross_entropy(first.flatten(0, 1), y.view(-1) % 40) - scored.mean()


@form(*HEAD, left=(1, 1), reasons=("used-elsewhere", "used-elsewhere"))
def vocabularies_that_overlap(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w)
    first = F.cross_entropy(logits[..., :48].reshape(-1, 48), y.view(-1) % 48)
    return first + F.cross_entropy(logits[..., 40:].reshape(-1, 40), y.view(-1) % 40)


@form(*HEAD, left=(1, 1), reasons=("amax", "amax"))
def one_vocabulary_is_read_otherwise(h: Any, w: Any, y: Any) -> Any:
    """Then the logits are computed in any case."""
    first, second = F.linear(h, w).chunk(2, -1)
    loss = F.cross_entropy(first.flatten(0, 1), y.view(-1) % 40)
    return loss + F.cross_entropy(second.flatten(0, 1), y.view(-1) % 40), second.amax(-1)


@form(*HEAD, (40,))
def codebooks(h: Any, w: Any, y: Any, c: Any) -> Any:
    """MTP heads, audio codecs: a view of the classes, one head at a time; a bias of all heads."""
    logits = F.linear(h, w).view(2, 12, 2, 40) + c
    losses = [F.cross_entropy(logits[:, :-1, k].flatten(0, 1), y[:, 1:].flatten() % 40) for k in (0, -1)]
    return torch.stack(losses).mean()


@form(*HEAD)
def codebooks_in_front(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w).unflatten(-1, (2, 40)).permute(2, 1, 0, 3)
    return sum(F.cross_entropy(each.flatten(0, 1), y.t().flatten() % 40) for each in logits.unbind(0))


@form(*HEAD)
def codebooks_of_some_classes(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w).view(2, 12, 2, 40)
    first = F.cross_entropy(logits[:, 1:, 0, :32].flatten(0, 1), y[:, 1:].flatten() % 32)
    second = logits.transpose(0, 2)[..., :32].select(0, 1)
    return first + F.cross_entropy(second.flatten(0, 1), y.t().flatten() % 32, reduction="none")


@form(*HEAD, (40,), left=(1, 1), reasons=TWO)
def codebooks_with_a_bias_of_more_classes(h: Any, w: Any, y: Any, c: Any) -> Any:
    logits = (F.linear(h, w).view(24, 2, 40) + c)[:, 0][:, :32]
    return F.cross_entropy(logits, y.view(-1) % 32)


@form(*HEAD, left=(1, 1), reasons=("several heads", "several heads"))
def codebooks_in_one_loss(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w).view(2, 12, 2, 40)
    return F.cross_entropy(logits.reshape(-1, 40), (y[..., None] % 40).expand(2, 12, 2).reshape(-1))


@form(*HEAD, (80, 32))
def stacked_heads(h: Any, w: Any, y: Any, v: Any) -> Any:
    """MusicGen: the logits of all heads are put into one tensor."""
    logits = torch.stack([F.linear(h, w), F.linear(h, v)], dim=1)
    losses = [F.cross_entropy(logits[:, k].contiguous().view(-1, 80), y.view(-1)) for k in range(2)]
    return losses[0] + 0.5 * losses[1]


@form(*HEAD, (80, 32), reasons=("several heads", "several heads"))
def stacked_heads_in_one_loss(h: Any, w: Any, y: Any, v: Any) -> Any:
    logits = torch.stack([F.linear(h, w), F.linear(h, v)], dim=1)
    return F.cross_entropy(logits.transpose(1, 2).reshape(-1, 80), y.view(-1).repeat_interleave(2))


@form(*HEAD)
def prompt_and_completion(h: Any, w: Any, y: Any) -> Any:
    """Rows of one linear, each with a loss."""
    logits = F.linear(h, w)
    prompt = F.cross_entropy(logits[:, :-5].flatten(0, 1), y[:, :-5].flatten())
    return prompt, F.cross_entropy(logits[:, -5:].flatten(0, 1), y[:, -5:].flatten(), reduction="none")


@form(*HEAD)
def chosen_and_rejected(h: Any, w: Any, y: Any) -> Any:
    """DPO: two halves of a batch."""
    chosen, rejected = F.linear(h, w).log_softmax(-1).chunk(2, dim=0)
    chosen, rejected = (each.gather(-1, y[:1, :, None]) for each in (chosen, rejected))
    return (chosen - rejected).sum()


@form(*HEAD, left=(1, 1), reasons=("used-elsewhere", "used-elsewhere"))
def chosen_alone_again(h: Any, w: Any, y: Any) -> Any:
    """ORPO: what one loss reads, another one reads as well."""
    logits = F.linear(h, w)
    chosen = F.cross_entropy(logits[:1].flatten(0, 1), y[0])
    return chosen + logits.log_softmax(-1).gather(-1, y[..., None]).mean()


@form(*HEAD, left=(1, 1), reasons=("the logsumexp of a linear's result is read by exp,",) * 2)
def probability_of_two_equal_draws(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w)
    return torch.exp(torch.logsumexp(2 * logits, -1) - 2 * torch.logsumexp(logits, -1))


@form(*HEAD, left=(1, 1), reasons=("overwritten", "overwritten"))
def halves_scaled_in_place(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w)
    logits /= 0.7
    first, second = logits.chunk(2)
    return F.cross_entropy(first[0], y[0]) * F.cross_entropy(second[0], y[1])
