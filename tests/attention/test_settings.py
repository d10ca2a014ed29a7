"""What the caller sets around an attention or in front of it: what that forbids is not put into the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from inductor_fusions import _inductor, config, reporting
from inductor_fusions.driver import passes
from inductor_fusions.effects import modes
from tests.attention.support import (
    cases,
    check,
    flex_everywhere,
    qkv,
    rand,
    scored,
    sdpa,
    short_everywhere,
    unfused,
    visible,
)

EFFICIENT, FLASH, MATH = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
FORBIDDEN = "no enabled SDPA backend"
CHOSEN = "the caller selects its backends"


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Each test leaves them as they were."""
    before = modes.ambient()
    yield
    assert modes.ambient() == before


biased = scored(lambda s, bias: s * 0.3 + bias)


def called(q: Any, k: Any, v: Any) -> Any:
    """A call whose mask hides nothing."""
    return F.scaled_dot_product_attention(q, k, v, torch.ones(7, 13, dtype=torch.bool))


def inside(backends: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    def function(*inputs: Any) -> Any:
        with sdpa_kernel(backends):
            return fn(*inputs)

    return function


#: Backends, and whether SDPA on a CPU has one among them.
BACKENDS: dict[str, tuple[Any, bool]] = {
    "flash": (FLASH, True),
    "math": (MATH, True),
    "efficient": (EFFICIENT, False),
    "efficient and cuDNN": ([EFFICIENT, SDPBackend.CUDNN_ATTENTION], False),
    "efficient and math": ([EFFICIENT, MATH], True),
}


@cases(BACKENDS)
def test_written_out_inside(case: tuple[Any, bool]) -> None:
    backends, has_one = case
    inputs = (*qkv(), rand(7, 13, grad=False))
    options: dict[str, Any] = {} if has_one else {"fused": 0, "reason": FORBIDDEN}
    check(inside(backends, biased), inputs, **options)
    check(biased, inputs)  # nothing is left behind


@cases(BACKENDS)
def test_written_out_around(case: tuple[Any, bool]) -> None:
    backends, has_one = case
    options: dict[str, Any] = {} if has_one else {"fused": 0, "reason": FORBIDDEN}
    with sdpa_kernel(backends):
        check(biased, (*qkv(), rand(7, 13, grad=False)), **options)


def test_left_before_the_attention() -> None:
    def fn(q: Any, k: Any, v: Any, bias: Any) -> Any:
        with sdpa_kernel(MATH):
            q = q * F.scaled_dot_product_attention(q, q, q)
        return biased(q, k, v, bias)

    seen = check(fn, (*qkv(), rand(7, 13, grad=False)))
    assert seen.ours.calls("_sdpa_kernel")


def test_one_backend_by_its_switch() -> None:
    """`torch.backends.cuda.enable_flash_sdp` is a call in the graph, and holds behind it."""

    def fn(q: Any, k: Any, v: Any, bias: Any) -> Any:
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
        found = biased(q, k, v, bias)
        torch.backends.cuda.enable_flash_sdp(True)
        torch.backends.cuda.enable_math_sdp(True)
        return found + biased(q, k, v, bias * 0.5)

    check(fn, (*qkv(), rand(7, 13, grad=False)), fused=1, reason=FORBIDDEN)


def test_between_the_products() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(MATH):
            scores = q @ k.mT * 0.3
        return torch.softmax(scores, -1) @ v

    unfused(fn, qkv(), "the backends of SDPA change between")


def test_calls_stay_calls() -> None:
    """A call loses the mask that hides nothing, and does not become another operation."""
    for backends in (MATH, FLASH, [EFFICIENT, MATH]):
        seen = check(inside(backends, called), qkv())
        assert sdpa(seen.ours).kwargs["attn_mask"] is None


def windowed(q: Any, k: Any, v: Any) -> Any:
    i = torch.arange(64)
    near = (i[:, None] >= i) & (i[:, None] - i < 8)
    return F.scaled_dot_product_attention(q, k, v, near)


def test_calls_do_not_become_flex_attention() -> None:
    inputs = qkv(64, 64, batch=1, heads=1)
    with flex_everywhere("flex"):
        check(windowed, inputs, kernel="flex")
        unfused(inside(MATH, windowed), inputs, CHOSEN)
        with sdpa_kernel([FLASH, MATH]):
            unfused(windowed, inputs, CHOSEN)


def test_calls_do_not_become_short() -> None:
    masked = lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m)  # noqa: E731
    inputs = (*qkv(), visible(7, 13))
    with short_everywhere():
        check(masked, inputs, kernel="short")
        unfused(inside([FLASH, MATH], masked), inputs, CHOSEN)


def test_what_is_written_out_may_become_another_operation() -> None:
    """Flex attention is no backend of SDPA. Its block masks are shared where the settings are the same."""

    def windowed_and_capped(q: Any, k: Any, v: Any) -> Any:
        places = torch.arange(q.shape[2])
        near = (places[:, None] - torch.arange(k.shape[2])).abs() < 4
        return scored(lambda s: (torch.tanh(s * 0.1) * 3.0).masked_fill(~near, -torch.inf))(q, k, v)

    with flex_everywhere():
        check(inside(EFFICIENT, windowed_and_capped), qkv(), kernel="flex")


def test_multihead_attention() -> None:
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    fn = lambda x: layer(x, x, x)[0]  # noqa: E731
    check(fn, (rand(2, 5, 16),), slack=16.0, reference=lambda x: layer.double()(x, x, x)[0])
    layer.float()
    check(
        inside(EFFICIENT, fn), (rand(2, 5, 16),), fused=0, reason="math backend", slack=16.0,
        reference=lambda x: layer.double()(x, x, x)[0],
    )  # fmt: skip


def test_deterministic_algorithms_inside() -> None:
    """Flex attention adds up the gradient of a bias in any order."""

    def fn(q: Any, k: Any, v: Any, bias: Any) -> Any:
        torch.use_deterministic_algorithms(True)
        found = torch.softmax(torch.tanh(q @ k.mT * 0.3 + bias), -1) @ v
        torch.use_deterministic_algorithms(False)
        return found

    inputs = (*qkv(), rand(3, 7, 13))
    with flex_everywhere():
        unfused(fn, inputs, "not deterministic")
        check(scored(lambda s, b: torch.tanh(s * 0.3 + b)), inputs, kernel="flex")


def test_bits_of_eager() -> None:
    """What torch 2.15 calls strict numerics."""
    inputs = (*qkv(), rand(7, 13, grad=False))
    asked = _inductor.loading.inductor_config
    for value, fused in (("strict", 0), ("strict_reduction", 0), ("default", 1)):
        if hasattr(asked(), "numerics"):
            setting = asked().patch(numerics=value)
        else:  # an older torch, told of it
            told = mock.Mock(wraps=asked(), numerics=value)
            setting = mock.patch.object(_inductor.loading, "inductor_config", lambda found=told: found)
        with setting:
            check(biased, inputs, fused=fused, reason=None if fused else "eager-bits")
    check(biased, inputs)


@pytest.mark.usefixtures("fresh_cache")
def test_lite_mode() -> None:
    """Inductor runs no pass, so nothing is fused and nothing reported."""
    q, k, v = (x.detach() for x in qkv())

    def plain(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.mT, -1) @ v

    for mode, fused in (("lite", 0), (None, 1)):
        with config.patch(policy="always"), reporting.isolated() as sites:
            found = torch.compile(plain, mode=mode)(q, k, v)
        assert [site.verdict for site in sites] == ["fused"] * fused
        assert fused or torch.equal(found, plain(q, k, v))


def test_caches_tell_settings_apart() -> None:
    """Inductor's keys hold deterministic algorithms; nothing in them tells the backends of SDPA."""
    found = passes.FusionPass("pre_grad", ())
    keys = [found.uuid()]
    with sdpa_kernel(MATH):
        keys.append(found.uuid())
    with sdpa_kernel([MATH, FLASH]), config.patch(policy="always"):
        keys.append(found.uuid())
    assert len(set(keys)) == 3 and keys[0] == found.uuid()
