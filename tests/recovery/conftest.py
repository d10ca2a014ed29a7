"""Everything that is proved is fused, and no cache serves what was compiled before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from inductor_fusions import config, reporting


@pytest.fixture
def everything() -> Iterator[None]:
    with config.patch(policy="always"), reporting.isolated(keep=False):
        yield


@pytest.fixture
def no_cache() -> Iterator[None]:
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
