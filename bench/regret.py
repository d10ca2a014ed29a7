"""What the decisions lose where nothing is measured: parts of the tables are left out, and estimated.

    python -m bench.regret --json bench/results/regret_tables.json

Left out are each width in turn, in every section (of attention each shape), of a table that is alone and of
one beside those of other GPUs; and each GPU: its problems, of kinds that other GPUs have rows of, are decided
from those rows and judged by its own. Of each row: is a kernel chosen, and what does it gain?

No device is needed. What the configurations of grouped GEMMs lose: `bench.tile_model`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from bench.common import Json
from inductor_fusions import config
from inductor_fusions.decisions import Query, decide, devices, tables
from inductor_fusions.decisions.problems import MARGIN, SECTIONS, Row, has_adapters
from inductor_fusions.decisions.tables import Table

#: Of the file: it is made of tables, without a device.
HEAD: Json = {"schema": 1, "device": "none", "torch": "any", "command": "python -m bench.regret"}
#: A row that is chosen and slower than this counts.
SLOW, SLOWER = 0.98, 0.95
#: What `width` of a row of each section is left out together.
WIDTHS: dict[str, Callable[[Row], Hashable]] = {
    "attention": lambda row: (row["batch"] * row["heads"], row["q_len"], row["kv_len"], row["head_dim"]),
    "block_mm": lambda row: (str(row["n"]), str(row["k"]), str(row["m"])),
    "lora": lambda row: (str(row["inner"]), str(row["outer"])),
    "lora_sums": lambda row: (str(row["inner"]), row["columns"]),
    "lora_dropout": lambda row: (row["inner"], row["outer"]),
    "lora_merged": lambda row: (row["inner"], row["outer"]),
    "narrow_mm": lambda row: row["width"],
    "dot_interaction": lambda row: (row["features"], row["width"]),
    "outer_product_linear": lambda row: (row["p"], row["q"], row["columns"], row["rows"]),
}


@dataclass
class Loss:
    """What was lost in a section.

    Attributes:
        rows, chosen: how many there are, and how many of them a kernel was chosen for.
        best, kept: the logarithms of all gains from `MARGIN` on, and of those that the chosen kernels have.
        slow, slower: how many chosen ones are below `SLOW` and `SLOWER` of stock.
        worst: the least gain of them.
    """

    rows: int = 0
    chosen: int = 0
    best: float = 0.0
    kept: float = 0.0
    slow: int = 0
    slower: int = 0
    worst: float = math.inf

    def add(self, gains: dict[str, float], kernel: str | None) -> None:
        """Count a row that has these gains, for which a kernel was chosen."""
        self.rows += 1
        most = max(gains.values())
        self.best += math.log(most) if most >= MARGIN else 0.0
        if kernel is not None:
            gain = max(gains[kernel], 0.05)
            self.chosen += 1
            self.kept += math.log(gain)
            self.slow, self.slower = self.slow + (gain < SLOW), self.slower + (gain < SLOWER)
            self.worst = min(self.worst, gain)

    def to_json(self) -> Json:
        """Rounded, with the share of the gain that is kept."""
        worst = round(self.worst, 3) if self.chosen else None
        return {
            "rows": self.rows, "chosen": self.chosen,
            "kept": round(self.kept / self.best, 4) if self.best else None,
            "below_0.98": self.slow, "below_0.95": self.slower, "worst": worst,
        }  # fmt: skip


def gains(section: str, row: Row) -> dict[str, float]:
    """What a row says each kernel gains; {} of rows that are of tiles alone."""
    gain = row.get("gain")
    if gain is None or not SECTIONS[section].gains or (section == "block_mm" and has_adapters(row)):
        return {}
    return dict(gain) if isinstance(gain, dict) else {section: float(gain)}


def widths_left_out(table: Table, name: str, others: dict[str, Table]) -> dict[str, Loss]:
    """Of each section, every width estimated from the others, and from the tables of other devices."""
    found: dict[str, Loss] = {}
    device = torch.device("cuda" if name != "cpu" else "cpu")
    for section, width in WIDTHS.items():
        rows = [row for row in table.get(section, ()) if gains(section, row)]
        for left_out in dict.fromkeys(map(width, rows)):
            kept = [row for row in table[section] if width(row) != left_out]
            with only({**others, name: Table({**table, section: kept})}, name):
                for row in rows:
                    if width(row) == left_out:
                        found.setdefault(section, Loss()).add(*outcome(section, row, device))
    return found


def other_gpus(found: dict[str, Table], name: str) -> dict[str, Table]:
    """The tables of the other GPUs."""
    return {each: table for each, table in found.items() if each not in (name, "cpu")}


def devices_left_out(found: dict[str, Table], name: str) -> dict[str, Loss]:
    """Every row of this GPU that other GPUs have comparable rows of, decided from those."""
    losses: dict[str, Loss] = {}
    others = other_gpus(found, name)
    for section in WIDTHS:
        same = SECTIONS[section].same
        kinds = {same(row) for table in others.values() for row in table.get(section, ())}
        rows = [row for row in found[name].get(section, ()) if gains(section, row) and same(row) in kinds]
        own = Table({key: value for key, value in found[name].items() if key != section})
        with only({**others, name: own}, name):
            for row in rows:
                losses.setdefault(section, Loss()).add(*outcome(section, row, torch.device("cuda")))
    return losses


def outcome(section: str, row: Row, device: torch.device) -> tuple[dict[str, float], str | None]:
    """The gains of a row, and the kernel that is decided on for its problem."""
    kernels = gains(section, row)
    measured = SECTIONS[section].measured
    problem = {name: value for name, value in row.items() if name not in measured}
    return kernels, decide(Query(section, problem, tuple(kernels)), device).kernel


@contextlib.contextmanager
def only(found: dict[str, Table], name: str) -> Iterator[None]:
    """Inside, these are the tables, and a device of this name is asked for."""
    named = {"names": lambda: sorted(found), "device_name": lambda device: name}
    with (
        mock.patch.multiple(tables, load=found.get, **named),
        mock.patch.object(devices, "hardware", lambda device: devices.known(name)),
    ):
        yield


def measure(names: list[str]) -> Iterator[tuple[str, str, Loss]]:
    """(what was left out, section, loss)."""
    found = {name: table for name in names if (table := tables.load(name)) is not None}
    with config.patch(estimate=True, policy="profitable"):
        for name, table in found.items():
            for section, loss in widths_left_out(table, name, {}).items():
                yield f"{name}, one width left out", section, loss
        for name in sorted(found.keys() - {"cpu"}):
            for section, loss in widths_left_out(found[name], name, other_gpus(found, name)).items():
                yield f"{name}, one width left out beside other GPUs", section, loss
        for name in sorted(found.keys() - {"cpu"}):
            for section, loss in devices_left_out(found, name).items():
                yield f"{name}, from the rows of other GPUs", section, loss


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="append", help="a table's name; all by default")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    names = arguments.table or tables.names()
    found: dict[str, dict[str, Json]] = {}
    print(f"{'section':22} {'rows':>5} {'chosen':>6} {'kept':>7} {'<0.98':>6} {'<0.95':>6} {'worst':>6}")
    for what, section, loss in measure(names):
        if what not in found:
            print(what)
        row = found.setdefault(what, {})[section] = loss.to_json()
        print(f"{section:22} " + " ".join(f"{value!s:>6}" for value in row.values()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**HEAD, "left_out": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
