"""What a lowering does where its kernel cannot be had."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from . import config
from .fusion import Rejected

log = logging.getLogger(__name__)

T = TypeVar("T")


def kernel_or(name: str, kernel: Callable[[], T | None], instead: Callable[[], T]) -> T:
    """The values of a kernel; those of `instead` where there is no kernel for a case, or making it raises.

    Args:
        name: of the operation, for the log.
        kernel: makes the kernel and returns its outputs, as Inductor's values; where there is none, it
            raises `Rejected` or returns None. Of any other error there is a warning, and `config.strict`
            raises it.
        instead: the same from operations that Inductor has.
    """
    try:
        found = kernel()
        if found is not None:
            return found
    except Rejected as miss:
        log.info("%s is computed without its kernel: %s", name, miss.reason)
    except Exception as error:
        if config.strict:
            raise
        log.warning("the kernel of %s raised %r; it is computed without it", name, error)
        log.info("traceback", exc_info=True)
    return instead()
