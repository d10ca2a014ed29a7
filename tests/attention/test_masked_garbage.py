"""Keys that no query sees and that hold no numbers, as a cache that is allocated empty.

Eager drops them where scores are replaced. So do flex attention and the operation for short attention. SDPA
adds its mask to the scores, and NaN stays (docs/attention.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from inductor_fusions import testing
from tests.attention.support import capture, cases, flex_everywhere, qkv, short_everywhere

N = 13

FILLED: dict[str, Callable[[Any, Any], Any]] = {
    "-inf": lambda s, pad: s.masked_fill(pad, -torch.inf),
    "-1e9": lambda s, pad: s.masked_fill(pad, -1e9),
    "where": lambda s, pad: torch.where(pad, torch.finfo(s.dtype).min, s),
    "positions": lambda s, pad: s.masked_fill(torch.arange(N) > 8, -torch.inf),
    "behind a function": lambda s, pad: torch.tanh(s).masked_fill(pad, -torch.inf),
}


def run(fill: Any, bad: float, kernel: str, of: str = "k") -> tuple[testing.Capture, torch.Tensor]:
    """What comes of an attention whose last keys are hidden and not finite, and eager's result."""
    q, k, v = qkv(7, N, grad=False)
    {"k": k, "v": v}[of][:, :, 9:] = bad
    pad = (torch.arange(N) > 8)[None, None, None].expand(2, 1, 1, N).clone()
    fn = lambda q, k, v, pad: torch.softmax(fill(q @ k.mT * 0.3, pad), -1) @ v  # noqa: E731
    everywhere = {"flex": lambda: flex_everywhere("flex"), "short": short_everywhere}
    with everywhere.get(kernel, contextlib.nullcontext)(), torch.no_grad():
        found = capture(fn, q, k, v, pad, train=False, policy="always")
    assert [site.verdict for site in found.sites] == ["fused"]
    return found, fn(q, k, v, pad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kernel", ["flex", "short"])
@cases(FILLED)
def test_scores_that_are_replaced(case: Any, kernel: str, bad: float) -> None:
    if case is FILLED["behind a function"] and kernel == "short":
        pytest.skip("that operation has no functions of scores")
    found, wanted = run(case, bad, kernel)
    assert wanted.isfinite().all()
    torch.testing.assert_close(found.outputs, wanted)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_masks_of_sdpa_are_added(bad: float) -> None:
    """What the documentation says of them."""
    found, wanted = run(FILLED["-inf"], bad, "sdpa")
    assert found.sites[0].kernel.startswith("sdpa")
    assert wanted.isfinite().all() and not torch.as_tensor(found.outputs).isfinite().all()


def test_keys_with_numbers() -> None:
    for kernel in ("sdpa", "flex", "short"):
        found, wanted = run(FILLED["-inf"], 3e4, kernel)
        torch.testing.assert_close(found.outputs, wanted)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("fill", ["-inf", "where"])
def test_values(fill: str, bad: float) -> None:
    """0 times NaN is NaN in eager mode as well."""
    found, wanted = run(FILLED[fill], bad, "sdpa", of="v")
    torch.testing.assert_close(found.outputs, wanted, equal_nan=True)
