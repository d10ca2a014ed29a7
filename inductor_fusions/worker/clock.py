"""Times calls in interleaved blocks, and takes medians."""

from __future__ import annotations

import functools
import statistics
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: Seconds that the host takes to empty the L2 cache, and to record two events.
COLD_HOST = 4e-5

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """The time of one call: median over blocks in seconds, and the interquartile range over the median."""

    median: float
    spread: float


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def _block(call: Call, count: int, device: str, host_seconds: float) -> float:
    """Seconds a call, over `count` calls. With `host_seconds` > 0 the device first waits that long, so
    that the host runs ahead and the launches cost nothing."""
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if host_seconds > 0:
        torch.cuda._sleep(int(2e9 * host_seconds))  # cycles, at about 2 GHz
    first.record()
    for _ in range(count):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3 / count


@functools.cache
def _waste() -> torch.Tensor:
    """More bytes than the L2 cache of the device holds."""
    size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return torch.empty(4 * size, dtype=torch.int8, device="cuda")


def _cold_block(call: Call, count: int, host_seconds: float) -> float:
    """A `_block` on a GPU that fills the L2 cache with other bytes before each call, outside of its time."""
    waste = _waste()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    torch.cuda._sleep(int(2e9 * host_seconds))
    for first, last in pairs:
        waste.zero_()
        first.record()
        call()
        last.record()
    pairs[-1][1].synchronize()
    return float(sum(first.elapsed_time(last) for first, last in pairs)) * 1e-3 / count


def summarize(samples: Sequence[float]) -> Timing:
    """Median and spread of some samples."""
    median = statistics.median(samples)
    if len(samples) < 2:
        return Timing(median, 0.0)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, (high - low) / median)


def apart(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function` behind code of its own, which is called `name`.

    Dynamo keeps what it compiled by code object, so two variants with the same code would be one.
    """

    def call(*args: Any) -> Any:
        return function(*args)

    code = call.__code__.replace(co_name=name)
    return types.FunctionType(code, call.__globals__, name, None, call.__closure__)


def interleave(
    calls: Mapping[str, Call],
    device: str,
    rounds: int,
    block_seconds: float,
    max_calls: int = 200,
    run_ahead: bool = False,
    cold: bool = False,
) -> dict[str, Timing]:
    """Time several calls side by side: one block of each a round, in an order that rotates.

    Args:
        calls: what to time, by name; each was called before and is warm.
        device: "cuda" (events) or "cpu" (host clock).
        rounds: blocks of each.
        block_seconds: how long a block should take; a block has at least one call.
        max_calls: the most calls in a block.
        run_ahead: CUDA only: time the device alone, with the launches queued beforehand.
        cold: with `run_ahead`: what a call reads is not in the L2 cache, nor is what it read the time before.
    """
    counts: dict[str, int] = {}
    hosts: dict[str, float] = {}
    for name, call in calls.items():
        call()
        synchronize(device)
        start = time.perf_counter()
        for _ in range(2):
            call()
        host = (time.perf_counter() - start) / 2
        synchronize(device)
        seconds = (time.perf_counter() - start) / 2
        counts[name] = max(1, min(max_calls, round(block_seconds / seconds)))
        launching = host + (COLD_HOST if cold else 0.0)
        hosts[name] = 1e-4 + 1.5 * counts[name] * launching if run_ahead else 0.0
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            if cold and run_ahead and device == "cuda":
                seconds = _cold_block(calls[name], counts[name], hosts[name])
            else:
                seconds = _block(calls[name], counts[name], device, hosts[name])
            samples[name].append(seconds)
    return {name: summarize(values) for name, values in samples.items()}
