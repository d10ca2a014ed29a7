"""Estimates between rows: the nearest ones, their weights, and how full a device is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from inductor_fusions.decisions import bracket, estimating
from inductor_fusions.decisions.estimating import Nearby
from inductor_fusions.decisions.occupancy import idle_multiprocessors, wave_quantization


def test_bracket() -> None:
    """The rows next to a number of tokens, not further apart than 8 times."""

    def around(known: tuple[int, ...], tokens: int) -> list[int]:
        return bracket(known, tokens, lambda row: row)

    assert around((1, 16, 4096), 4) == around((1, 16, 4096), 8192) == []
    assert around((16, 4096), 16) == [16, 16]
    assert around((1024, 1, 16, 4096), 2048) == [1024, 4096]


def test_estimate() -> None:
    """Nearer rows count more; what is far, or differs, is in doubt; what is too far says nothing."""
    assert estimating.estimate([], 6.0, 0.02) is None
    one = Nearby(0.1, 0.3, 0)
    assert estimating.estimate([replace(one, distance=6.1)], 6.0, 0.02) is None
    near, both, apart = (
        estimating.estimate(rows, 6.0, 0.02)
        for rows in ([one], [one, Nearby(1.0, 0.1, 1)], [replace(one, distance=2.0)])
    )
    assert near is not None and both is not None and apart is not None
    assert near.mean == apart.mean == pytest.approx(0.3) and 0.2 < both.mean < 0.3
    assert near.doubt < apart.doubt and near.doubt < both.doubt and both.rows == (0, 1)
    further = estimating.estimate([one], 6.0, 0.02, further=0.5)
    assert further is not None and further.lower < 0 < near.lower


def test_estimate_from_two_devices() -> None:
    """A row of another device that is nearer counts for more, if its doubt is worth less than distance."""
    own, doubtful = Nearby(2.0, 0.3, 0), Nearby(0.0, -0.1, 1, doubt=0.05)
    found = estimating.estimate([own, doubtful], 6.0, 0.05)
    assert found is not None and found.rows == (1, 0) and found.mean < 0.1
    found = estimating.estimate([own, replace(doubtful, doubt=0.2)], 6.0, 0.05)
    assert found is not None and found.rows == (0, 1) and found.mean > 0.1


def test_wave_quantization() -> None:
    """0 for a full device; negative where the library's tiles fill it better."""
    assert wave_quantization(((8192, 8192),), 132) == pytest.approx(0.0, abs=0.02)
    square = wave_quantization(((2048, 2048),), 132)
    assert wave_quantization(((2048, 2304),), 132) < -0.2 < square == 0.0
    # Three gradients of weights with a quarter of a wave each: together they take the time of one.
    assert wave_quantization(((768, 768),) * 3, 132) > 0.2


def test_idle_multiprocessors() -> None:
    """0 for a full device; with many keys half of the logarithm of the share that is busy."""

    def idle(heads: int, queries: int, keys: int, train: bool = False, kernel: str = "sdpa") -> float:
        row = {"batch": 1, "heads": heads, "q_len": queries, "kv_len": keys, "mask": "pad", "train": train}
        return idle_multiprocessors({**row, "dtype": "float16"}, kernel, 132)

    assert idle(132, 128, 128) == idle(33, 512, 64) == 0.0
    # With few keys a kernel takes as long as its launch; thread blocks read many one after another.
    assert idle(33, 64, 64) > -0.1 and idle(33, 64, 512) < -0.2 and idle(33, 64, 8192) < -0.5
    assert idle(33, 64, 1 << 20) == pytest.approx(math.log(0.25) / 2, abs=0.01)
    # Efficient attention takes longer for a key.
    assert idle(33, 64, 512, kernel="efficient") < idle(33, 64, 512)
    # The backward has no more thread blocks at once than tiles of queries, and of keys.
    assert idle(33, 512, 64, train=True) < idle(33, 512, 64)
    assert idle(33, 64, 4096, train=True) == idle(33, 4096, 64, train=True) < -0.5
