"""`explain`: what is fused in a model, what is not, and why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..explaining import Explanation
from ..explaining import explain as explain_model
from ..sites import error_text, groups
from . import app
from .common import PROG, Device, JsonFlag, UserError, calm, console, find_device, print_json, writable
from .deciding import absent_gpu
from .models import Attention, Precision, from_callable, from_hugging_face, to_dtype

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face model type (bert), a configuration class (BertConfig), a folder with "
        "config.json, or module:callable that returns (model, kwargs of its forward).",
    ),
]
Attn = Annotated[
    Attention | None,
    typer.Option(help="attn_implementation of a Hugging Face model; default: the model's own."),
]
Train = Annotated[bool, typer.Option("--train", help="Explain a training step: forward and backward.")]
Dtype = Annotated[
    Precision | None,
    typer.Option(help="Dtype of the weights; default: bfloat16 on a GPU, otherwise float32."),
]
Seq = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Sequence length of a Hugging Face model's input; default: 128, or the most that it takes.",
    ),
]
NoCache = Annotated[
    bool,
    typer.Option("--no-cache", help="Call a decoder with use_cache=False; default: the model's own."),
]
Layers = Annotated[
    int | None,
    typer.Option(min=1, help="Limit each stack of a Hugging Face model to this number of layers."),
]
Target = Annotated[
    str | None,
    typer.Option(
        metavar="GPU", help="Explain for a GPU that need not be in this machine, such as nvidia_h200."
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write an HTML page with the graphs before and after."),
]


@app.command(
    epilog="Exit codes: 0 explained, whatever was fused; 1 the model does not run; 2 a wrong "
    "argument, environment variable or model, with one line on stderr."
)
def explain(
    context: typer.Context,
    model: Model,
    attn: Attn = None,
    train: Train = False,
    dtype: Dtype = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size of a Hugging Face model's input.")] = 2,
    seq: Seq = None,
    padded: Annotated[bool, typer.Option("--padded", help="Pass a padding mask.")] = False,
    no_cache: NoCache = False,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Compile with dynamic=True.")] = False,
    layers: Layers = None,
    device: Annotated[Device, typer.Option(help="The device; auto: a GPU if there is one.")] = Device.auto,
    target: Target = None,
    html: Html = None,
    as_json: JsonFlag = False,
) -> None:
    """Show for each candidate of a model whether it is fused, and why.

    The model has random weights, and nothing is downloaded. All passes of torch.compile run, but no code is
    generated. With --target nothing is computed, and weights take no memory.
    """
    if target is not None:
        _check_target(target, device)
    where = find_device(device if target is None else Device.cpu)
    writable(html, "--html")
    on_gpu = where.type == "cuda" or target is not None
    precision = dtype or (Precision.bfloat16 if on_gpu else Precision.float32)
    with calm():
        if ":" in model and not Path(model).exists():
            _check_own_model(context)
            module, kwargs = from_callable(model)
        else:
            module, kwargs = from_hugging_face(model, attn, batch, seq, padded, layers, is_run=target is None)
            if no_cache:
                kwargs["use_cache"] = False
            module = module.to(getattr(torch, precision.value))
            kwargs = {k: to_dtype(x, getattr(torch, precision.value)) for k, x in kwargs.items()}
        if target is None:
            module = module.to(where)
        module = module.train(train)
        kwargs = {k: x.to(where) if isinstance(x, torch.Tensor) else x for k, x in kwargs.items()}
        found = _explained(module, kwargs, train, dynamic, target)
    if html is not None:
        found.to_html(html)
    if as_json:
        print_json({**found.to_dict(), "model": model, "groups": _rows(found)})
        return
    out = console()
    if found.sites:
        out.print(found)
    out.print(f"{model}: {found.summary()}", markup=False, highlight=False)


def _check_own_model(context: typer.Context) -> None:
    """Refuse options that make a Hugging Face model if the model is the user's own.

    Raises:
        UserError: one of them was given.
    """
    for name in ("attn", "dtype", "batch", "seq", "padded", "no_cache", "layers"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} is for models of Hugging Face: module:callable makes its own")


def _check_target(target: str, device: Device) -> None:
    """Refuse what cannot be explained for another device.

    Raises:
        UserError: nothing is known of it, or something else is asked for as well.
    """
    absent_gpu(target)
    if device is not Device.auto:
        raise UserError("--target and --device exclude each other")


def _explained(
    model: torch.nn.Module, kwargs: dict[str, Any], train: bool, dynamic: bool, target: str | None
) -> Explanation:
    reserved = ("train", "dynamic", "gpu", "fn")
    given = {name: value for name, value in kwargs.items() if name in reserved}
    if given:
        raise UserError(f"an argument of the model has the reserved name {next(iter(given))}")
    try:
        return explain_model(model, train=train, dynamic=True if dynamic else None, gpu=target, **kwargs)
    except Exception as error:
        print(f"{PROG}: the model does not compile or run: {error_text(error)}", file=sys.stderr)
        raise typer.Exit(1) from error


def _rows(found: Explanation) -> list[dict[str, Any]]:
    """Sites that say the same, with their number."""
    return [
        {
            "count": count,
            "fusion": same[0].fusion,
            "verdict": same[0].verdict,
            "kernel_or_reason": same[0].kernel if same[0].verdict == "fused" else same[0].reason,
            "hint": same[0].hint,
            "source": same[0].source,
        }
        for count, same in groups(found.sites)
    ]
