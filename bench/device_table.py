"""Turn measurements into the tables that the package reads: `configs/devices/<device>.json`.

    python -m bench.device_table bench/results/attention_h200.json --name nvidia_h200
    python -m bench.device_table bench/results/{attention,flex}_h200.json --name nvidia_h200

A row keeps its shape, the tiles of flex attention that were fastest, and, for each kernel, the gain over
stock: the smaller one of the gain in wall time (launches included) and of the gain on the device alone.
Efficient attention gains no more than SDPA's own choice where it is slower than that on the device.
Rows that were too large for stock are dropped.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from inductor_fusions.decisions import tables
from inductor_fusions.decisions.problems import MARGIN
from inductor_fusions.decisions.schema import KERNELS

#: Masks of the measurements that the package does not tell from another kind.
SAME_KIND = {
    "window": "bias_full",
    "window_grad": "bias_full_grad",
    "alibi": "bias_full",
    "bool4d": "bias_batch",
    "full_grad": "bias_full_grad",
}
#: Wall times whose interquartile range is more than this share of their median say nothing.
UNSTEADY = 0.5
SHAPE = ("batch", "heads", "q_len", "kv_len", "head_dim", "dtype", "mask", "train")


def gains(row: dict[str, Any]) -> dict[str, float]:
    """Stock's time over that of each kernel, the worse of wall time and device time; 0 where it is wrong.

    A kernel is left out if only unsteady wall times say something about it. Gains of flex attention and of
    row_bias are reduced by their spread: what may be chance counts as level.
    """
    found: dict[str, float] = {}
    for kernel in KERNELS:
        # In inference SDPA's own choice is the one that counts; the backward is where they differ.
        if kernel == "efficient" and not row["train"]:
            continue
        spread = max(row.get("spread", {}).get(name, 0.0) for name in ("unfused", kernel))
        clocks = [device_times(row)] + [row["times_us"]] * (spread <= UNSTEADY)
        ratios = [times["unfused"] / times[kernel] for times in clocks if {"unfused", kernel} <= {*times}]
        if kernel in row.get("wrong", {}):
            found[kernel] = 0.0  # over the error budget at this shape: never taken near it
        elif ratios:
            ratio = min(ratios)
            # These are measured beside compiling processes: a gain within the spread is none.
            doubt = spread if kernel in ("flex", "row_bias") else 0.0
            found[kernel] = round(ratio if ratio < 1 else max(1.0, ratio * (1 - doubt)), 3)
    device = device_times(row)
    if {"sdpa", "efficient"} <= {*found} and device.get("efficient", 0.0) > device.get("sdpa", math.inf):
        # Its launch may be faster. Within a model that is hidden, and what is slower on the device is not.
        found["efficient"] = min(found["efficient"], found["sdpa"])
    return found


def device_times(row: dict[str, Any]) -> dict[str, float]:
    """Microseconds of each candidate on the device.

    SDPA and its backends have the least time of those that call the same kernels. A time is too
    long where the host was not ahead of the device, as in training at small shapes.
    """
    times: dict[str, float] = row.get("device_us") or {}
    called: dict[str, list[str]] = row.get("kernels", {})
    calls = [name for name in ("sdpa", "flash", "efficient", "cudnn") if name in times and name in called]
    least = {name: min(times[other] for other in calls if called[other] == called[name]) for name in calls}
    return {**times, **least}


def calls_sdpa(row: dict[str, Any], candidate: str) -> bool:
    """Whether the compiled code of a candidate calls a kernel of SDPA."""
    return any("scaled_dot_product" in name for name in row.get("kernels", {}).get(candidate, ()))


def gains_where_stock_fuses(row: dict[str, Any], padded: dict[str, Any] | None) -> dict[str, float]:
    """The gains of a row of which one of stock's own patterns made a call of SDPA.

    That SDPA is no faster there says nothing of the same attention in a form that stock's patterns do not
    match. With a padding mask they do not match; it adds little to stock's time, and more to SDPA's. So
    SDPA gains at least what it gains there, and the others as much more as they are faster than SDPA. If
    that is unknown or no gain, gains below `MARGIN` are left out.

    Args:
        padded: the row of the same shape with a padding mask, or None.
    """
    found = gains(row)
    least = gains(padded).get("sdpa", 0.0) if padded is not None else 0.0
    if least >= MARGIN and found.get("sdpa"):
        return {kernel: round(least * gain / found["sdpa"], 3) for kernel, gain in found.items()}
    return {kernel: gain for kernel, gain in found.items() if gain >= MARGIN}


def merged(files: list[dict[str, Any]]) -> dict[str, Any]:
    """Several files of one device as one, with the header of the first.

    Raises:
        SystemExit: they were measured on different devices, or with different versions of torch.
    """
    first = files[0]
    for other in files[1:]:
        for name in ("device", "torch"):
            if other[name] != first[name]:
                raise SystemExit(f"{name} differs: {first[name]} and {other[name]}")
    return {**first, "rows": [row for file in files for row in file["rows"]]}


def table(measured: dict[str, Any]) -> dict[str, Any]:
    """The table of one file of measurements."""
    rows = []
    padded = {_shape(row): row for row in measured["rows"] if row["mask"] == "pad"}
    for row in measured["rows"]:
        stock_fuses = calls_sdpa(row, "unfused")
        gain = gains_where_stock_fuses(row, padded.get(_shape(row))) if stock_fuses else gains(row)
        if gain:
            kept: dict[str, Any] = {key: row[key] for key in SHAPE}
            kept["mask"] = SAME_KIND.get(kept["mask"], kept["mask"])
            # A training row repeats those of the forward that inference found.
            options = {
                n: v for n, v in row.get("options", {}).items() if n.startswith("bwd_") == row["train"]
            }
            if row["train"] and "gemm_backward" in row:
                kept |= {name: row[name] for name in ("gemm_backward", "visible")}
            rows.append({**kept, "gain": gain, **({"options": options} if "options" in row else {})})
    return {**head(measured), "attention": rows}


def _shape(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in SHAPE if name != "mask")


def head(measured: dict[str, Any]) -> dict[str, Any]:
    """What a table says of where and when it was measured."""
    names = ("device", "torch", "triton", "date")
    return {"schema": 1, **{name: measured[name] for name in names if name in measured}}


def kept(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows that a table has of other sections than attention, by section."""
    data = json.loads(path.read_text()) if path.exists() else {}
    return {
        name: rows for name, rows in data.items() if isinstance(rows, list) and rows and name != "attention"
    }


def put(path: Path, section: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write the rows of a section into a table, in place of those that it has."""
    write(path, {**json.loads(path.read_text()), section: list(rows)})


def merge(path: Path, sections: Mapping[str, Iterable[dict[str, Any]]]) -> None:
    """Write rows into a table, in place of those of the same problems that it has."""
    data = json.loads(path.read_text())

    def same(row: dict[str, Any]) -> str:
        return json.dumps({"masks": 0, **row, "gain": 0, "config": None}, sort_keys=True)

    for name, new in sections.items():
        # Of one problem the row that was measured by itself counts.
        found = sorted((*data.get(name, []), *new), key=lambda row: "gain" in row)
        if found:
            data[name] = list({same(row): row for row in found}.values())
    write(path, data)


def write(path: Path, data: dict[str, Any]) -> None:
    """JSON with one measured row a line, so that diffs can be read."""
    path.write_text(tables.text(data))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measurements", type=Path, nargs="+")
    parser.add_argument("--name", required=True, help="the device's name in configs/devices")
    arguments = parser.parse_args()
    data = table(merged([json.loads(file.read_text()) for file in arguments.measurements]))
    target = Path("configs/devices") / f"{arguments.name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    write(target, {**data, **kept(target)})
    print(f"{len(data['attention'])} rows in {target}")


if __name__ == "__main__":
    main()
