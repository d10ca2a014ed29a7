"""Estimates between rows: the nearest ones, their weights, and how full a device is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from inductor_fusions.decisions import bracket, estimating
from inductor_fusions.decisions.attention_rows import idle_multiprocessors
from inductor_fusions.decisions.estimating import Nearby
from inductor_fusions.decisions.gemm_times import Gemms, of_row, speedup


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


def test_speedup_of_gemms() -> None:
    """What the models of times say: of full devices, of one wave more, of products together, of memory."""

    def gain(*products: tuple[int, int, int], passes: int = 0) -> float:
        return speedup(Gemms(products, tuple(range(len(products))), passes), 132)

    assert gain((8192, 8192, 8192)) == pytest.approx(gain((16384, 8192, 8192)), abs=0.02)
    # 144 tiles of 128 x 256 are a wave more than 132 multiprocessors take, and the library has 192 x 192.
    assert gain((2048, 2304, 4096)) < gain((2048, 2048, 4096)) - 0.2
    # Three gradients of weights with a quarter of a wave each: together they take the time of one.
    assert gain(*[(768, 768, 4096)] * 3) > gain((768, 768, 4096)) + 0.5
    # An activation behind a product is memory that stock reads and writes once more: the more, the less K.
    assert gain((8192, 4096, 512), passes=2) - gain((8192, 4096, 512)) > 0.2
    assert gain((8192, 4096, 8192), passes=2) - gain((8192, 4096, 8192)) < 0.1


def test_gemms_of_rows() -> None:
    """Products of one result are added; gradients of weights have rows and columns of their own."""
    row = {"n": [1024], "m": None, "k": [4096, 512], "tokens": 300}
    assert of_row({**row, "kind": "sum"}) == Gemms(((300, 1024, 4096), (300, 1024, 512)), (0, 0))
    gated = {**row, "kind": "gated", "n": [1024] * 2, "k": [512] * 2}
    assert of_row(gated) == Gemms(((300, 1024, 512),) * 2, (0, 1), 3)
    gradients = {"kind": "shared_b", "n": [512, 512], "m": [1024, 256], "k": None, "tokens": 300}
    assert of_row(gradients) == Gemms(((1024, 512, 300), (256, 512, 300)), (0, 1))
    adapted = {"inner": [512], "outer": [1024, 64], "tokens": 300}
    assert of_row(adapted) == Gemms(((300, 1024, 512), (300, 64, 512)), (0, 1))
    assert of_row({**adapted, "inner": [512, 64], "outer": [1024]}).groups == (0, 0)
    mixed = {**row, "kind": "mixed", "n": [1024, 64], "k": [512, 16, 512], "groups": [0, 0, 1]}
    assert of_row(mixed) == Gemms(((300, 1024, 512), (300, 1024, 16), (300, 64, 512)), (0, 0, 1))


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
