"""What the tuners of linears share: calls on operands in turn, rows that are checked, gains, settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from bench.common import Json, apart, interleave, microseconds

#: Operands of one graph together, as a multiple of the L2 cache.
PAST_L2 = 2.5
#: Most calls in one graph.
MOST_SETS = 64
#: Rows of an output that are compared with float64: the first ones and the last ones.
CHECKED_ROWS = 64

#: One set of operands.
O = TypeVar("O")
_numbers = itertools.count()


def count_of_sets(operands: Sequence[torch.Tensor], device: str) -> int:
    """So many sets of such operands that they do not fit into the L2 cache together."""
    if device != "cuda":
        return 2
    size = sum(t.numel() * t.element_size() for t in operands)
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(MOST_SETS, round(PAST_L2 * cache / size + 0.5)))


def as_graph(run: Callable[[O], Any], sets: Sequence[O], device: str) -> Callable[[], object]:
    """One call of `run` on each set, as a CUDA graph."""
    if device != "cuda":
        return lambda: [run(one) for one in sets]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(sets[0])
        run(sets[-1])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in sets:
            run(one)
    return graph.replay


def compiled(fn: Callable[..., Any], row: Any, **options: Any) -> Callable[..., Any]:
    """`fn(row, ...)` under `torch.compile`, behind code of its own: another candidate gets other kernels."""

    def call(*args: Any) -> Any:
        return fn(row, *args)

    own = apart(call, f"candidate_{next(_numbers)}")
    return torch.compile(own, dynamic=False, **options)


def settled(calls: Mapping[str, Callable[[], object]], device: str, quick: bool, sets: int) -> Json:
    """The times of one call, and spreads, of graphs that call it on so many sets."""
    rounds, block = (3, 1e-3) if quick else (15, 4e-3)
    return microseconds(interleave(calls, device, rounds, block), sets, 3)


def checked_rows(x: torch.Tensor) -> torch.Tensor:
    """The first and the last rows, which are compared with float64."""
    return x if x.shape[0] <= 2 * CHECKED_ROWS else torch.cat([x[:CHECKED_ROWS], x[-CHECKED_ROWS:]])


def set_up(device: str) -> None:
    """Settings of the process that measures."""
    import torch._dynamo.config
    import torch._inductor.config as inductor

    import inductor_fusions  # noqa: F401 - installs the passes

    # Two configurations are the same operation: only the first would be compiled.
    inductor.force_disable_caches = True
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    if device == "cuda":
        inductor.compile_threads = 1  # the workers are parallel as it is


def gain(row: Json) -> float:
    """The time of stock, the faster of its two, over that of the best configuration; 0 without one."""
    times = row["times_us"]
    if not row.get("best"):
        return 0.0
    return float(min(times[n] for n in ("stock", "max_autotune") if n in times) / times[row["best"]])


def plain_gain(row: Json) -> float:
    """The time of stock without autotuning over that of the best configuration; 0 without one.

    Tables are for that mode: where Inductor autotunes, the configurations compete with its own each time.
    """
    times = row["times_us"]
    return float(times["stock"] / times[row["best"]]) if row.get("best") else 0.0
