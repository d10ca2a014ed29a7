"""Loss heads as models and trainers write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .linear_form import form


def labels() -> Any:
    return torch.randint(72, (2, 12), generator=torch.Generator().manual_seed(0))


def rows() -> Any:
    return torch.tensor([3, 0, 17, 8, 8])


#: Hidden states, the weight of the head, labels.
HEAD = ((2, 12, 32), (80, 32), labels)
TWO = ("loss", "loss")


@form(*HEAD)
def padded_vocabulary(h: Any, w: Any, y: Any) -> Any:
    """nanochat: the first classes of a head that has more; then a softcap."""
    logits = F.linear(h, w)[..., :72].float()
    logits = 15 * torch.tanh(logits / 15)
    return F.cross_entropy(logits.view(-1, 72), y.view(-1))


@form(*HEAD, (80,))
def classes_in_the_middle(h: Any, w: Any, y: Any, c: Any) -> Any:
    logits = torch.narrow(F.linear(h, w, c).view(24, 80), 1, 8, 72)
    return F.cross_entropy(logits, y.view(-1), reduction="none")


@form(*HEAD, left=(1, 1), reasons=TWO)
def every_second_class(h: Any, w: Any, y: Any) -> Any:
    return F.cross_entropy(F.linear(h, w)[:, 1:, ::2].flatten(0, 1), y[:, 1:].flatten() % 40)


@form(*HEAD, (80,))
def rows_and_classes_in_one_index(h: Any, w: Any, y: Any, c: Any) -> Any:
    """A choice of one token of a few, read at one position."""
    return F.cross_entropy(F.linear(h, w, c)[:, -2, 8:-8], y[:, -2] % 64)


@form(*HEAD, (80,))
def bias_by_itself(h: Any, w: Any, y: Any, c: Any) -> Any:
    """The decoder of BERT: a tied weight, and a bias that is a parameter of the head."""
    return F.cross_entropy((torch.matmul(h, w.t()) + c).view(-1, 80), y.view(-1))


@form(*HEAD, (72,))
def bias_of_some_classes(h: Any, w: Any, y: Any, c: Any) -> Any:
    return F.cross_entropy((c + F.linear(h, w)[..., :72]).view(-1, 72), y.view(-1))


@form(*HEAD)
def bias_that_hides_classes(h: Any, w: Any, y: Any) -> Any:
    """It is made behind the linear, by a write in place."""
    logits, hidden = F.linear(h, w), torch.zeros(80, dtype=h.dtype)
    hidden[72:].fill_(-1e4)
    return F.cross_entropy((logits + hidden).view(-1, 80), y.view(-1))


@form(*HEAD, "frozen 80", reasons=("overwritten", "overwritten"))
def bias_that_is_overwritten(h: Any, w: Any, y: Any, c: Any) -> Any:
    c = c * 2
    logits = F.linear(h, w) + c
    c.zero_()
    return F.cross_entropy(logits.view(-1, 80), y.view(-1))


@form(*HEAD, (80,), reasons=TWO)
def bias_behind_a_scale(h: Any, w: Any, y: Any, c: Any) -> Any:
    return F.cross_entropy((F.linear(h, w) * 0.5 + c).view(-1, 80), y.view(-1))


@form(*HEAD, (80,), (80,), reasons=TWO)
def two_biases(h: Any, w: Any, y: Any, c: Any, d: Any) -> Any:
    return F.cross_entropy((F.linear(h, w, c) + d).view(-1, 80), y.view(-1))


@form(*HEAD, (8, 32), (80, 8), reasons=("an adapter of the head",) * 2)
def adapter_of_the_head(h: Any, w: Any, y: Any, a: Any, b: Any) -> Any:
    logits = F.linear(h, w) + F.linear(F.linear(h, a), b) * 2.0
    return F.cross_entropy(logits.view(-1, 80), y.view(-1))


@form(*HEAD, (12, 1), reasons=TWO)
def number_of_each_row(h: Any, w: Any, y: Any, c: Any) -> Any:
    return F.cross_entropy((F.linear(h, w) + c).view(-1, 80), y.view(-1))


@form(*HEAD)
def capped_by_a_sigmoid(h: Any, w: Any, y: Any) -> Any:
    """modded-nanogpt."""
    logits = 23 * torch.sigmoid((F.linear(h, w) + 5) / 7.5)
    return F.cross_entropy(logits.float().view(-1, 80), y.view(-1))


@form(*HEAD, (80,))
def shifted_logits_with_a_bias(h: Any, w: Any, y: Any, c: Any) -> Any:
    logits = 3 * torch.tanh((F.linear(h, w, c) + 0.5)[..., :72] * 0.3) + 7
    return F.cross_entropy(logits.view(-1, 72), y.view(-1))


@form(*HEAD, reasons=TWO)
def shifted_between_scale_and_cap(h: Any, w: Any, y: Any) -> Any:
    logits = 3 * torch.tanh(F.linear(h, w) * 0.3 + 0.5)
    return F.cross_entropy(logits.view(-1, 80), y.view(-1))


@form(*HEAD, reasons=TWO)
def shifted_behind_a_cast(h: Any, w: Any, y: Any) -> Any:
    """In bfloat16 the sum would be rounded more coarsely."""
    logits = torch.sigmoid(F.linear(h, w).float() + 8)
    return F.cross_entropy(logits.view(-1, 80), y.view(-1))


@form(*HEAD, (80,), reasons=("added to cast logits",) * 2)
def capped_behind_a_cast_and_a_bias(h: Any, w: Any, y: Any, c: Any) -> Any:
    logits = 30 * torch.tanh((F.linear(h, w).float() + c) / 30)
    return F.cross_entropy(logits.view(-1, 80), y.view(-1))


@form(*HEAD, reasons=TWO)
def shifted_on_both_sides_of_a_scale(h: Any, w: Any, y: Any) -> Any:
    logits = 3 * torch.tanh((F.linear(h, w) + 1) * 0.3 + 0.5)
    return F.cross_entropy(logits.view(-1, 80), y.view(-1))


@form(*HEAD, reasons=TWO)
def shifted_by_more_than_logits_have_digits(h: Any, w: Any, y: Any) -> Any:
    return F.cross_entropy((F.linear(h, w) + 1e30).view(-1, 80), y.view(-1))


@form(*HEAD)
def head_by_einsum(h: Any, w: Any, y: Any) -> Any:
    return F.cross_entropy(torch.einsum("bsd,vd->bsv", h, w).reshape(-1, 80), y.reshape(-1))


@form(*HEAD, left=(1, 1), reasons=TWO)
def head_by_einsum_of_other_dims(h: Any, w: Any, y: Any) -> Any:
    return F.cross_entropy(torch.einsum("bsd,vd->svb", h, w).permute(2, 0, 1).reshape(-1, 80), y.reshape(-1))


@form(*HEAD, rows)
def logits_of_some_rows(h: Any, w: Any, y: Any, which: Any) -> Any:
    """As masked language models select what is masked."""
    logits = F.linear(h, w).view(-1, 80)
    return F.cross_entropy(logits[which], y.view(-1)[which])


@form(*HEAD, rows)
def rows_by_index_select(h: Any, w: Any, y: Any, which: Any) -> Any:
    logits = torch.index_select(F.linear(h, w).flatten(0, 1), 0, which)
    return F.cross_entropy(logits, y.view(-1)[which])


@form(*HEAD, lambda: torch.arange(72), left=(1, 1), reasons=TWO)
def classes_by_a_tensor(h: Any, w: Any, y: Any, which: Any) -> Any:
    return F.cross_entropy(F.linear(h, w).view(-1, 80)[:, which], y.view(-1))


@form(*HEAD)
def gathered_less_the_logsumexp(h: Any, w: Any, y: Any) -> Any:
    """Log-probabilities of GRPO, at a temperature."""
    logits = F.linear(h, w).float() / 0.7
    taken = logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return taken - logits.logsumexp(-1)


@form(*HEAD)
def logsumexp_less_what_is_gathered(h: Any, w: Any, y: Any) -> Any:
    """The negative of log-probabilities."""
    logits = F.linear(h, w)
    return (logits.logsumexp(-1) - torch.take_along_dim(logits, y[..., None], dim=-1)[..., 0]).mean()


@form(*HEAD, left=(1, 1))
def logsumexp_less_other_rows(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w)
    return logits.logsumexp(-1) - logits.gather(-1, y[..., None]).flip(1)[..., 0]


@form(*HEAD)
def less_the_logsumexp_of_each_sample(h: Any, w: Any, y: Any) -> Any:
    """TRL and verl, in float32."""
    logits = F.linear(h, w).float()
    taken = torch.gather(logits, dim=-1, index=y[..., None])
    summed = torch.stack([torch.logsumexp(each, dim=-1) for each in logits])
    return (taken - summed.unsqueeze(-1)).squeeze(-1)


@form(*HEAD)
def log_softmax_of_each_sample(h: Any, w: Any, y: Any) -> Any:
    """The same trainers, in bfloat16."""
    found = []
    for each, label in zip(F.linear(h, w), y, strict=True):
        found.append(F.log_softmax(each, dim=-1).gather(-1, label.unsqueeze(-1)).squeeze(-1))
    return torch.stack(found)


@form(*HEAD)
def samples_in_another_order(h: Any, w: Any, y: Any) -> Any:
    """Not one loss, but one for each sample."""
    logits = F.linear(h, w)
    picked = [F.log_softmax(logits[i], -1).gather(-1, y[1 - i][:, None]).squeeze(-1) for i in (0, 1)]
    return torch.stack(picked)


@form(*HEAD, left=(1, 1))
def less_another_logsumexp(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w).float()
    return logits.gather(-1, y[..., None]).squeeze(-1) - (logits * 2).logsumexp(-1)


@form(*HEAD)
def less_the_logsumexp_of_all_pairs(h: Any, w: Any, y: Any) -> Any:
    """Not squeezed: each value is subtracted from those of all rows."""
    logits = F.linear(h, w).float()[0]
    return logits.gather(-1, y[0, :, None]) - logits.logsumexp(-1)


@form(*HEAD)
def taken_along_a_dim(h: Any, w: Any, y: Any) -> Any:
    return torch.take_along_dim(F.linear(h, w).log_softmax(-1), y.unsqueeze(-1), dim=-1).squeeze(-1)


@form(*HEAD, left=(1, 1), reasons=("read by gather", "read by gather"))
def several_labels_of_a_row(h: Any, w: Any, y: Any) -> Any:
    """The most likely tokens of a teacher."""
    return F.linear(h, w).log_softmax(-1).gather(-1, torch.stack([y, y + 1], -1))


@form(*HEAD)
def picked_by_two_indices(h: Any, w: Any, y: Any) -> Any:
    logs = F.log_softmax(F.linear(h, w).view(-1, 80), dim=-1)
    return -logs[torch.arange(24), y.view(-1) - 40].mean()  # from the last class on, where it is negative


@form(*HEAD, left=(1, 1))
def picked_from_the_second_row_on(h: Any, w: Any, y: Any) -> Any:
    logs = F.log_softmax(F.linear(h, w).view(-1, 80), dim=-1)
    return logs[torch.arange(1, 24), y.view(-1)[1:]]


@form(*HEAD)
def scaled_in_place(h: Any, w: Any, y: Any) -> Any:
    """verl divides by a temperature."""
    logits = F.linear(h, w).float()
    logits.div_(0.8)
    return -F.cross_entropy(logits.view(-1, 80), y.view(-1), reduction="none")


@form(*HEAD, (80,))
def bias_and_number_in_place(h: Any, w: Any, y: Any, c: Any) -> Any:
    logits = F.linear(h, w)
    logits += c
    logits.add_(2.0)
    return F.cross_entropy(logits.view(-1, 80), y.view(-1))


@form(*HEAD, reasons=TWO)
def clamped_in_place(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w).float()
    logits.clamp_(-3, 3)
    return F.cross_entropy(logits.view(-1, 80), y.view(-1))


@form(*HEAD, left=(1, 1), reasons=("overwritten", "overwritten"))
def some_are_scaled_in_place(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w)
    logits[:, :6].mul_(3)
    return F.cross_entropy(logits.view(-1, 80), y.view(-1))
