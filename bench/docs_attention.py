"""Sections of docs/performance.md about attention alone: the kernels that take it, and flex attention."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from bench.device_table import gains
from bench.docs_pieces import NONE, Json, get, number, opening, quotient, table
from inductor_fusions.problems import MARGIN

MASKS = (
    ("none", "no mask"),
    ("causal", "causal"),
    ("pad", "padding, `[B, 1, 1, K]`"),
    ("bias_batch", "additive, `[B, 1, Q, K]`"),
    ("bool4d", "boolean, `[B, 1, Q, K]`"),
    ("bias", "bias, `[1, H, Q, K]`"),
    ("bias_grad", "bias with a gradient, `[1, H, Q, K]`"),
    ("bias_full", "bias, `[B, H, Q, K]`"),
    ("full_grad", "bias with a gradient, `[B, H, Q, K]`"),
    ("alibi", "ALiBi and padding (BLOOM)"),
    ("window", "bias and window mask (Swin)"),
)


def attention_section(data: Json) -> str:
    """Summary of a file of bench.tune_attention."""
    rows: list[Json] = data["rows"]
    parts = opening("Attention alone", data)
    wrong = sorted(str(row["key"]) for row in rows if row.get("wrong"))
    text = (
        f"{len(rows)} shapes. Each is timed as written out (stock) and as each kernel that takes it. A gain "
    )
    text += (
        "is the time of stock over that of the kernel, the worse one of the wall time and the time on the "
    )
    text += "device. `none pays` counts shapes where no kernel that the package can emit reaches "
    text += f"{MARGIN:.2f}, or where all are out of the error budget; the package also weighs the nearest "
    text += (
        "shapes. `memory` is what SDPA takes over what stock takes, beyond the inputs (median). `shapes by "
    )
    text += "backend` names what SDPA chose in the forward."
    parts += [text, _kernels(rows)]
    if wrong:
        parts.append(
            f"Out of the error budget, and so never chosen near these shapes ({len(wrong)}): "
            + "; ".join(f"{key}" for key in wrong)
            + "."
        )
    else:
        parts.append("No kernel was out of the error budget.")
    parts.append(_shapes(rows))
    return "\n\n".join(parts)


def _kernels(rows: Sequence[Json]) -> str:
    body = []
    dtypes = sorted({str(row["dtype"]) for row in rows}, key=lambda d: (d != "bfloat16", d))
    known = [name for name, _ in MASKS]
    others = sorted({str(row["mask"]) for row in rows} - set(known))
    titles = dict(MASKS)
    for dtype in dtypes:
        for mask in (*known, *others):
            for train in (False, True):
                group = [r for r in rows if (r["dtype"], r["mask"], r["train"]) == (dtype, mask, train)]
                if group:
                    kind = f"{titles.get(mask, mask)}, {'training' if train else 'inference'}, {dtype}"
                    body.append((kind, *_kernel_row(group)))
    columns = ["mask", "shapes", "least gain", "median gain", "largest gain", "none pays", "memory"]
    return table([*columns, "shapes by backend"], body)


def _kernel_row(group: Sequence[Json]) -> tuple[str, ...]:
    best = [max(gains(row).values(), default=0.0) for row in group]
    known = [gain for gain in best if gain > 0]
    memory = [
        get(row, "peak_mib", "sdpa") / unfused  # type: ignore[operator]
        for row in group
        if get(row, "peak_mib", "sdpa") is not None and (unfused := get(row, "peak_mib", "unfused"))
    ]
    backends = Counter(
        name.removeprefix("_scaled_dot_product_").replace("_attention", "").replace("_for_cpu", "")
        for row in group
        for name in (row.get("kernels") or {}).get("sdpa", ())[:1]
    )
    return (
        str(len(group)),
        number(min(known, default=None), 2),
        number(statistics.median(known) if known else None, 2),
        number(max(known, default=None), 2),
        str(sum(gain < MARGIN for gain in best)),
        number(statistics.median(memory) if memory else None, 2),
        ", ".join(f"{name} {count}" for name, count in backends.most_common()) or NONE,
    )


def _shapes(rows: Sequence[Json]) -> str:
    """Times of every shape, in microseconds."""
    names = ("unfused", "sdpa", "cudnn", "flash", "efficient", "short")
    body = [
        (
            str(row["key"]),
            *(number(get(row, "times_us", name), 1) for name in names),
            number(max(gains(row).values(), default=None), 2),
        )
        for row in rows
    ]
    return table(("shape", "stock", *names[1:], "best gain"), body)


def flex_section(data: Json) -> str:
    """Every shape of a file of bench.tune_flex."""
    rows: list[Json] = data["rows"]
    parts = opening("Flex attention", data)
    parts.append(
        f"{len(rows)} attentions whose masks are predicates, or whose scores are changed, as models write "
        "them: stock, SDPA with the mask as a dense tensor, and flex attention with its block mask computed "
        "in each call. Times are microseconds; memory is beyond the inputs."
    )
    columns = ("case", "stock", "sdpa", "flex", "stock / flex", "sdpa / flex", "MiB stock", "MiB flex")
    body = [
        (
            str(row["key"]),
            *(number(get(row, "times_us", name), 0) for name in ("unfused", "sdpa", "flex")),
            *(number(quotient(row, name, "flex"), 2) for name in ("unfused", "sdpa")),
            *(number(get(row, "peak_mib", name), 0) for name in ("unfused", "flex")),
        )
        for row in rows
    ]
    parts.append(table(columns, body))
    left = [f"{row['key']}: {n} ({why})" for row in rows for n, why in (row.get("wrong") or {}).items()]
    parts.append(f"Out of the error budget: {'; '.join(left) or 'none'}.")
    return "\n\n".join(parts)
