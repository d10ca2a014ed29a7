"""`python -m inductor_fusions bench`: stock beside fused, and the gate on it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import common, plots, suites, tuning
from bench import compare as comparing
from inductor_fusions.cli.common import (
    PROG,
    Device,
    JsonFlag,
    UserError,
    console,
    find_device,
    print_json,
    table,
    writable,
)
from inductor_fusions.cli.models import need_transformers

#: Seconds that `bench --quick` takes at most for each `--repeat`, beside its start: four minutes with that.
QUICK_SECONDS = 210.0
NAMES = (*suites.SUITES, *suites.GROUPS)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


Suite = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help=f"{', '.join(NAMES)}; may be given again. Default: all."),
]
Only = Annotated[
    str, typer.Option(metavar="REGEX", help="Only cases whose name matches this regular expression.")
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The results file. Cases that it already has are not measured again."),
]
Seconds = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Limit the run to this many seconds: a case that would exceed it is not started. Default: "
        f"{QUICK_SECONDS:.0f} for each --repeat with --quick, else no limit.",
    ),
]
Repeat = Annotated[
    int, typer.Option(min=1, help="Time each case this often; the runs give the noise of its ratio.")
]
Compare = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A results file of an earlier run; its ratios are compared."),
]
FailUnder = Annotated[
    float | None,
    typer.Option(
        metavar="RATIO",
        help="Fail if the new ratio over the old one is below this; without --compare: if stock over "
        "fused is. Default: 0.97 with --compare, else no limit.",
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Write plots as PNG and SVG: speedups, a roofline, curves."),
]


@app.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 no case is worse than the limit; 1 a case is worse by more than its noise, exceeds "
    "its error budget, or failed; 2 a wrong argument. Needs a checkout.",
)
def bench(
    suite: Suite = None,
    only: Only = "",
    quick: Annotated[bool, typer.Option("--quick", help="A few cases, four minutes at most.")] = False,
    device: Annotated[Device, typer.Option(help="The device; auto: a GPU if there is one.")] = Device.auto,
    out: Out = None,
    budget: Seconds = None,
    repeat: Repeat = 1,
    autotune: Annotated[bool, typer.Option("--autotune", help="Also time stock under max-autotune.")] = False,
    compare: Compare = None,
    fail_under: FailUnder = None,
    plot: Plot = None,
    list_only: Annotated[bool, typer.Option("--list", help="Print the names of the cases and exit.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Time operations, blocks and whole models, stock beside fused, and compare with an earlier run.

    Each case is compared with float64 before it is timed. Ratios of stock to fused are compared, not times,
    and a case is worse only if its ratio is lower by more than its noise.
    """
    where = find_device(device).type
    todo = _selected(suite, only, quick, where)
    if list_only:
        _list(todo, as_json)
        return
    writable(out, "--out")
    if any(entry.suite == "models" for entry in todo):
        need_transformers()
    old = _read(compare) if compare is not None else None
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib: pip install 'inductor_fusions[bench]'")
    if budget is None and quick:
        budget = QUICK_SECONDS * repeat
    data = _measure(todo, where, out, budget, repeat, quick, autotune, old)
    names = {entry.name for entry in todo}
    data["rows"] = [row for row in data["rows"] if row["name"] in names]
    limit = fail_under if fail_under is not None else 0.97 if old is not None else 0.0
    verdict = _verdict(data, old, limit)
    if plot is not None:
        for path in plots.draw(data, plot):
            print(f"{PROG}: {path}", file=sys.stderr)
    if as_json:
        print_json({**data, **verdict})
    else:
        _show(data, verdict, old is not None)
    if verdict["worse"]:
        raise typer.Exit(1)


def _selected(wanted: Sequence[str] | None, only: str, quick: bool, device: str) -> list[Any]:
    names = [name.strip() for text in wanted or ["all"] for name in text.split(",")]
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise UserError(f"--suite: there is no suite {unknown[0]}; there are: {', '.join(NAMES)}")
    try:
        pattern = re.compile(only) if only else None
    except re.error as error:
        raise UserError(f"--only: {only!r} is not a regular expression: {error}") from error
    found: list[Any] = suites.select(names, pattern, quick, device)
    if not found:
        raise UserError(f"no case of {', '.join(names)} matches {only!r}: --list names them")
    return found


def _list(todo: Sequence[Any], as_json: bool) -> None:
    if as_json:
        print_json(
            {"schema": 1, "cases": [{"suite": e.suite, "name": e.name, "quick": e.quick} for e in todo]}
        )
        return
    for entry in todo:
        print(f"{entry.suite:12} {entry.name}")


def _read(path: Path) -> dict[str, Any]:
    """The results of an earlier run.

    Raises:
        UserError: there are none in that file.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if found["schema"] != 1 or not all("name" in row for row in found["rows"]):
            raise KeyError("rows with names")
    except OSError as error:
        raise UserError(f"--compare: {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--compare: {path} holds no results of {PROG} bench") from error
    return found


def _measure(
    todo: Sequence[Any],
    device: str,
    out: Path | None,
    budget: float | None,
    repeat: int,
    quick: bool,
    autotune: bool,
    old: dict[str, Any] | None,
) -> dict[str, Any]:
    """Header and rows of a results file, with every case of `todo` that the time allowed."""
    limit = common.Budget(budget)
    with _file(out) as path:
        # The roofline is drawn for operations and blocks.
        dtypes = sorted({entry.dtype for entry in todo if entry.suite != "models"})
        header = suites.header(device, repeat, dtypes)
        header["settings"] = common.own_settings()
        different = comparing.unlike(header, old) if old is not None else ""
        if different:
            raise UserError(f"--compare: {different}")
        try:
            results = common.Results(path, header, key=lambda row: str(row["name"]))
        except SystemExit as refused:
            raise UserError(str(refused)) from None
        missing = [entry for entry in todo if entry.name not in results]
        suites.prepare(missing, device)
        settings = suites.Settings(device, quick, repeat, autotune)
        with common.Progress(len(missing)) as progress:
            measured = suites.run(missing, settings, lambda: limit.left, progress.say)
            failed = tuning.keep(results, (row for _, row in measured), _in_short, progress)
        rows = [*results.rows, *map(_of_failed, failed)]
        return {**results.data, "rows": rows, "left": len(missing) - progress.done}


def _of_failed(row: dict[str, Any]) -> dict[str, Any]:
    """A case that failed, with the columns that every row has."""
    return {**row, "failed": {"case": row["failed"]}, "ratio": {}, "median_ms": {}, "correct": None}


@contextlib.contextmanager
def _file(out: Path | None) -> Iterator[Path]:
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "bench.json"


def _in_short(row: dict[str, Any]) -> str:
    text = " ".join(f"{name} {ms:.3f} ms" for name, ms in row["median_ms"].items())
    if "stock/fused" in row["ratio"]:
        text += f", stock/fused {row['ratio']['stock/fused']:.2f}"
    if row["correct"] is False:
        text += ", WRONG"
    return text + "".join(f", {name} failed: {why}" for name, why in row["failed"].items())


def _verdict(data: dict[str, Any], old: dict[str, Any] | None, limit: float) -> dict[str, Any]:
    """Means, changes and the cases that are worse, as plain data."""
    changes = comparing.compare(data["rows"], old["rows"] if old is not None else None)
    return {
        "fail_under": limit,
        "means": [vars(mean) for mean in comparing.means(data["rows"])],
        "changes": [{**vars(c), "change": c.change, "worse": c.worse(limit)} for c in changes],
        "worse": [c.name for c in changes if c.worse(limit)],
    }


def _show(data: dict[str, Any], verdict: dict[str, Any], compared: bool) -> None:
    out = console()
    columns = ["case", "sites fused", "stock ms", "fused ms", "by hand ms", "stock / fused", "error"]
    shown = table(*columns, *(["before", "change", "band"] if compared else []), "")
    changes = {change["name"]: change for change in verdict["changes"]}
    for row in data["rows"]:
        change = changes[row["name"]]
        sites, ms = row.get("sites") or {}, row["median_ms"]
        ratio, noise = change["new"], row.get("noise") or 0.0
        cells = [
            str(row["name"]),
            f"{sites.get('fused', 0)} of {sites['total']}" if "total" in sites else "-",
            *(f"{ms[name]:.3f}" if name in ms else "-" for name in ("stock", "fused", "limit")),
            "-" if ratio is None else f"{ratio:.2f} ± {ratio * noise:.2f}",
            {True: "ok", False: "WRONG", None: "-"}[row.get("correct")],
        ]
        if compared:
            cells.append("-" if change["old"] is None else f"{change['old']:.2f}")
            cells.append("-" if change["change"] is None else f"{change['change']:.2f}")
            cells.append(f"{change['band']:.2f}")
        shown.add_row(*cells, "worse" if change["worse"] else change["problem"])
    out.print(shown)
    means = table("suite", "cases", "geometric mean", "below 1.0", "by more than noise")
    for mean in verdict["means"]:
        value = "-" if mean["mean"] is None else f"{mean['mean']:.3f}"
        means.add_row(mean["kind"], str(mean["cases"]), value, str(mean["below"]), str(mean["clearly"]))
    out.print(means)
    if data["left"]:
        out.print(
            f"{data['left']} cases are left: the time was up, or the device is lost. --out FILE keeps what "
            "was measured, --budget sets the limit"
        )
    if verdict["worse"]:
        what = "the earlier run" if compared else "stock"
        out.print(
            f"worse than {verdict['fail_under']:g} of {what}, wrong or failed: {'; '.join(verdict['worse'])}",
            markup=False,
            highlight=False,
        )
