"""Adapters behind a dropout: the mask is kept beside the input, and the same seed gives the same mask."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from devtools import cuda_codegen
from inductor_fusions import config, operands, reporting
from inductor_fusions.fusions.lora import inputs, profit
from inductor_fusions.fusions.lora.accumulate import LORA_ACCUMULATE
from inductor_fusions.fusions.lora.op import NARROW_MM
from tests.block_mm.support import Run, rand, run
from tests.lora.spellings import targets
from tests.support.arguments import named
from tests.support.covering import pairwise

BF16, FP32 = torch.bfloat16, torch.float32
IN, OUT, RANK = 64, 48, 16


class Adapted(nn.Module):
    """Linears on one input, with an adapter each, as PEFT spells them.

    Args:
        p: of the dropout in front of each adapter.
    """

    def __init__(self, adapters: torch.dtype = FP32, count: int = 1, p: float = 0.25) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(IN, OUT, dtype=BF16).requires_grad_(False) for _ in range(count))
        self.a = nn.ModuleList(nn.Linear(IN, RANK, bias=False, dtype=adapters) for _ in range(count))
        self.b = nn.ModuleList(nn.Linear(RANK, OUT, bias=False, dtype=adapters) for _ in range(count))
        self.drop = nn.ModuleList(nn.Dropout(p) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = []
        for base, a, b, drop in zip(self.base, self.a, self.b, self.drop, strict=True):
            result = base(x)
            results.append((result + b(a(drop(x.to(a.weight.dtype)))) * 2.0).to(result.dtype))
        return torch.cat(results, -1)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Every device counts: the operations are products one by one there. A test on a GPU sees that GPU."""
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(inputs, "check_device", lambda value: None)
    monkeypatch.setattr(operands, "check_device", lambda value: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))


def outcome(
    fn: Callable[..., Any],
    args: Sequence[Any],
    fused: bool,
    *,
    dynamic: bool | None = None,
    real: bool = False,
) -> tuple[Any, Any]:
    """Outputs and gradients of a seed, and the sites.

    Args:
        fn, args: what is differentiated.
        fused: whether the fusions are on.
        real: with the kernels of Inductor, and its random numbers; else its graphs as eager mode runs them,
            which takes a tenth of the time.
    """
    if not real:
        torch.manual_seed(3)
        seen = run(fn, args, train=True, dynamic=dynamic, policy="always" if fused else "profitable")
        return [*seen.outputs, *seen.grads], seen.sites
    torch._dynamo.reset()
    leaves = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves += list(fn.parameters()) if isinstance(fn, nn.Module) else []
    leaves = [t for t in leaves if t.requires_grad]
    others = {"qkv": False, "gated_mlp": False, "linear_epilogue": False}
    settings = config.patch(enabled=fused, policy="always", strict=True, **others)
    with settings, reporting.isolated() as sites, torch._inductor.config.patch(force_disable_caches=True):
        torch.manual_seed(3)
        y = torch.compile(fn, fullgraph=True, dynamic=dynamic)(*args)
        weight = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y)
        grads = torch.autograd.grad((y * weight).sum(), leaves)
    return [y.detach(), *grads], list(sites)


def same_as_stock(fn: Callable[..., Any], args: Sequence[Any], count: int = 1, **options: Any) -> Any:
    """Check that outputs and gradients are those of stock, of which another mask is far off; the sites."""
    stock, _ = outcome(fn, args, False, **options)
    ours, sites = outcome(fn, args, True, **options)
    assert sum(site.verdict == "fused" for site in sites if site.fusion == "lora_input") == count, sites
    for i, (y, z) in enumerate(zip(ours, stock, strict=True)):
        assert (y is None) == (z is None)
        if y is None:
            continue
        assert y.dtype == z.dtype and y.shape == z.shape
        # All that is dropped is 0 times infinity.
        assert torch.equal(y.isnan(), z.isnan())
        y, z = y.double().nan_to_num(), z.double().nan_to_num()
        error = float((y - z).norm() / z.norm().clamp(min=1e-3))
        assert error < 0.01, (i, error)
    return sites


#: Both products of an adapter: of x, a (rank, in) and b (out, rank).
PRODUCTS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "t": lambda x, a, b: x @ a.t() @ b.t(),
    "mT": lambda x, a, b: x.matmul(a.mT).matmul(b.mT),
    "a product and a linear": lambda x, a, b: F.linear(x @ a.t(), b),
    "a linear and a product": lambda x, a, b: F.linear(x, a) @ b.t(),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_dropout_in_front_of_a_product(name: str) -> None:
    """Linears that are spelled as products with transposed matrices."""

    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        return F.linear(x, w) + PRODUCTS[name](F.dropout(x, 0.25), a, b) * 2.0

    operands = rand(24, IN), rand(OUT, IN).detach(), rand(RANK, IN), rand(OUT, RANK)
    same_as_stock(fn, operands)


def test_dropout_in_front_of_other_products() -> None:
    """A square matrix that is not transposed, and a product that no other one reads."""

    def not_transposed(x: Any, w: Any, a: Any, b: Any) -> Any:
        return F.linear(x, w) + F.dropout(x, 0.25) @ a @ b

    def alone(x: Any, w: Any, a: Any, b: Any) -> Any:
        return F.linear(x, w).sum() + (F.dropout(x, 0.25) @ a.t()).sum() + b.sum()

    same_as_stock(
        not_transposed, (rand(24, IN), rand(OUT, IN).detach(), rand(IN, RANK), rand(RANK, OUT)), count=0
    )
    same_as_stock(alone, (rand(24, IN), rand(OUT, IN).detach(), rand(RANK, IN), rand(OUT, RANK)), count=0)


@pytest.mark.parametrize(
    ("adapters", "shape", "real"), pairwise([FP32, BF16], [(24, IN), (2, 3, 8, IN)], [True, False])
)
def test_same_seed_same_mask(adapters: torch.dtype, shape: tuple[int, ...], real: bool) -> None:
    same_as_stock(Adapted(adapters), (rand(*shape),), real=real)


class Autocast(nn.Module):
    """A module under autocast, as Trainer of transformers wraps a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", BF16):
            return self.module(x)


@pytest.mark.parametrize("adapters", [FP32, BF16], ids=str)
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_autocast(adapters: torch.dtype, inside: bool) -> None:
    """Both linears of an adapter round their operands; the dropout in front of them draws in float32."""
    model = Adapted(adapters, 2)
    with torch.autocast("cpu", BF16, enabled=not inside):
        sites = same_as_stock(Autocast(model) if inside else model, (rand(2, 12, IN),), count=2)
    assert sum(site.fusion == "lora_input" for site in sites) == 2


def test_what_autocast_keeps() -> None:
    """The input once, and a mask for each adapter; no dropped input."""
    kept: list[torch.Tensor] = []
    with (
        config.patch(policy="always", strict=True),
        torch._inductor.config.patch(force_disable_caches=True),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        torch.compile(Autocast(Adapted(count=3)), fullgraph=True)(rand(24, IN))
    assert (
        sorted(str(t.dtype) for t in kept if t.numel() == 24 * IN) == ["torch.bfloat16"] + ["torch.bool"] * 3
    )


def test_autocast_to_another_dtype() -> None:
    """The input would be rounded first."""
    with torch.autocast("cpu", torch.float16):
        seen = run(Adapted(), (rand(24, IN),), train=True, policy="always")
    (site,) = [site for site in seen.sites if site.fusion == "lora_input"]
    assert site.verdict == "rejected" and "different dtypes" in site.reason


def test_autocast_that_ends_before_the_linear() -> None:
    """What holds at the linear counts."""

    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        with torch.autocast("cpu", BF16):
            y = F.linear(x, w)
        return (y + F.linear(F.linear(F.dropout(x.float(), 0.25), a), b)).to(y.dtype)

    weights = rand(OUT, IN), torch.randn(RANK, IN).requires_grad_(), torch.randn(OUT, RANK).requires_grad_()
    same_as_stock(fn, (rand(24, IN), *weights))


@pytest.mark.parametrize("adapters", [FP32, BF16], ids=str)
def test_masks_are_drawn_once(adapters: torch.dtype) -> None:
    """By a loop, which stores them for the product and for the backward."""
    with config.patch(policy="always", strict=True):
        made = cuda_codegen.generate(Adapted(adapters, 3), (rand(96, IN),), train=True, run=False)
    forward, backward = made.modules
    numbers = re.compile(r"\brand(4x)?\(")
    drawing = [kernel for kernel in forward.kernels if numbers.search(kernel.source)]
    assert drawing and not any(kernel.is_template for kernel in drawing)
    (product,) = [kernel for kernel in forward.kernels if "lora_narrow_mm" in kernel.name]
    assert product.source.count("kept = tl.load(") == 3
    assert not any(numbers.search(kernel.source) for kernel in backward.kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("adapters", [FP32, BF16], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_same_seed_same_mask_on_a_gpu(adapters: torch.dtype, count: int) -> None:
    """Without the base nothing but the mask is zero in the gradient: another one is seen by each element."""
    model, x = Adapted(adapters, count).cuda(), torch.randn(512, IN, dtype=BF16).cuda().requires_grad_()
    same_as_stock(model, (x,), count=count, real=True)
    with torch.no_grad():
        for base in model.base:
            base.weight.zero_()
        for b in list(model.b)[1:]:
            b.weight.zero_()
    stock, ours = (outcome(model, (x,), fused, real=True)[0][1] for fused in (False, True))
    assert 0.2 < float((stock == 0).float().mean()) < 0.3
    assert torch.equal(ours == 0, stock == 0)


def test_several_dropouts_keep_their_order() -> None:
    """Of other random numbers, too, which are drawn in between and behind."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Adapted(FP32, 1), Adapted(BF16, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noise = torch.rand_like(x)
            y = F.dropout(self.first(x), 0.5)
            return torch.cat([y, self.second(x + noise) + torch.rand(2 * OUT, dtype=BF16)], -1)

    same_as_stock(Between(), (rand(24, IN),), count=3, real=True)


@pytest.mark.parametrize("adapters", [FP32, BF16], ids=str)
def test_dynamic(adapters: torch.dtype) -> None:
    same_as_stock(Adapted(adapters, 3), (rand(3, 24, IN),), count=3, dynamic=True)


def test_base_of_float32() -> None:
    model = Adapted().float()
    same_as_stock(model, (torch.randn(24, IN, requires_grad=True),))


def test_input_that_is_transposed() -> None:
    same_as_stock(Adapted(), (rand(IN, 24).detach().t().requires_grad_(),))


def test_nested_dropout() -> None:
    """What another dropout keeps is an input as any."""

    class Twice(Adapted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(F.dropout(x, 0.5))

    same_as_stock(Twice(), (rand(24, IN),))


def test_what_is_no_number() -> None:
    """0 times it is none, as in stock."""
    x = rand(24, IN).detach()
    x[3, 5], x[7] = float("nan"), float("inf")
    model, args = Adapted(), (x.requires_grad_(),)
    stock, ours = (outcome(model, args, fused)[0] for fused in (False, True))
    for y, z in zip(ours, stock, strict=True):
        assert torch.equal(y.isfinite(), z.isfinite())


def test_checkpointing() -> None:
    """The backward draws again what the forward has drawn."""

    class Checkpointed(Adapted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    same_as_stock(Checkpointed(FP32, 2), (rand(24, IN),), count=2)


# -- what is left alone -----------------------------------------------------------------------------------


def written(drop: Callable[[Any], Any], later: Callable[[Any, Any], Any] = lambda y, dropped: y) -> Any:
    """A linear with an adapter, a dropout, and what else is done with what that gives."""

    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        dropped = drop(x.float())
        return later((F.linear(x, w) + F.linear(F.linear(dropped, a), b)).to(x.dtype), dropped)

    return fn


@pytest.mark.parametrize(("fn", "reason"), [
    (written(lambda x: F.dropout(x, 0.25), lambda y, dropped: y + dropped.sum()), "read elsewhere"),
    (written(lambda x: F.dropout(x, 0.25, False)), None),
    (written(lambda x: F.dropout(x, 0.25, inplace=True)), "writes in place between"),
    (written(lambda x: F.dropout(x, 1.0)), None),
    (written(lambda x: F.dropout1d(x.unsqueeze(0), 0.25).squeeze(0)), None),
    (written(lambda x: F.alpha_dropout(x, 0.25, True)), None),
    (written(lambda x: F.dropout(x, 0.25) * 2), None),
])  # fmt: skip
def test_other_dropouts_stay(fn: Any, reason: str | None) -> None:
    args = [rand(24, IN), rand(OUT, IN).detach()]
    args += [torch.randn(shape).requires_grad_() for shape in ((RANK, IN), (OUT, RANK))]
    sites = same_as_stock(fn, args, count=0)
    reasons = [site.reason for site in sites if site.fusion == "lora_input" and site.verdict != "fused"]
    assert [reason in given for given in reasons] == ([True] if reason is not None else [])


def test_numbers_of_eager_mode() -> None:
    """Where Inductor leaves them to eager mode, dropouts are not decomposed: their numbers are others."""
    with torch._inductor.config.patch(fallback_random=True):
        model, args = Adapted(), (rand(24, IN),)
        sites = same_as_stock(model, args, count=0)
        assert "fallback_random" in next(site.reason for site in sites if site.fusion == "lora_input")


# -- the graphs -------------------------------------------------------------------------------------------


def narrow_calls(seen: Run, graph: int) -> list[tuple[int, int, bool]]:
    """The skinny GEMMs of a graph: number of matrices, number of masks, and whether transposed."""
    return [
        (len(named(c).b), len(named(c).kept), named(c).transposed) for c in targets(seen, NARROW_MM, graph)
    ]


@pytest.mark.parametrize(("adapters", "count", "dynamic"), pairwise([FP32, BF16], [1, 3], [False, True]))
def test_kernels_of_a_step(adapters: torch.dtype, count: int, dynamic: bool) -> None:
    """Forward one skinny GEMM of the input, which reads the masks, and a grouped GEMM; backward the
    gradients of the As together, and one sum that adds the adapters behind their masks."""
    seen = run(Adapted(adapters, count), (rand(96, IN),), train=True, dynamic=dynamic)
    assert narrow_calls(seen, 0) == [(count, count, False)]
    assert seen.products(0) == 0 and len(seen.calls(0)) == 1
    assert (count, count, True) in narrow_calls(seen, 1)
    (call,) = targets(seen, LORA_ACCUMULATE, 1)
    assert len(named(call).kept) == count


@pytest.mark.parametrize("adapters", [FP32, BF16], ids=str)
def test_what_a_dropout_leaves_is_in_memory_once(
    adapters: torch.dtype, shelf: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is kept for the backward, the product reads that, not what it was before it was scaled."""
    monkeypatch.setattr(inputs, "_read", lambda node: None)
    seen = run(Adapted(adapters), (rand(96, IN),), train=True)
    (call,) = targets(seen, NARROW_MM)
    (output,) = seen.graphs[0].find_nodes(op="output")
    assert named(call).x in output.all_input_nodes
    shelf(on="cpu", cpu={"lora_dropout": []})
    checked = []
    monkeypatch.setattr(profit, "check_dropped", lambda shape, device: checked.append(shape))
    run(Adapted(adapters), (rand(96, IN),), train=True)
    assert checked == [profit.Dropped(96, IN, OUT, RANK, BF16, adapters)]


def test_the_base_reads_the_gradient_as_it_is() -> None:
    """Not a copy that was widened for the adapters, and rounded again."""

    class Behind(Adapted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sin()

    seen = run(Behind(), (rand(96, IN),), train=True)
    (product,) = seen.graphs[1].find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    dy, _ = product.args
    assert dy.target is torch.ops.aten.mul.Tensor and dy.meta["val"].dtype == BF16


# -- the operations ---------------------------------------------------------------------------------------


def test_a_mask_for_each() -> None:
    with pytest.raises(ValueError, match="a mask for each"):
        NARROW_MM(torch.randn(6, 8), [torch.randn(8, 3)], [1.0], [0.0], False, [torch.ones(6, 8) > 0] * 2)
