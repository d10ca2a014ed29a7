"""Errors of the kernel, for Triton's interpreter."""

from __future__ import annotations

import itertools

import torch

from inductor_fusions.fusions.linear_cross_entropy import kernels
from inductor_fusions.fusions.linear_cross_entropy.chunks import Pulls
from tests.support.errors import relative

#: Rows, columns, and columns of a step.
SIZES = {"odd": (5, 77, 32), "one step": (3, 64, 64), "short": (4, 7, 16), "one column": (2, 1, 16)}
DTYPES = {"float16": torch.float16, "float32": torch.float32}
#: Scale and cap of the logits, whether they are weighted, whether the total is wanted, gradients; whether the
#: entropy is wanted, and with hidden classes.
FORMS = {
    "plain": (1.0, 0.0, False, False, True, ""),
    "far from 0": (1.0, 0.0, False, False, True, "entropy"),
    "scaled": (0.25, 0.0, False, False, True, "entropy"),
    "capped": (0.5, 3.0, False, False, True, ""),
    "smoothed": (1.0, 0.0, False, True, True, ""),
    "weighted": (1.0, 2.0, True, True, True, "entropy"),
    "forward": (1.0, 0.0, False, False, False, ""),
    "hidden classes": (1.0, 0.0, False, False, True, "hidden"),
    "classes at the lowest number": (1.0, 0.0, False, False, True, "lowest"),
    "forward with entropy": (1.0, 0.0, False, False, False, "entropy"),
}
CASES = {
    f"{size}, {form} {dtype}": (size, form, dtype)
    for size, form, dtype in itertools.product(SIZES, FORMS, DTYPES)
}


def errors(case: str) -> dict[str, float]:
    """Relative error of each result against float64; rows that are left out have to be 0."""
    size, form, dtype = CASES[case]
    (rows, columns, block), (scale, cap, weighted, totals, pulled, entropy) = SIZES[size], FORMS[form]
    torch.manual_seed(0)
    # Rows of a larger buffer.
    x = 3 * torch.randn(rows, columns + 3) + (500 if form == "far from 0" else 0)
    x = x.to(DTYPES[dtype])[:, :columns]
    labels = torch.randint(columns, (rows,))
    if entropy in ("hidden", "lowest"):  # of most lanes all
        least = float("-inf") if entropy == "hidden" else torch.finfo(x.dtype).min
        x[:, torch.arange(columns) % 16 > 2] = least
        labels = labels // 16 * 16
    labels[1] = -1
    weights = torch.rand(columns) if weighted else None
    stats = torch.zeros(2 + totals + bool(entropy), rows + 2)[:, :rows]
    soft, hot, flat, spread = torch.rand(4, rows)
    pulls = Pulls(soft, hot, flat if totals else None, spread if entropy else None) if pulled else None
    wide = x.double().requires_grad_()
    y = scale * wide
    y = cap * torch.tanh(y) if cap else y
    w = torch.ones(columns).double() if weights is None else weights.double()
    there = labels >= 0
    picked = y.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    lse = y.logsumexp(1)
    results = [(picked - lse, -hot), (lse, soft - hot)]
    results += [((y * w).sum(1), -flat)] if totals else []
    if entropy:
        logs = y.log_softmax(1).clamp(min=torch.finfo(y.dtype).min)
        results.append((-(logs.exp() * logs).sum(1), spread))
    true = [each for each, _ in results]
    (dx,) = torch.autograd.grad([(each * factor)[there].sum() for each, factor in results], wide)
    kernels.rows(
        x, labels, scale, cap, weights, stats, pulls, totals, bool(entropy), entropy == "hidden", block
    )  # fmt: skip
    assert not stats[:, ~there].any()
    found = {str(i): relative(stats[i][there], exact[there], 1e-9) for i, exact in enumerate(true)}
    if pulls is not None:
        assert not x[~there].any()
        found["dx"] = relative(x, dx, 1e-9)
    return found
