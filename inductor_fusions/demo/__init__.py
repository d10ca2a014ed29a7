"""The demonstration: four whole models, stock and fused `torch.compile` side by side.

Every model has a real configuration (`configs/models`) and random weights. Stock and fused are compiled from
the same module in the same process, and their steps are timed in turns. Outputs and gradients of both are
compared with a float64 run of an eager copy, over a slice of the batch.
"""

from __future__ import annotations

import contextlib
import gc
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..checking import budget
from ..decisions import machine
from ..sites import error_text
from .models import Case, cases
from .runner import PHASES, Row, Runner

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = ["Result", "cases", "run", "show"]

#: Free memory from which on a GPU gets the models in full size.
FULL_SIZE_BYTES = 60 * 2**30


@dataclass
class Result:
    """The rows of a run, where it ran, and whether with tiny models, whose times are not valid."""

    device: str
    dtype: str
    seconds: float
    rows: list[Row]
    quick: bool = False

    @property
    def ok(self) -> bool:
        """Whether every row is."""
        return all(row.ok for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: {"schema": 1, "ok": ..., "rows": [...]} with device and versions."""
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        packages = ("triton", "transformers", "inductor_fusions")
        versions |= {package: found for package in packages if (found := machine.version(package))}
        return {"schema": 1, "ok": self.ok, "versions": versions, **asdict(self)}


def run(device: torch.device, quick: bool = False, only: str = "", console: Console | None = None) -> Result:
    """Run the demonstration.

    Args:
        device: where. A large GPU takes the models in full size and bfloat16.
        quick: tiny models, to see whether it works.
        only: only the models whose title contains this.
        console: where the progress bar and a line for each model go.
    """
    start = time.perf_counter()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    large = device.type == "cuda" and torch.cuda.mem_get_info(device)[0] >= FULL_SIZE_BYTES
    chosen = cases("tiny" if quick else "full" if large else "small")
    chosen = [case for case in chosen if only.lower() in case.title.lower()]
    rows = []
    with _quiet(), _progress(console) as bar:
        task = bar.add_task("", total=len(chosen) * len(PHASES))
        for i, case in enumerate(chosen):

            def say(phase: str, i: int = i, title: str = case.title) -> None:
                done = i * len(PHASES) + PHASES.index(phase)
                bar.update(task, completed=done, description=f"{title}: {phase}")

            row = _one(case, device, dtype, 0.5 if quick else 6.0, say)
            rows.append(row)
            if console is not None:
                bar.console.print(f"{row.model}: {_in_a_line(row)}", markup=False, highlight=False)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        bar.update(task, completed=len(chosen) * len(PHASES), description="done")
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    seconds = round(time.perf_counter() - start, 1)
    return Result(name, str(dtype).removeprefix("torch."), seconds, rows, quick)


def _one(
    case: Case, device: torch.device, dtype: torch.dtype, seconds: float, say: Callable[[str], None]
) -> Row:
    """The row of a case, also where it fails."""
    runner: Runner | None = None
    try:
        runner = Runner(case, device, dtype, seconds, say)
        return runner.run()
    except Exception as error:
        row = runner.row if runner is not None else Row(case.title, 0, case.batch, case.seq, case.train, 0)
        row.verdict = f"failed: {error_text(error)}"
        return row


def _in_a_line(row: Row) -> str:
    if row.verdict.startswith("failed"):
        return row.verdict
    return f"{row.fused} of {row.sites} fused, {row.stock_ms:.1f} ms -> {row.fused_ms:.1f} ms, {row.verdict}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of torch and transformers that say nothing here."""
    import warnings

    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.")
        try:
            yield
        finally:
            logging.set_verbosity(before)


def _progress(console: Console | None) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    hidden = console is None or not console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=hidden)


def show(result: Result, console: Console) -> None:
    """Print the table, and why a site was missed."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    caption = (
        f"{result.device}, {result.dtype}, torch {torch.__version__}; medians of interleaved steps; error: "
        f"against float64, at most {budget.FACTOR} times stock's; {result.seconds:.0f} s in all"
    )
    if result.quick:
        caption += "; tiny models: the times are not valid"
    table = Table(title="torch.compile, stock and fused", caption=caption, box=SIMPLE_HEAD, padding=0)
    table.add_column("model", overflow="fold")
    for name in ("attention\nsites", "fused", "stock\nms", "fused\nms", "ratio", "error", "stock's\nerror"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for row in result.rows:
        model = f"{row.model}\n[dim]{row.layers} layers, b{row.batch} s{row.seq}"
        if row.verdict.startswith("failed"):
            table.add_row(model, str(row.sites), *["-"] * 6, "[red]failed")
            continue
        errors = [f"{max(found.values()):.1e}" for found in (row.errors, row.stock_errors)]
        times = [f"{row.stock_ms:.1f}", f"{row.fused_ms:.1f}", f"{row.ratio:.2f}x"]
        verdict = f"[green]{row.verdict}" if row.ok else f"[red]{row.verdict}"
        table.add_row(model, str(row.sites), str(row.fused), *times, *errors, verdict)
    console.print(table)
    for row in result.rows:
        if row.verdict.startswith("failed"):
            console.print(f"{row.model}: {row.verdict}", markup=False)
        for reason, count in row.missed.items():
            console.print(f"{row.model}: {count} left as they are: {reason}", markup=False)
