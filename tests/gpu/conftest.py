"""Fixtures of the tests on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def needs_cudnn() -> Iterator[None]:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("cuDNN attention is taken on Hopper and later")
    torch.manual_seed(0)
    yield
