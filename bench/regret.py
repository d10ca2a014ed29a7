"""What the decisions lose where nothing is measured: parts of the tables are left out, and estimated.

    python -m bench.regret --json bench/results/regret_tables.json

Left out are each width in turn, in every section (of attention each shape), and each GPU: its problems, of
kinds that other GPUs have rows of, are decided from those rows and judged by its own. Of each row: is a
kernel chosen, and what does it gain?

Of grouped GEMMs whose configurations were all timed (`first_us` of `bench.tune_projections`): how much
longer than the fastest one does the configuration take that is chosen without rows of this width? No device
is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import projections, tune_projections
from bench.common import Json
from inductor_fusions import config
from inductor_fusions.block_mm import cost, heuristics
from inductor_fusions.decisions import Query, decide, devices, tables
from inductor_fusions.decisions.problems import FEW_ROWS, MARGIN, SECTIONS, Row, has_adapters
from inductor_fusions.decisions.tables import Table

#: Of the file: it is made of tables, without a device.
HEAD: Json = {"schema": 1, "device": "none", "torch": "any", "command": "python -m bench.regret"}
#: A row that is chosen and slower than this counts.
SLOW, SLOWER = 0.98, 0.95
#: Where all configurations of problems were timed, and how many of one at least.
RESULTS = Path(__file__).parent / "results"
TIMED = {"nvidia_h100_80gb_hbm3": "projections_h100.json", "nvidia_h200": "projections_h200.json"}
FEWEST = 6
#: What `width` of a row of each section is left out together.
WIDTHS: dict[str, Callable[[Row], Hashable]] = {
    "attention": lambda row: (row["batch"] * row["heads"], row["q_len"], row["kv_len"], row["head_dim"]),
    "block_mm": lambda row: (str(row["n"]), str(row["k"]), str(row["m"])),
    "lora": lambda row: (str(row["inner"]), str(row["outer"])),
    "lora_sums": lambda row: (str(row["inner"]), row["columns"]),
    "lora_dropout": lambda row: (row["inner"], row["outer"]),
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


def widths_left_out(table: Table, name: str) -> dict[str, Loss]:
    """Of each section, every width estimated from the others."""
    found: dict[str, Loss] = {}
    device = torch.device("cuda" if name != "cpu" else "cpu")
    for section, width in WIDTHS.items():
        rows = [row for row in table.get(section, ()) if gains(section, row)]
        for left_out in dict.fromkeys(map(width, rows)):
            kept = [row for row in table[section] if width(row) != left_out]
            with only({name: Table({**table, section: kept})}, name):
                for row in rows:
                    if width(row) == left_out:
                        found.setdefault(section, Loss()).add(*outcome(section, row, device))
    return found


def devices_left_out(found: dict[str, Table], name: str) -> dict[str, Loss]:
    """Every row of this GPU that other GPUs have comparable rows of, decided from those."""
    losses: dict[str, Loss] = {}
    others = {each: table for each, table in found.items() if each not in (name, "cpu")}
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


def tiles_left_out(table: Table, name: str, results: Path) -> Json:
    """What is lost by the configurations that are chosen, and by those of the nearest problem."""
    lost: dict[str, list[float]] = {"nearest": [], "chosen": []}
    for result in json.loads(results.read_text())["rows"]:
        times = result.get("first_us", {})
        if result["tokens"] <= FEW_ROWS or len(times) < FEWEST:
            continue
        found = {n: tuple(result[n]) for n in ("inner", "outer")}
        row = projections.Row(result["kind"], result["tokens"], dtype=result["dtype"], **found)
        row = replace(row, activation=result["activation"], conv1d=result.get("conv1d", False))
        with FakeTensorMode():
            problem = projections.problem(row, projections.make(row, "cpu", 0))
        width = WIDTHS["block_mm"]
        kept = [each for each in table["block_mm"] if width(each) != width(result["problem"])]
        hopper = mock.patch.object(heuristics, "capability", lambda device: 90)
        with only({name: Table({**table, "block_mm": kept})}, name), hopper:
            for how, losses in lost.items():
                with mock.patch.object(cost, "is_modelled", return_value=how == "chosen"):
                    chosen = tune_projections.name_of(
                        heuristics.choose(problem, torch.device("cuda"), row.tokens)
                    )
                if chosen in times:
                    losses.append(times[chosen] / min(t for n, t in times.items() if n != "stock") - 1)
    return {how: summary(losses) for how, losses in lost.items()}


def summary(losses: list[float]) -> Json:
    """Of relative losses of time."""
    tenth = sorted(losses)[int(0.9 * len(losses))]
    found = {"mean": statistics.mean(losses), "nine_tenths_below": tenth, "most": max(losses)}
    return {"problems": len(losses), **{name: round(value, 3) for name, value in found.items()}}


def measure(names: list[str]) -> Iterator[tuple[str, str, Loss]]:
    """(what was left out, section, loss)."""
    found = {name: table for name in names if (table := tables.load(name)) is not None}
    with config.patch(estimate=True, policy="profitable"):
        for name, table in found.items():
            for section, loss in widths_left_out(table, name).items():
                yield f"{name}, one width left out", section, loss
        for name in found:
            if name != "cpu":
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
    tiles = {}
    for name, file in TIMED.items():
        if name in names and (table := tables.load(name)) is not None:
            tiles[name] = tiles_left_out(table, name, RESULTS / file)
            print(f"{name}, configurations of grouped GEMMs, one width left out: {tiles[name]}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**HEAD, "left_out": found, "tiles": tiles}, indent=1) + "\n")


if __name__ == "__main__":
    main()
