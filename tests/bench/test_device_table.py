"""What a table has of measured attentions."""

from __future__ import annotations

from typing import Any

import pytest

from bench import device_table

CUDNN, MATH = ["_scaled_dot_product_cudnn_attention"], ["math"]


def measured(mask: str, stock: list[str], **times: float) -> dict[str, Any]:
    """A row of bench.tune_attention: which attention stock ran, and microseconds."""
    return {
        "batch": 1, "heads": 12, "q_len": 64, "kv_len": 64, "head_dim": 64, "dtype": "bfloat16",
        "mask": mask, "train": False, "times_us": times, "kernels": {"unfused": stock},
    }  # fmt: skip


def table(*rows: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The gains of each mask in the table."""
    found = device_table.table({"device": "a GPU", "rows": list(rows)})["attention"]
    return {row["mask"]: row["gain"] for row in found}


PAD = measured("pad", MATH, unfused=30.0, sdpa=20.0, short=12.0)


@pytest.mark.parametrize("padded", [True, False])
def test_stock_patterns_that_match(padded: bool) -> None:
    """A call of SDPA by stock's own pattern is not the baseline of attentions that it does not match."""
    row = measured("none", CUDNN, unfused=20.2, sdpa=20.0, short=16.0)
    found = table(*[PAD] * padded, row)
    # With a padding mask SDPA gains 1.5; the short kernel takes four fifths of SDPA's time.
    assert found["none"] == pytest.approx(
        {"sdpa": 1.5, "short": 1.5 / 0.8} if padded else {"short": 1.2625}, abs=2e-3
    )


def test_nothing_known_is_no_row() -> None:
    row = measured("none", CUDNN, unfused=20.0, sdpa=20.0)
    slow = measured("pad", MATH, unfused=20.0, sdpa=30.0)
    assert table(row) == {}
    assert table(row, slow) == {"pad": {"sdpa": 0.667}}


def test_stock_patterns_that_do_not_match() -> None:
    row = measured("none", MATH, unfused=20.0, sdpa=20.0)
    assert table(PAD, row)["none"] == {"sdpa": 1.0}
