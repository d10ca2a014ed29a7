"""explain(gpu=...): code that torch needs a device for, or the sizes and classes of the arguments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right

from inductor_fusions import config, explain, explaining


def tensors(*shape: int, count: int = 1) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(count)]


def attention(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, dim=-1) @ v


FACTORIES = {
    "zeros": lambda x: torch.zeros(x.shape[0], 1, device=x.device, dtype=x.dtype),
    "arange": lambda x: torch.arange(x.shape[0], device=x.device)[:, None].to(x.dtype),
    "none": lambda x: 0,
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_a_size_that_is_marked_dynamic(factory, train, monkeypatch):
    """It stays symbolic where autograd is traced on the CPU."""
    monkeypatch.setattr(explaining, "_differentiates_cuda", lambda: False)
    (x,), w = tensors(40, 64), tensors(64, 64, count=2)
    torch._dynamo.mark_dynamic(x, 0)
    found = explain(lambda x, w, u: (x @ w + factory(x), x @ u), x, *w, train=train, gpu="nvidia_h200")
    assert "qkv" in {site.fusion for site in found}
    assert all(any("16[s" in line.shape for line in pair.before) for pair in found.graphs)


def adapter(x, w, a, b):
    return x @ w + torch.einsum("bnr,or->bno", torch.einsum("bnd,rd->bnr", x, a), b)


def gated(x, w, v):
    return nn.functional.silu(torch.einsum("bnd,df->bnf", x, w)) * torch.einsum("bnd,df->bnf", x, v)


def heads(x, q, k, v):
    return tuple(torch.einsum("bnd,dhe->bhne", x, w) for w in (q, k, v))


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("fn", "weights", "fusions"),
    [
        (adapter, [(256, 128), (16, 256), (128, 16)], ["lora", "lora"]),
        (gated, [(256, 512)] * 2, ["gated_mlp", "qkv"]),  # the backward reads gate and up
        (heads, [(256, 4, 64)] * 3, ["qkv", "qkv"]),
    ],
)
def test_a_linear_that_is_an_einsum(fn, weights, fusions, train, monkeypatch):
    """It is a product of one sample, of which stock makes a linear on a GPU, also for autograd on the CPU."""
    monkeypatch.setattr(explaining, "_differentiates_cuda", lambda: False)
    (x,), w = tensors(2, 512, 256), [tensors(*shape)[0] for shape in weights]
    with config.patch(policy="always"):
        found = explain(fn, x, *w, train=train, gpu="nvidia_h200")
    assert fusions[train] in {site.fusion for site in found if site.verdict == "fused"}
    assert "limit" not in {site.code for site in found}


class Recurrent(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell.bfloat16()

    def forward(self, x):
        y = self.cell(x, x) if isinstance(self.cell, nn.GRUCell) else self.cell(x)[0]
        return attention(y, y, y)


CELLS = {
    "GRU": lambda: nn.GRU(64, 64),
    "both directions": lambda: nn.GRU(64, 32, num_layers=2, bidirectional=True),
    "a cell": lambda: nn.GRUCell(64, 64, bias=False),
    "LSTM": lambda: nn.LSTM(64, 64),
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_a_recurrent_layer(cell, train):
    """torch has a kernel for the cell of a GRU on a device, and none for tensors without values."""
    model = Recurrent(cell())
    (x,) = tensors(8, 64) if isinstance(model.cell, nn.GRUCell) else tensors(2, 8, 64)
    with config.patch(policy="always"):
        found = explain(model, x, train=train, gpu="nvidia_h200")
    assert [site.verdict for site in found if site.fusion == "attention"] == ["fused"]


class Speech(nn.Module):
    """Attention, and the loss of sequences.

    Args:
        lengths: how the loss has the lengths of a batch, from one length and the frames.
    """

    def __init__(self, lengths) -> None:
        super().__init__()
        self.lengths, self.head, self.loss = lengths, nn.Linear(64, 32).bfloat16(), nn.CTCLoss()

    def forward(self, q, k, v, labels):
        x = self.head(attention(q, k, v)).transpose(0, 1).log_softmax(-1, torch.float32)
        lengths = (self.lengths(length, x) for length in (x.shape[0], labels.shape[-1]))
        return self.loss(x, labels, *lengths)


LENGTHS = {
    "a tuple": lambda length, x: (length,) * x.shape[1],
    "made on the GPU": lambda length, x: torch.full((x.shape[1],), length, device=x.device),
    "made on the CPU": lambda length, x: torch.full((x.shape[1],), length),
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_loss_of_sequences(lengths, train):
    """torch computes on the device, and reads lengths, to see its result."""
    labels = torch.ones(4, 10, dtype=torch.int64)
    with config.patch(policy="always"):
        found = explain(Speech(lengths), *tensors(4, 50, 64, count=3), labels, train=train, gpu="nvidia_h200")
    assert [site.verdict for site in found if site.fusion == "attention"] == ["fused"]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_losses_of_sequences_that_are_given(mode):
    """Lengths are arguments, and each sequence has a loss of its own."""

    def weighted(x, labels, lengths):
        losses = nn.functional.ctc_loss(x.log_softmax(-1), labels, lengths, lengths, reduction="none")
        return attention(x, x, x) * losses[:, None]

    (x,), labels = tensors(16, 4, 8), torch.ones(4, 16, dtype=torch.int64)
    with config.patch(policy="always"), mode():
        found = explain(weighted, x, labels, torch.full((4,), 16), gpu="nvidia_h200")
    assert [site.verdict for site in found if site.fusion == "attention"] == ["fused"]


class Tagged(torch.Tensor):
    """A tensor with an attribute."""


@pytest.mark.parametrize("gpu", [None, "nvidia_h200"])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_an_argument_of_a_subclass(train, gpu):
    """The compile sees its class, and the function its attributes."""

    def scaled(q, k, v):
        return torch.softmax(q @ k.transpose(-1, -2) * k.scale, dim=-1) @ v

    q, k, v = tensors(2, 3, 128, 64, count=3)
    tagged = k.detach().as_subclass(Tagged).requires_grad_()
    tagged.scale = k.scale = 0.125
    with config.patch(policy="always"):
        (site,) = [s for s in explain(scaled, q, tagged, v, train=train, gpu=gpu) if s.fusion == "attention"]
        assert (site.verdict, site.code) == ("left to stock", "subclass") and "Tagged" in site.reason
        assert explain(attention, q, k, v, train=train, gpu=gpu).sites[0].verdict == "fused"


def test_a_bias_of_a_class_of_its_own():
    """Its values are what its attributes say."""
    bias = causal_lower_right(8, 16)
    q, (k, v) = tensors(2, 3, 8, 16)[0], tensors(2, 3, 16, 16, count=2)
    explain(nn.functional.scaled_dot_product_attention, q, k, v, bias)


def test_a_function_that_compares_values():
    with pytest.raises(ValueError, match=r"have no values, but .*test_explain_absent\.py:\d+ reads one"):
        explain(lambda x: torch.cov(x) + 1, *tensors(8, 16), gpu="nvidia_h200")


class Adaptive(nn.Module):
    """Rare labels have clusters of their own; the rows of all clusters are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.loss = nn.Linear(64, 64), nn.AdaptiveLogSoftmaxWithLoss(64, 500, [50, 200])

    def forward(self, x, labels):
        return self.loss(self.up(x), labels).loss


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_an_error_that_follows_from_what_is_selected(train):
    """The module says that labels are out of range, because each cluster took all rows."""
    message = r"nonzero and index selected all elements, with which .*test_explain_absent\.py:\d+ raised Runt"
    labels = torch.randint(500, (32,))
    with pytest.raises(ValueError, match=message) as raised:
        explain(Adaptive(), torch.randn(32, 64), labels, train=train, gpu="nvidia_h200")
    assert "arget" not in str(raised.value)


def test_an_error_of_the_function():
    def fails(x):
        torch._dynamo.graph_break()
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        explain(fails, *tensors(8, 16), gpu="nvidia_h200")


def test_a_convolution_of_rows():
    """Its result has other strides on the CPU, where autograd is traced: a view there is a copy on a GPU."""

    def reduced(x, kernel, w):
        y = F.conv2d(x.mT.unflatten(-1, (8, 8)), kernel)
        rows = F.linear(y.flatten(2).mT, w)
        return attention(rows, rows, rows)

    inputs = (*tensors(2, 64, 16), *tensors(16, 16, 1, 1), *tensors(32, 16))
    with config.patch(policy="always"):
        found = explain(reduced, *inputs, train=True, gpu="nvidia_h200")
    assert [site.verdict for site in found if site.fusion == "attention"] == ["fused"]


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_part_behind_a_graph_break(dynamic):
    """A graph takes a part of a tensor that does not start where the tensor does."""

    def broken(x):
        part = (x * 2)[1:]
        torch._dynamo.graph_break()
        return attention(part, part, part)

    with config.patch(policy="always"):
        found = explain(broken, *tensors(4, 16, 64), train=True, dynamic=dynamic, gpu="nvidia_h200")
    assert [site.verdict for site in found if site.fusion == "attention"] == ["fused"]
