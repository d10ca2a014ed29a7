"""Masks and biases that views make: what a kernel is given has the strides that it was promised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx

from inductor_fusions import config, reporting, testing
from inductor_fusions._inductor import value_of
from tests.attention.support import cases, check, code_for_a_gpu, flex_everywhere, qkv, scored, sdpa

B, H, N, D = 2, 3, 32, 16


attend = scored(lambda s, bias: s * 0.3 + bias)


def shifted(q: Any, e: Any) -> Any:
    """Relative positions, brought into place by a pad, views and a slice."""
    r = q @ e.mT
    r = torch.cat((torch.zeros_like(r[..., :1]), r), -1)
    return r.view(B, H, 2 * N, N)[:, :, 1:].view(B, H, N, 2 * N - 1)[..., :N]


#: The shape of what a bias is made of, and how.
VIEWS: dict[str, tuple[tuple[int, ...], Callable[[Any, Any], Any]]] = {
    "shifted positions": ((H, 2 * N - 1, D), shifted),
    "some columns": ((B, H, N, 2 * N), lambda q, x: x.sin()[..., :N]),
    "columns further on": ((B, H, N, N + 8), lambda q, x: x.sin()[..., 8:]),
    "columns of an input": ((B, H, N, N + 8), lambda q, x: x[..., 8:]),
    "samples further on": ((B + 1, H, N, N), lambda q, x: x.sin()[1:]),
    "samples of an input": ((B + 1, H, N, N), lambda q, x: x[1:]),
    "every other row": ((B, H, 2 * N, N), lambda q, x: x.sin()[:, :, ::2]),
    "heads first": ((H, B, N, N), lambda q, x: x.sin().transpose(0, 1)),
    "some heads, first": ((H + 1, B, N, N), lambda q, x: x.sin()[1:].transpose(0, 1)),
    "transposed": ((B, H, N, N), lambda q, x: x.sin().mT),
    "expanded": ((B, 1, 1, N), lambda q, x: x.sin().expand(B, H, N, N)),
    "a part of what is expanded": ((B, 1, 1, 2 * N), lambda q, x: x.sin().expand(B, H, N, 2 * N)[..., :N]),
    "one sample of several": ((B + 1, H, N, N), lambda q, x: x.sin()[1:2].expand(B, H, N, N)),
    "dense": ((B, H, N, N), lambda q, x: x.sin()),
}


def two_layers(view: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A function of q, k, v and of what a bias is made of."""

    def fn(q: Any, k: Any, v: Any, x: Any) -> Any:
        bias = view(q, x)
        return attend(q, k, v, bias) + attend(k, q, v, bias)

    return fn


def strided(run: testing.Capture) -> list[fx.Node]:
    """Calls of as_strided in the graphs of a run."""
    return [node for name in ("as_strided", "as_strided.default") for node in run.calls(name)]


@cases(VIEWS)
def test_bias_of_views(case: Any) -> None:
    """In inference one buffer of the bias serves all layers, and has the strides that are declared."""
    shape, view = case
    inputs = (*qkv(N, N, grad=False), torch.randn(shape))
    run = check(two_layers(view), inputs, fused=2, train=False)
    for node in strided(run.ours):
        source = node.args[0].meta.get("val")
        assert source is None or (
            torch._prims_common.is_non_overlapping_and_dense(source) and source.storage_offset() == 0
        )


#: One of each kind of view: of what is computed and of inputs, cut, with steps, permuted, expanded.
COMPILED = (
    "shifted positions", "columns of an input", "samples further on", "every other row", "some heads, first",
    "a part of what is expanded",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in COMPILED else pytest.param(name, marks=pytest.mark.long) for name in VIEWS]
)
def test_bias_of_views_in_generated_code(name: str) -> None:
    shape, view = VIEWS[name]
    with config.patch(attention_kernel="sdpa"):
        inputs = (*qkv(N, N, grad=False), torch.randn(shape))
        check(two_layers(view), inputs, fused=2, train=False, backend="inductor")


@cases(
    {name: VIEWS[name] for name in ("shifted positions", "columns further on", "samples further on", "dense")}
)
def test_gradient_of_views(case: Any) -> None:
    shape, view = case
    fn = lambda q, k, v, x: attend(q, k, v, view(q, x))  # noqa: E731
    check(fn, (*qkv(N, N), torch.randn(shape).requires_grad_()))


@cases(
    {name: VIEWS[name] for name in ("shifted positions", "columns further on", "every other row", "dense")}
)
def test_code_for_cuda(case: Any) -> None:
    """The buffer of the bias is as large as its strides say, and nothing reads it with others."""
    shape, view = case
    fn = lambda q, k, v, x: attend(q, k, v, view(q, x))  # noqa: E731
    with config.patch(policy="always", attention_kernel="sdpa"):
        inputs = (*qkv(N, N, grad=False), torch.randn(shape))
        code = code_for_a_gpu(fn, inputs, change=through_efficient)
    wrapper = code.forward.wrapper
    assert f"empty_strided_cuda(({B}, {H}, {N}, {N}), ({H * N * N}, {N * N}, {N}, 1)" in wrapper
    assert not any("as_strided" in kernel.name for kernel in code.kernels)


def through_efficient(graph: fx.Graph) -> None:
    """SDPA is decomposed for a CPU before the device is changed: here is what CUDA would have."""
    aten = torch.ops.aten
    for node in graph.find_nodes(
        op="call_function", target=aten._scaled_dot_product_flash_attention_for_cpu.default
    ):
        q, k, v = node.args[:3]
        scale, mask = node.kwargs["scale"], node.kwargs["attn_mask"]
        with graph.inserting_before(node):
            new = graph.call_function(
                aten._scaled_dot_product_efficient_attention.default, (q, k, v, mask, False), {"scale": scale}
            )
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def test_odd_strides_of_a_single_query() -> None:
    """Efficient attention checks the alignment of every stride, also of a dim of size 1."""

    def fn(state: Any, memory: Any) -> Any:
        scores = (memory @ state.unsqueeze(2)).squeeze(2)
        return (torch.softmax(scores, 1).unsqueeze(1) @ memory).squeeze(1)

    inputs = (torch.randn(B, D), torch.randn(B, N, D))
    q = value_of(sdpa(check(fn, inputs).ours).args[0])
    assert q.shape[-2] == 1 and all(stride % 8 == 0 for stride in q.stride()[:-1])


#: Queries, keys and values of which rows overlap, or are one row.
OVERLAPPING: dict[str, Callable[[Any], Any]] = {
    "one element apart": lambda x: x.unfold(-1, D, 1)[:, :, :N],
    "two elements apart": lambda x: x.unfold(-1, D, 2)[:, :, :N],
    "by as_strided": lambda x: x.as_strided((B, H, N, D), (H * 5, 5, 3, 1)),
    "one row": lambda x: x[:, :, None, :D].expand(-1, -1, N, -1),
}


@cases(OVERLAPPING)
@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_rows_that_overlap(case: Any, which: int) -> None:
    """A kernel of SDPA for a CPU reads other memory where rows begin one element apart."""

    def fn(x: Any, *operands: Any) -> Any:
        q, k, v = operands[:which] + (case(x),) + operands[which:]
        return torch.softmax(q @ k.mT * 0.3, -1) @ v

    check(fn, (torch.randn(B, H, 3 * N), *qkv(N, N, grad=False)[:2]), train=False)


def test_strides_that_depend_on_data() -> None:
    """Inductor may lay out such an output as it likes, if it computes it itself."""

    def fn(q: Any, k: Any, v: Any, keep: Any) -> Any:
        rows = keep.nonzero()[:, 0]
        torch._check(rows.shape[0] >= 1)
        return torch.softmax(q[:, :, rows] @ k.mT * 0.3, -1) @ v

    inputs = (*qkv(N, N, grad=False), torch.arange(N) % 2 == 0)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = check(fn, inputs).ours
    (graph,) = run.graphs
    (returned,) = next(iter(graph.graph.find_nodes(op="output"))).args[0]
    assert returned.target is torch.ops.inductor_fusions.own.default


#: Biases that flex attention captures: inputs, what is computed, and views of both.
CAPTURED: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "an input": lambda q, k, x, m: torch.tanh(q @ k.mT * 0.3 + x[..., :N]),
    "an input, further on": lambda q, k, x, m: torch.tanh(q @ k.mT * 0.3 + x[..., 8:]),
    "a column of an input": lambda q, k, x, m: torch.tanh(q @ k.mT * 0.3 + x[..., 3:4]),
    "a row of an input": lambda q, k, x, m: torch.tanh(q @ k.mT * 0.3 + x[:, :, 3:4, :N]),
    "computed": lambda q, k, x, m: torch.tanh(q @ k.mT * 0.3 + x.exp()[..., :N]),
    "a column of what is computed": lambda q, k, x, m: torch.tanh(q @ k.mT * 0.3 + x.exp()[..., 3:4]),
    "transposed": lambda q, k, x, m: torch.tanh(q @ k.mT * 0.3 + x.exp()[..., :N].mT),
    "two of one": lambda q, k, x, m: torch.tanh(torch.tanh(q @ k.mT + x[..., :N]) + x[..., 8:]),
    "a product": lambda q, k, x, m: torch.tanh(q @ k.mT * 0.3 + q @ q.mT),
    "before and behind": lambda q, k, x, m: torch.tanh(q @ k.mT * 0.3 + m.exp()) + m,
    "filled with 0": lambda q, k, x, m: (q @ k.mT * 0.3).masked_fill(m < -1e3, 0.0) + m,
    "filled with -1": lambda q, k, x, m: (q @ k.mT * 0.3).masked_fill(m * 2 < -1e3, -1.0) + m * 1.5,
    "filled with 2": lambda q, k, x, m: (q @ k.mT * 0.3).masked_fill(x[..., :N] * 2 > 0, 2.0),
    "filled with -10": lambda q, k, x, m: (q @ k.mT * 0.3).masked_fill(x[..., 8:] > 0, -10.0) + m,
    "where": lambda q, k, x, m: torch.where(x[..., 8:] > 0, q @ k.mT * 0.3, 0.0) + m,
    "where the scores say so": lambda q, k, x, m: (q @ k.mT * 0.3).masked_fill((q @ k.mT) < 0, 0.0),
    "part of the keys": lambda q, k, x, m: torch.tanh(q @ k.mT * 0.3 + k[..., :1]),
}


@cases(CAPTURED)
def test_captured_by_flex_attention(case: Any) -> None:
    hidden = torch.zeros(B, 1, N, N).masked_fill(torch.rand(B, 1, N, N) < 0.3, -1e9)
    hidden[..., 0] = 0.0
    fn = lambda q, k, v, x, m: torch.softmax(case(q, k, x, m), -1) @ v  # noqa: E731
    inputs = (*qkv(N, N, grad=False), torch.randn(B, H, N, N + 8), hidden)
    with flex_everywhere("flex"), config.patch(strict=True, policy="always"):
        check(fn, inputs, kernel="flex", train=False)
        code = code_for_a_gpu(fn, inputs)
    assert any(kernel.is_template and "flex_attention" in kernel.name for kernel in code.kernels)


@pytest.fixture
def padded_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Products of odd sizes are padded here as on a GPU; whether each of them could be."""
    from torch._inductor import config as inductor_config
    from torch._inductor.fx_passes import pad_mm

    found: list[bool] = []

    def can_pad(*args: Any, can: Callable[..., bool] = pad_mm.can_pad) -> bool:
        found.append(can(*args))
        return found[-1]

    for name, answer in {
        "check_device": lambda *_: True,
        "has_triton": lambda: True,
        "can_pad": can_pad,
    }.items():
        monkeypatch.setattr(pad_mm, name, answer)
    with inductor_config.patch(force_shape_pad=True):
        yield found


@pytest.mark.parametrize("view", ["as it is", "viewed"])
def test_a_bias_that_is_a_padded_product(view: str, padded_products: list[bool], fresh_cache: None) -> None:
    """torch pads products of odd sizes where that is faster, and cuts the result: behind the bias there is
    a buffer of other strides then. Source: torch/_inductor/fx_passes/pad_mm.py."""

    def fn(q: Any, k: Any, v: Any, x: Any, y: Any) -> Any:
        bias = x @ y.mT
        return attend(q, k, v, bias.view(2, 3, 9, 9) if view == "viewed" else bias)

    batch = (6,) if view == "viewed" else (2, 3)
    inputs = (*(torch.randn(2, 3, 9, 16) for _ in "qkv"), *(torch.randn(*batch, 9, 5) for _ in "xy"))
    with config.patch(attention_kernel="sdpa"):
        check(fn, inputs, fused=1, train=False, backend="inductor")
    assert any(padded_products)


LONG = 1030


#: Of x (240, LONG) and y (LONG, 8): a mask that views what Inductor pads, since its rows are long.
PADDED: dict[str, Callable[[Any, Any], Any]] = {
    "viewed": lambda x, y: x.view(B, H, 40, LONG),
    "a part": lambda x, y: x[:40],
    "stacked products": lambda x, y: torch.stack([part @ (y @ y.mT) for part in x.view(6, 40, LONG)[:3]])[
        None
    ],
}


@pytest.mark.parametrize("name", PADDED)
def test_a_bias_whose_rows_are_padded(name: str, fresh_cache: None) -> None:
    """Inductor pads strides above 1024 of what it lays out itself (`comprehensive_padding`)."""
    from torch._inductor import config as inductor_config

    def fn(q: Any, k: Any, v: Any, x: Any, y: Any) -> Any:
        weights = x.softmax(-1)
        return attend(q, k, v, PADDED[name](weights, y)), weights @ y

    shapes = ((B, H, 40, D), (B, H, LONG, D), (B, H, LONG, D), (240, LONG), (LONG, 8))
    inputs = [torch.randn(shape) for shape in shapes]
    with config.patch(attention_kernel="sdpa"), inductor_config.patch(disable_padding_cpu=False):
        check(fn, inputs, train=False, backend="inductor")


class Doubled(torch.autograd.Function):
    """Views its gradient, as rotations of queries do whose kernels are written by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (dy.view(-1, dy.shape[-1]) * 2.0).view(dy.shape)


def spelled(q: Any, k: Any, v: Any) -> Any:
    scores = torch.einsum("...qd,...kd->...qk", q, k) * 0.3
    return (scores - scores.amax(-1, keepdim=True).detach()).softmax(-1) @ v


VIEWED: dict[str, Callable[..., Any]] = {
    "the kernel's": spelled,
    "scaled": lambda q, k, v: spelled(q * 0.3, k.exp(), v * v.detach().sum(-1, keepdim=True)),
    "of one tensor": lambda q, k, v: spelled(q, q, q) + k + v,
    "summed": lambda q, k, v: spelled(q, k.expand(2, *k.shape[1:]), v.expand(2, *v.shape[1:])),
}


@pytest.mark.parametrize("name", VIEWED)
@pytest.mark.parametrize("shape", [(2, 13, 16), (2, 3, 13, 16)], ids=["3-D", "4-D"])
def test_the_caller_views_gradients(shape: tuple[int, ...], name: str, fresh_cache: None) -> None:
    """They are contiguous, as those of products are; SDPA writes them in another order."""

    def gradients(call: Callable[..., Any]) -> Any:
        q, k, v = inputs
        return torch.autograd.grad(call(Doubled.apply(q), k, Doubled.apply(v)).square().sum(), inputs)

    of_one = (1, *shape[1:]) if name == "summed" else shape
    inputs = [torch.randn(size, requires_grad=True) for size in (shape, of_one, of_one)]
    with config.patch(policy="always"), reporting.isolated() as sites:
        found = gradients(torch.compile(VIEWED[name]))
    assert [site.verdict for site in sites] == ["fused"]
    for ours, eager in zip(found, gradients(VIEWED[name]), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-3)
