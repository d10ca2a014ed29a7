"""`env` and `list`: versions, devices, hooks, settings and tables; all fusions."""

from __future__ import annotations

import os
import platform
import statistics
from pathlib import Path
from typing import Any

import torch

from .. import __version__, _inductor, config, registry
from ..decisions import machine, problems, tables
from ..fusion import Fusion
from ..variables import SWITCHES
from . import app
from .common import EXIT_CODES, Device, JsonFlag, console, find_device, print_json
from .common import table as table_of

PACKAGE = __name__.partition(".")[0]
#: What is printed for toggles that have no value.
UNSET = {"skip": "none", "max": "all"}
#: Fusions of linears share a section of the tables: the kinds of problem of each.
BLOCK_MM = {"qkv": ("shared_a", "shared_b", "sum"), "gated_mlp": ("gated",), "linear_epilogue": ("linear",)}


@app.command(epilog=EXIT_CODES)
def env(as_json: JsonFlag = False) -> None:
    "Show versions, devices, installed hooks, current settings and the tables found."
    found = environment()
    if as_json:
        print_json(found)
        return
    table = table_of("", "", header=False)
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
        value = toggle["value"] if toggle["value"] not in (None, "") else UNSET[toggle["name"]]
        table.add_row(toggle["variable"], f"{value} ({toggle['from']})")
    table.add_section()
    tuned = found["tables"]
    for folder, count in tuned["folders"].items():
        table.add_row("tables in", f"{folder}: " + ("no such folder" if count is None else f"{count} files"))
    for entry in tuned["files"]:
        rows = ", ".join(f"{count} of {section}" for section, count in entry["sections"].items())
        measured = ", ".join(f"{what} {version}" for what, version in entry["measured_with"].items())
        told = f"rows: {rows}; measured with {measured}"
        table.add_row(entry["file"], told if entry["usable"] else "not usable")
    own = "found" if tuned["found"] else "none: estimated from other devices, or left to stock"
    if tuned["hint"]:
        own += f"; {tuned['hint']}"
    table.add_row(f"for this device: {tuned['device']}.json", own)
    console().print(table)


def environment() -> dict[str, Any]:
    """What `env` shows, as plain data."""
    versions: dict[str, str | None] = {"inductor_fusions": __version__, "torch": str(torch.__version__)}
    versions |= {name: machine.version(name) or None for name in ("triton", "transformers", "peft")}
    versions["python"] = platform.python_version()
    device = find_device(Device.auto)
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
        "tables": {
            "device": name,
            "found": tables.load(name) is not None,
            "hint": another_triton(tables.load(name), versions["triton"]) if device.type == "cuda" else "",
            "folders": _folders(),
            "files": _table_files(),
        },
    }


def another_triton(table: dict[str, Any] | None, installed: str | None) -> str:
    """A hint if the kernels of a table were compiled by another release of Triton; else ""."""
    measured = (table or {}).get("triton")
    if not measured or not installed or measured.split(".")[:2] == installed.split(".")[:2]:
        return ""
    told = f"measured with Triton {measured}, and this is {installed}"
    return f"{told}: `python -m inductor_fusions tune` measures anew"


def _describe_pass(item: Any) -> str:
    kind = type(item)
    if kind.__module__.partition(".")[0] == PACKAGE:
        names = ", ".join(fusion.name for fusion in item.fusions)
        return f"{kind.__name__}: {names or 'no fusion'}"
    return getattr(item, "__qualname__", f"{kind.__module__}.{kind.__qualname__}")


def _toggles() -> list[dict[str, Any]]:
    found = []
    toggles: Any = config  # install_config_module() gives it methods that mypy does not see
    defaults = {name: toggles._config[name].default for name in toggles.get_config_copy()}
    defaults = {name: int(value) if isinstance(value, bool) else value for name, value in defaults.items()}
    for name, value in toggles.get_config_copy().items():
        if name.startswith("_") or not name.islower():  # what else the module holds
            continue
        variable = config.variable_of(name)
        shown = int(value) if isinstance(value, bool) else value  # as the variable takes it
        given = os.environ.get(variable)
        if given is not None and isinstance(value, bool):  # true, on and yes are 1
            given = str(int(SWITCHES.get(given.lower(), not value)))
        source = "default" if given is None else "environment"
        if str(shown) != (str(defaults[name]) if given is None else given) and value is not None:
            source = "assigned"
        found.append({"name": name, "variable": variable, "value": shown, "from": source})
    return found


def _table_files() -> list[dict[str, Any]]:
    loaded = {name: tables.load(name) for name in tables.names()}
    return [
        {
            "file": f"devices/{name}.json",
            "usable": table is not None,
            "measured_with": {
                what: version for what, version in (table or {}).items() if what in ("torch", "triton")
            },
            "rows": len((table or {"attention": ()})["attention"]),
            "sections": {
                section: len(rows) for section, rows in (table or {}).items() if isinstance(rows, list)
            },
        }
        for name, table in loaded.items()
    ]


def _folders() -> dict[str, int | None]:
    """The folders of tables and of measurements, with the number of their files; None: there is no folder."""
    places = [Path(os.path.normpath(str(place))) for place in (*tables.folders(), machine.folder())]
    return {str(place): len([*place.glob("*.json")]) if place.is_dir() else None for place in places}


@app.command("list", epilog=EXIT_CODES)
def list_fusions(as_json: JsonFlag = False) -> None:
    "List the fusions: what each does, its setting, and its measured gain on each device."
    found = [_describe_fusion(fusion) for fusion in registry.of()]
    problems = [
        {"name": entry.name, "package": entry.package, "problem": entry.problem}
        for entry in registry.foreign()
        if entry.problem
    ]
    if as_json:
        print_json({"schema": 1, "fusions": found, "not_loaded": problems})
        return
    table = table_of(
        "fusion", "stage", "toggle", "what it does", "median gain of the shapes where it is faster"
    )
    for row in found:
        name = f"{row['name']}\n({row['package']})" if row["package"] else row["name"]
        toggle = f"{row['variable']} ({'on' if row['on'] else 'off'})"
        gains = [
            f"{device}: {g['median']:.2f}x, up to {g['best']:.2f}x, at {g['pays']} of {g['shapes']} shapes"
            for device, g in row["gains"].items()
        ]
        table.add_row(name, row["stage"], toggle, row["summary"], "\n".join(gains) or "-")
    for problem in problems:
        table.add_row(
            f"{problem['name']}\n({problem['package']})", "", "", f"not loaded: {problem['problem']}"
        )
    console().print(table)


def _describe_fusion(fusion: Fusion) -> dict[str, Any]:
    toggle = config.toggle_of(fusion.name)
    package = next((e.package for e in registry.foreign() if fusion in e.fusions), "")
    return {
        "name": fusion.name,
        "package": package,
        "stage": fusion.stage,
        "variable": config.variable_of(toggle) if toggle else f"INDUCTOR_FUSIONS_SKIP={fusion.name}",
        "on": config.is_on(fusion.name),
        "summary": fusion.summary,
        "gains": {device: gains for device in _devices() if (gains := _gains(device, fusion.name))},
    }


def _devices() -> list[str]:
    """Every device with a table, this one first."""
    names = [entry["file"].rpartition("/")[2].removesuffix(".json") for entry in _table_files()]
    return sorted(names, key=lambda name: (name != tables.device_name(find_device(Device.auto)), name))


def _gains(device: str, fusion: str) -> dict[str, Any]:
    """Measured gains of a fusion on a device: shapes, those where it pays, median and best gain."""
    table: dict[str, Any] = tables.load(device) or {}
    if fusion in BLOCK_MM:
        rows = [row for row in table.get("block_mm", ()) if row["kind"] in BLOCK_MM[fusion]]
    else:
        rows = table.get(fusion, ())
    best = [_gain(row) for row in rows]
    pays = [gain for gain in best if gain >= problems.MARGIN]
    if not pays:
        return {}
    return {"shapes": len(best), "pays": len(pays), "median": statistics.median(pays), "best": max(pays)}


def _gain(row: dict[str, Any]) -> float:
    """The gain in a row, of its fastest kernel; 0 if there is none."""
    gain = row["gain"]
    if isinstance(gain, dict):
        return max(gain.values(), default=0.0)
    return float(gain) if row.get("config", {}) is not None else 0.0
