"""`demo`: four whole models, stock and fused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from . import app
from .common import Device, UserError, console, find_device, writable
from .models import need_transformers


@app.command(
    "demo",
    epilog="Exit codes: 0 every attention that is expected to be faster was fused, and every error "
    "is within its budget, whatever the times; 1 otherwise; 2 a wrong argument or environment "
    "variable.",
)
def run_demo(
    device: Annotated[Device, typer.Option(help="The device; auto: a GPU if there is one.")] = Device.auto,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models; the times are not valid.")] = False,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Only models whose title contains this text.")
    ] = "",
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the rows as JSON.")
    ] = None,
) -> None:
    """Compile four whole models, stock and fused, and compare times and errors.

    Real configurations and random weights: BERT with eager attention and a padded batch, a Llama-style
    decoder without a mask, the same in a training step, and T5. Two to three minutes on two CPU cores; a
    large GPU takes the models in full size.
    """
    from rich.console import Console

    from .. import demo

    need_transformers()
    where = find_device(device)
    writable(as_json, "--json")
    titles = [case.title for case in demo.cases("tiny")]
    if not any(only.lower() in title.lower() for title in titles):
        raise UserError(f"--only: no title contains {only!r}; the titles are: {'; '.join(titles)}")
    result = demo.run(where, quick=quick, only=only, console=Console(stderr=True))
    if as_json is not None:
        as_json.write_text(json.dumps(result.to_dict(), indent=1) + "\n", "utf-8")
    demo.show(result, console())
    if not result.ok:
        raise typer.Exit(1)
