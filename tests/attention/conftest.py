"""Fixtures of the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._inductor import cpu_vec_isa


@pytest.fixture
def vector_code() -> Iterator[None]:
    """Inductor writes vector instructions; the other tests do without, which compiles faster."""

    def forget() -> None:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        for isa in cpu_vec_isa.supported_vec_isa_list:
            clear = getattr(type(isa).__bool__, "cache_clear", None)
            if clear is not None:
                clear()

    with torch._inductor.config.patch({"cpp.vec_isa_ok": None}):
        forget()
        yield
    forget()
