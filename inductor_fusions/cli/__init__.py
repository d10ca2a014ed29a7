"""The command line: `python -m inductor_fusions`, also installed as `inductor-fusions`."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from .. import __version__
from .common import EXIT_CODES, PROG, one_line

app = typer.Typer(
    name=PROG,
    help="Fused kernels for stock torch.compile: show what is installed, explain what is fused in a "
    "model and why, run scripts with the fusions, and measure.",
    epilog=EXIT_CODES.replace("; 2", "; 1 the check of the command failed (see each command); 2"),
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # paragraphs of docstrings are filled anew
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The console entry point: user errors are one line on stderr, without a traceback."""
    try:
        code = app(prog_name=PROG, standalone_mode=False)
    except BrokenPipeError:  # the reader of the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except (KeyboardInterrupt, typer.Abort):
        print(f"{PROG}: interrupted", file=sys.stderr)
        code = 130
    except Exception as error:
        # Typer's own errors; their base class has no public name that all versions share.
        if hasattr(error, "format_message"):
            said = one_line(error.format_message()).replace("Value error, ", "")  # pydantic's
            said += _valid_commands(error)
            print(f"{PROG}: {said}", file=sys.stderr)
            code = getattr(error, "exit_code", 2)
        elif getattr(error, "errno", None) == errno.ENOSPC:  # where the output goes
            print(f"{PROG}: {error}", file=sys.stderr)
            code = 1
        else:
            raise
    sys.exit(code)


def _valid_commands(error: Exception) -> str:
    """What an error about an unknown command adds: the commands that there are; "" of other errors."""
    context = getattr(error, "ctx", None)
    if context is None or not str(getattr(error, "message", "")).startswith("No such command"):
        return ""
    return f" Valid commands: {', '.join(context.command.list_commands(context))}"


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


# The commands add themselves to `app`, in the order of --help.
from . import environment, explaining, running, demoing, benching  # noqa: E402, F401, I001
