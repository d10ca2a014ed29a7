"""Kernels in Triton's interpreter, in a process of its own.

What Triton defines when it is imported depends on TRITON_INTERPRET, and bfloat16 is garbage there: float16
stands for it.
"""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy
import pytest
from packaging.version import Version

#: Seconds for one case.
TIMEOUT = 600


def errors_of(module: str) -> Any:
    """A fixture: the function `errors` of a module of tests, run where kernels are interpreted.

    It takes the name of a case; what it raises is raised in the test.

    Args:
        module: "tests.block_mm.interpreted".
    """

    @pytest.fixture(scope="module")
    def errors() -> Iterator[Callable[[str], Any]]:
        triton = pytest.importorskip("triton")
        if Version(triton.__version__) < Version("3.7") and Version(numpy.__version__) >= Version("2.4"):
            pytest.skip("the interpreter of Triton 3.6 needs NumPy before 2.4")
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
            pool = multiprocessing.get_context("spawn").Pool(1, _prepared)
        with pool:
            yield lambda name: pool.apply_async(_errors, (module, name)).get(TIMEOUT)

    return errors


def _errors(module: str, name: str) -> Any:
    return importlib.import_module(module).errors(name)


def _prepared() -> None:
    _without_idle_checks()
    _with_conditions_as_they_are()


def _with_conditions_as_they_are() -> None:
    """Triton 3.9 makes integers of a condition that is broadcast, and then refuses them as a mask."""
    from triton.runtime.interpreter import interpreter_builder

    broadcast = interpreter_builder.create_splat

    def create_splat(*arguments: Any) -> Any:
        found, given = broadcast(*arguments), arguments[-1]
        if given.data.dtype == numpy.bool_:
            found.data = found.data.astype(numpy.bool_)
        return found

    interpreter_builder.create_splat = create_splat


def _without_idle_checks() -> None:
    """The interpreter computes for each sum and product whether it overflows, and then asserts nothing.

    It asserts with `debug` alone, which is off. Without them it takes two thirds of the time.
    """
    from triton.runtime.interpreter import interpreter_builder

    if not interpreter_builder.options.debug:
        interpreter_builder.options = dataclasses.replace(
            interpreter_builder.options, sanitize_overflow=False
        )
