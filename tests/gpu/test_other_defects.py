"""Kernels that are known to be wrong, further ones: odd scales and sizes, one query, what ends a process.

As in `test_kernel_defects.py`, a defect that does not show any more fails its test.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from inductor_fusions import _inductor, config, testing
from inductor_fusions._inductor import templates, torch_version
from inductor_fusions.fusions import kernel_defects
from inductor_fusions.layouts import pinning
from tests.gpu.defects import RIGHT, WRONG, attention, bare, error, exact, low_scores, rand
from tests.kernel_defects.examples import of_scaled_query, scaled_query

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_cudnn")]

aten = torch.ops.aten

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


def test_one_query_beside_a_low_logsumexp() -> None:
    version = torch.backends.cudnn.version()
    if version // 100 not in (919, 925, 926):
        pytest.skip(f"needs cuDNN 9.19, 9.25 or 9.26, whose kernels are wrong; this is {version}")
    q, k, v = (torch.randn(1, 2, n, 64, device="cuda") * 0.1 for n in (1, 128, 128))
    q[..., 0], k[..., 0] = 1.0, -122 / 0.25
    inputs = [x.bfloat16() for x in (q, k, v)]
    found = bare(inputs, torch.randn_like(inputs[0]))
    assert not all(each.isfinite().all() for each in found[1:])


@pytest.mark.skipif(not _inductor.mask_rows_have_32_bits(), reason="fixed in this torch")
def test_rows_of_a_long_mask() -> None:
    """The mask is causal, and the last rows read those of other queries."""
    length = 66_048
    q, k, v = (rand(1, 1, length, 64, dtype=torch.bfloat16).detach() for _ in range(3))
    mask = torch.full((length, length), float("-inf"), dtype=torch.bfloat16, device="cuda").triu_(1)
    with torch.no_grad(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        right = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        wrong = F.scaled_dot_product_attention(q, k, v, mask)
    rows = 2**32 // length
    assert error([wrong[:, :, :rows]], [right[:, :, :rows].double()]) < RIGHT
    assert error([wrong[:, :, rows + 64 :]], [right[:, :, rows + 64 :].double()]) > WRONG


@pytest.mark.parametrize("heads", [4, 8])
def test_decoding(heads: int, fresh_cache: None) -> None:
    """By its report the bare kernel is wrong on Blackwell, for fewer than 8 heads of keys at least."""
    q, k, v = (
        torch.randn(1, n, s, 128, device="cuda").bfloat16()
        for n, s in ((28 // 4 * heads, 1), *[(heads, 300)] * 2)
    )

    def fn(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    wide = fn(*(x.double() for x in (q, k, v)))
    with torch.no_grad():
        assert error([torch.compile(fn)(q, k, v)], [wide]) < RIGHT
        if kernel_defects.decodes_wrongly(q.device) and torch_version() < (2, 15) and heads < 8:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                assert error([fn(q, k, v)], [wide]) > RIGHT


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


def expanded() -> list[torch.Tensor]:
    """q, and one head of keys and of values."""
    return [
        torch.randn(2, heads, 8, 16, device="cuda", dtype=torch.float16, requires_grad=True)
        for heads in (4, 1, 1)
    ]


def flash_of_expanded(q: Any, k: Any, v: Any) -> Any:
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def test_gradients_of_what_is_expanded() -> None:
    """The kernel gives them other strides than the fake kernel."""
    q, k, v = (x.detach() for x in expanded())
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False)
    out, logsumexp, cum_q, cum_k, max_q, max_k, seed, offset, _ = found
    settings = (out, logsumexp, cum_q, cum_k, max_q, max_k, 0.0, False, seed, offset)
    made = aten._scaled_dot_product_flash_attention_backward(out, q, k, v, *settings)
    assert made[1].stride() != torch.empty_like(k).stride()


def test_gradients_of_what_is_expanded_in_a_compiled_graph(fresh_cache: None) -> None:
    inputs = expanded()
    found, wanted = (
        torch.autograd.grad(fn(*inputs).square().sum(), inputs)
        for fn in (torch.compile(flash_of_expanded), flash_of_expanded)
    )
    assert error(found, wanted) < RIGHT
