"""Loss heads as models and trainers write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .linear_form import form, forms


def labels() -> Any:
    return torch.randint(72, (2, 12), generator=torch.Generator().manual_seed(0))


def rows() -> Any:
    return torch.tensor([3, 0, 17, 8, 8])


#: Hidden states, the weight of the head, labels.
HEAD = ((2, 12, 32), (80, 32), labels)
TWO = ("loss", "loss")


def of_logits(change: Any) -> Any:
    """The loss of what is made of a linear; `change` gets hidden states, the weight, and what follows."""

    def loss(h: Any, w: Any, y: Any, *further: Any) -> Any:
        logits = change(h, w, *further)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))

    return loss


forms(*HEAD, of=of_logits)(
    # nanochat: the first classes of a head that has more; then a softcap.
    padded_vocabulary=lambda h, w: 15 * torch.tanh(F.linear(h, w)[..., :72].float() / 15),
    # The decoder of BERT: a tied weight, and a bias that is a parameter of the head.
    bias_by_itself=(lambda h, w, c: torch.matmul(h, w.t()) + c, (80,)),
    bias_of_some_classes=(lambda h, w, c: c + F.linear(h, w)[..., :72], (72,)),
    # modded-nanogpt.
    capped_by_a_sigmoid=lambda h, w: (23 * torch.sigmoid((F.linear(h, w) + 5) / 7.5)).float(),
    shifted_logits_with_a_bias=(
        lambda h, w, c: 3 * torch.tanh((F.linear(h, w, c) + 0.5)[..., :72] * 0.3) + 7, (80,),
    ),
)  # fmt: skip
forms(*HEAD, of=of_logits, reasons=TWO)(
    bias_behind_a_scale=(lambda h, w, c: F.linear(h, w) * 0.5 + c, (80,)),
    two_biases=(lambda h, w, c, d: F.linear(h, w, c) + d, (80,), (80,)),
    number_of_each_row=(lambda h, w, c: F.linear(h, w) + c, (12, 1)),
    shifted_between_scale_and_cap=lambda h, w: 3 * torch.tanh(F.linear(h, w) * 0.3 + 0.5),
    # In bfloat16 the sum would be rounded more coarsely.
    shifted_behind_a_cast=lambda h, w: torch.sigmoid(F.linear(h, w).float() + 8),
    shifted_on_both_sides_of_a_scale=lambda h, w: 3 * torch.tanh((F.linear(h, w) + 1) * 0.3 + 0.5),
    shifted_by_more_than_logits_have_digits=lambda h, w: F.linear(h, w) + 1e30,
)


@form(*HEAD, reasons=("functions of the same logits",) * 2)
def with_a_margin(h: Any, w: Any, y: Any) -> Any:
    """ArcFace: the label's logit is replaced by another function of it, in a sum."""
    cosines = F.linear(F.normalize(h, dim=-1), F.normalize(w, dim=-1)).flatten(0, 1)
    chosen = F.one_hot(y.flatten(), 80).to(cosines.dtype)
    turned = cosines * 0.9 - torch.sqrt((1 - cosines.square()).clamp(min=1e-6)) * 0.4
    return F.cross_entropy((chosen * turned + (1 - chosen) * cosines) * 16, y.flatten())


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


@form(*HEAD, (8, 32), (80, 8), reasons=("an adapter of the head",) * 2)
def adapter_of_the_head(h: Any, w: Any, y: Any, a: Any, b: Any) -> Any:
    logits = F.linear(h, w) + F.linear(F.linear(h, a), b) * 2.0
    return F.cross_entropy(logits.view(-1, 80), y.view(-1))


@form(*HEAD, (80,), reasons=("added to cast logits",) * 2)
def capped_behind_a_cast_and_a_bias(h: Any, w: Any, y: Any, c: Any) -> Any:
    logits = 30 * torch.tanh((F.linear(h, w).float() + c) / 30)
    return F.cross_entropy(logits.view(-1, 80), y.view(-1))


@form(*HEAD)
def head_by_einsum(h: Any, w: Any, y: Any) -> Any:
    return F.cross_entropy(torch.einsum("bsd,vd->bsv", h, w).reshape(-1, 80), y.reshape(-1))


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


@form(*HEAD, left=(1, 1), reasons=("overwritten", "overwritten"))
def some_are_scaled_in_place(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w)
    logits[:, :6].mul_(3)
    return F.cross_entropy(logits.view(-1, 80), y.view(-1))


@form(*HEAD, left=(1, 1), reasons=TWO)
def head_by_einsum_of_other_dims(h: Any, w: Any, y: Any) -> Any:
    return F.cross_entropy(torch.einsum("bsd,vd->svb", h, w).permute(2, 0, 1).reshape(-1, 80), y.reshape(-1))


@form(*HEAD, reasons=TWO)
def clamped_in_place(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w).float()
    logits.clamp_(-3, 3)
    return F.cross_entropy(logits.view(-1, 80), y.view(-1))


@form(*HEAD, left=(1, 1), reasons=("returns the log-probabilities",) * 2)
def log_probabilities_returned_by_a_policy(h: Any, w: Any, y: Any) -> Any:
    """Through views, as fairseq and policies have them."""
    lp = F.log_softmax(F.linear(h, w), -1, dtype=torch.float32)
    return F.nll_loss(lp.view(-1, 80), y.view(-1)), lp


@form(*HEAD, left=(1, 1), reasons=("log-probabilities are also read",) * 2)
def log_probabilities_read_elsewhere(h: Any, w: Any, y: Any) -> Any:
    lp = F.log_softmax(F.linear(h, w), -1).view(-1, 80)
    return F.nll_loss(lp, y.view(-1)), lp.tanh().sum(-1)
