"""Log-probabilities of logits less their logsumexp, which are a log_softmax."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .linear_form import form
from .losses import HEAD


@form(*HEAD)
def logits_less_their_logsumexp(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w).float() / 0.7
    return (logits - torch.logsumexp(logits, -1, keepdim=True)).gather(-1, y[..., None])


@form(*HEAD)
def a_loss_of_logits_less_their_logsumexp(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w).flatten(0, 1)
    return F.nll_loss(logits - logits.logsumexp(1)[:, None], y.flatten())


@form(*HEAD)
def with_a_penalty_on_the_same_logsumexp(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w)
    lse = logits.logsumexp(-1, keepdim=True)
    return (0.1 * lse**2 - (logits - lse).gather(-1, y[..., None])).mean()


@form(*HEAD)
def log_prob_of_categorical(h: Any, w: Any, y: Any) -> Any:
    """PPO."""
    return torch.distributions.Categorical(logits=F.linear(h, w)).log_prob(y)


@form(*HEAD)
def log_prob_and_entropy_of_categorical(h: Any, w: Any, y: Any) -> Any:
    d = torch.distributions.Categorical(logits=F.linear(h, w), validate_args=False)
    return (d.log_prob(y) * 2).mean(), d.entropy()


@form(*HEAD, left=(1, 1), reasons=("also read by",) * 2)
def log_prob_of_the_same_labels_in_each_sample(h: Any, w: Any, y: Any) -> Any:
    """The labels are broadcast."""
    return torch.distributions.Categorical(logits=F.linear(h, w), validate_args=False).log_prob(y[:1])


@form(*HEAD, reasons=("read by gather", "read by gather"))
def less_the_logsumexp_of_other_logits(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w).float()
    return (logits - (logits * 2).logsumexp(-1, keepdim=True)).gather(-1, y[..., None])


@form((80, 32), (80, 32), lambda: torch.arange(80), left=(1, 1), reasons=("read by gather", "read by gather"))
def less_the_logsumexp_of_another_row(h: Any, w: Any, y: Any) -> Any:
    """That of row j is subtracted from class j."""
    logits = F.linear(h, w)
    return (logits - logits.logsumexp(-1)).gather(-1, y[:, None])


@form(*HEAD, left=(0, 1), reasons=("", "mode"))
def less_a_constant_logsumexp(h: Any, w: Any, y: Any) -> Any:
    """Its gradient is another one."""
    logits = F.linear(h, w)
    with torch.no_grad():
        lse = logits.logsumexp(-1, keepdim=True)
    return (logits - lse).gather(-1, y[..., None])


@form(*HEAD, left=(1, 1), reasons=("also read by",) * 2)
def all_log_probabilities_are_returned(h: Any, w: Any, y: Any) -> Any:
    d = torch.distributions.Categorical(logits=F.linear(h, w), validate_args=False)
    return d.log_prob(y), d.logits * 2


@form(*HEAD, left=(1, 1), reasons=("read by its number", "read by its number"))
def one_class_by_its_number(h: Any, w: Any, y: Any) -> Any:
    return F.log_softmax(F.linear(h, w), -1)[..., 5]


@form(*HEAD)
def one_class_by_labels(h: Any, w: Any, y: Any) -> Any:
    logs = F.log_softmax(F.linear(h, w), -1)
    return logs.gather(-1, torch.full_like(logs[..., :1], 5, dtype=torch.long))


@form(*HEAD, left=(1, 1), silent="linear_cross_entropy")
def one_row_that_is_returned(h: Any, w: Any, y: Any) -> Any:
    logs = F.log_softmax(F.linear(h, w), -1)
    return logs[:, -1], logs[0]


@form(*HEAD, left=(1, 1), reasons=("gather is between", "gather is between"))
def softmax_of_a_few_classes(h: Any, w: Any, y: Any) -> Any:
    """The label and classes that are drawn."""
    some = F.linear(h, w).gather(-1, torch.stack([y, y.roll(1)], -1))
    return -F.log_softmax(some, -1)[..., 0].mean()


def summed_by_rows(logits: Any, rows: int = 7) -> Any:
    """The logsumexp of a few rows at a time, each written into a part of a tensor."""
    found = logits.new_zeros(len(logits))
    for i in range(0, len(logits), rows):
        found[i : i + rows] = torch.logsumexp(logits[i : i + rows], -1)
    return found


@form(*HEAD)
def less_the_logsumexp_of_a_few_rows(h: Any, w: Any, y: Any) -> Any:
    """OpenRLHF, in float32."""
    logits = F.linear(h, w).float().view(-1, 80)
    return logits.gather(1, y.view(-1, 1)).squeeze(1) - summed_by_rows(logits)


@form(*HEAD, (80,))
def less_joined_logsumexps_beside_an_entropy(h: Any, w: Any, y: Any, c: Any) -> Any:
    logits = torch.sigmoid(F.linear(h, w, c)[:, 1:].flatten(0, 1) + 1) * 9 + 2
    taken = logits.gather(1, y[:, 1:].flatten()[:, None]).squeeze(1)
    logs = taken - torch.cat([torch.logsumexp(part, -1) for part in logits.split(9)])
    return logs, -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


@form(*HEAD)
def less_a_constant_logsumexp_of_a_few_rows(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w).view(-1, 80)
    with torch.no_grad():
        lse = summed_by_rows(logits)
    return logits[torch.arange(24), y.view(-1)] - lse


@form(*HEAD, left=(1, 1), reasons=("read by cat", "read by cat"))
def less_the_logsumexp_of_the_first_rows(h: Any, w: Any, y: Any) -> Any:
    """Most logits are not read: only those of the labels."""
    logits = F.linear(h, w).view(-1, 80)
    lse = torch.cat([logits[:4].logsumexp(-1), logits[4:8].logsumexp(-1)]).repeat(3)
    return logits.gather(1, y.view(-1, 1)).squeeze(1) - lse


@form(*HEAD, left=(1, 1), reasons=("read by cat", "read by cat"))
def less_logsumexps_of_which_one_is_scaled(h: Any, w: Any, y: Any) -> Any:
    first, second = (logits := F.linear(h, w).view(-1, 80)).split(12)
    lse = torch.cat([first.logsumexp(-1), (second * 2).logsumexp(-1)])
    return logits.gather(1, y.view(-1, 1)).squeeze(1) - lse


@form(*HEAD, left=(1, 1), reasons=("read by cat", "read by cat"))
def logits_of_labels_that_are_returned(h: Any, w: Any, y: Any) -> Any:
    """They have more digits than their difference from the logsumexp."""
    logits = F.linear(h, w).view(-1, 80)
    taken = logits.gather(1, y.view(-1, 1)).squeeze(1)
    return taken - torch.cat([part.logsumexp(-1) for part in logits.split(12)]), taken
