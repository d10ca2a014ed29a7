"""What compiled graphs hand to kernels that are known to be wrong, read from the code for a GPU."""

from __future__ import annotations

import ast
import contextlib
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("triton")

from devtools import cuda_codegen
from inductor_fusions import config, reporting
from inductor_fusions._inductor import torch_version
from inductor_fusions.fusions import kernel_defects
from inductor_fusions.fusions.kernel_defects import op, own_dropout
from inductor_fusions.fusions.kernel_defects.attention_gradients import gradients
from tests.attention.support import flex_everywhere, short_everywhere
from tests.kernel_defects.examples import DIM, HEADS, LENGTH, of_scaled_query, scaled_query
from tests.support.arguments import named

aten = torch.ops.aten
B, H, S, D = 2, 4, 24, 16

#: Orders of (batch, heads, length, dim) in memory, from the outermost to the innermost dim.
ORDERS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "hbsd": (1, 0, 2, 3), "sbhd": (2, 0, 1, 3)}

#: What is done with an attention's output, which decides how its gradient lies in memory.
OUTPUTS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda o: o,
    "heads merged": lambda o: o.transpose(1, 2).reshape(B, S, H * D),
    "scaled": lambda o: o * 2,
    "summed": lambda o: o.float().sum(),
    "length first": lambda o: o.permute(2, 0, 1, 3).reshape(S, -1),
    "product over heads": lambda o: torch.einsum("bhqd,hde->bqe", o, torch.ones(H, D, 8, dtype=o.dtype)),
    "one head": lambda o: o[:, 1],
    "added to its transpose": lambda o: o.transpose(0, 1) + 1,
}


def cudnn(q: Any, k: Any, v: Any, bias: Any = None, dropout: float = 0.0, causal: bool = False) -> Any:
    """The operation that SDPA becomes on a GPU where cuDNN takes it."""
    return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, dropout, causal, False, scale=0.25)[
        0
    ]


def leaf(*shape: int, order: str = "bhsd", grad: bool = True) -> torch.Tensor:
    """A random tensor of a logical shape, laid out in an order."""
    dims = ORDERS[order]
    memory = torch.randn([shape[d] for d in dims], dtype=torch.bfloat16)
    return memory.permute([dims.index(d) for d in range(4)]).detach().requires_grad_(grad)


def backward_call(code: cuda_codegen.Generated) -> ast.Call:
    """The only call of cuDNN's backward."""
    (found,) = _calls(code.backward.wrapper, "_scaled_dot_product_cudnn_attention_backward")
    return found


def _calls(wrapper: str, name: str) -> list[ast.Call]:
    calls = [n for n in ast.walk(ast.parse(wrapper)) if isinstance(n, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).endswith(f"{name}.default")]


def strides(wrapper: str, argument: ast.expr) -> tuple[int, ...]:
    """Of an argument of a call in generated code."""
    if isinstance(argument, ast.Call):  # reinterpret_tensor(buffer, sizes, strides, offset)
        return tuple(ast.literal_eval(argument.args[2]))
    name = ast.unparse(argument)
    for node in ast.walk(ast.parse(wrapper)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            made = node.value
            if isinstance(made, ast.Call) and "empty_strided" in ast.unparse(made.func):
                return tuple(ast.literal_eval(made.args[1]))
            if isinstance(made, ast.Call) and ast.unparse(made.func) == "reinterpret_tensor":
                return tuple(ast.literal_eval(made.args[2]))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "assert_size_stride":
            if ast.unparse(node.args[0]) == name:
                return tuple(ast.literal_eval(node.args[2]))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "assert_size_stride_grouped":  # 2.14
            names, _, found = (each.elts for each in node.args[:3] if isinstance(each, ast.Tuple))
            for each, steps in zip(names, found, strict=True):
                if ast.unparse(each) == name:
                    return tuple(ast.literal_eval(steps))
    raise AssertionError(f"{name} has no strides in\n{wrapper}")


def order_of(found: tuple[int, ...]) -> list[int]:
    return sorted(range(4), key=lambda dim: -found[dim])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("output", OUTPUTS)
def test_gradient_lies_as_the_output(output: str, order: str) -> None:
    inputs = [leaf(B, H, S, D, order=order) for _ in range(3)]
    code = cuda_codegen.generate(lambda *x: OUTPUTS[output](cudnn(*x)), inputs, train=True, run=False)
    call, wrapper = backward_call(code), code.backward.wrapper
    gradient, out, query = (strides(wrapper, call.args[i]) for i in (op.GRADIENT, op.OUTPUT, 1))
    assert gradient == out
    assert order_of(out) == order_of(query)
    assert math.copysign(1.0, ast.literal_eval(call.args[13])) == -1.0


def test_no_copy_where_the_layout_is_right() -> None:
    """The gradient of merged heads lies as q does in a model: no kernel runs before the backward."""
    inputs = [leaf(B, H, S, D, order="bshd") for _ in range(3)]
    fn = OUTPUTS["heads merged"]
    code = cuda_codegen.generate(lambda *x: fn(cudnn(*x)), inputs, train=True, run=False)
    assert not code.backward.kernels
    assert isinstance(backward_call(code).args[0], ast.Call)  # a view of the gradient that comes in


def test_without_the_cure_the_gradient_lies_otherwise() -> None:
    inputs = [leaf(B, H, S, D) for _ in range(3)]
    fn = OUTPUTS["heads merged"]
    with config.patch(kernel_defects=False):
        code = cuda_codegen.generate(lambda *x: fn(cudnn(*x)), inputs, train=True, run=False)
    call, wrapper = backward_call(code), code.backward.wrapper
    assert strides(wrapper, call.args[0]) != strides(wrapper, call.args[4])


@pytest.mark.parametrize("keys", [64, 128, 192, 200, 320])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("mask", [(B, 1, 1), (B, H, S), (1, 1, S)])
def test_keys_of_half_a_tile(keys: int, dropout: float, mask: tuple[int, ...]) -> None:
    inputs = [leaf(B, H, S, D), leaf(B, H, keys, D), leaf(B, H, keys, D)]
    bias = torch.randn(*mask, keys).bfloat16()

    def fn(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return cudnn(q, k, v, bias.expand(B, H, S, keys), dropout)

    code = cuda_codegen.generate(fn, [*inputs, bias], train=True, run=False)
    graph = code.backward.graph
    (call,) = [node for node in graph.nodes if node.target is op.CUDNN_BACKWARD]
    given = named(call)
    lengths = [*(x.meta["val"].shape[2] for x in (given.k, given.v)), given.bias.meta["val"].shape[3]]
    half = keys % kernel_defects.TILE == 64
    assert lengths == ([keys + 64] * 3 if half and not dropout else [keys] * 3)
    assert given.max_k == lengths[0]
    shifted = any(node.target is aten.sub.Tensor for node in graph.nodes)
    assert shifted == bool(half and dropout) and not rounded_by_casts(graph)
    (output,) = (node for node in graph.nodes if node.op == "output")
    grads = [node.meta["val"].shape for node in output.args[0] if isinstance(node, torch.fx.Node)]
    assert [list(shape) for shape in grads] == [list(x.shape) for x in inputs]
    if half and not dropout:  # what was expanded is not written out
        (padded, *_) = given.bias.args
        assert padded.meta["val"].numel() == math.prod(mask) * (keys + 64)


def test_a_symbolic_number_of_keys() -> None:
    def fn(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return cudnn(q, k, v, bias.expand(B, H, S, k.shape[2]))

    inputs = [leaf(B, H, S, D), leaf(B, H, 72, D), leaf(B, H, 72, D), torch.zeros(B, 1, 1, 72).bfloat16()]
    for x in inputs[1:]:
        torch._dynamo.mark_dynamic(x, x.dim() - (1 if x is inputs[3] else 2))
    code = cuda_codegen.generate(fn, inputs, train=True, run=False)
    graph = code.backward.graph
    (call,) = [node for node in graph.nodes if node.target is op.CUDNN_BACKWARD]
    assert isinstance(named(call).k.meta["val"].shape[2], torch.SymInt)
    assert any(node.target is aten.sub.Tensor for node in graph.nodes) and not rounded_by_casts(graph)


def rounded_by_casts(graph: torch.fx.Graph) -> bool:
    """Whether a cast to a narrow dtype and back rounds: Inductor drops both where they are in one loop."""
    casts = [node for node in graph.nodes if node.target is torch.ops.prims.convert_element_type.default]
    return any(
        cast.args[0] in casts and cast.args[0].args[1].itemsize < cast.args[1].itemsize for cast in casts
    )


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.999])
def test_dropout_of_the_forward_and_of_the_backward(dropout: float) -> None:
    inputs = [leaf(B, H, S, D) for _ in range(3)]
    code = cuda_codegen.generate(lambda *x: cudnn(*x, None, dropout), inputs, train=True, run=False)
    (forward,) = _calls(code.forward.wrapper, "_scaled_dot_product_cudnn_attention")
    ours = [ast.literal_eval(forward.args[5]), ast.literal_eval(backward_call(code).args[13])]
    assert ours == [own_dropout(dropout)] * 2
    assert 0 < own_dropout(dropout) - dropout < 2e-7


def test_report() -> None:
    inputs = [leaf(B, H, S, D) for _ in range(3)]
    with reporting.isolated() as sites:
        cuda_codegen.generate(lambda *x: cudnn(cudnn(*x), *x[1:]), inputs, train=True, run=False)
    (site,) = [site for site in sites if site.fusion == "kernel_defects"]
    assert site.verdict == "fused" and "cudnn_plans" in site.kernel
    assert site.details["calls"] == "2"


def test_inference_has_no_such_calls() -> None:
    inputs = [leaf(B, H, S, D, grad=False) for _ in range(3)]
    with reporting.isolated() as sites, torch.no_grad():
        cuda_codegen.generate(lambda *x: cudnn(*x), inputs, run=False)
    assert not [site for site in sites if site.fusion == "kernel_defects"]


@pytest.mark.parametrize("order", [*ORDERS.values(), (3, 0, 1, 2)])
def test_order_of_strides(order: tuple[int, ...]) -> None:
    memory = torch.empty([(2, 3, 5, 7)[dim] for dim in order])
    tensor = memory.permute([order.index(dim) for dim in range(4)])
    plain = list(range(4))
    assert op.outer_to_inner(tensor.stride()) == (list(order) if order[-1] == 3 else plain)
    assert op.as_laid_out(tensor.contiguous(), tensor).stride() == (
        tensor.stride() if order[-1] == 3 else tensor.contiguous().stride()
    )


def test_query_of_flex_attention_for_short_queries() -> None:
    """q is scaled in the graph, heads last in memory: the template read it as if it were contiguous."""
    with torch.no_grad(), flex_everywhere("flex"):
        code = cuda_codegen.generate(scaled_query, of_scaled_query("cpu"), run=False)
    (kernel,) = [each for each in code.kernels if "stride_qg" in each.source]
    found = [line for line in kernel.source.splitlines() if "stride_qz, stride_qh, stride_qg" in line]
    strides = {tuple(map(int, line.split("=")[1].split(","))) for line in found if "=" in line}
    assert strides == {(LENGTH * HEADS * DIM, DIM, DIM, HEADS * DIM, 1)}


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dims", [(D, D), (D, 2 * D)])
def test_one_query(queries: int, masked: bool, dims: tuple[int, int]) -> None:
    """Without a mask flash attention or products compute its gradients: cuDNN may give NaN."""
    inputs = [leaf(B, H, length, dim) for length, dim in ((queries, D), (S, D), (S, dims[1]))]
    bias = torch.zeros(B, H, queries, S, dtype=torch.bfloat16) if masked else None
    with reporting.isolated() as sites:
        code = cuda_codegen.generate(lambda *x: cudnn(*x, bias), inputs, train=True, run=False)
    (site,) = [site for site in sites if site.fusion == "kernel_defects"]
    cured = queries == 1 and not masked
    assert ("cudnn_one_query" in site.kernel) == cured
    instead = ["flash"] if dims[0] == dims[1] else []
    assert kernels_of_gradients(code) == (instead if cured else ["cudnn"])


def kernels_of_gradients(code: cuda_codegen.Generated) -> list[str]:
    """The kernels of SDPA that the backward calls."""
    names = ("cudnn", "flash")
    wrapper = code.backward.wrapper
    return [n for n in names if _calls(wrapper, f"_scaled_dot_product_{n}_attention_backward")]


@pytest.mark.parametrize("keys, causal, dropout, cured", [
    (192, False, 0.0, True), (128, False, 0.0, False), (100, False, 0.0, False), (192, True, 0.0, False),
    (192, False, 0.1, False),
])  # fmt: skip
def test_keys_of_half_a_tile_without_a_mask(keys: int, causal: bool, dropout: float, cured: bool) -> None:
    inputs = [leaf(B, H, length, D) for length in (S, keys, keys)]
    fn = functools.partial(cudnn, bias=None, dropout=dropout, causal=causal)
    with reporting.isolated() as sites:
        code = cuda_codegen.generate(lambda *x: fn(*x), inputs, train=True, run=False)
    found = [site.kernel for site in sites if site.fusion == "kernel_defects"]
    assert any("cudnn_padded_keys" in kernel for kernel in found) == cured
    assert kernels_of_gradients(code) == ["flash" if cured else "cudnn"]


@pytest.mark.parametrize("reason", ["switched off", "another dim of values"])
def test_keys_of_half_a_tile_where_flash_does_not_compute(reason: str) -> None:
    """cuDNN gets a mask, which costs one row for all queries, heads and samples."""
    dim, off = (D, True) if reason == "switched off" else (2 * D, False)
    inputs = [leaf(B, H, S, D), leaf(B, H, 192, D), leaf(B, H, 192, dim)]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]) if off else contextlib.nullcontext():
        code = cuda_codegen.generate(lambda *x: cudnn(*x), inputs, train=True, run=False)
    (call,) = [node for node in code.backward.graph.nodes if node.target is op.CUDNN_BACKWARD]
    bias = named(call).bias.meta["val"]
    assert bias.shape == (B, H, S, 256) and bias.untyped_storage().nbytes() == 256 * 2


def test_gradients_of_one_query() -> None:
    q, k, v, grad = (torch.randn(B, H, n, D, dtype=torch.float64) for n in (1, S, S, 1))
    leaves = [x.requires_grad_() for x in (q, k - 40.0, v)]
    expected = torch.autograd.grad(
        torch.softmax(leaves[0] @ leaves[1].mT * 0.25, -1) @ leaves[2], leaves, grad
    )
    found = gradients(grad, *leaves, None, 0.25, False)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_no_template_stores_one_number() -> None:
    """Inductor leaves out the mask of such a store, and all rows of a tile go there."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.mT * 0.3, -1) @ v

    for length, templates in ((1, 0), (2, 1)):
        inputs = [torch.randn(1, 1, length, 1).half() for _ in range(3)]
        with torch.no_grad(), short_everywhere(), config.patch(policy="always"):
            code = cuda_codegen.generate(fn, inputs, run=False)
        assert sum(kernel.is_template for kernel in code.kernels) == templates


@pytest.mark.parametrize(("dim", "defective"), [(6, True), (8, False)])
def test_the_gradient_of_a_sum(
    dim: int, defective: bool, fresh_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one number for all places. With head dims that are a multiple of 8 nothing is copied."""
    if torch_version() >= (2, 13):  # the copy is made, though it is not needed
        monkeypatch.setattr(kernel_defects, "fails_on_broadcast_numbers", lambda: True)

    def fn(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).sum()

    inputs = [torch.randn(B, H, S, dim, requires_grad=True) for _ in range(3)]
    counts = []
    for cured in (True, False):
        with config.patch(kernel_defects=cured):
            if defective and not cured and torch_version() < (2, 13):
                with pytest.raises(Exception, match="list index out of range"):
                    cuda_codegen.generate(fn, inputs, train=True, run=False)
                return
            counts.append(len(cuda_codegen.generate(fn, inputs, train=True, run=False).kernels))
    assert counts[0] - counts[1] == defective


@pytest.mark.parametrize("kernel", ["flash", "flash in the place of cuDNN"])
@pytest.mark.parametrize("expanded", [True, False])
def test_keys_that_are_expanded(expanded: bool, kernel: str, fresh_cache: None) -> None:
    """The backward of flash attention gets copies of them; others it gets as they are."""
    length = S if kernel == "flash" else 64

    def fn(q: Any, k: Any, v: Any) -> Any:
        if expanded:
            k, v = (x.expand(-1, H, -1, -1) for x in (k, v))
        if kernel == "flash":
            return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=0.25)[0]
        return cudnn(q, k, v)

    q = leaf(B, H, length, D)
    k, v = (leaf(B, 1 if expanded else H, length, D) for _ in "kv")
    wrapper = cuda_codegen.generate(fn, [q, k, v], train=True, run=False).backward.wrapper
    (call,) = _calls(wrapper, "_scaled_dot_product_flash_attention_backward")
    layouts = [strides(wrapper, argument) for argument in call.args[2:4]]
    assert layouts == [(H * length * D, length * D, D, 1)] * 2
    assert ("clone" in wrapper) == expanded


def test_known_defects_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    for each in kernel_defects.KNOWN:
        cells = (
            f"`{each.name}`", each.where, each.seen, each.condition, each.effect, each.instead, each.source,
        )  # fmt: skip
        assert f"| {' | '.join(cells)} |" in page
