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


def test_least_time_on_the_device_of_the_same_kernels() -> None:
    """The device waits for the host in one candidate and not in the other, which calls the same kernels."""
    kernels = {"unfused": MATH, "sdpa": CUDNN, "cudnn": CUDNN, "efficient": ["_efficient_attention"]}
    row = measured("none", MATH, unfused=60.0, sdpa=40.0, cudnn=44.0, efficient=30.0)
    row |= {"train": True, "kernels": kernels, "device_us": {**row["times_us"], "sdpa": 90.0}}
    assert table(row)["none"] == {"sdpa": 1.364, "efficient": 2.0}
    row["kernels"] = {**kernels, "cudnn": ["_scaled_dot_product_flash_attention"]}
    assert table(row)["none"] == {"sdpa": 0.667, "efficient": 2.0}


def test_unsteady_wall_times_say_nothing() -> None:
    """Half of the rounds took much longer: the device's clock counts alone, or nothing does."""
    row = measured("pad", MATH, unfused=90.0, sdpa=30.0, short=45.0)
    row["spread"] = {"unfused": 0.1, "sdpa": 0.6, "short": 0.1}
    assert table(row) == {"pad": {"short": 2.0}}
    row["device_us"] = {"unfused": 24.0, "sdpa": 16.0, "short": 8.0}
    assert table(row) == {"pad": {"sdpa": 1.5, "short": 2.0}}
    row["spread"]["unfused"] = 0.6
    assert table(row) == {"pad": {"sdpa": 1.5, "short": 3.0}}


def test_a_faster_launch_does_not_beat_a_faster_kernel() -> None:
    """Efficient attention is chosen by name only where the device is not slower with it."""
    kernels = {"unfused": MATH, "sdpa": CUDNN, "efficient": ["_efficient_attention"]}
    row = measured("pad", MATH, unfused=60.0, sdpa=40.0, efficient=30.0)
    row |= {"train": True, "kernels": kernels}
    row["device_us"] = {"unfused": 45.0, "sdpa": 15.0, "efficient": 20.0}
    assert table(row)["pad"] == {"sdpa": 1.5, "efficient": 1.5}
    row["device_us"]["efficient"] = 15.0
    assert table(row)["pad"] == {"sdpa": 1.5, "efficient": 2.0}
