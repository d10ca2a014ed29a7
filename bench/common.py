"""What the benchmarks share: time budget, progress, resumable JSON results, timing, memory and errors.

`bench.provenance` has the header of results.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import inductor_fusions
from inductor_fusions.checking import budget
from inductor_fusions.checking.budget import relative_error
from inductor_fusions.worker.clock import Call, Timing, apart, interleave, summarize, synchronize

__all__ = ["Timing", "apart", "relative_error", "summarize", "synchronize"]

Json = dict[str, Any]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Results:
    """A JSON file `{header..., "rows": [...]}` that grows row by row and is resumed if it exists.

    Raises:
        SystemExit: the file was measured on another device, or with other versions or settings.
    """

    def __init__(self, path: Path, header: Json, key: Callable[[Json], str]) -> None:
        self.path = path
        self.data: Json = {**header, "rows": []}
        self._key = key
        if path.exists():
            old = json.loads(path.read_text())
            for name in ("schema", "device", "torch", "triton", "settings"):
                if old.get(name) != header.get(name):
                    raise SystemExit(
                        f"{path} has {name} = {old.get(name)!r}, this run has {header.get(name)!r}: "
                        "rows of the two cannot be compared, so give --out another file"
                    )
            self.data["rows"] = old["rows"]
            previous = [*old.get("previous_commands", []), old.get("command")]
            self.data["previous_commands"] = list(dict.fromkeys(previous))
        self._done = {key(row) for row in self.rows}

    @property
    def rows(self) -> list[Json]:
        """The rows measured so far, those of earlier runs included."""
        rows: list[Json] = self.data["rows"]
        return rows

    def __contains__(self, key: str) -> bool:
        return key in self._done

    def append(self, row: Json) -> None:
        """Add one row, in place of one with its key, and write the file in one step, so that a kill leaves
        a whole file."""
        key = self._key(row)
        places = [i for i, old in enumerate(self.rows) if self._key(old) == key]
        if places:
            self.rows[places[0]] = row
        else:
            self.rows.append(row)
        self._done.add(key)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head = {name: value for name, value in self.data.items() if name != "rows"}
        lines = ",\n".join("  " + json.dumps(r) for r in self.rows)
        text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + lines + "\n ]\n}\n"
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(text)
        os.replace(temporary, self.path)


class Budget:
    """A limit in seconds, counted from the moment it is made."""

    def __init__(self, seconds: float | None) -> None:
        self.start = time.monotonic()
        self.seconds = seconds

    @property
    def elapsed(self) -> float:
        """Seconds used."""
        return time.monotonic() - self.start

    @property
    def left(self) -> float:
        """Seconds left; infinite without a limit."""
        return float("inf") if self.seconds is None else self.seconds - self.elapsed


class Progress:
    """A progress bar on stderr where that is a terminal, else one plain line a step."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._start = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """What is going on now."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        else:
            self._line(text)

    def step(self, text: str) -> None:
        """One more item is done."""
        self.done += 1
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
            self._bar.update(self._task, completed=self.done)
        else:
            self._line(text)

    def _line(self, text: str) -> None:
        seconds = time.monotonic() - self._start
        print(f"[{self.done}/{self.total} {seconds:4.0f}s] {text}", file=sys.stderr, flush=True)


# Time, memory, errors --------------------------------------------------------------------------------


def device_milliseconds(calls: Mapping[str, Call], device: str, rounds: int) -> Json:
    """Medians on the device alone, with the launches queued beforehand, in ms by name: what a model takes
    that does not wait for its host."""
    times = interleave(calls, device, rounds, 1e-2, max_calls=20, run_ahead=True)
    return {name: round(t.median * 1e3, 4) for name, t in times.items()}


def microseconds(times: Mapping[str, Timing], calls: int = 1, digits: int = 2) -> Json:
    """ "times_us", medians in microseconds by name, and "spread"; each time is that of so many calls."""
    return {
        "times_us": {name: round(t.median * 1e6 / calls, digits) for name, t in times.items()},
        "spread": {name: round(t.spread, 4) for name, t in times.items()},
    }


def both_clocks(calls: Mapping[str, Call], device: str, rounds: int, block_seconds: float) -> Json:
    """`interleave` by the wall clock and, on a GPU, on the device alone.

    Returns:
        "times_us" and "device_us": medians in microseconds, by name; "spread": of the wall clock.
    """
    found = microseconds(interleave(calls, device, rounds, block_seconds))
    if device == "cuda":
        ahead = interleave(calls, device, rounds, block_seconds, run_ahead=True)
        found["device_us"] = microseconds(ahead)["times_us"]
    return found


def in_turn(call: Callable[[Any], Any], sets: Sequence[Any]) -> Call:
    """A call that takes some sets of inputs in turn, so that caches do not hold the one that is next."""
    left = itertools.cycle(sets)
    return lambda: call(next(left))


def compiled_only() -> AbstractContextManager[None]:
    """Inside, a call that would have to be compiled raises: what is timed was compiled before."""
    stance: AbstractContextManager[None] = torch.compiler.set_stance("fail_on_recompile")
    return stance


def peak_bytes(call: Call, device: str) -> int | None:
    """Most device memory that one call takes beyond what was allocated before it; None on the CPU."""
    if device != "cuda":
        return None
    gc.collect()  # what earlier calls left in cycles may be freed during this one
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before


def collect(device: str) -> None:
    """Give unused memory back."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def free(device: str) -> None:
    """Drop what is compiled, and give its memory back."""
    torch._dynamo.reset()
    collect(device)


def error_limit(unfused: float | None, dtype: torch.dtype) -> float:
    """The error budget; where the unfused compiled form could not be measured, two eps of the dtype."""
    return 2 * torch.finfo(dtype).eps if unfused is None else budget.limit(unfused, dtype)


@contextlib.contextmanager
def switched(on: bool) -> Iterator[None]:
    """The fusions on or off, in every thread: on a GPU, a backward is compiled in one of autograd's."""
    before = inductor_fusions.enabled()
    (inductor_fusions.enable if on else inductor_fusions.disable)()
    try:
        yield
    finally:
        (inductor_fusions.enable if before else inductor_fusions.disable)()


def own_settings() -> dict[str, str]:
    """The environment variables of inductor_fusions that are set."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith("INDUCTOR_FUSIONS")}


def is_fatal(error: BaseException) -> bool:
    """Whether the process cannot use its device any more. A library that got no memory can."""
    text = str(error)
    if "ALLOC_FAILED" in text:
        return False
    accelerator_error = getattr(torch, "AcceleratorError", ())
    told = ("CUDA error", "illegal memory", "device-side assert")  # Triton has its own words
    return isinstance(error, accelerator_error) or any(each in text for each in told)


def one_line(error: BaseException, length: int = 160) -> str:
    """An exception as one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:length]


@contextlib.contextmanager
def skipping(skipped: Json, name: str) -> Iterator[None]:
    """What is raised inside is kept as the reason why `name` is skipped, unless the device is lost."""
    try:
        yield
    except Exception as error:
        if is_fatal(error):
            raise
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        skipped[name] = "out of memory" if out_of_memory else one_line(error)


def fresh_cache() -> AbstractContextManager[None]:
    """An empty Inductor and Triton cache, for honest compile times."""
    from torch._inductor.utils import fresh_cache as fresh

    context: AbstractContextManager[None] = fresh()
    return context
