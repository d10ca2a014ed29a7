"""`bench` and `tune`: what a checkout has beside the package, and what was measured on this machine."""

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
    """A module of `bench`, which is in a checkout and not in the installed package.

    Raises:
        UserError: this is no checkout.
    """
    if not is_checkout(ROOT):
        raise UserError(
            "the benchmarks are not in the installed package: clone the repository, and run this there after "
            "pip install -e '.[models,bench]'"
        )
    with imports_from(ROOT):
        found = importlib.import_module(f"bench.{name}")
    if not Path(str(found.__file__)).is_relative_to(ROOT):
        raise UserError(f"another package is named bench as well: {found.__file__}")
    return found


def is_checkout(folder: Path) -> bool:
    """Whether a folder is one of this repository: beside an installed package, `bench` may be anybody's."""
    project = folder / "pyproject.toml"
    if not (folder / "bench" / "suites.py").is_file() or not project.is_file():
        return False
    return 'name = "inductor_fusions"' in project.read_text("utf-8").splitlines()


# -- bench ----------------------------------------------------------------------------------------


#: All that follows is read by the command of the checkout, `--help` too.
FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=FORWARDED)
def bench(context: typer.Context) -> None:
    """Time operations, blocks and whole models, stock beside fused, and compare with an earlier run.

    Only in a checkout.
    """
    command = typer.main.get_command(load("gate").app)
    raise typer.Exit(command.main(context.args, f"{PROG} bench", standalone_mode=False) or 0)


# -- tune -----------------------------------------------------------------------------------------


class _Tune(TyperCommand):
    """What follows `run` and `export` is not looked at."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] in (["run"], ["export"]):
            ctx.meta["given"], args = args[1:], args[:1]
        return super().parse_args(ctx, args)


@app.command(
    cls=_Tune,
    epilog="Exit codes: 0 measured as far as the time allowed; 1 a row failed; 2 a wrong argument; of run "
    "those of the script. Run it again until no row is left. Only in a checkout, but for run, export and "
    "--why.",
)
def tune(
    context: typer.Context,
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="What to tune: attention, flex, lora or projections. With --why: a section of a table. Or "
            "run SCRIPT [ARGS]: run a script and measure what it compiles; or export [FILE]: write what was "
            "measured on this machine as a table.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Results; rows that it has are not measured again. Default: bench/results/KIND_DEVICE.json.",
        ),
    ] = None,
    only: Annotated[str, typer.Option(metavar="REGEX", help="Only rows whose name matches this.")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Short blocks: to try it; times mean nothing.")
    ] = False,
    device: Annotated[Device, typer.Option(help="Where; auto takes a GPU if there is one.")] = Device.auto,
    budget: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Start no row after this time.")
    ] = None,
    write_table: Annotated[
        bool,
        typer.Option("--table", help="Measure nothing: write configs/devices/DEVICE.json from the results."),
    ] = False,
    list_only: Annotated[bool, typer.Option("--list", help="Name the rows and stop.")] = False,
    why: Annotated[
        str | None,
        typer.Option(
            metavar="PROBLEM",
            help="Measure nothing: say what is decided for a problem, a row of a table as JSON without what "
            "was measured, and from which rows. Not only in a checkout.",
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="GPU", help="With --why: a GPU that need not be in this machine.")
    ] = None,
) -> None:
    """Measure every kernel on this device, and write the table from which fusions are decided.

    A table decides what the package fuses here: measure on an idle device, and commit the results with it.
    """
    if kind == "run":
        raise typer.Exit(run_script(context.meta["given"], find_device(Device.auto)))
    if kind == "export":
        export(context.meta["given"], find_device(Device.auto))
        return
    if why is not None:
        show_decision(kind, why, target, device)
        return
    if target is not None:
        raise UserError("--target goes with --why: nothing is measured on a device that is not here")
    bench = load("tune")
    raise typer.Exit(
        bench.measure(kind, find_device(device), out, only, quick, budget, write_table, list_only)
    )
