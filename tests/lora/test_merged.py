"""Adapters that are merged into a frozen weight in each step: two products, where these are faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inductor_fusions import config, reporting, testing


@pytest.fixture(autouse=True)
def on_hopper(any_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def operands() -> tuple[torch.Tensor, ...]:
    """x, w, a, b and a bias."""
    made = [torch.randn(shape).requires_grad_() for shape in ((3, 8, 32), (48, 32), (4, 32), (48, 4), (48,))]
    made[1].requires_grad_(False)
    return tuple(made)


def check(fn: Callable[..., Any], inputs: Any = None, **options: Any) -> testing.Checked:
    options = {"backend": testing.EAGER_AFTER_PASSES, "slack": 4.0, **options}
    return testing.check(fn, operands() if inputs is None else inputs, **options)


FORMS: dict[str, Callable[..., Any]] = {
    "loralib": lambda x, w, a, b, c: F.linear(x, w + (b @ a) * 0.5, c),
    "minLoRA": lambda x, w, a, b, c: F.linear(x, w + torch.matmul(b, a).view(w.shape) * 0.25) + c,
    "LyCORIS": lambda x, w, a, b, c: F.linear(x, w + (b @ a).reshape(w.shape) * 2.0 / 4, c),
    "a difference": lambda x, w, a, b, c: F.linear(x, w - 0.5 * (b @ a)),
    "addmm": lambda x, w, a, b, c: F.linear(x, torch.addmm(w, b, a, alpha=0.5), c),
    "by @": lambda x, w, a, b, c: x @ (w.t() + 0.5 * (a.t() @ b.t())),
    "a second linear": lambda x, w, a, b, c: F.linear(x, w, c) + F.linear(x, 0.5 * (b @ a)),
    "a second product": lambda x, w, a, b, c: x @ w.t() + (x @ (a.t() @ b.t())) * 2.0,
    "a difference of weights": lambda x, w, a, b, c: (
        F.linear(x, w, c) + F.linear(x, ((f := w.detach()) + (b @ a).view(48, 32) * c.mean()) - f)
    ),
    "turned": lambda x, w, a, b, c: F.linear(x, b.matmul(a) + w, bias=c),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str) -> None:
    """Outputs and all gradients; the weight that was merged is in the graph no more."""
    run = check(FORMS[name])
    assert run.ours.fused[0].kernel == "two products"


def test_it_is_not_measured() -> None:
    check(FORMS["loralib"], policy="profitable", fused=0, reason="not-measured")


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", ["loralib", "a second linear"])
def test_measured(name: str, train: bool, shelf: Callable[..., None]) -> None:
    """Two products where a row says that they are faster: one with a weight, and one without."""
    row = {
        "inner": 32, "outer": 48, "rank": 4, "base": name == "loralib", "train": train, "dtype": "float32",
        "tf32": False, "tokens": 24,
    }  # fmt: skip
    for gain, how in ((1.5, {"fused": 1}), (0.9, {"fused": 0, "reason": "not-faster"})):
        shelf(on="cpu", cpu={"lora_merged": [{**row, "gain": gain}]})
        found = check(FORMS[name], policy="profitable", train=train, **how)
        assert gain < 1 or found.ours.fused[0].kernel == "two products, 1.50x measured"


@pytest.mark.parametrize("name", FORMS)
def test_inference(name: str) -> None:
    """A trained weight as well: nothing is differentiated."""
    x, w, *more = operands()
    run = check(FORMS[name], (x, w.requires_grad_(name == "loralib"), *more), train=False)
    assert run.ours.fused[0].kernel == "two products"


def test_frozen() -> None:
    """With Inductor's `freezing`, a weight is merged once."""
    with torch._inductor.config.patch(freezing=True):
        check(FORMS["loralib"], policy="profitable", train=False, fused=0, reason="merges them once")


@pytest.mark.parametrize("frozen", [(2,), (3,), (2, 3)], ids=["a", "b", "both"])
def test_the_adapter_changes_before_the_backward(frozen: tuple[int, ...]) -> None:
    """Eager mode keeps no factor whose other one is frozen, so its change must not be seen: it is left."""
    given = [x.detach().requires_grad_(place not in (1, *frozen)) for place, x in enumerate(operands())]
    check(FORMS["loralib"], given, fused=0, reason="A and B are trained")
    x, w, a, b, _ = given
    torch._dynamo.reset()
    with config.patch(policy="always", strict=True):
        y = torch.compile(FORMS["loralib"])(*given)
    wanted = (w + 0.5 * (b @ a)).detach().sum(0).expand_as(x)
    with torch.no_grad():
        for each, other in ((a, b), (b, a)):
            if not other.requires_grad:
                each.zero_()
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, wanted)


def test_the_weight_changes_before_the_backward() -> None:
    """Eager mode keeps the merged weight, so what is kept here is a copy."""
    x, w, a, b, c = operands()
    weight = w.clone()
    torch._dynamo.reset()
    with config.patch(policy="always"), reporting.isolated() as sites:
        y = torch.compile(FORMS["loralib"])(x, weight, a, b, c)
    assert "two products" in [site.kernel for site in sites]
    weight.zero_()
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, (w + 0.5 * (b @ a)).sum(0).expand_as(x))


def used_twice(x: Any, w: Any, a: Any, b: Any, c: Any) -> Any:
    weight = w + b @ a
    return F.linear(x, weight) + weight.sum()


def rotated(w: Any, a: Any) -> Any:
    return torch.einsum("ork,rkc->orc", w.view(48, 8, 4), a.reshape(8, 4, 4)).reshape(48, 32)


def padded(w: Any, a: Any, b: Any) -> Any:
    """Products of groups, as a convolution, in some rows of a matrix of zeros (MergedLinear of loralib)."""
    result = w.new_zeros(w.shape)
    result[torch.arange(24) * 2] = F.conv1d(a[None], b[:24, :2, None], groups=2).squeeze(0)
    return result


def placed(w: Any) -> Any:
    """A weight in some rows of a matrix of zeros: no adapter."""
    result = w.new_zeros(w.shape)
    result[torch.arange(24) * 2] = w[:24] * 2
    return result


class Hadamard(torch.autograd.Function):
    """The weight of LoHa with a gradient that its author wrote, as PEFT has it."""

    @staticmethod
    def forward(ctx: Any, b: Any, a: Any) -> Any:
        ctx.save_for_backward(b, a)
        return (b @ a) * (b @ a)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        b, a = ctx.saved_tensors
        grad = 2 * grad * (b @ a)
        return grad @ a.T, b.T @ grad


OTHERS: dict[str, tuple[Callable[..., Any], str | None]] = {
    "a difference to another weight": (lambda x, w, a, b, c: F.linear(x, (w + b @ a) - w * 2), "merged"),
    "two factors": (lambda x, w, a, b, c: F.linear(x, (b @ a) * c.mean() * c.sum()), "merged"),
    "a second linear with a bias": (lambda x, w, a, b, c: F.linear(x, b @ a, c), "merged"),
    "a trained weight": (lambda x, w, a, b, c: F.linear(x, (w * c[:, None]) + b @ a), "merged"),
    "used twice": (used_twice, "also used"),
    "an activation": (lambda x, w, a, b, c: F.linear(x, w + (b @ a).tanh()), None),
    "a vector": (lambda x, w, a, b, c: F.linear(x, w + (b @ a) * c[:, None]), "merged"),
    "LoHa": (lambda x, w, a, b, c: F.linear(x, w + (b @ a) * (b @ a)), "merged"),
    "LoHa, by a Function": (lambda x, w, a, b, c: F.linear(x, w + Hadamard.apply(b, a)), "of rank 4"),
    "LoKr": (lambda x, w, a, b, c: F.linear(x, w + torch.kron(a[:2, :2], b[:24] @ a[:, :16])), "merged"),
    "LoKr, factors": (lambda x, w, a, b, c: F.linear(x, w) + x @ torch.kron(a[:, :12], b[:8]), "merged"),
    "OFT": (lambda x, w, a, b, c: F.linear(x, rotated(w, a), c), "merged"),
    "BOFT": (lambda x, w, a, b, c: F.linear(x, w @ torch.block_diag(*a.view(8, 4, 4))), "merged"),
    "FourierFT": (lambda x, w, a, b, c: F.linear(x, w + torch.fft.ifft2(w * c[:, None]).real), "merged"),
    "SHiRA": (lambda x, w, a, b, c: F.linear(x, w.index_put((torch.arange(4),), a)), "merged"),
    "DoRA": (lambda x, w, a, b, c: F.linear(x, (m := w + b @ a) / m.norm(dim=1, keepdim=True)), "merged"),
    "rows of zeros": (lambda x, w, a, b, c: F.linear(x, w) + F.linear(x, padded(w, a, b)), "by conv1d"),
    "rows of a weight": (lambda x, w, a, b, c: F.linear(x, placed(w)), None),
    "a sum of the weight": (lambda x, w, a, b, c: F.linear(x, (w + b @ a).sum(0, keepdim=True)), None),
    "another order": (lambda x, w, a, b, c: F.linear(x, w + (a.t() @ b.t()).view(48, 32)), "merged"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_left_alone(name: str) -> None:
    fn, reason = OTHERS[name]
    check(fn, fused=0, reason=reason)


SILENT: dict[str, Callable[..., Any]] = {
    "a normalised weight": lambda x, w, a, b, c: F.linear(x, F.normalize(w) * c[:, None]),
    "compared features": lambda x, w, a, b, c: x[0] @ (w[:32] @ w[:32]).t(),
    "slices of a weight": lambda x, w, a, b, c: F.linear(x, torch.cat([w[:8], w[16:]])),
}


@pytest.mark.parametrize("name", SILENT)
def test_no_adapter(name: str) -> None:
    found = check(SILENT[name], fused=0)
    assert not [site for site in found.sites if site.code == "merged"]
