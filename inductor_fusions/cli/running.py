"""`run` and `bisect`: run the user's script unchanged."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer

from .. import reporting
from ..checking import bisecting
from ..driver import watching
from . import app
from .common import PROG, JsonFlag, UserError, console, imports_from, print_json, writable
from .issue import Collector
from .issue import write as write_issue

#: Arguments after the name of the script belong to the script.
REST = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


@app.command(
    context_settings=REST,
    epilog="Under a launcher: torchrun -m inductor_fusions run train.py, accelerate launch -m "
    "inductor_fusions run train.py. Exit codes: that of the script; 1 it raised; 2 a wrong argument.",
)
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or with -m a module.")],
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Print the report of all sites to stderr at the end.")
    ] = False,
    as_json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the report as JSON to this file at the end."),
    ] = None,
    issue: Annotated[
        Path | None,
        typer.Option(
            "--issue",
            metavar="FILE",
            help="Write a JSON file to attach to an issue: environment, report, the first graphs "
            "with candidates, and the traceback.",
        ),
    ] = None,
) -> None:
    """Run a training or inference script unchanged, with the fusions on.

    Works like `python SCRIPT ARGS` and `python -m MODULE ARGS`: arguments after SCRIPT are passed to it.
    Processes that the script starts have to import the package themselves.
    """
    writable(as_json, "--json")
    writable(issue, "--issue")
    _check_script(script, module)
    collector, raised = Collector(), ""
    sys.argv = [script, *context.args]
    sys.path[0] = os.getcwd() if module else str(Path(script).resolve().parent)
    try:
        with watching.observing(collector) if issue is not None else contextlib.nullcontext():
            if module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    except Exception as error:
        raised = "".join(traceback.format_exception(type(error), error, _of_script(error.__traceback__)))
        sys.stderr.write(raised)
        raise typer.Exit(1) from None
    finally:
        if issue is not None:
            write_issue(issue, collector, raised)
        found = reporting.report()
        if as_json is not None:
            as_json.write_text(found.to_json() + "\n", "utf-8")
        if report:
            print(found, file=sys.stderr)


def _check_script(script: str, module: bool) -> None:
    """Refuse a script that does not exist.

    Raises:
        UserError: there is no such file, module or option.
    """
    if script.startswith("-"):  # options that are not known here are taken for the script's
        raise UserError(f"no such option: {script}; options of the script follow its name")
    if not module:
        if not Path(script).is_file():
            raise UserError(f"no such file: {script}")
        return
    try:
        with imports_from(Path.cwd()):
            found = importlib.util.find_spec(script)
    except (ImportError, ValueError) as error:
        raise UserError(f"no module named {script}: {error}") from error
    if found is None:
        raise UserError(f"no module named {script}")


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the first frame of the script on."""
    start = trace
    while start is not None:
        name = start.tb_frame.f_code.co_filename
        if name != __file__ and "runpy" not in name:
            return start
        start = start.tb_next
    return trace


@app.command(
    context_settings=REST,
    epilog="Exit codes: 0 the site was found; 1 there is none, because the script does the same with "
    "and without fusions; 2 a wrong argument.",
)
def bisect(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or with -m a module.")],
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    by: Annotated[
        bisecting.By,
        typer.Option(
            help="When a run counts as wrong. 'exit': its exit code is not 0. 'output': numbers on "
            "stdout differ from a run without fusions."
        ),
    ] = bisecting.By.exit,
    rtol: Annotated[float, typer.Option(min=0.0, help="Allowed relative error with --by output.")] = 1e-2,
    as_json: JsonFlag = False,
) -> None:
    """Find the fused site that changes what a script does.

    Runs the script repeatedly with INDUCTOR_FUSIONS_MAX, which fuses only the first sites, and halves the
    range each time. Arguments after SCRIPT are passed to it.
    """
    _check_script(script, module)

    def say(line: str) -> None:
        print(f"{PROG}: {line}", file=sys.stderr)

    try:
        found = bisecting.bisect(["-m", script] if module else [script], context.args, by, rtol, say)
    except bisecting.NotFound as missed:
        if as_json:
            print_json({"schema": 1, "found": False, "why": str(missed)})
        else:
            console().print(str(missed), markup=False, highlight=False)
        raise typer.Exit(1) from None
    if as_json:
        print_json(found.to_dict())
    else:
        console().print(str(found), markup=False, highlight=False)
