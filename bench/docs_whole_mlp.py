"""docs/whole_mlp.md: when fusing parts of an MLP pays, from the results of bench.whole_mlp."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench.docs_linears import details, gain, summary
from bench.docs_pieces import NONE, NOTICE, Json, get, number, opening, table
from inductor_fusions.problems import MARGIN

TEXT = """# An MLP in one kernel?

    y = gelu(x W1 + b1) W2 + b2

The product, the bias and the activation of the first half can be one kernel, and so can the whole MLP. This
page says when either pays, from measurements by `python -m bench.whole_mlp`.

## What there is to gain

With T tokens, width W, hidden width H and elements of s bytes, the two products take 4 T W H FLOPs however
they are split. What fusing saves is memory traffic of the hidden layer:

| form | bytes of the hidden layer that are moved |
| --- | ---: |
| product, then bias and activation, then product | 4 s T H |
| bias and activation in the first product | 2 s T H |
| one kernel | 0 |

Each step saves 2 s T H bytes, beside 4 T W H FLOPs: T and H cancel, and the width decides. On a device with
P FLOP/s and B bytes a second, moving the hidden layer once more takes s P / (2 W B) times as long as the
products do at their best. That is much for narrow layers, and little for wide ones.

One kernel pays for it elsewhere:

- **Registers.** A thread block has to keep its tokens' whole result, T' x W sums in float32, until the last
  hidden column is done: from some hundred columns on only few tokens fit, and each token block reads all
  weights anew.
- **Weights.** Both matrices go through each thread block, 2 s W H bytes from the L2 cache. Two products
  choose tiles for each of them.
- **Few tokens.** The loop over hidden columns is serial: with few tokens, few thread blocks have work,
  where a product alone is split over its columns.
- **Training.** The backward reads the hidden layer, before the activation or behind it: it is written after
  all, or computed again.

So the package has no fusion of whole MLPs. Bias and activation are an epilogue (`linear_epilogue`), where a
table says that it pays, and with `max_autotune` stock has the same choice. It pays twice: the hidden layer is
moved half as often, and one launch is left out, which is what counts for few tokens. It costs where the
activation is long: a thread block computes it after its product, while the tensor cores wait.
"""

COMMAND = """## Measurements

Nothing is measured yet. `python -m bench.whole_mlp --out bench/results/whole_mlp_DEVICE.json` measures it,
and `make docs` writes it here.
"""

#: Variants in the order of the columns; what is compared with them is in the first group.
NAMES = {
    "up": ("stock", "epilogue", "triton", "bare"),
    "mlp": ("stock", "epilogue", "max_autotune", "whole"),
}
TITLES = {
    "up": "The first half: product, bias and activation",
    "mlp": "The whole MLP",
}


def page(results: Path) -> str:
    """The text of docs/whole_mlp.md."""
    parts = [NOTICE, TEXT.strip()]
    for path in sorted(results.glob("whole_mlp_*.json")):
        parts.append(section(json.loads(path.read_text("utf-8"))))
    if len(parts) == 2:
        parts.append(COMMAND.strip())
    for path in sorted(results.glob("projections_*.json")):
        parts += epilogues(json.loads(path.read_text("utf-8")))
    for path in sorted(results.glob("mlp_training_*.json")):
        parts += training(json.loads(path.read_text("utf-8")))
    return "\n\n".join(parts) + "\n"


def epilogues(data: Json) -> list[str]:
    """What a file of bench.tune_projections says of linears with their activation."""
    rows = sorted(
        (row for row in data["rows"] if row["kind"] == "linear" and gain(row)),
        key=lambda row: (row["inner"], str(row["activation"]), row["tokens"], str(row["key"])),
    )
    if not rows:
        return []
    pays = sum((gain(row) or 0.0) >= MARGIN for row in rows)
    text = (
        "A linear with its bias and activation in the block GEMM, as `linear_epilogue` emits it, is faster "
        f"than stock by {MARGIN - 1:.0%} or more in {pays} of {len(rows)} cases. Times are microseconds, of "
        "CUDA graphs over operands that are not in the L2 cache; stock is the better one of default and "
        "max-autotune, where both were measured. **bare** is the library's product without bias and "
        "activation: what the whole would take if the rest were free."
    )
    kinds: dict[str, list[Json]] = {}
    for row in rows:
        few = "up to 128 tokens" if row["tokens"] <= 128 else "more tokens"
        kinds.setdefault(f"{row['activation']}, {few}", []).append(row)
    return [
        f"## The first half alone, {data.get('device', '?')}",
        f"torch {data.get('torch', '?')}, {str(data.get('date', '?'))[:10]}; "
        "[measurements.html](measurements.html) has the commands.",
        text,
        summary("activation", "cases", dict(sorted(kinds.items())), "bare"),
        details("case", rows, "bare", "linear "),
    ]


def training(data: Json) -> list[str]:
    """What a file of bench.mlp_training says of forward and backward."""
    names = ("stock", "max_autotune", "gemms", "up", "up_triton", "hidden", "hidden_triton")
    body = []
    for row in data["rows"]:
        times = row.get("device_us") or row["times_us"]
        most = (number(get(row, "limits", name), 2) for name in ("free", "triton"))
        # Rows from before the script tried all templates say so.
        key = row["key"] + ("" if row.get("persistent") else ", without persistent templates")
        body.append((key, *(number(times.get(name), 0) for name in names), *most))
    text = (
        "A step of forward and backward, in microseconds on the device alone. **gemms** are the GEMMs of the "
        "step alone, by the library: the limit if the activation and its gradient were free. **up** and "
        "**hidden** are those of them that would carry an epilogue, the product in front of the activation "
        "and the gradient of the hidden layer; **triton** beside them is the fastest of Inductor's Triton "
        "templates for the same product, without an epilogue. The last two columns are the most that fusing "
        "can gain over the faster stock: with epilogues in kernels as fast as the library's, and in Triton's."
    )
    head = ("case", "stock", "max-autotune", "gemms", "up", "triton", "hidden", "triton", "most", "in Triton")
    return [
        f"## Training, {data.get('device', '?')}",
        f"torch {data.get('torch', '?')}, {str(data.get('date', '?'))[:10]}, by `{data.get('command', '?')}`",
        text,
        table(head, body),
    ]


def section(data: Json) -> str:
    """Every row of a file of bench.whole_mlp."""
    parts = opening("Measurements", data)
    peak = data.get("peak") or {}
    for dtype, rate in (peak.get("tflops") or {}).items():
        parts.append(
            f"Rates measured here: {number(rate, 1)} TFLOP/s in {dtype}, {number(peak.get('gb_per_s'), 0)} "
            "GB/s. `roofline` is the least time that they allow for what has to be moved and computed."
        )
    parts.append(
        "Times are microseconds on the device alone, where that was measured. **stock** is `torch.compile`: "
        "a product of the library and a pointwise kernel. **epilogue** has bias and gelu in the library's "
        "product. **triton** has them in a Triton kernel. **bare** is the product without them. **whole** is "
        "one kernel."
    )
    for part, names in NAMES.items():
        rows = sorted(
            (row for row in data["rows"] if row["part"] == part), key=lambda r: (r["width"], r["tokens"])
        )
        if rows:
            parts += [f"### {TITLES[part]}", answer(part, rows), _rows(rows, names)]
    return "\n\n".join(parts)


def usable(row: Json) -> dict[str, float]:
    """Times of the variants that do all of the work and are in the error budget."""
    clock = "device_us" if row.get("device_us") else "times_us"
    return {
        name: value
        for name in NAMES[row["part"]]
        if name != "bare"
        and name not in row.get("wrong", ())
        and (value := get(row, clock, name)) is not None
    }


def answer(part: str, rows: Sequence[Json]) -> str:
    """What the rows say to the question."""
    fused = ("whole",) if part == "mlp" else ("epilogue", "triton")
    wins, compared = [], 0
    for row in rows:
        times = usable(row)
        ours = [times[name] for name in fused if name in times]
        others = [value for name, value in times.items() if name not in fused]
        if ours and others:
            compared += 1
            if min(others) / min(ours) >= MARGIN:
                wins.append((row, min(others) / min(ours)))
    what = "One kernel" if part == "mlp" else "A product with bias and activation in it"
    against = "everything else" if part == "mlp" else "the product and a pointwise kernel"
    text = f"{what} is faster than {against}, by {MARGIN - 1:.0%} or more, in {len(wins)} of {compared} cases"
    if not wins:
        return text + "."
    widths = Counter(row["width"] for row, _ in wins)
    of = Counter(row["width"] for row in rows)
    where = ", ".join(f"{count} of {of[width]} at width {width}" for width, count in sorted(widths.items()))
    row, most = max(wins, key=lambda win: win[1])
    return (
        f"{text}: {where}. The most is {most:.2f} times, with {row['tokens']} tokens of width {row['width']}."
    )


def _rows(rows: Sequence[Json], names: Sequence[str]) -> str:
    body = []
    for row in rows:
        clock = "device_us" if row.get("device_us") else "times_us"
        times = usable(row)
        least = get(row, "roofline_us", "whole" if row["part"] == "mlp" else "epilogue")
        body.append(
            (
                f"width {row['width']}, {row['tokens']} tokens",
                *(
                    "wrong" if name in row.get("wrong", ()) else number(get(row, clock, name), 1)
                    for name in names
                ),
                number(get(row, "roofline_us", "unfused"), 1),
                number(least, 1),
                min(times, key=lambda name: times[name]) if times else NONE,
            )
        )
    return table(("case", *names, "roofline, unfused", "roofline, fused", "fastest"), body)
