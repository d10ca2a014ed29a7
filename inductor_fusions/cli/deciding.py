"""`tune --why`: the decision for one problem, and the rows behind it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import torch

from .. import _inductor, decisions
from ..decisions.problems import SECTIONS
from ..decisions.schema import KERNELS
from ..explaining import absent
from ..fusions.attention.short import plan
from .common import Device, UserError, console, find_device, table


def show_decision(section: str, problem: str, target: str | None, device: Device) -> None:
    """Print the kernel, where the decision comes from, what it is expected to gain, and the rows behind it.

    Args:
        problem: a row of it as JSON, without what was measured.
        target: a GPU that need not be in this machine.
        device: where, without a target.

    Raises:
        UserError: there is no such section, problem or device.
    """
    known = [name for name, each in SECTIONS.items() if each.gains]
    if section not in known:
        raise UserError(f"tables have no section {section}; valid sections: {', '.join(known)}")
    row = _read(section, problem)
    with contextlib.ExitStack() as stack:
        where = find_device(device) if target is None else torch.device("cuda", 0)
        if target is not None:
            stack.enter_context(_inductor.absent_device(absent_gpu(target)))
        kernels = _kernels_of(row) if section == "attention" else ()
        found = decisions.decide(decisions.Query(section, row, kernels), where)
    out = console()
    known_as = f"{found.kernel}, {found.note}" if found.kernel is not None else f"stock: {found.reason}"
    out.print(known_as, markup=False, highlight=False)
    if not found.rows:
        return
    columns = list(dict.fromkeys(name for each in found.rows for name in each))
    cells = [tuple(json.dumps(each[name]) if name in each else "" for name in columns) for each in found.rows]
    shown = table(*columns)
    for row_cells in dict.fromkeys(cells):  # the row of the problem itself bounds it from both sides
        shown.add_row(*row_cells)
    out.print(shown)


def _kernels_of(attention: dict[str, Any]) -> tuple[str, ...]:
    """The kernels for an attention of these sizes."""
    longest = max(attention["q_len"], attention["kv_len"])
    is_short = not plan.too_large(longest, attention["head_dim"], getattr(torch, attention["dtype"]))
    return tuple(name for name in KERNELS if name != "short" or is_short)


def absent_gpu(target: str) -> _inductor.AbsentDevice:
    """The stand-in for a GPU that need not be in this machine.

    Raises:
        UserError: nothing is known of it.
    """
    try:
        return absent(target)
    except ValueError as error:
        raise UserError(f"--target: {error}") from None


def _read(section: str, problem: str) -> dict[str, Any]:
    try:
        row = json.loads(problem)
        SECTIONS[section].check(row, is_problem=True)
    except ValueError as error:
        what = f"{problem} is not JSON" if isinstance(error, json.JSONDecodeError) else error
        columns = ", ".join((*SECTIONS[section].columns, *SECTIONS[section].may))
        raise UserError(f"--why: {what}; the columns of {section} are {columns}") from None
    found: dict[str, Any] = row
    return found
