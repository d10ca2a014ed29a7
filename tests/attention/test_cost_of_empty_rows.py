"""What the gradients of fully masked rows cost, and that the decision counts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_fw_bw_and_get_code

from inductor_fusions import config
from tests.attention.support import LOWEST, capture
from tests.attention.test_empty_rows import B, H, S, finish, given, with_mask


def repeated(q, k, v, mask):
    """Two queries share a key."""
    k, v = (t[:, :1].expand(-1, H, -1, -1) for t in (k, v))
    return with_mask(q, k, v, mask)


NO_PRODUCTS: dict[str, Callable[..., Any]] = {
    "that leaves": with_mask,
    "of grouped heads": repeated,
    "in front of a product": lambda q, k, v, mask: (
        with_mask(q, k, v, mask).transpose(1, 2).flatten(2) @ v[0].transpose(0, 1).flatten(1).mT
    ),
}


@pytest.mark.parametrize("name", NO_PRODUCTS)
def test_gradients_cost_no_product_in_the_forward(name: str) -> None:
    """Zeros carry the gradient of fully masked rows into k; nothing computes them."""
    fn, inputs = NO_PRODUCTS[name], given()
    with config.patch(policy="always", strict=True):
        compiled = torch.compile(fn, fullgraph=True)
        with torch._inductor.config.patch(force_disable_caches=True):
            out, (forward, backward) = run_fw_bw_and_get_code(lambda: compiled(*inputs))
    assert "_scaled_dot_product" in forward and "extern_kernels.bmm(" not in forward
    assert forward.count("extern_kernels.mm(") == (name == "in front of a product")
    assert backward.count("extern_kernels.bmm(") == 2
    torch.testing.assert_close(out, fn(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["added", "filled", "one row"])
def test_the_decision_counts_what_keeps_the_gradients(how: str, shelf: Callable[..., None]) -> None:
    """Of a small attention; a fill sends no gradient, and that of a mask with one row is not kept."""
    sizes = dict(batch=B, heads=H, q_len=S, kv_len=S, head_dim=16, dtype="float32")
    masks = ("pad", "bias_batch")
    gain = {"sdpa": 1.5}
    rows = [{**sizes, "mask": m, "train": train, "gain": gain} for m in masks for train in (True, False)]
    shelf(on="cpu", cpu={"attention": rows})
    q, k, v, mask = given()

    def filled(q, k, v, mask):
        return finish((q @ k.mT * 0.3).masked_fill(mask < 0, LOWEST), v)

    inputs = (q, k, v, mask[:, :, :1] if how == "one row" else mask)
    for train in (False, True):
        run = capture(filled if how == "filled" else with_mask, *inputs, train=train, policy="profitable")
        (site,) = run.sites
        left = train and how == "added"
        assert (site.verdict == "left to stock") == left, site
        assert not left or (site.code == "not-faster" and "fully masked" in site.reason)
