"""Losses of all classes, or of probabilities, which are only reported."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .linear_form import form
from .losses import HEAD, TWO

_OF_SOFTMAX = ("probabilities", "probabilities")


@form(*HEAD, (80, 32), reasons=TWO)
def distillation(h: Any, w: Any, y: Any, teacher: Any) -> Any:
    """A sum over all classes."""
    wanted = F.softmax(F.linear(h.detach(), teacher.detach()), dim=-1)
    return -(wanted * F.log_softmax(F.linear(h, w), dim=-1)).sum(-1).mean()


@form(*HEAD, left=(1, 1), reasons=_OF_SOFTMAX)
def probabilities_of_labels(h: Any, w: Any, y: Any) -> Any:
    return -(F.linear(h, w).softmax(-1).gather(-1, y[..., None]) + 1e-6).log().mean()


@form(*HEAD, reasons=("of each class", "of each class"))
def binary_losses(h: Any, w: Any, y: Any) -> Any:
    return F.binary_cross_entropy_with_logits(F.linear(h, w), F.one_hot(y, 80).to(h.dtype))


@form(*HEAD, (2, 12, 1), (2, 12, 9), left=(1, 1), reasons=_OF_SOFTMAX)
def copied_words(h: Any, w: Any, y: Any, gate: Any, copied: Any) -> Any:
    """Pointer-generator: a second distribution, of the words of the source, is added before the logarithm."""
    gate = torch.sigmoid(gate)
    p = gate * F.softmax(F.linear(h, w), dim=2)
    mixed = p.scatter_add(2, y[:, None, :9].expand(2, 12, 9), (1 - gate) * copied.softmax(-1))
    return torch.log(mixed + 1e-6)


@form(*HEAD, left=(1, 1), reasons=_OF_SOFTMAX)
def unlikelihood(h: Any, w: Any, y: Any) -> Any:
    """What should not be said."""
    p = F.softmax(F.linear(h, w), -1)
    return -torch.log((1 - p[..., :10]).clamp(min=1e-4)).sum()


@form(*HEAD, left=(1, 1))
def probabilities_alone(h: Any, w: Any, y: Any) -> Any:
    """No logarithm: that is no loss of labels."""
    return (F.softmax(F.linear(h, w), -1) * 0.5)[..., :10].clamp(min=1e-4)


@form(*HEAD, reasons=("of each pair", "of each pair"))
def sigmoid_of_pairs(h: Any, w: Any, y: Any) -> Any:
    """SigLIP."""
    signs = 2 * F.one_hot(y, 80).to(h.dtype) - 1
    return -F.logsigmoid(signs * (F.linear(h, w) * 10 - 1)).sum() / 24


@form(*HEAD, reasons=("of each class", "of each class"))
def binary_by_keyword(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w)
    return F.binary_cross_entropy_with_logits(target=F.one_hot(y, 80).to(h.dtype), input=logits)


@form(*HEAD, (80, 32), reasons=_OF_SOFTMAX)
def divergence_of_two_heads(h: Any, w: Any, y: Any, v: Any) -> Any:
    """That of Jensen and Shannon: each distribution over their mean."""
    p, q = (F.linear(h, each).softmax(-1) for each in (w, v))
    mean = (p + q) / 2
    return (p * (p / mean).log()).sum() + (q * (q / mean).log()).sum()


@form(*HEAD, left=(1, 1), reasons=("written as exponentials", "written as exponentials"))
def logsumexp_by_hand(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w)
    logits = logits - logits.amax(-1, keepdim=True)
    return (logits.exp().sum(-1).log() - logits.gather(-1, y[..., None]).squeeze(-1)).mean()


@form(*HEAD, left=(1, 1), reasons=("written as exponentials", "written as exponentials"))
def softmax_by_hand(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w)
    e = torch.exp(logits - logits.max(-1, keepdim=True)[0])
    return -torch.log((e / e.sum(-1, keepdim=True)).gather(-1, y[..., None])).mean()


#: A batch of images and one of texts, each in fewer vectors than these are wide.
PAIRS = ((16, 32), (16, 32))


@form(*PAIRS, left=(0, 0), reasons=("read by diag", "read by diag"))
def rows_of_a_batch_against_all(a: Any, b: Any) -> Any:
    """InfoNCE: as many classes as rows, which are few."""
    return -F.log_softmax(a @ b.t() * 5, dim=1).diag().mean()


@form(*PAIRS, left=(0, 0), reasons=("over the rows", "over the rows"))
def columns_of_a_batch_against_all(a: Any, b: Any) -> Any:
    """The other direction of CLIP."""
    return -F.log_softmax(a @ b.t() * 5, dim=0).diagonal().mean()


@form(*PAIRS, left=(0, 0), reasons=("masked_fill is between", "masked_fill is between"))
def without_the_positive_pair(a: Any, b: Any) -> Any:
    scores = a @ b.t() / 0.3
    negatives = scores.masked_fill(torch.eye(16, dtype=torch.bool), float("-inf"))
    return (torch.logsumexp(negatives, 1) - scores.diagonal()).mean()


@form(*PAIRS, left=(0, 0), reasons=("written as exponentials", "written as exponentials"))
def labels_of_several_rows(a: Any, b: Any) -> Any:
    """SupCon: the largest of each row is taken off, and a row is not compared with itself."""
    z = F.normalize(torch.cat([a, b]), dim=1)
    scores = z @ z.t() / 0.3
    scores = scores - scores.max(dim=1, keepdim=True)[0].detach()
    others = 1 - torch.eye(32, dtype=z.dtype)
    logs = scores - torch.log((torch.exp(scores) * others).sum(1, keepdim=True))
    same = (torch.arange(32)[:, None] % 3 == torch.arange(32) % 3).to(z.dtype) * others
    return -((same * logs).sum(1) / same.sum(1)).mean()


@form(*PAIRS, (), reasons=("of each pair", "of each pair"))
def sigmoid_of_few_pairs(a: Any, b: Any, scale: Any) -> Any:
    signs = 2 * torch.eye(16, dtype=a.dtype) - 1
    return -F.logsigmoid(signs * (torch.matmul(a, b.t()) * scale.exp() - 1)).sum(-1).mean()


#: A few classes, of which each token has some.
LABELS = ((16, 32), (8, 32), lambda: torch.arange(128).view(16, 8) % 5 == 0)
_OF_EACH_CLASS = {"reasons": ("of each class", "of each class")}


@form(*LABELS, **_OF_EACH_CLASS)
def binary_by_hand(h: Any, w: Any, y: Any) -> Any:
    p, y = torch.sigmoid(F.linear(h, w)), y.to(h.dtype)
    return -(y * torch.log(p + 1e-3) + (1 - y) * torch.log(1 - p + 1e-3)).mean()


@form(*LABELS, **_OF_EACH_CLASS)
def binary_of_probabilities(h: Any, w: Any, y: Any) -> Any:
    return F.binary_cross_entropy(torch.sigmoid(F.linear(h, w)), y.to(h.dtype))


@form(*LABELS, **_OF_EACH_CLASS)
def binary_by_softplus(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w)
    return (F.softplus(logits) - logits * y).mean()


@form(*PAIRS, reasons=("masked_select", "masked_select"))
def others_by_masked_select(a: Any, b: Any) -> Any:
    """SimCLR: the graph ends where a mask selects all but each row itself."""
    o = torch.cat([F.normalize(a, dim=-1), F.normalize(b, dim=-1)])
    similar = torch.exp(torch.mm(o, o.t().contiguous()) / 0.5)
    others = similar.masked_select((torch.ones_like(similar) - torch.eye(len(o))).bool()).view(len(o), -1)
    return -torch.log(torch.exp((a * b).sum(-1)).repeat(2) / others.sum(-1)).mean()


@form((16, 32), (16, 32), (), reasons=("read by another loss",) * 2)
def both_directions_of_pairs(a: Any, b: Any, scale: Any) -> Any:
    """CLIP."""
    scores = scale.exp() * F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).t()
    return F.cross_entropy(scores, torch.arange(16)) + F.cross_entropy(scores.T, torch.arange(16))


@form((16, 32), (40, 32), lambda: torch.arange(16), reasons=("log-probabilities are also read by mean",) * 2)
def smoothed_by_hand(h: Any, w: Any, y: Any) -> Any:
    logs = F.log_softmax(F.linear(h, w), -1)
    return (-0.9 * logs.gather(1, y[:, None]).squeeze(1) - 0.1 * logs.mean(-1)).mean()


@form(*PAIRS)
def exponentials_that_are_returned(a: Any, b: Any) -> Any:
    """A kernel of pairs is no loss."""
    return torch.exp(torch.mm(a, b.t()))


@form((24, 32), (80, 32), lambda: torch.arange(24), left=(1, 1), reasons=("masked_select", "masked_select"))
def log_probabilities_by_masked_select(h: Any, w: Any, y: Any) -> Any:
    """The graph ends where a mask of each row's label selects."""
    chosen = F.one_hot(y, 80).bool()
    return -F.log_softmax(F.linear(h, w), -1).masked_select(chosen).mean()


@form((24, 32), (80, 32), lambda: torch.arange(24), left=(1, 1), reasons=("masked_select", "masked_select"))
def logits_by_masked_select(h: Any, w: Any, y: Any) -> Any:
    chosen, logits = F.one_hot(y, 80).bool(), F.linear(h, w)
    return (logits.logsumexp(-1) - logits.masked_select(chosen)).mean()


@form((24, 32), (80, 32), left=(1, 1), reasons=("the graph returns",) * 2)
def log_probabilities_that_are_returned(h: Any, w: Any) -> Any:
    """A language model, whose loss is elsewhere."""
    return F.log_softmax(F.linear(h, w), -1)


@form((2, 12, 32), (80, 32), left=(1, 1), reasons=("the graph returns",) * 2)
def log_probabilities_of_steps_in_front(h: Any, w: Any) -> Any:
    return F.log_softmax(F.linear(h, w), -1).transpose(0, 1)


@form((24, 32), (10, 32), left=(1, 1), silent="linear_cross_entropy")
def log_probabilities_of_few_classes(h: Any, w: Any) -> Any:
    """A classifier, whose loss is elsewhere."""
    return F.log_softmax(F.linear(h, w), -1)


@form((24, 32), (80, 32), left=(1, 1), silent="linear_cross_entropy")
def logits_that_are_returned(h: Any, w: Any) -> Any:
    logits = F.linear(h, w)
    return logits, logits.softmax(-1)


def labels() -> torch.Tensor:
    return torch.arange(1, 9).view(2, 4)


@form((12, 2, 32), (80, 32), labels, left=(1, 1), reasons=("the graph returns",) * 2)
def connectionist_temporal_classification(h: Any, w: Any, y: Any) -> Any:
    """The graph ends in front of `ctc_loss`."""
    lengths = torch.tensor([12, 12]), torch.tensor([4, 4])
    return F.ctc_loss(F.linear(h, w).float().log_softmax(-1), y, *lengths)
