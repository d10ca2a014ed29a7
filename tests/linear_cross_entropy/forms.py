"""Losses of logits as models and trainers write them, and those that are left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

#: A batch of sequences, the width of the hidden states, classes.
B, T, H, V = 2, 9, 24, 61
Function = Callable[..., Any]


def causal(logits: Any, labels: Any) -> Any:
    """Of transformers: labels are shifted, and logits cast."""
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, V), labels.view(-1), ignore_index=-100, reduction="mean")


def shifted_logits(logits: Any, labels: Any) -> Any:
    logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def capped(logits: Any, labels: Any) -> Any:
    """Of Gemma 2, with a sum that is divided by a number of tokens."""
    logits = torch.tanh(logits / 3.0) * 3.0
    return F.cross_entropy(logits.view(-1, V), labels.view(-1), reduction="sum") / 14


def likelihood(logits: Any, labels: Any) -> Any:
    logs = F.log_softmax(logits[:, :-1], dim=-1)
    return F.nll_loss(logs.reshape(-1, V), labels[:, 1:].reshape(-1))


def log_probabilities(logits: Any, labels: Any) -> Any:
    """Of DPO: labels are overwritten where they are left out."""
    logits, labels = logits[:, :-1], labels[:, 1:].clone()
    mask = labels != -100
    labels[labels == -100] = 0
    return torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2) * mask


def penalised_weighted(logits: Any, labels: Any, weights: Any) -> Any:
    """Of OLMo: the penalty is returned as well. Here it is made of views and casts of its own."""
    flat, labels = logits.view(-1, V), labels.view(-1)
    penalty = (labels != -100) * torch.logsumexp(logits.flatten(0, 1), -1, keepdim=True).squeeze(1) ** 2
    return F.cross_entropy(flat, labels, weights, label_smoothing=0.2) + penalty.sum(), penalty


def penalised_capped(logits: Any, labels: Any) -> Any:
    logits = (torch.tanh(logits / 3.0) * 3.0)[:, :-1].reshape(-1, V)
    return F.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum"), logits.logsumexp(1)


def penalised_by_hand(logits: Any, labels: Any) -> Any:
    """Of t5x: one logsumexp for both. The labels are made behind it."""
    lse = logits.logsumexp(-1)
    likelihood = lse - logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (likelihood + 0.1 * lse**2).mean()


def penalised_with_a_number(logits: Any, labels: Any) -> Any:
    """Of modded-nanogpt, with a z-loss: its softcap adds a number, which a logsumexp sees."""
    logits = 23 * torch.sigmoid((logits + 5) / 7.5)
    return causal(logits, labels) + 0.1 * logits.logsumexp(-1).square().mean()


def penalised_without_gradient(logits: Any, labels: Any) -> Any:
    with torch.no_grad():
        seen = logits.logsumexp(-1)
    return causal(logits, labels), seen


def entropy(logits: Any) -> Any:
    """verl."""
    return logits.logsumexp(-1) - (F.softmax(logits, -1) * logits).sum(-1)


def entropy_of_logs(logits: Any) -> Any:
    """TRL."""
    logs = F.log_softmax(logits, -1)
    return -(logs.exp() * logs).sum(-1)


def entropy_of_categorical(logits: Any) -> Any:
    return torch.distributions.Categorical(logits=logits, validate_args=False).entropy()


def less_parts(logits: Any, labels: Any) -> Any:
    """OpenRLHF: the logsumexp of a few rows at a time."""
    labels, logits = labels[:, 1:].clamp(min=0).reshape(-1, 1), logits[:, :-1].reshape(-1, V) / 0.7
    lse = torch.cat([part.logsumexp(-1) for part in logits.split(7)])
    return logits.gather(-1, labels).squeeze(-1) - lse


def policy(logits: Any, labels: Any) -> Any:
    """PPO: a log_softmax by hand, whose last dim the labels are broadcast to."""
    chosen = torch.distributions.Categorical(logits=logits, validate_args=False)
    return chosen.log_prob(labels.clamp(min=0)), chosen.entropy()


def both(logits: Any, labels: Any) -> Any:
    """The entropy of all rows that have a label, ignored or not."""
    logits = logits / 0.7
    loss = F.cross_entropy(logits.view(-1, V), labels.view(-1), reduction="none")
    return loss, entropy_of_logs(logits.view(-1, V))


def overwritten_entropies(logits: Any, labels: Any) -> Any:
    """Of the same rows: each has memory of its own."""
    first, again, some = entropy(logits), entropy(logits), entropy(logits[:1])
    first *= labels > 2
    some -= 1
    return first, again, some


def both_watched(logits: Any, labels: Any) -> Any:
    """GRPO."""
    logits = logits[:, 1:]
    logs = logits.log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0)).squeeze(-1)
    with torch.no_grad():
        found = [entropy_of_logs(part) for part in logits.reshape(-1, V).split(6)]
    return logs, torch.cat(found).view_as(logs)


#: Functions of logits and labels, or of a weight of each class too, that become `linear_cross_entropy`.
LOSSES: dict[str, Function] = {
    "causal": causal,
    "shifted logits": shifted_logits,
    "capped": capped,
    # Of Granite and Cohere.
    "scaled": lambda logits, labels: F.cross_entropy((0.25 * logits / 1.5).reshape(-1, V), labels.flatten()),
    "classes in the middle": lambda logits, labels: nn.CrossEntropyLoss(label_smoothing=0.1)(
        logits.transpose(1, 2), labels
    ),
    "a cap behind a transpose": lambda logits, labels: F.cross_entropy(
        torch.tanh(logits.mT / 3.0) * 3.0, labels, reduction="sum"
    ),
    "weighted": lambda logits, labels, weights: F.cross_entropy(
        logits.view(-1, V), labels.view(-1), weights, label_smoothing=0.2
    ),
    "likelihood": likelihood,
    "likelihood in the middle": lambda logits, labels: F.nll_loss(
        torch.log_softmax(logits.mT, 1), labels, reduction="sum"
    ),
    "some classes": lambda logits, labels: F.cross_entropy(
        logits[..., : V - 1].reshape(-1, V - 1), labels.clamp(0, V - 2).view(-1)
    ),
    # A class that there is.
    "another label is ignored": lambda logits, labels: F.cross_entropy(
        logits.view(-1, V), labels.clamp(min=0).view(-1), ignore_index=0
    ),
    # A loop over parts of 128 rows, of which there is one.
    "one part": lambda logits, labels: sum(
        F.cross_entropy(part, labels.view(-1)) for part in logits.view(-1, V).split(128)
    ),
    "one sample": lambda logits, labels: F.cross_entropy(logits[1], labels[1]) * 2,
}
#: Those that become `linear_softmax_rows`.
ROWS: dict[str, Function] = {
    "weighted, each": lambda logits, labels, weights: F.cross_entropy(
        logits.view(-1, V), labels.view(-1), weights, reduction="none"
    ),
    # Rows that the caller weighs.
    "each": lambda logits, labels: F.cross_entropy(
        logits.view(-1, V), labels.view(-1), reduction="none", label_smoothing=0.1
    ),
    "log-probabilities": log_probabilities,
    # The z-loss of PaLM, also of rows whose label is ignored.
    "penalised": lambda logits, labels: causal(logits, labels) + 0.1 * logits.logsumexp(-1).square().mean(),
    "penalised in part": lambda logits, labels: (
        causal(logits, labels) + sum(part.logsumexp(-1).sum() for part in logits.flatten(0, 1).split(7)[:2])
    ),
    "penalised, weighted": penalised_weighted,
    "penalised, capped": penalised_capped,
    "penalised by hand": penalised_by_hand,
    "penalised, with a number": penalised_with_a_number,
    # The loss does not see the number that the penalty sees.
    "penalised, with other numbers": lambda logits, labels: (
        causal(0.5 * logits, labels) + 0.1 * (0.5 * (logits + 5) + 0.25).logsumexp(-1).square().mean()
    ),
    "a penalty without a gradient": penalised_without_gradient,
    "entropy": lambda logits, labels: entropy(logits),
    "entropy of Categorical": lambda logits, labels: entropy_of_categorical(logits) * (labels > 2),
    "log_prob of Categorical": policy,
    "less logsumexps of parts": less_parts,
    "overwritten entropies": overwritten_entropies,
    "loss and entropy": both,
    "log-probabilities and entropy": both_watched,
    "labels in int32": lambda logits, labels: logits.log_softmax(-1).gather(
        -1, labels.clamp(min=0).int()[..., None]
    ),
}
#: All of them, with the operation.
FORMS = {name: (form, "linear_cross_entropy") for name, form in LOSSES.items()}
FORMS |= {name: (form, "linear_softmax_rows") for name, form in ROWS.items()}


def returned(logits: Any, labels: Any) -> Any:
    return causal(logits, labels), logits


def returned_capped(logits: Any, labels: Any) -> Any:
    logits = torch.tanh(logits / 3.0) * 3.0
    return causal(logits, labels), logits


def returned_wider(logits: Any, labels: Any) -> Any:
    """As accelerate casts what a model returns under autocast."""
    return causal(logits, labels), logits.double()


def returned_slice(logits: Any, labels: Any) -> Any:
    return shifted_logits(logits, labels), logits


def penalised_in_front(logits: Any, labels: Any) -> Any:
    """What the loss reads is made behind the penalty."""
    penalty = logits.logsumexp(-1).square().mean()
    return causal(logits, labels + 0) + penalty


def labels_overwritten_behind_a_penalty(logits: Any, labels: Any) -> Any:
    labels = labels.clone()
    penalty = logits.logsumexp(-1).square().mean()
    labels[:, 3] = 7
    return F.cross_entropy(logits.mT, labels) + penalty


def overwritten(logits: Any, labels: Any) -> Any:
    logits[:, 0] = 0.0
    return causal(logits, labels)


def without_gradients(logits: Any, labels: Any) -> Any:
    with torch.no_grad():
        loss = causal(logits, labels)
    return loss + logits.sum()


def of_as_many_classes_as_tokens(logits: Any, labels: Any) -> Any:
    tokens = logits.shape[1]
    return F.cross_entropy(torch.narrow(logits, -1, 0, tokens).reshape(-1, tokens), labels.view(-1) % tokens)


def rows_of_two_losses(logits: Any, labels: Any) -> Any:
    half, first = logits.shape[1] // 2, labels[:, 0]
    return F.cross_entropy(logits.narrow(1, 0, half + 1)[:, 0], first) + F.cross_entropy(
        logits.narrow(1, half - 1, half)[:, 0], first
    )


def row_by_row(logits: Any, labels: Any) -> Any:
    """As verl does in bfloat16."""
    pairs = zip(logits.flatten(0, -2), labels.flatten(), strict=True)
    return -torch.stack(
        [row.log_softmax(-1).gather(-1, label.clamp(min=0)[None]) for row, label in pairs]
    ).mean()


#: With a part of the reason.
OTHERS: dict[str, tuple[Function, str]] = {
    "the loss of each row": (row_by_row, "of one row of logits"),
    "the logits are returned": (returned, "used-elsewhere"),
    "the logits are read elsewhere": (
        lambda logits, labels: causal(logits, labels) + 1e-4 * logits.square().mean(),
        "used-elsewhere",
    ),
    # The logsumexp of other rows than those of the loss.
    "a penalty of other rows": (
        lambda logits, labels: shifted_logits(logits, labels) + logits.logsumexp(-1).square().mean(),
        "used-elsewhere",
    ),
    "a penalty of other logits": (
        lambda logits, labels: causal(logits * 2, labels) + logits.logsumexp(-1).mean(),
        "used-elsewhere",
    ),
    "a penalty over the rows": (
        lambda logits, labels: causal(logits, labels) + logits.logsumexp(1).mean(),
        "used-elsewhere",
    ),
    "a penalty in front": (penalised_in_front, "order"),
    "labels are overwritten behind a penalty": (labels_overwritten_behind_a_penalty, "overwritten"),
    "probabilities": (
        lambda logits, labels: F.cross_entropy(
            logits.view(-1, V), torch.softmax(logits.detach(), -1).view(-1, V)
        ),
        "loss",
    ),
    "a tensor is added": (lambda logits, labels, weights: causal(logits.tanh() + weights, labels), "loss"),
    "rounded": (lambda logits, labels: causal(logits.bfloat16(), labels), "rounded"),
    "capped twice": (lambda logits, labels: causal(logits.tanh().tanh(), labels), "loss"),
    "overwritten": (overwritten, "overwritten"),
    "gradients are off": (without_gradients, ""),
    "another softmax": (
        lambda logits, labels: F.nll_loss(logits.view(-1, V).log_softmax(0), labels.view(-1)),
        "loss",
    ),
    "classes that are rows": (
        lambda logits, labels: F.cross_entropy(logits.reshape(V, -1).t(), labels.view(-1)),
        "loss",
    ),
}
