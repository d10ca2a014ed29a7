"""Counters, traces, logs and the cache folder, which reports read and write."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .loading import inductor_config


def compile_counters() -> Any:
    """torch._dynamo.utils.counters, imported late (importing dynamo is slow)."""
    from torch._dynamo.utils import counters

    return counters


def trace_id() -> tuple[str, int] | None:
    """(compile, attempt) of the compile that runs now; Dynamo abandons an attempt to start again."""
    from torch._guards import CompileContext

    current = CompileContext.current_trace_id()
    return None if current is None else (str(current.compile_id), int(current.attempt))


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Write a JSON artifact to TORCH_TRACE; tlparse shows it as `name`.json."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=payload)


def artifact_log(module: str, name: str) -> logging.Logger | None:
    """The log that TORCH_LOGS="<name>" switches on; None if it is off, or its name is not registered.

    The name is registered while torch is imported, by the entry point in the group "torch.backends", from
    torch 2.13 on.
    """
    from torch._logging import _internal as logs

    if name not in logs.log_registry.artifact_names or not logs.log_state.is_artifact_enabled(name):
        return None
    return logs.getArtifactLogger(module, name)


def cache_folder() -> Path | None:
    """The folder of Inductor's caches, or None if caches are disabled."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    config = inductor_config()
    if config.force_disable_caches or not config.fx_graph_cache:
        return None
    return Path(cache_dir())
