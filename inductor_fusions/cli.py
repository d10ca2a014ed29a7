"""The command line: `python -m inductor_fusions`, also installed as `inductor-fusions`."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from . import __version__, _inductor, config, demo, fusions, reporting, tables

if TYPE_CHECKING:
    from rich.console import Console

PROG = "inductor-fusions"
EXIT_CODES = (
    "Exit codes: 0 done; 2 a wrong argument, environment variable or model, said in one line on stderr."
)

app = typer.Typer(
    name=PROG,
    help="Fused attention for stock torch.compile: what is installed, what it does to a model, and a demo.",
    epilog=EXIT_CODES.replace("; 2", "; 1 what was asked for did not hold (see each command); 2"),
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class UserError(typer.BadParameter):
    """A mistake of the user's: shown as one line, exit code 2."""

    def format_message(self) -> str:
        return str(self.message)


class Device(str, Enum):
    """Where to run."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Attention(str, Enum):
    """The attention of a Hugging Face model."""

    eager = "eager"
    sdpa = "sdpa"


class Precision(str, Enum):
    """A dtype of weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def main() -> None:
    """The console entry point: mistakes of the user's are one line on stderr, without a traceback."""
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
        if not hasattr(error, "format_message"):
            raise
        print(f"{PROG}: {_one_line(error.format_message())}", file=sys.stderr)
        code = getattr(error, "exit_code", 2)
    sys.exit(code)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


# -- env ------------------------------------------------------------------------------------------


@app.command(epilog=EXIT_CODES)
def env(as_json: JsonFlag = False) -> None:
    """Show versions, devices, the hooks really installed, the toggles in force and the tables found."""
    found = environment()
    if as_json:
        _print_json(found)
        return
    table = _table("", "", header=False)
    for name, version in found["versions"].items():
        table.add_row(name, version or "not installed")
    for device in found["devices"]:
        table.add_row("device", device)
    table.add_section()
    for stage, hook in found["hooks"].items():
        table.add_row(f"{stage} ({hook['hook']})", ", ".join(hook["passes"]) or "nothing installed")
    if not found["enabled"]:
        table.add_row("", "the fusions are off")
    table.add_section()
    for toggle in found["toggles"]:
        table.add_row(toggle["variable"], f"{toggle['value']}  ({toggle['from']})")
    table.add_section()
    tuned = found["tables"]
    for entry in tuned["files"]:
        table.add_row(entry["file"], f"{entry['rows']} rows" if entry["usable"] else "not usable")
    own = "found" if tuned["found"] else "none: attention written by hand is left to stock here"
    table.add_row(f"for this device: {tuned['device']}.json", own)
    _console().print(table)


def environment() -> dict[str, Any]:
    """What `env` shows, as plain data."""
    versions: dict[str, str | None] = {"inductor_fusions": __version__, "torch": str(torch.__version__)}
    versions |= {name: _version(name) for name in ("triton", "transformers", "peft")}
    versions["python"] = platform.python_version()
    device = _device(Device.auto)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        devices = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(count)]
    else:
        devices = [f"cpu {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"]
    hooks = {
        stage: {"hook": hook, "passes": [_describe_pass(item) for item in _inductor.get_hook(stage)]}
        for stage, hook in _inductor.HOOKS.items()
    }
    name = tables.device_name(device)
    return {
        "schema": 1,
        "versions": versions,
        "devices": devices,
        "enabled": bool(config.enabled),
        "hooks": hooks,
        "toggles": _toggles(),
        "tables": {"device": name, "found": tables.load(name) is not None, "files": _table_files()},
    }


def _describe_pass(item: Any) -> str:
    kind = type(item)
    if kind.__module__.partition(".")[0] == __package__:
        names = ", ".join(fusion.name for fusion in item.fusions)
        return f"{kind.__name__}: {names or 'no fusion in this stage yet'}"
    return getattr(item, "__qualname__", f"{kind.__module__}.{kind.__qualname__}")


def _toggles() -> list[dict[str, Any]]:
    found = []
    toggles: Any = config  # install_config_module() gives it methods that mypy does not see
    for name, value in toggles.get_config_copy().items():
        if name.startswith("_") or not name.islower():  # what else the module holds
            continue
        variable = _variable(name)
        source = "environment" if variable in os.environ else "default"
        shown = int(value) if isinstance(value, bool) else value  # as the variable takes it
        found.append({"name": name, "variable": variable, "value": shown, "from": source})
    return found


def _variable(toggle: str) -> str:
    """The environment variable of a toggle."""
    return "INDUCTOR_FUSIONS" if toggle == "enabled" else f"INDUCTOR_FUSIONS_{toggle.upper()}"


def _table_files() -> list[dict[str, Any]]:
    devices = tables.folder() / "devices"
    if not devices.is_dir():
        return []
    names = sorted(entry.name for entry in devices.iterdir() if entry.name.endswith(".json"))
    loaded = {name: tables.load(name.removesuffix(".json")) for name in names}
    return [
        {
            "file": f"{devices.name}/{name}",
            "usable": table is not None,
            "rows": len((table or {}).get("attention", ())),
        }
        for name, table in loaded.items()
    ]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# -- list -----------------------------------------------------------------------------------------


@app.command("list", epilog=EXIT_CODES)
def list_fusions(as_json: JsonFlag = False) -> None:
    """List the fusions: name, stage, toggle and what each turns into what."""
    found = [
        {
            "name": fusion.name,
            "stage": fusion.stage,
            "variable": _variable(fusion.name) if hasattr(config, fusion.name) else None,
            "on": bool(config.enabled and getattr(config, fusion.name, True)),
            "summary": fusion.summary,
        }
        for fusion in fusions.ALL
    ]
    if as_json:
        _print_json({"schema": 1, "fusions": found})
        return
    table = _table("fusion", "stage", "toggle", "summary")
    for row in found:
        state = "on" if row["on"] else "off"
        table.add_row(
            str(row["name"]), str(row["stage"]), f"{row['variable']}  ({state})", str(row["summary"])
        )
    _console().print(table)


# -- demo -----------------------------------------------------------------------------------------


@app.command(
    "demo",
    epilog="Exit codes: 0 every attention was fused, but those that no fused kernel is measured to be faster "
    "for on this device, and every error is within its budget, whatever the times; 1 not so; 2 a wrong "
    "argument or environment variable.",
)
def run_demo(
    device: Annotated[Device, typer.Option(help="Where; auto takes a GPU if there is one.")] = Device.auto,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models: times mean nothing.")] = False,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only models whose title contains this.")] = "",
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the rows as JSON as well.")
    ] = None,
) -> None:
    """Compile four whole models, stock and fused, and compare times and errors.

    Real configurations and random weights: BERT with eager attention and a padded batch, a Llama-style
    decoder without a mask, the same in a training step, and T5. Two to three minutes on two CPU cores; a
    large GPU takes the models in full size.
    """
    from rich.console import Console

    _need_transformers()
    where = _device(device)
    if as_json is not None and not as_json.parent.is_dir():
        raise UserError(f"--json: there is no folder {as_json.parent}")
    titles = [case.title for case in demo.cases("tiny")]
    if not any(only.lower() in title.lower() for title in titles):
        raise UserError(f"--only: no model's title contains {only!r}; there are: {'; '.join(titles)}")
    result = demo.run(where, quick=quick, only=only, console=Console(stderr=True))
    if as_json is not None:
        as_json.write_text(json.dumps(result.to_dict(), indent=1) + "\n", "utf-8")
    demo.show(result, _console())
    if not result.ok:
        raise typer.Exit(1)


# -- explain --------------------------------------------------------------------------------------


@app.command(
    epilog="Exit codes: 0 compiled, whatever was fused; 1 the model does not run or does not compile; 2 a "
    "wrong argument, environment variable or model. Mistakes are said in one line on stderr."
)
def explain(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face configuration class (BertConfig, LlamaConfig), a folder with config.json, "
            "or module:callable that returns (model, kwargs of its forward).",
        ),
    ],
    attn: Annotated[
        Attention | None, typer.Option(help="Attention of a Hugging Face model; default: the model's own.")
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="A training step: forward and backward.")] = False,
    dtype: Annotated[
        Precision | None, typer.Option(help="Dtype of the weights; default: bfloat16 on a GPU, else float32.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a Hugging Face model's input.")] = 2,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of a Hugging Face model's input.")] = 128,
    padded: Annotated[bool, typer.Option("--padded", help="Give a padding mask.")] = False,
    no_cache: Annotated[
        bool,
        typer.Option("--no-cache", help="Call a decoder with use_cache=False; default: the model's own."),
    ] = False,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Compile with dynamic=True.")] = False,
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="At most this many layers in each stack of a Hugging Face model."),
    ] = None,
    device: Annotated[Device, typer.Option(help="Where; auto takes a GPU if there is one.")] = Device.auto,
    as_json: JsonFlag = False,
) -> None:
    """Compile a model with random weights, and say of each attention what became of it and why."""
    where = _device(device)
    precision = dtype or (Precision.bfloat16 if where.type == "cuda" else Precision.float32)
    with _calm():
        if ":" in model and not Path(model).exists():
            module, kwargs = _from_callable(model)
        else:
            module, kwargs = _from_hugging_face(model, attn, batch, seq, padded, layers)
            if no_cache:
                kwargs["use_cache"] = False
            module = module.to(getattr(torch, precision.value))
            kwargs = {k: _to_dtype(x, getattr(torch, precision.value)) for k, x in kwargs.items()}
        module = module.to(where).train(train)
        kwargs = {k: x.to(where) if isinstance(x, torch.Tensor) else x for k, x in kwargs.items()}
        report = _compile(module, kwargs, train, dynamic)
    groups = Counter(
        (s.fusion, s.verdict, s.kernel if s.verdict == "fused" else s.reason, s.hint, s.source)
        for s in report
    )
    names = ("fusion", "verdict", "kernel_or_reason", "hint", "source")
    rows: list[dict[str, Any]] = [
        {"count": n, **dict(zip(names, key, strict=True))} for key, n in groups.items()
    ]
    if as_json:
        _print_json({**report.to_dict(), "model": model, "groups": rows})
        return
    table = _table("sites", "fusion", "verdict", "kernel or reason", "source")
    for row in rows:
        text = row["kernel_or_reason"] + (f"\n({row['hint']})" if row["hint"] else "")
        color = "green" if row["verdict"] == "fused" else "yellow"
        table.add_row(
            str(row["count"]),
            row["fusion"],
            f"[{color}]{row['verdict']}",
            _literal(text),
            _literal(_short(row["source"])),
        )
    console = _console()
    if rows:
        console.print(table)
    if not config.enabled:
        console.print("The fusions are off: INDUCTOR_FUSIONS=0.")
    verdicts = Counter(site.verdict for site in report)
    said = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    console.print(f"{model}: {said or 'no attention was found'}", markup=False, highlight=False)


def _from_callable(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """What `module:callable` returns."""
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            make = getattr(make, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"cannot import {name}: {error}") from error
    except Exception as error:
        raise UserError(f"importing {module_name} raised {_describe(error)}") from error
    try:
        made = make()
    except Exception as error:
        raise UserError(f"{name}() raised {_describe(error)}") from error
    match made:
        case (torch.nn.Module() as model, dict(kwargs)):
            return model, kwargs
    raise UserError(f"{name}() must return (a torch.nn.Module, a dict of keyword arguments)")


_LAYER_COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
    "n_layer",
    "n_layers",
)


def _from_hugging_face(
    name: str, attn: Attention | None, batch: int, seq: int, padded: bool, layers: int | None
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model with random weights and its inputs, by the name of a configuration class or a folder."""
    transformers = _need_transformers()
    try:
        if Path(name).is_dir():
            model_config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        elif name.endswith("Config") and hasattr(transformers, name):
            model_config = getattr(transformers, name)()
        else:
            raise UserError(
                f"{name} is neither a configuration class of transformers {transformers.__version__} "
                "(such as BertConfig), nor a folder with config.json, nor module:callable"
            )
        if layers is not None:
            _shrink(model_config, layers)
        limit = getattr(model_config, "max_position_embeddings", None)
        if isinstance(limit, int) and seq > limit > 0:
            raise UserError(f"--seq {seq}: {name} takes at most {limit} tokens")
        options = {"attn_implementation": attn.value} if attn is not None else {}
        torch.manual_seed(0)
        model: Any = transformers.AutoModel.from_config(model_config, **options)
        return model, _hugging_face_inputs(model, batch, seq, padded)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name}: transformers cannot build it: {_describe(error)}") from error


def _shrink(model_config: Any, layers: int) -> None:
    """At most this many layers in each stack of a configuration and of those inside it."""
    for name in _LAYER_COUNTS:
        count = getattr(model_config, name, None)
        if isinstance(count, int) and count > layers:
            setattr(model_config, name, layers)
    for name in ("layer_types", "mlp_layer_types", "depths"):
        value = getattr(model_config, name, None)
        if isinstance(value, list) and name == "depths":
            model_config.depths = [min(depth, layers) for depth in value]
        elif isinstance(value, list):
            setattr(model_config, name, value[:layers])
    for value in list(vars(model_config).values()):
        if hasattr(value, "to_diff_dict"):  # a configuration inside, such as the text part's
            _shrink(value, layers)


def _hugging_face_inputs(model: Any, batch: int, seq: int, padded: bool) -> dict[str, Any]:
    model_config, name = model.config, model.main_input_name
    text = model_config.get_text_config()
    vision = getattr(model_config, "vision_config", model_config)
    inputs: dict[str, Any] = {}
    if name == "input_ids":
        inputs["input_ids"] = torch.randint(3, text.vocab_size, (batch, seq))
        if padded:
            lengths = torch.linspace((seq + 1) // 2, seq, batch).long()
            inputs["attention_mask"] = (torch.arange(seq) < lengths[:, None]).long()
    if name == "pixel_values" or hasattr(model_config, "vision_config"):
        size = vision.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        inputs["pixel_values"] = torch.randn(batch, getattr(vision, "num_channels", 3), height, width)
    if name == "input_features":
        inputs[name] = torch.randn(batch, model_config.num_mel_bins, 2 * model_config.max_source_positions)
    if name == "input_values":
        inputs[name] = torch.randn(batch, 400 * seq)
    if getattr(model_config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = torch.randint(3, text.vocab_size, (batch, seq))
    if not inputs:
        raise UserError(f"inputs of kind {name} are not known here: use module:callable")
    return inputs


def _to_dtype(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _compile(model: torch.nn.Module, kwargs: dict[str, Any], train: bool, dynamic: bool) -> reporting.Report:
    """Compile in isolation, run once, and return what the passes met."""
    compiled = torch.compile(model, dynamic=True if dynamic else None)
    try:
        with _inductor.fresh_compile(), torch.set_grad_enabled(train):
            reporting.clear()
            output = compiled(**kwargs)
            if train:
                loss = sum(x.float().pow(2).mean() for x in _tensors(output) if x.requires_grad)
                if isinstance(loss, torch.Tensor):
                    loss.backward()
            return reporting.report()
    except Exception as error:
        print(f"{PROG}: the model does not compile or run: {_describe(error)}", file=sys.stderr)
        raise typer.Exit(1) from error


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors in a model's output."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


# -- shared ---------------------------------------------------------------------------------------


def _device(wanted: Device) -> torch.device:
    available = torch.cuda.is_available()
    if wanted is Device.cuda and not available:
        raise UserError("--device cuda: torch finds no CUDA device")
    if wanted is Device.auto:
        wanted = Device.cuda if available else Device.cpu
    return torch.device(wanted.value)


def _need_transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UserError("transformers is not installed: pip install 'inductor_fusions[models]'") from error


@contextlib.contextmanager
def _calm() -> Iterator[None]:
    """Without the warnings of torch and transformers about models that are only looked at."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.")
        yield


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {_one_line(str(error))}"


def _one_line(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _short(source: str) -> str:
    """A source line without its code, and without the current folder or the one of installed packages."""
    place = source.partition(": ")[0]
    return place.removeprefix(os.getcwd() + os.sep).rpartition("site-packages" + os.sep)[2]


def _literal(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def _table(*columns: str, header: bool = True) -> Any:
    from rich.table import Table

    table = Table(show_header=header)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _console() -> Console:
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=160)


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=1))
