"""Estimates between rows: the nearest ones, their weights, and how full a device is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from inductor_fusions.decisions import bracket, estimating
from inductor_fusions.decisions.attention_rows import idle_multiprocessors
from inductor_fusions.decisions.estimating import Estimate, Nearby, Process
from inductor_fusions.decisions.gemm_times import Gemms, of_row, speedup


def test_bracket() -> None:
    """The rows next to a number of tokens, not further apart than 8 times."""

    def around(known: tuple[int, ...], tokens: int) -> list[int]:
        return bracket(known, tokens, lambda row: row)

    assert around((1, 16, 4096), 4) == around((1, 16, 4096), 8192) == []
    assert around((16, 4096), 16) == [16, 16]
    assert around((1024, 1, 16, 4096), 2048) == [1024, 4096]


#: A process whose covariance falls by half over 7 doublings.
PROCESS = Process(deviation=0.1, length=10.0, noise=0.02)


def of(*rows: Nearby, further: float = 0.0) -> Estimate | None:
    """The estimate at the origin."""
    return estimating.estimate((0.0, 0.0), rows, PROCESS, 6.0, further)


def test_estimate() -> None:
    """Nearer rows count more; what is far, or differs, is in doubt; what is too far says nothing."""
    one = Nearby((0.1, 0.0), 0.3, 0)
    assert of() is None and of(replace(one, place=(3.0, -3.1))) is None
    near, both, apart = of(one), of(one, Nearby((0.5, 0.5), 0.1, 1)), of(replace(one, place=(0.0, 4.0)))
    assert near is not None and both is not None and apart is not None
    assert near.mean == pytest.approx(0.3, abs=0.01) and 0.2 < both.mean < 0.3 and both.rows == (0, 1)
    # Far from every row, the expected gain comes nearer to 0.
    assert apart.mean < near.mean - 0.005 and near.doubt < min(both.doubt, apart.doubt)
    further = of(one, further=0.5)
    assert further is not None and further.lower < 0 < near.lower


def test_estimate_beyond_the_rows() -> None:
    """Rows on a line: the estimate goes on in its direction, and is in more doubt than between them."""
    between, beyond = (
        of(*(Nearby((x + at, 0.0), 0.2 + 0.03 * x, x) for x in range(3))) for at in (-0.5, 0.5)
    )
    assert between is not None and beyond is not None
    assert 0.2 < between.mean < 0.23 and beyond.mean < 0.21 and between.doubt < beyond.doubt


def test_a_loss_nearby_is_a_veto() -> None:
    """Of equally near rows one that is clearly slower than stock counts, whatever the others gain."""
    gains = [Nearby((float(x), 0.0), 0.5, x) for x in (1, -1, 2)]
    found = of(*gains)
    assert found is not None and not found.is_slow
    slow = Nearby((0.0, 1.0), -0.1, 3, is_slow=True)
    for place, veto in (((0.0, 1.0), True), ((0.0, 1.5), False)):
        found = of(*gains, replace(slow, place=place))
        assert found is not None and found.is_slow == veto
    # So does a row of the very problem on another device, even if its doubt makes it count as further away.
    elsewhere = of(*gains, replace(slow, place=(0.0, 0.0), doubt=0.1, device="another"))
    assert elsewhere is not None and elsewhere.rows[0] != 3 and elsewhere.is_slow


def test_estimate_from_two_devices() -> None:
    """A row of another device that is nearer counts for more, if its doubt is worth less than distance."""
    own, other = Nearby((2.0, 0.0), 0.3, 0), Nearby((0.0, 0.0), -0.1, 1, doubt=0.02, device="another")
    found = of(own, other)
    assert found is not None and found.rows == (1, 0) and found.mean < 0.1
    doubted = of(own, replace(other, doubt=0.15))
    assert doubted is not None and doubted.rows == (0, 1) and doubted.mean > found.mean + 0.03
    # Many rows of one other device do not make up for what is not known of the difference of the devices.
    alike = [Nearby((x / 10, 0.0), 0.3, x, doubt=0.1, device="another") for x in range(8)]
    many, few = of(*alike), of(alike[0])
    assert many is not None and few is not None and 0.9 * few.doubt < many.doubt < few.doubt


def test_no_tensors() -> None:
    """Torch may be tracing: the system of equations is solved without it."""
    found = estimating._solve([[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 2.0]], [1.0, 2.0, 3.0])
    system = torch.tensor([[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 2.0]], dtype=torch.float64)
    right = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert found == pytest.approx(torch.linalg.solve(system, right).tolist())


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
