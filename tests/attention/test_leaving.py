"""What leaves a graph has the strides that it has in eager, and the caller may write to it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch.utils.checkpoint import checkpoint

from inductor_fusions import config, reporting, testing
from inductor_fusions._inductor.compiling import fresh_compile
from tests.attention.support import TRAIN, capture, flex_everywhere, short_everywhere

KERNELS = {"sdpa": contextlib.nullcontext, "flex": lambda: flex_everywhere("flex"), "short": short_everywhere}


def traced() -> Callable[..., Any]:
    """A backend that is Inductor up to what it would lower, and runs that.

    Its results are no views to autograd, as those of generated code: what shares their memory does not know.
    """

    def lower(graph: Any, example_inputs: Any, **options: Any) -> Any:
        return make_boxed_func(lambda *args: [apart(each) for each in graph.forward(*args)])

    def apart(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with torch.no_grad():
            memory = torch.empty(0, dtype=value.dtype)
            return memory.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())

    return lambda graph, example_inputs: compile_fx(graph, example_inputs, inner_compile=lower)


def attend(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.35, -1) @ v


def by_einsum(q: str, k: str, v: str, out: str) -> Callable[..., Any]:
    def attention(queries: Any, keys: Any, values: Any) -> Any:
        scores = torch.einsum(f"{q},{k}->bhqk", queries, keys) * 0.35
        return torch.einsum(f"bhqk,{v}->{out}", scores.softmax(-1), values)

    return attention


def shared_heads(q: Any, k: Any, v: Any) -> Any:
    return attend(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


def views_of_projections(q: Any, k: Any, v: Any) -> Any:
    return attend(*(x.unflatten(-1, (2, 16)).transpose(1, 2) for x in (q, k, v)))


#: The attention, and the shapes of q, k and v.
SPELLINGS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "3-D": (attend, ((4, 6, 16), (4, 9, 16), (4, 9, 16))),
    "4-D": (attend, ((2, 3, 6, 16), (2, 3, 9, 16), (2, 3, 9, 16))),
    "one head": (attend, ((2, 1, 6, 16), (2, 1, 9, 16), (2, 1, 9, 16))),
    "one sample": (attend, ((1, 3, 6, 16), (1, 3, 9, 16), (1, 3, 9, 16))),
    "groups": (attend, ((2, 2, 3, 6, 16), (2, 2, 1, 9, 16), (2, 2, 1, 9, 16))),
    "shared heads": (shared_heads, ((2, 4, 6, 16), (2, 2, 9, 16), (2, 2, 9, 16))),
    "projections": (views_of_projections, ((2, 6, 32), (2, 9, 32), (2, 9, 32))),
    "einsum to bqhd": (by_einsum("bqhd", "bkhd", "bkhd", "bqhd"),
        ((2, 6, 3, 16), (2, 9, 3, 16), (2, 9, 3, 16))),
    "einsum to bhqd": (by_einsum("bhqd", "bhkd", "bhkd", "bhqd"),
        ((2, 3, 6, 16), (2, 3, 9, 16), (2, 3, 9, 16))),
    "einsum to qbhd": (by_einsum("qbhd", "kbhd", "kbhd", "qbhd"),
        ((6, 2, 3, 16), (9, 2, 3, 16), (9, 2, 3, 16))),
    "einsum to bdqh": (by_einsum("bhqd", "bhkd", "bkhd", "bdqh"),
        ((2, 3, 6, 16), (2, 3, 9, 16), (2, 9, 3, 16))),
}  # fmt: skip

#: What is made of the result, and leaves.
WAYS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda o: o,
    "transpose": lambda o: o.transpose(1, 2),
    "reshape": lambda o: o.transpose(1, 2).reshape(o.shape[0], -1),
    "flatten": lambda o: o.flatten(-2),
    "contiguous": lambda o: o.transpose(0, 1).contiguous(),
    "view": lambda o: o.view(-1),
    "view of a sum": lambda o: (o + 1).view(o.shape[0], -1),
    "same dtype": lambda o: o.to(torch.float32),
    "dropout": lambda o: F.dropout(o.mT, 0.5, False),
    "part": lambda o: o[..., 1:5],
    "parts": lambda o: o.chunk(2, -1),
    "pointwise": lambda o: o + 1,
    "pointwise, transposed": lambda o: (o * 2).mT,
    "sum": lambda o: o.sum(-1),
    "greatest": lambda o: o.max(0),
    "norm": lambda o: F.layer_norm(o, o.shape[-1:]),
    "cat": lambda o: torch.cat([o, o], -1),
    "several": lambda o: (o, {"views": [o.mT, o.transpose(0, 1)], "new": o.relu()}),
    "like": lambda o: torch.zeros_like(o),
    "written to": lambda o: o.add_(1.0),
    "written to behind a reshape": lambda o: o.transpose(1, 2).reshape(o.shape[0], -1).add_(1.0),
    "through a product": lambda o: (o @ o.new_ones(o.shape[-1], 5)).mT,
}


def operands(spelling: str, train: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).mul_(0.7).requires_grad_(train) for shape in SPELLINGS[spelling][1]]


def tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]


def fused_attentions(run: testing.Capture) -> int:
    return sum(site.fusion == "attention" for site in run.fused)


def same_strides(
    fn: Callable[..., Any], inputs: Any, fused: int | None = 1, backend: Any = None, **options: Any
) -> testing.Capture:
    expected = tensors(fn(*inputs))
    run = testing.capture(fn, *inputs, backend=backend or traced(), **options)
    assert fused is None or fused_attentions(run) == fused, run.sites
    found = tensors(run.outputs)
    assert [each.stride() for each in found] == [each.stride() for each in expected]
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager)
    return run


@TRAIN
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_strides_of_outputs(spelling: str, train: bool) -> None:
    attention, inputs = SPELLINGS[spelling][0], operands(spelling, train)
    for way in WAYS if spelling == "4-D" else ("itself", "transpose", "pointwise", "reshape"):
        same_strides(lambda *x, way=way: WAYS[way](attention(*x)), inputs)


@pytest.mark.parametrize("kernel", ["flex", "short"])
def test_strides_of_other_kernels(kernel: str) -> None:
    for spelling, way, train in itertools.product(
        ("3-D", "4-D", "projections", "einsum to bdqh"), ("itself", "transpose", "pointwise"), (False, True)
    ):
        with KERNELS[kernel]():
            attention, inputs = SPELLINGS[spelling][0], operands(spelling, train)
            run = same_strides(lambda *x, a=attention, w=way: WAYS[w](a(*x)), inputs)
            assert kernel in run.fused[0].kernel


@TRAIN
def test_strides_with_symbolic_sizes(train: bool) -> None:
    for spelling in ("3-D", "4-D", "projections", "einsum to bqhd", "einsum to bdqh"):
        attention, inputs = SPELLINGS[spelling][0], operands(spelling, train)
        for way in ("itself", "transpose", "pointwise"):
            same_strides(lambda *x, a=attention, w=way: WAYS[w](a(*x)), inputs, dynamic=True)


def test_strides_in_generated_code() -> None:
    for spelling, train in itertools.product(("3-D", "4-D", "projections"), (False, True)):
        attention, inputs = SPELLINGS[spelling][0], operands(spelling, train)

        def fn(*x: Any, attention: Any = attention) -> Any:
            o = attention(*x)
            return o, o.mT, o * 2, (o + 1).sum(-1)

        same_strides(fn, inputs, backend="inductor")


@torch.compiler.nested_compile_region
def region(q: Any, k: Any, v: Any) -> Any:
    return attend(q, k, v)


BODIES = {
    "branch": lambda q, k, v: torch.cond(
        q.sum() > 100, attend, lambda q, k, v: (q @ k.transpose(-1, -2)).relu() @ v, (q, k, v)
    ),
    "both branches": lambda q, k, v: torch.cond(
        q.sum() > 100, lambda q, k, v: attend(q, k, v).mT, lambda q, k, v: attend(q, v, k).mT, (q, k, v)
    ),
    "operand of a branch": lambda q, k, v: torch.cond(
        q.sum() > 100, lambda o: o + 1, lambda o: o.sin(), (attend(q, k, v),)
    ),
    "checkpoint": lambda q, k, v: checkpoint(attend, q, k, v, use_reentrant=False),
    "checkpoint and more": lambda q, k, v: checkpoint(attend, q, k, v, use_reentrant=False).mT + 1,
    "region": region,
    "two regions": lambda q, k, v: (region(q, k, v).transpose(1, 2), region(k, q, q)),
}  # fmt: skip


@TRAIN
@pytest.mark.parametrize("body", BODIES)
def test_strides_of_bodies(body: str, train: bool) -> None:
    same_strides(BODIES[body], operands("4-D", train), fused=None)


@TRAIN
def test_operands_of_branches_in_generated_code(train: bool) -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        o = views_of_projections(q, k, v)
        return torch.cond(q.sum() > 100, lambda o: o + 1, lambda o: o.sin(), (o,))

    with KERNELS["short"]():  # gives another layout than eager
        same_strides(fn, operands("projections", train), backend="inductor")


def test_sizes_that_depend_on_data() -> None:
    def fn(x: Any, keep: Any) -> Any:
        x = x[keep]
        torch._check(x.shape[0] > 0)  # attention of nothing is left as it is
        q, k, v = (y.view(x.shape[0], 6, 2, 16).transpose(1, 2) for y in x.chunk(3, -1))
        return attend(q, k, v)

    x, keep = torch.randn(5, 6, 96), torch.tensor([True, False, True, True, False])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for backend in (traced(), "inductor"):
            run = same_strides(fn, (x, keep), backend=backend)
            run.outputs.view(-1)


def test_what_an_operation_of_the_user_sees() -> None:
    seen = []

    @torch.library.custom_op("fusions_leaving::look", mutates_args=())
    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.stride())
        return x.clone()

    look.register_fake(torch.empty_like)
    for spelling in ("4-D", "einsum to bdqh"):
        attention, inputs = SPELLINGS[spelling][0], operands(spelling, False)
        same_strides(lambda *x, a=attention: look(a(*x)), inputs)
        assert seen[0] == seen[1]
        seen.clear()


def test_what_is_written_into_an_input() -> None:
    def fn(q: Any, k: Any, v: Any, buffer: Any) -> Any:
        buffer.copy_(attend(q, k, v))
        return buffer.mT, buffer * 2

    same_strides(fn, (*operands("4-D", False), torch.zeros(2, 6, 3, 16).transpose(1, 2)))


def test_strides_that_are_asked_for() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        out = attend(q, k, v)
        return torch.as_strided(out, (6, 4), (16, 1)) + out.stride(-2)

    same_strides(fn, [x.mT.contiguous().mT for x in operands("4-D", False)], fused=None)


# -- memory ----------------------------------------------------------------------------------------


def gradients_after_a_write(fn: Callable[..., Any], inputs: Any) -> list[Any]:
    """Gradients where the caller adds to each output before the backward."""
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    loss: Any = 0.0
    for each in tensors(fn(*inputs)):
        if each.requires_grad:
            each += torch.linspace(0, 1, each.shape[-1], dtype=each.dtype)
            weights = torch.linspace(-1, 1, each.shape[-1], dtype=each.dtype)
            loss = loss + (each * weights).square().sum()
    loss.backward()
    return [x.grad for x in inputs if x.requires_grad]


def written_by_the_caller(
    fn: Callable[..., Any], inputs: Any, fused: int | None = 1, backend: Any = None
) -> None:
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    expected = gradients_after_a_write(fn, wide)
    with fresh_compile(), config.patch(policy="always"), reporting.isolated() as sites:
        compiled = torch.compile(fn, backend=backend or traced(), dynamic=False)
        found = gradients_after_a_write(compiled, inputs)
    done = [site for site in sites if site.fusion == "attention" and site.verdict == "fused"]
    assert fused is None or len(done) == fused, sites
    for ours, true in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), true, atol=2e-5, rtol=2e-5)


#: Outputs that share memory with others cannot be added to one by one.
ALONE = [way for way in WAYS if way not in ("several", "parts", "same dtype", "like")]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_outputs_that_the_caller_writes_to(spelling: str) -> None:
    attention, inputs = SPELLINGS[spelling][0], operands(spelling, True)
    for way in ALONE if spelling in ("3-D", "4-D") else ("itself", "transpose", "reshape"):
        written_by_the_caller(lambda *x, w=way: WAYS[w](attention(*x)), inputs)


@pytest.mark.parametrize("kernel", ["flex", "short"])
def test_outputs_of_other_kernels_that_the_caller_writes_to(kernel: str) -> None:
    for spelling, way in itertools.product(("3-D", "4-D", "projections"), ("itself", "transpose", "reshape")):
        with KERNELS[kernel]():
            attention, inputs = SPELLINGS[spelling][0], operands(spelling, True)
            written_by_the_caller(lambda *x, a=attention, w=way: WAYS[w](a(*x)), inputs)


@pytest.mark.parametrize("spelling", ["3-D", "4-D", "groups"])
def test_outputs_of_generated_code_that_the_caller_writes_to(spelling: str) -> None:
    attention, inputs = SPELLINGS[spelling][0], operands(spelling, True)
    written_by_the_caller(attention, inputs, backend="inductor")
    written_by_the_caller(lambda *x: attention(*x).mT, inputs, backend="inductor")


@pytest.mark.parametrize("body", ["branch", "checkpoint", "checkpoint and more", "region", "two regions"])
def test_outputs_of_bodies_that_the_caller_writes_to(body: str) -> None:
    written_by_the_caller(BODIES[body], operands("4-D", True), fused=None)


@pytest.mark.parametrize("body", ["checkpoint", "checkpoint and more"])
def test_outputs_of_generated_code_of_a_checkpoint_that_the_caller_writes_to(body: str) -> None:
    """Autograd sees views in what a checkpoint calls; nobody may write to one that a function returns."""
    written_by_the_caller(BODIES[body], operands("4-D", True), backend="inductor")


def test_outputs_of_a_graph_that_a_checkpoint_of_the_graph_wrote_to() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        o = checkpoint(attend, q, k, v, use_reentrant=False)
        o += 1
        return o.transpose(1, 2).flatten(2) @ q.new_ones(48, 8)

    written_by_the_caller(fn, operands("4-D", True))


# -- what costs nothing ----------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.checkpointed = torch.nn.Linear(24, 72), torch.nn.Linear(24, 24), checkpointed

    def forward(self, x: Any) -> Any:
        q, k, v = (y.unflatten(-1, (3, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        o = checkpoint(attend, q, k, v, use_reentrant=False) if self.checkpointed else attend(q, k, v)
        return x + self.out(o.transpose(1, 2).contiguous().view(*x.shape[:2], -1))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@TRAIN
def test_nothing_is_copied_in_a_model(train: bool, checkpointed: bool) -> None:
    model = torch.nn.Sequential(Layer(checkpointed), Layer(checkpointed))
    x = torch.randn(2, 6, 24, requires_grad=train)
    with torch.set_grad_enabled(train):
        run = capture(model, x, train=train)
    assert fused_attentions(run) == 2
    assert not run.calls("clone") and len(run.calls("contiguous")) == 2


def test_nothing_is_copied_where_the_result_is_new() -> None:
    """A result that was masked behind the kernel is not what that keeps."""
    with config.patch(stock_misfires=False):
        run = capture(lambda q, k, v: attend(q, k, v) + 1, *operands("4-D", True), train=True)
    assert fused_attentions(run) == 1 and not run.calls("clone")


# -- what stock puts there -------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["itself", "transpose", "view", "dropout", "written to"])
def test_results_of_stocks_patterns_that_the_caller_writes_to(way: str) -> None:
    attention, inputs = SPELLINGS["4-D"][0], operands("4-D", True)
    with config.patch(attention=False):
        written_by_the_caller(lambda *x: WAYS[way](attention(*x)), inputs, fused=0)


def test_a_result_that_stock_leaves_is_not_copied() -> None:
    """A pattern that is not there keeps nothing: the copy goes."""
    seen = []
    with config.patch(attention=False), fresh_compile():
        torch._inductor.config.post_grad_custom_post_pass = lambda graph: seen.append(
            [node.target for node in graph.nodes]
        )
        try:
            torch.compile(lambda q, k, v: torch.softmax((q @ k.mT).sin(), -1) @ v)(*operands("4-D", True))
        finally:
            torch._inductor.config.post_grad_custom_post_pass = None
    assert seen and torch.ops.aten.clone.default not in seen[0]
    assert torch.ops.inductor_fusions.own.default not in seen[0]


def test_strides_of_a_softmax_that_is_rewritten() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        weights = torch.softmax(q @ k.mT, 1)
        return weights, weights + 1, weights @ v

    same_strides(fn, operands("4-D", True), fused=0)
