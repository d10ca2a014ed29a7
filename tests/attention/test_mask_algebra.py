"""Masks put together at random: what is proved of one is what evaluating it says."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from inductor_fusions import testing
from tests.attention.support import check


class Draws:
    """Random choices that are made beforehand: Dynamo cannot draw while it traces."""

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)
        self.numbers = [source.random() for _ in range(400)]
        self.at = 0

    def random(self) -> float:
        self.at += 1
        return self.numbers[self.at - 1]

    def randrange(self, stop: int) -> int:
        return int(self.random() * stop)

    def choice(self, items: list[int]) -> int:
        return items[self.randrange(len(items))]


class Mask:
    """A boolean mask over (queries, keys), drawn from a seed; a function of the two lengths."""

    def __init__(self, seed: int) -> None:
        self.draw = Draws(seed)
        self.rows = self.columns = 0

    def __call__(self, rows: Any, columns: Any) -> Any:
        self.draw.at = 0  # the same choices at each call
        self.rows, self.columns = rows, columns
        return self.boolean(self.draw.choice([1, 1, 2, 3]))

    def index(self, length: Any, vertical: bool) -> Any:
        """The row or the column, written in some way."""
        how = self.draw.randrange(9)
        place = torch.arange(length)
        if how == 1:
            place = torch.ones(length, dtype=torch.long).cumsum(0) - 1
        elif how == 2:
            place = torch.arange(3, length + 3) - 3
        elif how == 3:
            place = torch.arange(0, 2 * length, 2) // 2 if self.draw.random() < 0.2 else torch.arange(length)
        elif how == 4:
            place = torch.arange(40)[torch.arange(length) + 2] - 2
        elif how == 5:
            place = place.neg().neg()
        elif how == 6:
            place = torch.arange(length, dtype=torch.float32)
        elif how == 7:
            place = torch.where(place >= 0, place, place * 5)
        elif how == 8:
            place = torch.arange(length + 4)[:length]
        if not vertical:
            return place[None, :] if self.draw.random() < 0.5 else place
        return place[:, None] if self.draw.random() < 0.5 else place.view(-1, 1)

    def shift(self) -> int:
        return self.draw.choice([0, 0, 0, 0, 1, -1, 2, 20, -20])

    def comparison(self) -> Any:
        row, column = self.index(self.rows, True), self.index(self.columns, False)
        if self.draw.random() < 0.15:
            row = row * self.draw.choice([1, 2])
        shift = self.shift()
        how = self.draw.randrange(8)
        if how == 0:
            return column <= row + shift
        if how == 1:
            return row + shift >= column
        if how == 2:
            return ~(column > row + shift)
        if how == 3:
            return column - row < shift + 1
        if how == 4:
            return column > row - self.draw.choice([1, 3, 30])
        if how == 5:
            return torch.ge(row, column - shift)
        if how == 6:
            return (column >= shift) & (row >= 0)
        return column < self.columns + shift

    def triangle(self) -> Any:
        ones = torch.ones(self.rows, self.columns, dtype=torch.bool)
        shift = self.shift()
        how = self.draw.randrange(6)
        if how == 0:
            return ones.tril(shift)
        if how == 1:
            return ~ones.triu(shift + 1)
        if how == 2:
            return torch.tril(torch.ones(self.rows, self.columns), shift) > 0
        if how == 3:
            start = self.draw.choice([0, 0, 0, 1, 3])
            return torch.ones(50, 50, dtype=torch.bool).tril()[start : start + self.rows, : self.columns]
        if how == 4:
            return torch.ones(self.columns, self.rows, dtype=torch.bool).triu(-shift).mT
        return torch.ones(self.columns, self.rows, dtype=torch.bool).tril(shift).transpose(0, 1)

    def opaque(self) -> Any:
        how = self.draw.randrange(3)
        if how == 0:
            return torch.ones(self.rows, self.columns, dtype=torch.bool).tril().flip(-1)
        if how == 1:
            return torch.arange(self.columns) % 3 != 1
        return (torch.arange(self.columns) - torch.arange(self.rows)[:, None]).abs() < 4

    def boolean(self, depth: int) -> Any:
        if depth <= 0 or self.draw.random() < 0.25:
            how = self.draw.random()
            return self.comparison() if how < 0.55 else self.triangle() if how < 0.92 else self.opaque()
        left, right = self.boolean(depth - 1), self.boolean(depth - 1)
        how = self.draw.randrange(11)
        if how in (0, 1):
            return left & right
        if how == 2:
            return left | right
        if how == 3:
            return torch.logical_and(left, right)
        if how == 4:
            return torch.where(left, right, False)
        if how == 5:
            return torch.where(left, left, right)
        if how == 6:
            return left * right
        if how == 7:
            return left.masked_fill(~right, False)
        if how == 8:
            return (left.float() * right.float()) > 0.5
        if how == 9:
            return ~(~left | ~right)
        return left.int() + right.int() == 2


def attention(mask: Mask, use: int):
    def fn(q, k, v):
        seen = mask(q.shape[-2], k.shape[-2])
        scores = q @ k.transpose(-1, -2) * 0.3
        if use == 0:
            scores = scores.masked_fill(~seen, -1e30)
        elif use == 1:
            scores = torch.where(seen, scores, -1e30)
        elif use == 2:
            scores = scores + torch.where(seen, 0.0, -1e30)
        else:
            scores = scores + (1.0 - seen.float()) * -1e30
        return torch.softmax(scores, dim=-1) @ v

    return fn


def run(seed: int, dynamic: bool | None = None) -> testing.Capture:
    draw = random.Random(-seed)
    rows, columns = draw.choice([(6, 6), (6, 6), (6, 6), (4, 7), (7, 4), (1, 5)])
    mask = Mask(seed)
    truth = mask(rows, columns).expand(rows, columns)
    q, k, v = torch.randn(2, 2, rows, 8), torch.randn(2, 2, columns, 8), torch.randn(2, 2, columns, 8)
    try:
        run = check(attention(mask, seed % 4), (q, k, v), train=False, dynamic=dynamic).ours
        (site,) = run.fused
        if "is_causal" in site.kernel:
            assert rows == columns and torch.equal(truth, torch.ones(rows, rows, dtype=torch.bool).tril())
        elif "mask" not in site.kernel:
            assert truth.all()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, {rows} x {columns}\n{truth.int()}\n{error}") from None
    return run


@pytest.mark.parametrize("seed", range(40))
def test_static(seed: int) -> None:
    run(seed)


@pytest.mark.parametrize("seed", range(100, 112))
def test_symbolic(seed: int) -> None:
    run(seed, dynamic=True)


@pytest.mark.parametrize("seed", [308, 319, 335, 338])
def test_proved_causal(seed: int) -> None:
    """Some of these masks are proved; else the tests above would say nothing."""
    assert "is_causal" in run(seed).fused[0].kernel


@pytest.mark.parametrize("seed", [301, 309, 325])
def test_proved_all_visible(seed: int) -> None:
    assert run(seed).fused[0].kernel == "sdpa"
