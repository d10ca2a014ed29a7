"""What Dynamo spends on itself, and no test asks for."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch


def spend_less() -> None:
    """Leave out Dynamo's timing of guards, and payloads of traces that nobody writes.

    It empties the processor's cache before it times the guards of a compile, 40 ms each. And pytest's capture
    of logs adds a handler to loggers that do not propagate, of which torch's traces are one: with a handler,
    they print each graph.
    """
    holders: list[Any] = [torch._C._dynamo.guards, sys.modules.get("torch._dynamo.guards")]
    for holder in filter(None, holders):
        holder.profile_guard_manager = lambda *_: 0.0
    logging.getLogger("torch.__trace").propagate = True
