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
    """What is behind `run` and `export` is left unparsed, in the arguments of the context."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = (
            args[:1] if args[:1] in (["run"], ["export"]) and args[1:2] not in (["-h"], ["--help"]) else args
        )
        super().parse_args(ctx, list(own))
        ctx.args = args[len(own) :]
        return args[len(own) :]


Kind = Annotated[
    str | None,
    typer.Argument(
        metavar="KIND",
        help="attention, flex, lora or projections: measure this kind of problems. run SCRIPT "
        "[ARGS]: run a script and measure what it compiles. export [FILE]: write the "
        "measurements of this machine as a table. With --why: a section of a table.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The results file. Rows that it already has are not measured again. Default: "
        "bench/results/KIND_DEVICE.json.",
    ),
]
Only = Annotated[
    str, typer.Option(metavar="REGEX", help="Only rows whose name matches this regular expression.")
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Short blocks, for a trial run; the times are not valid.")
]
Seconds = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="Stop after this many seconds; a row that has begun is finished. Repeat the command "
        "until no row is left.",
    ),
]
WriteTable = Annotated[
    bool,
    typer.Option("--table", help="Write configs/devices/DEVICE.json from the results, without measuring."),
]
ListOnly = Annotated[bool, typer.Option("--list", help="Print the names of the rows and exit.")]
Why = Annotated[
    str | None,
    typer.Option(
        metavar="PROBLEM",
        help="Print the decision for a problem and the rows behind it, without measuring. The "
        "problem is a row of a table as JSON, without the measured columns. Needs no checkout.",
    ),
]
Target = Annotated[
    str | None, typer.Option(metavar="GPU", help="With --why: a GPU, which need not be in this machine.")
]


@app.command(
    cls=_Tune,
    epilog="Exit codes: 0 measured until the budget ended; 1 a row failed; 2 a wrong argument; for "
    "run: that of the script. Needs a checkout, except for run, export and --why.",
)
def tune(
    context: typer.Context,
    kind: Kind = None,
    out: Out = None,
    only: Only = "",
    quick: Quick = False,
    device: Annotated[Device, typer.Option(help="The device; auto: a GPU if there is one.")] = Device.auto,
    budget: Seconds = None,
    write_table: WriteTable = False,
    list_only: ListOnly = False,
    why: Why = None,
    target: Target = None,
) -> None:
    """Measure every kernel on this device, and write the table that decides what is fused.

    Measure on an idle device, and commit the results with the table.
    """
    if kind is None:
        raise UserError("tune needs a KIND: attention, flex, lora, projections, run SCRIPT or export [FILE]")
    if kind == "run":
        raise typer.Exit(run_script(context.args, find_device(Device.auto)))
    if kind == "export":
        export(context.args, find_device(Device.auto))
    elif why is not None:
        show_decision(kind, why, target, device)
    elif target is not None:
        raise UserError("--target needs --why: only devices of this machine can be measured")
    else:
        where = find_device(device)
        failed = load("tune").measure(kind, where, out, only, quick, budget, write_table, list_only)
        raise typer.Exit(failed)
