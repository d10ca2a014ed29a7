"""Which losses become one operation with the linear in front of them, and what it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from inductor_fusions import config, testing
from inductor_fusions.fusions.linear_cross_entropy import chunks
from inductor_fusions.fusions.linear_cross_entropy.op import LINEAR_CROSS_ENTROPY
from tests.linear_cross_entropy import forms
from tests.linear_cross_entropy.forms import FORMS, OTHERS, B, Function, H, T, V, causal
from tests.support.modules import Module

CHUNK_ROWS = chunks.chunk_rows  # as it is, where a fixture has another


class Head(nn.Module):
    """A linear and what a function makes of its logits and of labels."""

    def __init__(self, loss: Function, bias: bool = False) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(H, V, bias=bias), loss
        self.register_buffer("weights", torch.rand(V))

    def forward(self, h: Any, labels: Any) -> Any:
        if self.loss.__code__.co_argcount == 3:
            return self.loss(self.head(h), labels, self.weights)
        return self.loss(self.head(h), labels)


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of which is shorter."""
    monkeypatch.setattr(chunks, "chunk_rows", lambda rows, *sizes: max(1, -(-rows // 3)))


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(V, (B, T))
    labels[0, 2], labels[1, 5] = -100, -100
    return torch.randn(B, T, H, requires_grad=True), labels


def check(fn: Function, inputs: Any = None, **options: Any) -> testing.Checked:
    options = {"backend": testing.EAGER_AFTER_PASSES, "slack": 4.0, "fused": 1, **options}
    return testing.check(fn, operands() if inputs is None else inputs, **options)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_form(name: str, bias: bool) -> None:
    """Fused; the loss and the gradients of hidden states, weight and bias."""
    fn, kernel = FORMS[name]
    run = check(Head(fn, bias), kernel=kernel)
    assert len(run.ours.grads) == 2 + bias


@pytest.mark.parametrize("name", FORMS)
def test_form_of_symbolic_sizes(name: str) -> None:
    check(Head(FORMS[name][0]), dynamic=True)


@pytest.mark.parametrize("name", ["causal", "capped", "log-probabilities", "log-probabilities and entropy"])
def test_without_gradients(name: str) -> None:
    h, labels = operands()
    check(Head(FORMS[name][0]), (h.detach(), labels), train=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name", ["causal", "weighted", "each", "log-probabilities", "loss and entropy", "entropy"]
)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """float16 would not hold gradients of a mean that are not scaled yet: its backward makes them."""
    run = check(Head(FORMS[name][0], bias=True), dtype=dtype, slack=1.0)
    if dtype == torch.float16:
        assert run.ours.fused[0].kernel == "linear_softmax_rows"


@pytest.mark.parametrize("name", [
    "weighted", "each", "likelihood in the middle", "another label is ignored", "loss and entropy",
    "log_prob of Categorical",
])  # fmt: skip
def test_exported(name: str) -> None:
    """Operators of aten have a number for the reduction."""
    head = Head(FORMS[name][0])
    exported = torch.export.export(head, operands()).module()
    check(exported, reference=head, kernel=FORMS[name][1])


@pytest.mark.parametrize("name", ["causal", "capped", "log-probabilities", "log-probabilities and entropy"])
def test_in_full(name: str) -> None:
    """As Inductor compiles it."""
    check(Head(FORMS[name][0], bias=True), backend="inductor")


@pytest.mark.parametrize("name", ["causal", "log-probabilities", "loss and entropy", "entropy"])
def test_certain_labels(name: str) -> None:
    """A loss near 0 of large logits keeps its digits: y[label] - logsumexp(y) would not."""
    head, h = Head(FORMS[name][0]), operands()[0]
    with torch.no_grad():
        head.head.weight *= 40
    check(head, (h, head.head(h).argmax(-1).roll(1, 1)), slack=1.0)


def test_frozen_head() -> None:
    """No gradient of a weight is made."""
    head = Head(causal)
    head.head.weight.requires_grad_(False)
    seen = testing.capture(head, *operands(), train=True, backend=testing.EAGER_AFTER_PASSES)
    (call,) = [n for g in seen.graphs for n in g.graph.nodes if n.target is LINEAR_CROSS_ENTROPY]
    assert call.args[-1] == [True, False, False]
    check(head)


def test_autocast() -> None:
    """The linear runs in bfloat16, and the loss in float32."""

    class Cast(Head):
        def forward(self, h: Any, labels: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return self.loss(self.head(h), labels)

    run = check(Cast(forms.shifted_logits, bias=True), slack=0.05 / torch.finfo(torch.float32).eps)
    assert run.ours.grads["head.weight"].dtype == torch.float32
    assert all(ours <= 1.5 * stock + 0.008 for ours, stock in run.errors.values()), run.errors


def test_operands_of_different_dtypes() -> None:
    """They raise as in eager mode, where autocast is off."""
    h, w, labels = torch.randn(B, H), torch.randn(V, H, dtype=torch.float16), torch.randint(V, (B,))
    with pytest.raises(RuntimeError, match="same dtype"):
        testing.capture(
            lambda h, w, labels: F.cross_entropy(F.linear(h, w), labels), h, w, labels,
            backend=testing.EAGER_AFTER_PASSES,
        )  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum", "sum over their number"])
def test_all_labels_are_ignored(reduction: str) -> None:
    """A mean over nothing is NaN, and its gradients are 0, as in stock."""

    def fn(logits: Any, labels: Any) -> Any:
        loss = F.cross_entropy(logits.view(-1, V), labels.view(-1), reduction=reduction.partition(" ")[0])
        return loss / (labels != -100).sum() if "number" in reduction else loss

    h, labels = operands()
    head = Head(fn)
    seen = testing.capture(head, h, labels.fill_(-100), train=True, backend=testing.EAGER_AFTER_PASSES)
    assert len(seen.fused) == 1 and all(not g.any() for g in seen.grads.values() if g is not None)
    assert seen.outputs == 0 if reduction == "sum" else seen.outputs.isnan()


@pytest.mark.parametrize("lowest", [float("-inf"), torch.finfo(torch.float32).min], ids=["inf", "min"])
@pytest.mark.parametrize("entropy", [forms.entropy, forms.entropy_of_logs, forms.entropy_of_categorical])
def test_entropy_of_hidden_classes(entropy: Function, lowest: float) -> None:
    """A bias hides them. 0 * -inf is NaN as in eager mode; Categorical clamps."""
    bias = torch.zeros(V)
    bias[::7] = lowest

    def fn(h: Any, w: Any, labels: Any) -> Any:
        logits = F.linear(h, w, bias)
        return logits.log_softmax(-1).gather(-1, labels[..., None]), entropy(logits)

    h, labels = operands()
    inputs = h, torch.randn(V, H, requires_grad=True), labels.clamp(min=0) // 7 * 7 + 1
    halves = [torch.full((B, T, 1), 0.5), torch.full((B, T), 0.5)]  # larger ones overflow in eager mode
    ours, stock = (
        testing.capture(fn, *inputs, train=True, backend=backend, cotangents=halves)
        for backend in (testing.EAGER_AFTER_PASSES, "eager")
    )
    assert len(ours.fused) == 1
    torch.testing.assert_close(ours.outputs, stock.outputs, equal_nan=True)
    torch.testing.assert_close(ours.grads, stock.grads, equal_nan=True)


@pytest.mark.parametrize("label", [V, -1])
def test_label_out_of_bounds(label: int) -> None:
    h, labels = operands()
    labels[0, 0] = label
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        testing.capture(Head(causal), h, labels.roll(1), backend=testing.EAGER_AFTER_PASSES)


def gathered(logits: Any, labels: Any) -> Any:
    return logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)


def of_each_token(logits: Any, labels: Any) -> Any:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


@pytest.mark.parametrize("label", [V, -1, -2])
@pytest.mark.parametrize("loss", [gathered, of_each_token])
def test_label_out_of_bounds_of_log_probabilities(loss: Function, label: int) -> None:
    h, labels = operands()
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        testing.capture(Head(loss), h, labels.clamp(min=0).fill_(label), backend=testing.EAGER_AFTER_PASSES)


@pytest.mark.parametrize("label", [-1, -V - 2, V, 2 * V + 3])
def test_labels_of_take_along_dim_are_modulo_the_classes(label: int) -> None:
    h, labels = operands()
    labels[0, 2], labels[1, 5] = label, label

    def picked(logits: Any, labels: Any) -> Any:
        return torch.take_along_dim(logits.log_softmax(-1), labels[..., None], -1)

    check(Head(picked), (h, labels))


def test_hidden_states_are_used_elsewhere() -> None:
    class Twice(Head):
        def forward(self, h: Any, labels: Any) -> Any:
            h = h * 2
            return self.loss(self.head(h), labels) + h.square().mean(), h

    check(Twice(causal))


def test_tied_weight() -> None:
    """That of an embedding, which gets both gradients."""

    def tied(net: Any, labels: Any) -> Any:
        return causal(F.linear(net.embedding(labels).tanh(), net.embedding.weight), labels)

    check(Module(tied, {"embedding": nn.Embedding(V, H)}), (torch.randint(V, (B, T)),))


@pytest.mark.parametrize("product", ["matmul", "addmm"])
def test_products(product: str) -> None:
    def fn(h: Any, w: Any, bias: Any, labels: Any) -> Any:
        logits = h @ w if product == "matmul" else torch.addmm(bias, h, w)
        return F.cross_entropy(logits, labels) + bias.sum()

    shapes = (B * T, H), (H, V), (V,)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    check(fn, (*inputs, torch.randint(V, (B * T,))))


@pytest.mark.parametrize("h, w", [((B * T, 1), (V, H)), ((B * T, H), (V, 1))])
def test_einsum_that_broadcasts_a_dim_that_it_sums_over(h: tuple[int, int], w: tuple[int, int]) -> None:
    inputs = [torch.randn(shape, requires_grad=True) for shape in (h, w)]
    check(
        lambda h, w, labels: F.cross_entropy(torch.einsum("td,vd->tv", h, w), labels),
        (*inputs, torch.randint(V, (B * T,))),
        fused=0,
        reason="loss",
    )


@pytest.mark.parametrize("name", OTHERS)
def test_left_alone(name: str) -> None:
    fn, reason = OTHERS[name]
    check(Head(fn), fused=0, reason=reason)


@pytest.mark.parametrize(
    "fn, reason", [(forms.of_as_many_classes_as_tokens, "loss"), (forms.rows_of_two_losses, "used-elsewhere")]
)
def test_ranges_of_symbolic_lengths(fn: Function, reason: str) -> None:
    check(Head(fn), fused=0, reason=reason, dynamic=True)


@pytest.mark.parametrize("backend", [testing.EAGER_AFTER_PASSES, "inductor"])
def test_checkpointed(backend: str) -> None:
    """A body that is run again: its backward makes the gradients."""

    class Checkpointed(Head):
        def forward(self, h: Any, labels: Any) -> Any:
            def body(h: Any, labels: Any) -> Any:
                return self.loss(self.head(h), labels)

            return torch.utils.checkpoint.checkpoint(body, h * 2, labels, use_reentrant=False)

    check(Checkpointed(causal, bias=True), kernel="linear_softmax_rows", backend=backend)


def test_adapted_head() -> None:
    """Logits are a sum of two products."""

    class Adapted(Head):
        def __init__(self, loss: Function) -> None:
            super().__init__(loss)
            self.a, self.b = nn.Linear(H, 4, bias=False), nn.Linear(4, V, bias=False)

        def forward(self, h: Any, labels: Any) -> Any:
            return self.loss(self.head(h) + 2 * self.b(self.a(h)), labels)

    with config.patch(lora=False):
        check(Adapted(causal), fused=0, reason="loss")


def test_strided_operands() -> None:
    """Hidden states, weight and labels that are views of others."""

    def fn(h: Any, w: Any, labels: Any) -> Any:
        return F.cross_entropy(F.linear(h.transpose(0, 1)[:, ::2], w[:, 1:]).flatten(0, 1), labels[::2])

    inputs = torch.randn(T, B, H, requires_grad=True), torch.randn(V, H + 1, requires_grad=True)
    check(fn, (*inputs, torch.randint(V, (B * -(-T // 2) * 2,))))


@pytest.mark.parametrize("backend", [testing.EAGER_AFTER_PASSES, "inductor"])
@pytest.mark.parametrize(
    "fn", [forms.returned, forms.returned_capped, forms.returned_wider], ids=["plain", "capped", "cast"]
)
def test_returned_logits_without_gradients(fn: Function, backend: str) -> None:
    """Where the caller says that nobody differentiates them, they are written once, as they are."""
    head, inputs = Head(fn, bias=True), operands()
    with config.patch(returned_logits="detached"):
        ours = testing.capture(head, *inputs, backend=backend, train=True)
    assert len(ours.fused) == 1
    head.loss = lambda logits, labels: (fn(logits, labels)[0], fn(logits, labels)[1].detach())
    with config.patch(enabled=False):
        stock = testing.capture(head, *inputs, backend=backend, train=True, cotangents=ours.cotangents)
    torch.testing.assert_close(ours.outputs, stock.outputs)
    assert not ours.outputs[1].requires_grad
    torch.testing.assert_close(ours.grads, stock.grads)


@pytest.mark.parametrize(
    "fn",
    [forms.returned, forms.returned_wider, forms.returned_slice],
    ids=["without gradients", "cast", "some rows"],
)
def test_returned_logits_that_are_left(fn: Function) -> None:
    """An evaluation needs them in any case, and the loss of some rows would copy them."""
    train = fn is forms.returned_slice
    with config.patch(returned_logits="detached"):
        seen = testing.capture(Head(fn), *operands(), backend=testing.EAGER_AFTER_PASSES, train=train)
    assert not seen.fused and "the graph returns the logits" in seen.sites[0].reason


def test_two_losses() -> None:
    """Each of them is one: of two heads on the same hidden states."""

    class Two(Head):
        def __init__(self, loss: Function) -> None:
            super().__init__(loss)
            self.other = nn.Linear(H, V)

        def forward(self, h: Any, labels: Any) -> Any:
            return self.loss(self.head(h), labels) - self.loss(self.other(h), labels.roll(1))

    check(Two(causal), fused=2)


@pytest.mark.parametrize("fn, classes", [
    (lambda h, w: (weights := F.linear(h, w).softmax(-1)).gather(-1, weights.topk(2, -1).indices), 8),
    (lambda h, w: torch.multinomial(F.linear(h, w).softmax(-1), 1), V),
    (lambda h, w: F.logsigmoid(F.linear(h, w)).cumsum(0).exp(), V),
    (lambda h, w: (F.softplus(F.linear(h, w)) * h.sum(-1, keepdim=True)).sum(-1), V),
    (lambda h, w: (torch.sigmoid(F.linear(h, w)) * w.sum(-1)).mean(), V),
    (lambda h, w: ((e := (h @ h.t()).exp()) / e.sum(-1, keepdim=True)) @ h, V),
], ids=["router", "sampler", "decays", "steps", "gates", "attention"])  # fmt: skip
def test_probabilities_of_no_loss(fn: Function, classes: int) -> None:
    seen = testing.capture(fn, torch.randn(4, H), torch.randn(classes, H))
    assert "linear_cross_entropy" not in {site.fusion for site in seen.sites}


def test_second_derivative() -> None:
    """Eager gives one; the operation has none, and says so."""
    h = torch.randn(5, H, requires_grad=True)
    w, labels = torch.randn(V, H), torch.randint(V, (5,))

    def fn(h: Any) -> Any:
        (d,) = torch.autograd.grad(F.cross_entropy(F.linear(h, w), labels), h, create_graph=True)
        return d.square().sum()

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        seen = testing.capture(fn, h, train=True, backend=testing.EAGER_AFTER_PASSES)
    assert not seen.fused and len(seen.sites) == 1


def test_by_default_small_logits_are_left() -> None:
    with config.patch(policy="profitable"):
        check(Head(causal), fused=0, policy="profitable", reason="are small")


def test_chunk_rows() -> None:
    """Half of all logits at the most, and at most 1 GiB on a GPU; of about the same size."""
    assert CHUNK_ROWS(16384, 128256, 2, "cuda") == 4096
    assert CHUNK_ROWS(8192, 128256, 2, "cuda") == 4096
    assert CHUNK_ROWS(16384, 248320, 2, "cuda") == 2048
    assert CHUNK_ROWS(7, 61, 4, "cpu") == 3
    for count in (1, 5, 1000, 4097, 16384):
        found = CHUNK_ROWS(count, 50257, 2, "cuda")
        assert 1 <= found <= count and found * 50257 * 2 <= max(chunks.CHUNK["cuda"], 50257 * 2)
