"""Kernels that are known to be wrong: each defect in the bare kernel, and compiled graphs without it.

A defect that does not show any more on the installed torch fails its test: then its entry in
`inductor_fusions/fusions/kernel_defects/known.py` says since when, and may go with the oldest torch that has
it.
"""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from inductor_fusions import _inductor, config, testing
from inductor_fusions._inductor import templates
from inductor_fusions.layouts import pinning
from tests.kernel_defects.examples import of_scaled_query, scaled_query

pytestmark = pytest.mark.gpu

aten = torch.ops.aten
HALVES = [torch.bfloat16, torch.float16]
#: Errors of gradients, relative to their largest number: at most that of a right kernel, at least that of a
#: wrong one.
RIGHT, WRONG = 0.03, 0.2
ORDERS = {
    "bhsd": (0, 1, 2, 3),
    "bshd": (0, 2, 1, 3),
    "hbsd": (1, 0, 2, 3),
    "sbhd": (2, 0, 1, 3),
    "shbd": (2, 1, 0, 3),
    "hsbd": (1, 2, 0, 3),
}


@pytest.fixture(autouse=True)
def needs_cudnn() -> Iterator[None]:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("cuDNN attention is taken on Hopper and later")
    torch.manual_seed(0)
    yield


def laid_out(tensor: torch.Tensor, order: str) -> torch.Tensor:
    dims = ORDERS[order]
    return tensor.permute(dims).contiguous().permute([dims.index(dim) for dim in range(4)])


def rand(*shape: int, dtype: torch.dtype, order: str = "bhsd") -> torch.Tensor:
    return laid_out(torch.randn(shape, device="cuda", dtype=dtype), order).requires_grad_()


def exact(inputs: Sequence[torch.Tensor], grad: torch.Tensor, fn: Callable[..., Any]) -> list[torch.Tensor]:
    """Gradients in float64."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    with sdpa_kernel(SDPBackend.MATH):
        return list(torch.autograd.grad(fn(*wide), wide, grad.double()))


def error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest error, relative to the largest number of each; NaN counts as the largest of all."""
    errors = [
        float((x.double() - y).abs().max() / y.abs().max()) for x, y in zip(found, expected, strict=True)
    ]
    return max(math.inf if math.isnan(each) else each for each in errors)


def attention(q: Any, k: Any, v: Any, bias: Any = 0.0) -> Any:
    return torch.softmax(q @ k.mT * 0.25 + bias, -1) @ v


def bare(
    inputs: Sequence[torch.Tensor], grad: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """cuDNN's forward and backward as they are."""
    q, k, v = (x.detach() for x in inputs)
    found = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, False, False, scale=0.25)
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = found
    return aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, 0.0, False, scale=0.25
    )


# -- plans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_plans_are_cached_without_the_layout_of_the_gradient(dtype: torch.dtype) -> None:
    inputs = [rand(2, 4, 20, 16, dtype=dtype) for _ in range(3)]
    grad = torch.randn_like(inputs[0])
    expected = exact(inputs, grad, attention)
    errors = {order: error(bare(inputs, laid_out(grad, order)), expected) for order in ORDERS}
    first, *others = errors.values()
    assert first < RIGHT and min(others) > WRONG, errors


#: Functions around an attention, each of which gives its gradient another layout.
AROUND: dict[str, Callable[..., Any]] = {
    "as it is": lambda o: o,
    "heads merged": lambda o: o.transpose(1, 2).flatten(2),
    "length first": lambda o: o.permute(2, 0, 1, 3).reshape(o.shape[2], -1) * 1.5,
    "heads first": lambda o: o.permute(1, 0, 2, 3).reshape(o.shape[1], -1),
    "length, heads": lambda o: o.permute(2, 1, 0, 3).reshape(o.shape[2], -1),
}
SPELLINGS: dict[str, Callable[..., Any]] = {
    "written out": attention,
    "einsum": lambda q, k, v: torch.einsum(
        "bhqk,bhkd->bhqd", torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.25, -1), v
    ),
    "call": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.25),
}


def errors_in_all_orders(dtype: torch.dtype, orders: Sequence[str]) -> dict[str, float]:
    """Attentions of one shape, compiled in one process: gradients of all layouts, eager calls in between."""
    found = {}
    for order in orders:
        inputs = [rand(2, 4, 12, 16, dtype=dtype, order=order) for _ in range(3)]
        for spelling, core in SPELLINGS.items():
            for name, around in AROUND.items():
                torch._dynamo.reset()

                def fn(*x: Any, core: Any = core, around: Any = around) -> Any:
                    return around(core(*x))

                # Eager calls, whose gradients have any layout.
                eager = F.scaled_dot_product_attention(*inputs, scale=0.25)
                for layout in ORDERS:
                    torch.autograd.grad(
                        eager, inputs, laid_out(torch.randn_like(eager), layout), retain_graph=True
                    )
                out = torch.compile(fn)(*inputs)
                grad = torch.randn_like(out)
                ours = torch.autograd.grad(out, inputs, grad)
                found[f"{order}, {spelling}, {name}"] = error(ours, exact(inputs, grad, fn))
    return found


@pytest.mark.parametrize("dtype", HALVES)
def test_no_compiled_backward_meets_the_plan_of_another(dtype: torch.dtype, fresh_cache: None) -> None:
    with config.patch(policy="always"), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        found = errors_in_all_orders(dtype, ["bhsd", "bshd", "hbsd"])
    wrong = {name: each for name, each in found.items() if each > RIGHT}
    assert not wrong


def test_some_do_without_the_cure(fresh_cache: None) -> None:
    with config.patch(policy="always", kernel_defects=False), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        found = errors_in_all_orders(torch.bfloat16, ["bhsd"])
    assert max(found.values()) > WRONG, found


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_dropout_draws_as_its_backward_takes_it(dropout: float, fresh_cache: None) -> None:
    """With v of unit vectors, the output holds the weights, and the gradient of v their sums over queries."""
    q, k = (rand(2, 4, 128, 64, dtype=torch.bfloat16) for _ in range(2))
    v = torch.eye(128, 64, device="cuda", dtype=torch.bfloat16).expand(2, 4, 128, 64).clone().requires_grad_()

    def fn(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.compile(fn)(q, k, v)
        (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    # out[i, d] = kept weight of key d; dv[j] = sum over i of the kept weights of key j.
    expected = out.double().sum(-2)
    torch.testing.assert_close(dv[..., :64, 0].double(), expected, rtol=0.05, atol=0.05)


# -- keys of half a tile -----------------------------------------------------------------------------


def masks(queries: int, keys: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    low = torch.finfo(dtype).min
    position = torch.arange(keys, device="cuda")
    causal = position <= torch.arange(queries, device="cuda")[:, None] + max(keys - queries, 0)
    zero = torch.zeros(2, 1, queries, keys, device="cuda")
    left, right = (zero.clone() for _ in range(2))
    left[0, ..., : keys // 2] = low
    right[1, ..., -(keys // 3) :] = low
    hidden = zero.clone()
    hidden[0, :, : queries // 3] = -math.inf
    rows = zero.clone()
    rows[:, :, 3:9] = -1000.0
    return {
        "left padding": left,
        "left padding, causal": left.masked_fill(~causal, low),
        "right padding": right,
        "fully masked rows": hidden,
        "low biases": zero - 200.0,
        "low rows": rows,
    }


def test_keys_of_half_a_tile_beside_a_low_logsumexp() -> None:
    inputs = [rand(2, 2, n, 64, dtype=torch.bfloat16) for n in (128, 192, 192)]
    grad = torch.randn_like(inputs[0])
    bias = masks(128, 192, torch.bfloat16)["low biases"].bfloat16().expand(2, 2, 128, 192)
    assert not bare(inputs, grad, bias)[0].isfinite().all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("call", [False, True])
def test_no_nan_at_any_length(dtype: torch.dtype, dynamic: bool, call: bool, fresh_cache: None) -> None:
    """Every number of keys from 64 to 1,088 in steps of 64."""
    torch._dynamo.reset()

    def fn(q: Any, k: Any, v: Any, bias: Any) -> Any:
        if call:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.25)
        return attention(q, k, v, bias)

    wrong = {}
    with config.patch(policy="always"), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for keys in range(64, 1089, 64):
            if not dynamic:
                torch._dynamo.reset()
            compiled = torch.compile(fn, dynamic=dynamic)
            for name, mask in masks(128, keys, dtype).items():
                if not call and name == "fully masked rows":
                    continue  # NaN in eager mode, and so are all gradients
                inputs = [rand(2, 2, n, 64, dtype=dtype) for n in (128, keys, keys)]
                bias = mask.to(dtype)
                # Fully masked rows differ between backends.
                alive = (bias > torch.finfo(dtype).min / 2).any(-1, keepdim=True)
                out = compiled(*inputs, bias)
                grad = torch.randn_like(out) * alive
                ours = torch.autograd.grad(out, inputs, grad)
                wide = torch.where(alive, bias.double(), 0.0)
                expected = exact(inputs, grad, lambda q, k, v, wide=wide: attention(q, k, v, wide))
                if (found := error(ours, expected)) > 0.05:
                    wrong[keys, name] = found
    assert not wrong


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("queries", [1, 2, 65, 128])
def test_keys_of_half_a_tile_without_a_mask(queries: int, dtype: torch.dtype) -> None:
    inputs = low_scores(queries, 192, dtype)
    assert not bare(inputs, torch.randn_like(inputs[0]))[0].isfinite().all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("flash", [False, True])
def test_no_nan_without_a_mask(dtype: torch.dtype, dynamic: bool, flash: bool, fresh_cache: None) -> None:
    """The gradients are those of flash attention, or of cuDNN with a mask if flash is switched off."""
    torch._dynamo.reset()

    def fn(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, scale=0.25)

    backends = [SDPBackend.CUDNN_ATTENTION, *([SDPBackend.FLASH_ATTENTION] if flash else [])]
    wrong = {}
    with sdpa_kernel(backends, set_priority=True):
        for queries, keys in ((1, 64), (2, 192), (65, 320), (130, 576), (64, 128)):
            if not dynamic:
                torch._dynamo.reset()
            inputs = low_scores(queries, keys, dtype)
            out = torch.compile(fn, dynamic=dynamic)(*inputs)
            grad = torch.randn_like(out)
            # What all keys have in common cancels in the gradient of q, and leaves the rounding of the dtype.
            ours = torch.autograd.grad(out, inputs, grad)
            if not (found := error(ours, exact(inputs, grad, attention))) < 0.05:
                wrong[queries, keys] = found
    assert not wrong


# -- others ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_of_zero_and_below(backend: SDPBackend, scale: float) -> None:
    inputs = [rand(2, 4, 20, 64, dtype=torch.bfloat16) for _ in range(3)]
    with sdpa_kernel(backend):
        assert not F.scaled_dot_product_attention(*inputs, scale=scale).isfinite().all()


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_dropout_of_one(backend: SDPBackend) -> None:
    inputs = [rand(2, 4, 20, 64, dtype=torch.bfloat16) for _ in range(3)]
    with sdpa_kernel(backend), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(*inputs, dropout_p=1.0)


def test_empty_batch() -> None:
    inputs = [rand(0, 4, 20, 64, dtype=torch.bfloat16) for _ in range(3)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), pytest.raises((RuntimeError, TypeError)):
        out = F.scaled_dot_product_attention(*inputs)
        torch.autograd.grad(out, inputs, torch.ones_like(out))


ODD: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "scale below zero": (lambda q, k, v: torch.softmax(q @ k.mT * -0.3, -1) @ v, (2, 4, 20, 64)),
    "scale of zero": (lambda q, k, v: torch.softmax(q @ k.mT * 0.0, -1) @ v, (2, 4, 20, 64)),
    "dropout of one": (lambda q, k, v: F.dropout(torch.softmax(q @ k.mT, -1), 1.0) @ v, (2, 4, 20, 64)),
    "empty batch": (attention, (0, 4, 20, 64)),
    "no length": (attention, (2, 4, 0, 64)),
    "no head dim": (attention, (2, 4, 20, 0)),
    "one query": (attention, (2, 4, 1, 64)),
    "one sample, one head": (attention, (1, 1, 7, 64)),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_as_eager_has_it(name: str, train: bool, dtype: torch.dtype, fresh_cache: None) -> None:
    """Stock's own patterns give NaN for some of these, so eager mode is what is compared with."""
    fn, shape = ODD[name]
    inputs = [rand(*shape, dtype=dtype).detach().requires_grad_(train) for _ in range(3)]
    ours, eager = (
        testing.capture(fn, *inputs, train=train, backend=backend) for backend in ("inductor", "eager")
    )
    assert not [site for site in ours.sites if site.verdict == "failed"]
    found = [*ours.tensors, *ours.grads.values()]
    for x, y in zip(found, [*eager.tensors, *eager.grads.values()], strict=True):
        tolerance = 0.1 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def test_query_of_flex_attention_for_short_queries(
    fresh_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = of_scaled_query("cuda")
    expected = scaled_query(*(x.double() if x.is_floating_point() else x for x in inputs))

    def found() -> float:
        torch._dynamo.reset()
        flex = config.patch(policy="always", attention_kernel="flex")
        with torch.no_grad(), flex, torch._inductor.utils.fresh_cache():
            return error([torch.compile(scaled_query)(*inputs)], [expected])

    assert found() < RIGHT
    monkeypatch.setattr(pinning, "settle_query", lambda *arguments: None)
    assert found() > WRONG


# -- one query, one number -----------------------------------------------------------------------------


def low_scores(queries: int, keys: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Scores of about -122, as queries and keys that point away from each other have."""
    q, k, v = (torch.randn(1, 2, n, 64, device="cuda") * 0.5 for n in (queries, keys, keys))
    apart = (122 / 64 / 0.25) ** 0.5
    return [x.to(dtype).requires_grad_() for x in (q + apart, k - apart, v)]


def test_one_query_beside_a_low_logsumexp() -> None:
    version = torch.backends.cudnn.version()
    if version // 100 not in (919, 925, 926):
        pytest.skip(f"needs cuDNN 9.19, 9.25 or 9.26, whose kernels are wrong; this is {version}")
    q, k, v = (torch.randn(1, 2, n, 64, device="cuda") * 0.1 for n in (1, 128, 128))
    q[..., 0], k[..., 0] = 1.0, -122 / 0.25
    inputs = [x.bfloat16() for x in (q, k, v)]
    found = bare(inputs, torch.randn_like(inputs[0]))
    assert not all(each.isfinite().all() for each in found[1:])


@pytest.mark.parametrize("keys", [128, 192])
@pytest.mark.parametrize("call", [False, True])
def test_one_query_in_a_compiled_graph(call: bool, keys: int, fresh_cache: None) -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, scale=0.25) if call else attention(q, k, v)

    inputs = low_scores(1, keys)
    with config.patch(policy="always"), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.compile(fn)(*inputs)
        grad = torch.randn_like(out)
        ours = torch.autograd.grad(out, inputs, grad)
    assert error(ours, exact(inputs, grad, attention)) < 0.05


def test_one_number_in_a_template(fresh_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of the kernel for short attention holds rows that there are not."""
    inputs = [torch.randn(1, 1, n, 16 if i < 2 else 1, device="cuda").half() for i, n in enumerate((1, 3, 3))]
    expected = attention(*(x.double() for x in inputs))

    def found() -> float:
        torch._dynamo.reset()
        short = config.patch(policy="always", attention_kernel="short")
        with torch.no_grad(), short, torch._inductor.utils.fresh_cache():
            return error([torch.compile(attention)(*inputs)], [expected])

    assert found() < RIGHT
    monkeypatch.setattr(templates, "_is_one_number", lambda size: False)
    assert found() > WRONG


# -- what ends a process -------------------------------------------------------------------------------


def fails(control: str, defect: str) -> bool:
    """Whether the process of a program fails, or prints "wrong", behind a control that has to pass.

    Raises:
        AssertionError: the control does not pass.
    """
    head = "import torch, torch.nn.functional as F\naten = torch.ops.aten\ntorch.manual_seed(0)\n"
    passed = "\ntorch.cuda.synchronize()\nprint('passed', flush=True)\n"
    program = head + textwrap.dedent(control) + passed + textwrap.dedent(defect) + passed
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    lines = done.stdout.split()
    assert lines[:1] == ["passed"], done.stderr[-2000:]
    return lines != ["passed", "passed"]


def test_a_gradient_that_begins_elsewhere() -> None:
    control = """
        def backward(length, first):
            q, k, v = (torch.randn(1, 2, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            found = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False)
            out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = found
            many = torch.randn(first + out.numel(), device="cuda", dtype=out.dtype)
            grad = many[first:].view(1, 2, length, 64)
            aten._scaled_dot_product_cudnn_attention_backward(
                grad, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, False)

        backward(128, first=0)
    """
    assert fails(control, "backward(64, first=1)")


def test_a_gradient_that_begins_elsewhere_in_a_compiled_graph(fresh_cache: None) -> None:
    inputs = [rand(1, 2, 64, 64, dtype=torch.bfloat16) for _ in range(3)]
    with config.patch(policy="always"), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.compile(attention)(*inputs)
        grad = torch.randn(out.numel() + 1, device="cuda", dtype=out.dtype)[1:].view(out.shape)
        ours = torch.autograd.grad(out, inputs, grad)
    assert error(ours, exact(inputs, grad, attention)) < RIGHT


def test_a_mask_that_alone_takes_a_gradient() -> None:
    control = """
        q, k, v = (torch.randn(1, 1, 64, 16, device="cuda") for _ in range(3))
        mask = torch.randn(1, 1, 64, 64, device="cuda", requires_grad=True)

        def backward(q):
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()

        backward(q.clone().requires_grad_())
    """
    assert fails(control, "backward(q)")


def test_a_mask_that_alone_takes_a_gradient_in_a_compiled_graph(fresh_cache: None) -> None:
    q, k, v = (torch.randn(1, 1, 64, 16, device="cuda") for _ in range(3))
    mask = torch.randn(1, 1, 64, 64, device="cuda", requires_grad=True)
    with config.patch(policy="always"):
        out = torch.compile(attention)(q, k, v, mask)
        grad = torch.randn_like(out)
        (ours,) = torch.autograd.grad(out, mask, grad)
    wide = mask.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(
        attention(q.double(), k.double(), v.double(), wide), wide, grad.double()
    )
    assert error([ours], [expected]) < RIGHT


@pytest.mark.skipif(
    not _inductor.counts_in_32_bits(),
    reason="needs torch before 2.14; since then flex attention indexes large captured tensors with 64 bits",
)
def test_flex_attention_counts_in_32_bits() -> None:
    """Every other element that the scores read is 20, whatever stands in front of them."""
    control = """
        from torch.nn.attention.flex_attention import flex_attention
        q, k, v = (torch.randn(1, 1, 128, 64, device="cuda") for _ in range(3))

        def check(first):
            torch._dynamo.reset()
            many = torch.zeros(first + 128, device="cuda", dtype=torch.int8)
            many[first::2] = 20

            def score(score, b, h, i, j):
                return score + many[j + first]

            found = torch.compile(flex_attention)(q, k, v, score_mod=score)
            expected = torch.softmax(q.double() @ k.double().mT / 8 + many[first:].double(), -1) @ v.double()
            if not (found - expected).abs().max() < 0.1:
                print("wrong", flush=True)

        check(first=64)
    """
    assert fails(control, "check(first=2 ** 31)")
