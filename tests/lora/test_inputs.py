"""Before autograd: float32 adapters keep their input as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inductor_fusions import _inductor, config, reporting, testing
from inductor_fusions.effects import scope, writes
from inductor_fusions.fusions.lora import inputs
from inductor_fusions.fusions.lora.adapters import source
from inductor_fusions.fusions.lora.op import ROUNDED


class Adapted(nn.Module):
    """A linear with an adapter, as PEFT spells it.

    Args:
        how: how the input is widened.
    """

    def __init__(self, how: str = "to") -> None:
        super().__init__()
        self.how = how
        self.base = nn.Linear(64, 48, dtype=torch.bfloat16).requires_grad_(False)
        self.a, self.b = nn.Linear(64, 16, bias=False), nn.Linear(16, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if self.how == "float" else x.to(self.a.weight.dtype)
        if self.how == "double first":
            wide = x.sin().double().float()
        if self.how == "dropout":
            wide = F.dropout(wide, 0.5)
        result = self.base(x)
        return (result + self.b(self.a(wide)) * 2.0).to(result.dtype)


class Gated(nn.Module):
    """The first half of a gated MLP: the gradient of its activation is computed in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = Adapted(), Adapted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)) * self.up(x)


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[pytest.MonkeyPatch]:
    """Every device counts: the operation is products one by one there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "check_device", lambda value: None)
        patch.setattr(inputs.profit, "narrow_kernel", lambda *shape: "narrow_mm")
        yield patch


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16().requires_grad_()


@pytest.mark.parametrize("how", ["to", "float"])
@pytest.mark.parametrize("shape", [(24, 64), (2, 3, 8, 64)], ids=str)
def test_numbers(how: str, shape: tuple[int, ...]) -> None:
    """Outputs and gradients are as exact as without it."""
    testing.check(Adapted(how), (rand(*shape),), fused=1, kernel="narrow_mm", train=True)


def test_weight_that_is_a_vector() -> None:
    def fn(x: Any, a: Any, b: Any) -> Any:
        return F.linear(F.linear(x.float(), a), b)

    args = (rand(2, 24, 64), torch.randn(64).requires_grad_(), torch.randn(48, 24))
    with config.patch(strict=True):
        testing.check(fn, args, fused=0, train=True, slack=4.0)


def test_the_graph_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many adapters there are: they are hundreds in large models."""
    calls: list[Any] = []
    monkeypatch.setattr(scope, "effects", lambda graph: calls.append(graph) or writes.effects(graph))
    testing.check(Gated(), (rand(24, 64),), fused=2, train=True)
    assert len(calls) == 1


def test_the_input_is_kept_as_it_is() -> None:
    """What autograd keeps is smaller: no float32 matrix of the size of the input."""

    def kept(policy: str) -> list[torch.dtype]:
        found: list[torch.dtype] = []

        def pack(t: torch.Tensor) -> torch.Tensor:
            if t.numel() == 4 * 24 * 64:
                found.append(t.dtype)
            return t

        x = rand(4, 24, 64)
        torch._dynamo.reset()
        with config.patch(enabled=policy != "stock"):
            compiled = torch.compile(Adapted(), fullgraph=True)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                compiled(x)
        return found

    with torch._inductor.config.patch(force_disable_caches=True):
        assert kept("stock") == [torch.float32]
        assert kept("ours") == [torch.bfloat16]


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded sums are marked, as on a torch that takes casts out."""
    monkeypatch.setattr(inputs, "drops_narrow_casts", lambda: True)


@pytest.mark.usefixtures("marked")
def test_a_rounded_sum() -> None:
    """Its gradient is in memory in 16 bits alone: what reads it in float32 reads a cast of that."""
    marks = 0

    def count(candidate: Any, rounded: torch.fx.Node | None) -> None:
        nonlocal marks
        marks += rounded is not None
        mark(candidate, rounded)

    def read(enabled: bool) -> list[torch.dtype]:
        found: list[torch.dtype] = []

        def collect(graph: torch.fx.Graph) -> None:
            assert not graph.find_nodes(op="call_function", target=ROUNDED)
            products = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
            for operand in (x for p in products for x in p.args if p.meta["val"].dtype == torch.float32):
                base = source(operand).base.meta["val"]
                if base.numel() == 24 * 48:
                    found.append(base.dtype)

        torch._dynamo.reset()
        settings = {"post_grad_custom_post_pass": collect, "force_disable_caches": True}
        with config.patch(enabled=enabled), torch._inductor.config.patch(settings):
            torch.compile(Gated(), fullgraph=True)(rand(24, 64)).sum().backward()
        return found

    mark = inputs.AdapterInput._mark
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs.AdapterInput, "_mark", count)
        assert set(read(True)) == {torch.bfloat16}
    assert marks == 2
    assert (torch.float32 in read(False)) == _inductor.drops_narrow_casts()


@pytest.mark.usefixtures("marked")
@pytest.mark.parametrize("backend", ["inductor", testing.EAGER_AFTER_PASSES])
def test_numbers_of_a_rounded_sum(backend: str) -> None:
    """Also where no fusion of adapters reads the graph."""
    testing.check(Gated(), (rand(24, 64),), fused=2, kernel="narrow_mm", train=True, backend=backend)


@pytest.mark.parametrize("how", ["dropout", "double first"])
def test_another_input_stays(how: str) -> None:
    """The masked input is another value; what was rounded on the way is not the input."""
    seen = testing.capture(Adapted(how), rand(24, 64), train=True)
    assert not seen.fused


def test_nothing_is_trained() -> None:
    """Without a gradient nothing is kept."""
    module = Adapted().requires_grad_(False)
    assert not testing.capture(module, rand(24, 64), train=True).fused
    with config.patch(lora=False):
        sites = testing.capture(Adapted(), rand(24, 64), train=True).sites
        assert not [site for site in sites if site.fusion.startswith("lora")]


def overwritten(x: Any, wide: Any) -> None:
    x.detach().mul_(3.0)


def wide_overwritten(x: Any, wide: Any) -> None:
    wide[:, 0] = 5.0


def wide_activated(x: Any, wide: Any) -> None:
    F.elu(wide, 1.0, True)


Change = Callable[[Any, Any], None]


def written(change: Change | None = None, later: Change | None = None, no_grad: bool = False) -> Any:
    """A linear with an adapter, and what else happens before and after the down-projection."""

    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        x = x * 1.0
        with torch.no_grad() if no_grad else contextlib.nullcontext():
            wide = x.float()
        base = F.linear(x, w)
        if change is not None:
            change(x, wide)
        y = (base + F.linear(F.linear(wide, a), b) * 2.0).to(x.dtype)
        if later is not None:
            later(x, wide)
        return y

    return fn


@pytest.mark.parametrize(("fn", "reason"), [
    (written(overwritten), "mul_ writes in place between the cast and the linear"),
    (written(wide_overwritten), "setitem writes in place"),
    (written(wide_activated), "elu writes in place"),
    (written(later=overwritten), "overwrites an operand that is saved"),
    (written(no_grad=True), "grad mode changes"),
])  # fmt: skip
def test_input_that_is_not_what_was_widened(fn: Any, reason: str) -> None:
    """The operation reads and keeps the input itself, where stock has a copy of it."""
    args = [rand(24, 64), rand(48, 64).detach()]
    args += [torch.randn(shape).requires_grad_() for shape in ((16, 64), (48, 16))]
    if "in place" in reason or "overwrites" in reason:
        args[0].requires_grad_(False)

    def outcome(call: Any) -> list[torch.Tensor]:
        y = call(*args)
        return [y, *torch.autograd.grad(y.float().sum(), [t for t in args if t.requires_grad])]

    stock = outcome(fn)
    torch._dynamo.reset()
    with reporting.isolated() as sites:
        found = outcome(torch.compile(fn, fullgraph=True, backend="inductor"))
    (site,) = (site for site in sites if site.fusion == "lora_input")
    assert site.verdict == "rejected" and reason in site.reason
    for y, z in zip(found, stock, strict=True):
        assert float((y - z).detach().norm()) <= 0.02 * float(z.detach().norm())


def test_autocast_inside() -> None:
    """What A gives is bfloat16 there, and the casts to float32 and back are none."""

    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            h = F.linear(x.float(), a)
            return F.linear(x, w) + F.linear(h, b), h

    args = (rand(24, 64), rand(48, 64), torch.randn(16, 64).requires_grad_(), torch.randn(48, 16))
    seen = testing.capture(fn, *args, train=True)
    assert not seen.fused and seen.tensors[1].dtype == torch.bfloat16
    assert [site.verdict for site in seen.sites if site.fusion == "lora_input"] == ["left to stock"]


def test_transforms_of_functions() -> None:
    """The operation has no rule for them."""

    def gradient(x: Any, a: Any, b: Any) -> Any:
        return torch.func.grad(lambda a: F.linear(F.linear(x.float(), a), b).square().sum())(a)

    def batched(x: Any, a: Any, b: Any) -> Any:
        return torch.vmap(lambda x: F.linear(F.linear(x.float(), a), b))(x.view(2, 40, 64))

    args = (rand(80, 64), torch.randn(16, 64).requires_grad_(), torch.randn(48, 16))
    for fn, reason in ((gradient, "torch.func.grad"), (batched, "torch.vmap")):
        seen = testing.check(fn, args, fused=0, reason=reason, slack=4.0, train=fn is batched)
        assert seen.sites


@pytest.mark.parametrize(("rows", "train", "reported"), [(64, False, 0), (65, False, 1), (64, True, 1)])
def test_few_rows_without_gradients(rows: int, train: bool, reported: int) -> None:
    """Decoding: the pair of kernels of the whole linear casts its input, and this has no site of its own."""
    seen = testing.capture(Adapted(), rand(rows, 64), train=train)
    assert sum(site.fusion == "lora_input" for site in seen.sites) == reported


def test_on_the_cpu_it_is_left_to_stock(on_the_cpu: pytest.MonkeyPatch) -> None:
    on_the_cpu.undo()
    seen = testing.capture(Adapted(), rand(24, 64), train=True)
    assert [site.verdict for site in seen.sites if site.fusion == "lora_input"] == ["left to stock"]


def test_on_a_device_without_autocast(on_the_cpu: pytest.MonkeyPatch) -> None:
    """As in tools that compile models of any size on the device `meta`."""
    on_the_cpu.undo()
    model, x = Adapted().to("meta"), rand(24, 64).detach().to("meta")
    seen = testing.capture(model, x.requires_grad_(), train=True, backend=testing.EAGER_AFTER_PASSES)
    assert [site.verdict for site in seen.sites if site.fusion == "lora_input"] == ["left to stock"]


@pytest.mark.parametrize("trained", ["x and a", "a"])
def test_input_that_the_caller_changes(trained: str) -> None:
    """Eager keeps a widened copy of it."""
    module, x = Adapted(), rand(24, 64).detach().requires_grad_(trained != "a")

    def gradients(fn: Any) -> list[torch.Tensor]:
        given = x.detach().clone().requires_grad_(x.requires_grad)
        out = fn(given)
        with torch.no_grad():
            given.mul_(-3.0)
            if trained == "a":
                module.a.weight.mul_(1.0)
        weights = [module.a.weight, module.b.weight, *([given] if x.requires_grad else [])]
        return list(torch.autograd.grad(out.float().square().sum(), weights))

    with config.patch(policy="always"), reporting.isolated() as sites:
        torch._dynamo.reset()
        found = gradients(torch.compile(module))
    assert [site.verdict for site in sites if site.fusion == "lora_input"] == ["fused"]
    for ours, eager in zip(found, gradients(module), strict=True):
        torch.testing.assert_close(ours, eager, atol=0.1, rtol=0.05)


def test_copy_that_is_made_where_no_gradient_is_recorded() -> None:
    """One that autograd records is made for those behind it."""
    first, second, x = Adapted(), Adapted(), rand(24, 64)

    def both(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            left = first(x)
        return left + second(x)

    def gradients(fn: Any) -> Any:
        return torch.autograd.grad(fn(x).float().square().sum(), [x, second.a.weight])

    with config.patch(policy="always"), reporting.isolated() as sites:
        torch._dynamo.reset()
        found = gradients(torch.compile(both, fullgraph=True))
    assert [site.verdict for site in sites if site.fusion == "lora_input"] == ["fused"] * 2
    for ours, eager in zip(found, gradients(both), strict=True):
        assert float((ours - eager).norm()) <= 0.02 * float(eager.norm())
