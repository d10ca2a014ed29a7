"""`bench` and `tune`: the benchmarks of a checkout, and the measurements of this machine."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from . import app
from .common import PROG, Device, UserError, find_device, imports_from
from .deciding import show_decision
from .tuning import export, run_script

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> Any:
    """Import a module of `bench`, which is in a checkout and not in the installed package.

    Raises:
        UserError: this is not a checkout.
    """
    if not is_checkout(ROOT):
        raise UserError(
            "the installed package has no benchmarks: clone the repository, pip install -e "
            "'.[models,bench]', and run this there; tune run, tune export and tune --why work here too"
        )
    with imports_from(ROOT):
        found = importlib.import_module(f"bench.{name}")
    if not Path(str(found.__file__)).is_relative_to(ROOT):
        raise UserError(f"another package named bench is imported first: {found.__file__}")
    return found


def is_checkout(folder: Path) -> bool:
    """Whether a folder is a checkout of this repository; otherwise its `bench` may be another package."""
    project = folder / "pyproject.toml"
    if not (folder / "bench" / "suites.py").is_file() or not project.is_file():
        return False
    return 'name = "inductor_fusions"' in project.read_text("utf-8").splitlines()


# -- bench ----------------------------------------------------------------------------------------


#: All arguments, `--help` too, are passed on to the command of the checkout.
FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=FORWARDED)
def bench(context: typer.Context) -> None:
    """Time operations, blocks and whole models, stock beside fused, and compare with an earlier run.

    Only in a checkout.
    """
    if not is_checkout(ROOT) and {"-h", "--help"} & {*context.args}:
        print(context.get_help())
        return
    command = typer.main.get_command(load("gate").app)
    raise typer.Exit(command.main(context.args, f"{PROG} bench", standalone_mode=False) or 0)


# -- tune -----------------------------------------------------------------------------------------


class _Tune(TyperCommand):
    """Arguments after `run` and `export` are passed on unparsed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] in (["run"], ["export"]) and args[1:2] not in (["-h"], ["--help"]):
            ctx.meta["given"], args = args[1:], args[:1]
        return super().parse_args(ctx, args)


@app.command(
    cls=_Tune,
    epilog="Exit codes: 0 measured until the budget ended; 1 a row failed; 2 a wrong argument; for "
    "run: that of the script. Needs a checkout, except for run, export and --why.",
)
def tune(
    context: typer.Context,
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND",
            help="attention, flex, lora or projections: measure this kind of problems. run SCRIPT "
            "[ARGS]: run a script and measure what it compiles. export [FILE]: write the "
            "measurements of this machine as a table. With --why: a section of a table.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The results file. Rows that it already has are not measured again. Default: "
            "bench/results/KIND_DEVICE.json.",
        ),
    ] = None,
    only: Annotated[
        str, typer.Option(metavar="REGEX", help="Only rows whose name matches this regular expression.")
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Short blocks, for a trial run; the times are not valid.")
    ] = False,
    device: Annotated[Device, typer.Option(help="The device; auto: a GPU if there is one.")] = Device.auto,
    budget: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Stop after this many seconds; a row that has begun is finished. Repeat the command "
            "until no row is left.",
        ),
    ] = None,
    write_table: Annotated[
        bool,
        typer.Option(
            "--table", help="Write configs/devices/DEVICE.json from the results, without measuring."
        ),
    ] = False,
    list_only: Annotated[bool, typer.Option("--list", help="Print the names of the rows and exit.")] = False,
    why: Annotated[
        str | None,
        typer.Option(
            metavar="PROBLEM",
            help="Print the decision for a problem and the rows behind it, without measuring. The "
            "problem is a row of a table as JSON, without the measured columns. Needs no checkout.",
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="GPU", help="With --why: a GPU, which need not be in this machine.")
    ] = None,
) -> None:
    """Measure every kernel on this device, and write the table that decides what is fused.

    Measure on an idle device, and commit the results with the table.
    """
    if kind is None:
        raise UserError("tune needs a KIND: attention, flex, lora, projections, run SCRIPT or export [FILE]")
    if kind == "run":
        raise typer.Exit(run_script(context.meta["given"], find_device(Device.auto)))
    if kind == "export":
        export(context.meta["given"], find_device(Device.auto))
        return
    if why is not None:
        show_decision(kind, why, target, device)
        return
    if target is not None:
        raise UserError("--target needs --why: only devices of this machine can be measured")
    bench = load("tune")
    raise typer.Exit(
        bench.measure(kind, find_device(device), out, only, quick, budget, write_table, list_only)
    )
