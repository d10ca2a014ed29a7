"""Entropies of logits, alone and beside log-probabilities, as trainers of policies write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from .linear_form import form, forms
from .losses import HEAD

_LEFT: dict[str, Any] = {"left": (1, 1), "reasons": ("used-elsewhere", "used-elsewhere")}
_REPORTED: dict[str, Any] = {"left": (1, 1), "reasons": ("losses of one label",) * 2}


def entropy(logits: Any) -> Any:
    """verl, open-instruct and OpenRLHF."""
    return torch.logsumexp(logits, dim=-1) - torch.sum(F.softmax(logits, dim=-1) * logits, dim=-1)


def entropy_of_chunks(logits: Any, rows: int = 8) -> Any:
    """TRL: a few rows at a time."""
    found = []
    for part in logits.reshape(-1, logits.shape[-1]).split(rows, dim=0):
        logs = F.log_softmax(part, dim=-1)
        found.append(-(torch.exp(logs) * logs).sum(-1))
    return torch.cat(found).reshape(logits.shape[:-1])


def picked(logits: Any, y: Any) -> Any:
    """TRL and verl, in bfloat16: one sample at a time."""
    pairs = zip(logits, y.unsqueeze(-1), strict=True)
    return torch.stack([F.log_softmax(each, dim=-1).gather(-1, label) for each, label in pairs]).squeeze(-1)


def of_logits(made: Any) -> Any:
    """Of the logits of a linear, and of the labels."""
    return lambda h, w, y, *bias: made(F.linear(h, w, *bias), y)


def of_logs(summed: Any) -> Any:
    """Of log-probabilities."""
    return lambda h, w, y: summed(F.log_softmax(F.linear(h, w), -1))


forms(*HEAD, of=of_logits)(
    entropy_alone=lambda logits, y: entropy(logits.float() / 0.7),
    entropy_alone_of_chunks=(lambda logits, y: entropy_of_chunks(logits[:, 1:]), (80,)),
    categorical=lambda logits, y: torch.distributions.Categorical(None, logits, False).entropy(),
    entropy_of_some_rows=lambda logits, y: (
        F.cross_entropy(logits.mT, y, reduction="none"), entropy(logits[:, -3:]), entropy(logits[1]),
    ),
    entropy_of_a_padded_vocabulary=(
        lambda logits, y: (F.cross_entropy(logits[..., :72].mT, y), entropy(logits[..., :72])), (80,),
    ),
)  # fmt: skip
forms(*HEAD, of=of_logits, left=(1, 1), reasons=("used-elsewhere", "used-elsewhere"))(
    # An option of verl.
    checkpointed_entropy=lambda logits, y: (
        picked(logits, y), torch.utils.checkpoint.checkpoint(entropy, logits, use_reentrant=False),
    ),
    entropy_of_more_rows=lambda logits, y: (F.cross_entropy(logits[:, 1:].mT, y[:, 1:]), entropy(logits)),
    entropy_of_other_logits=lambda logits, y: (picked(logits, y), entropy(logits * 2)),
    entropy_of_some_classes=lambda logits, y: (picked(logits, y), entropy(logits[..., :72])),
    # Some logits would be computed twice, or some for nothing.
    entropies_that_overlap=lambda logits, y: (entropy(logits[0]), entropy(logits[:, 3:8])),
    entropy_and_its_probabilities=lambda logits, y: (
        -((p := (logs := F.log_softmax(logits, -1)).exp()) * logs).sum(-1), p,
    ),
)  # fmt: skip
forms(*HEAD, of=of_logs, left=(1, 1), reasons=("losses of one label",) * 2)(
    # The gradient is another one.
    constant_probabilities=lambda logs: -(logs.exp().detach() * logs).sum(-1),
    mean_over_the_classes=lambda logs: (logs.exp() * logs).mean(-1),
    sum_over_all=lambda logs: -(logs.exp() * logs).sum(),
)


@form(*HEAD)
def mean_of_a_capped_entropy(h: Any, w: Any, y: Any) -> Any:
    logits = 3 * torch.tanh(F.linear(h, w).float() / 3)
    return (F.softmax(logits, -1) * -F.log_softmax(logits, -1)).sum(-1, keepdim=True).mean()


@form(*HEAD)
def entropy_written_in_chunks(h: Any, w: Any, y: Any) -> Any:
    """verl: each into a part of a tensor; the last one is shorter."""
    logits = F.linear(h, w).flatten(0, 1)
    found = torch.zeros(24)
    for i in range(0, 24, 10):
        found[i : i + 10] = entropy(logits[i : i + 10].float())
    return found


@form(*HEAD)
def grpo(h: Any, w: Any, y: Any) -> Any:
    """TRL: log-probabilities of the completion at a temperature; the entropy is only watched."""
    logits = F.linear(h, w)[:, :-1][:, -7:] / 0.9
    logs = picked(logits, y[:, -7:])
    with torch.no_grad():
        return logs, entropy_of_chunks(logits)


@form(*HEAD)
def entropy_in_front(h: Any, w: Any, y: Any) -> Any:
    """Gradients are on again where the log-probabilities are computed."""
    logits = F.linear(h, w)
    with torch.no_grad():
        watched = entropy_of_chunks(logits, 12).mean()
    return picked(logits, y).sum() + watched


@form(*HEAD)
def scaled_in_place_by_a_temperature(h: Any, w: Any, y: Any) -> Any:
    """verl: an entropy bonus."""
    logits = F.linear(h, w).float()
    logits.div_(0.8)
    logs = logits.gather(-1, y[..., None]).squeeze(-1) - logits.logsumexp(-1)
    return logs.sum() - 0.01 * entropy(logits).mean()


@form(*HEAD)
def one_softmax_for_both(h: Any, w: Any, y: Any) -> Any:
    logs = F.log_softmax(F.linear(h, w), -1, dtype=torch.float32)
    return logs.gather(-1, y[..., None]), -(logs.exp() * logs).sum(-1)


@form(*HEAD)
def one_logsumexp_for_both(h: Any, w: Any, y: Any) -> Any:
    """The logsumexp is returned as well."""
    logits = F.linear(h, w)
    lse = logits.logsumexp(-1)
    mean = (logits.softmax(-1) * logits).sum(-1)
    return logits.gather(-1, y[..., None]).squeeze(-1) - lse, lse - mean, lse


@form(*HEAD)
def loss_and_entropy_of_detached_logits(h: Any, w: Any, y: Any) -> Any:
    """Ignored tokens have an entropy."""
    logits = F.linear(h, w).view(-1, 80)
    loss = F.cross_entropy(logits, torch.where(y > 9, y, -100).view(-1), label_smoothing=0.1)
    return loss, entropy(logits.detach())


@form(*HEAD, left=(1, 1), reasons=("overwritten", "overwritten"))
def a_cast_that_is_overwritten(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w)
    wide = logits.float()
    wide[:, 1].zero_()
    return F.cross_entropy(logits.mT, y), entropy(wide)


@form(*HEAD)
def old_and_new_policy(h: Any, w: Any, y: Any) -> Any:
    """Two heads, and what is watched of the second one."""
    with torch.no_grad():
        old = picked(F.linear(h, w), y)
    logits = F.linear(h, w * 1.01)
    new = picked(logits, y)
    with torch.no_grad():
        watched = entropy(logits)
    return (new - old).exp().mean(), watched.mean()


@form(*HEAD)
def rows_that_are_gathered(h: Any, w: Any, y: Any) -> Any:
    some = torch.tensor([3, 1, 7])
    logits = F.linear(h, w).flatten(0, 1)[some]
    return F.cross_entropy(logits, y.flatten()[some], reduction="none"), entropy(logits[1:])


@form(*HEAD)
def bonus_in_front_of_views_of_the_labels(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w).flatten(0, 1)
    bonus = entropy_of_chunks(logits).mean() * 2
    return logits.log_softmax(-1).gather(-1, y.flatten().unsqueeze(-1)).sum() - bonus


@form(*HEAD, left=(1, 1), reasons=("in front of", "in front of"))
def bonus_in_front_of_a_copy_of_the_labels(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w)[:, :-1]
    bonus = entropy(logits).mean() * 2
    return F.cross_entropy(logits.flatten(0, 1), y[:, 1:].flatten()) - bonus


@form(*HEAD, left=(1, 1), reasons=("in front of", "in front of"))
def bonus_in_front_of_the_labels(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w)
    bonus = entropy(logits).mean() * 2
    return F.cross_entropy(logits.mT, y.roll(1, 1)) - bonus


@form(*HEAD, left=(0, 1), reasons=("", "used-elsewhere"))
def bonus_beside_what_is_watched(h: Any, w: Any, y: Any) -> Any:
    """The log-probabilities take no gradient, and the entropy does."""
    logits = F.linear(h, w)
    with torch.no_grad():
        logs = picked(logits, y)
    return logs, entropy(logits)


@form(*HEAD, **_REPORTED)
def cross_entropy_of_two_temperatures(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w)
    return -(F.softmax(logits * 2, -1) * F.log_softmax(logits, -1)).sum(-1)


@form(*HEAD, left=(0, 1), reasons=("", "losses of one label"))
def probabilities_without_gradient(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w)
    with torch.no_grad():
        p = F.softmax(logits, -1)
    return -(p * F.log_softmax(logits, -1)).sum(-1)


@form(*HEAD, left=(1, 1), reasons=("probabilities", "probabilities"))
def logarithm_of_a_sum(h: Any, w: Any, y: Any) -> Any:
    p = F.softmax(F.linear(h, w), -1)
    return -(p * torch.log(p + 1e-5)).sum(-1)


@form(*HEAD, left=(1, 1))
def entropy_in_bits(h: Any, w: Any, y: Any) -> Any:
    p = F.softmax(F.linear(h, w), -1)
    return -(p * torch.log2(p)).sum(-1)


@form((2, 12, 32), (8, 32), left=(1, 1), silent="linear_cross_entropy")
def entropy_of_a_router(h: Any, w: Any) -> Any:
    return entropy(F.linear(h, w))


@form((2, 4, 16), (1024, 16), reasons=("it is given", "it is given"))
def entropy_in_a_checkpoint_of_logits(h: Any, w: Any) -> Any:
    """verl's `entropy_checkpointing`: the linear is outside of it."""
    return torch.utils.checkpoint.checkpoint(entropy, F.linear(h, w), use_reentrant=False)


@form((2, 4, 16), (64, 16), silent="linear_cross_entropy")
def entropy_of_a_policy_in_a_checkpoint(h: Any, w: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(entropy, F.linear(h, w), use_reentrant=False)
