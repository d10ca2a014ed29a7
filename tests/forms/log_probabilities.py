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
