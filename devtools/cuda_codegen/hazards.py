"""Registers that a matrix instruction still reads while the next iteration of its loop writes them.

On Hopper the left operand of an asynchronous matrix product may lie in registers, which must stay as they are
until the product is waited for (PTX ISA, "wgmma.mma_async": asynchronous proxy and register accesses). Where
nothing in a loop but the next product takes its result, Triton 3.6 and 3.7 leave the last products of an
iteration under way (`warp_group_dot_wait {pendings = 3}`), also where the next iteration makes their left
operand anew. Results are then wrong now and then, and no tool that watches memory sees it.

`overwritten` finds such products in Triton's GPU dialect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_RESULTS = re.compile(r"^(%[\w:, %]+) = ")
_VALUE = re.compile(r"%[A-Za-z_0-9]+")
_CARRIED = re.compile(r"(%[A-Za-z_0-9]+) = ")
_PENDING = re.compile(r"pendings = (\d+)")
_DOT = "ttng.warp_group_dot "
_WAIT = "ttng.warp_group_dot_wait"
#: What keeps its place: the code in front of it stays there.
_FIXED = (_WAIT, "ttg.local_load", "tt.load", "ttg.async_wait", "gpu.barrier", "ttg.barrier")


@dataclass(frozen=True)
class _Operation:
    """A line: what it gives, what it takes, and the line."""

    results: tuple[str, ...]
    operands: tuple[str, ...]
    text: str

    @property
    def is_dot(self) -> bool:
        """Whether it is a product that goes on while other instructions run."""
        return _DOT in self.text and "isAsync = true" in self.text

    @property
    def reads_registers(self) -> bool:
        """Whether the left operand of a product lies in registers."""
        return self.is_dot and "ttg.dot_op<{opIdx = 0" in self.text.split(" : ", 1)[-1].split(" * ")[0]


def overwritten(ttgir: str) -> tuple[str, ...]:
    """The products, as lines of code, whose left operand changes while it may still be read.

    Args:
        ttgir: a kernel in Triton's GPU dialect (`compiled.asm["ttgir"]`).
    """
    found = {}
    for carried, body in _loops(ttgir):
        made = {name: i for i, op in enumerate(body) for name in op.results}
        for i, op in enumerate(body):
            left = op.operands[0] if op.reads_registers else ""
            # What a loop carries has its next value at the end of the iteration.
            until = -1 if left in carried else _rewritten(body, made, left) if left in made else None
            if until is not None and not _is_over(body, i, until):
                found[op.text] = None
    return tuple(found)


def _loops(ttgir: str) -> Iterator[tuple[set[str], list[_Operation]]]:
    """The values that each loop carries, and its body, with those of the loops in it."""
    open_loops: list[tuple[int, set[str], list[_Operation]]] = []
    depth = 0
    for line in ttgir.splitlines():
        text = re.sub(r"\s*loc\(.*\)\s*$", "", line.strip())
        given = _RESULTS.match(text)
        results = _VALUE.findall(given[1]) if given else []
        operands = _VALUE.findall(text[given.end() :] if given else text)
        operation = _Operation(tuple(results), tuple(operands), text)
        for *_, body in open_loops:
            body.append(operation)
        depth += text.count("{") - text.count("}")
        if " scf.for " in f" {text}" and text.endswith("{"):
            carried = set(_CARRIED.findall(text.partition("iter_args(")[2]))
            open_loops.append((depth, carried, []))
        while open_loops and depth < open_loops[-1][0]:
            yield open_loops.pop()[1:]


def _rewritten(body: Sequence[_Operation], made: Mapping[str, int], value: str) -> int:
    """The first place of an iteration where a value may be made: behind all that it waits for."""
    seen, todo, first = set(), [value], 0
    while todo:
        name = todo.pop()
        if name in seen or name not in made:
            continue
        seen.add(name)
        operation = body[made[name]]
        if any(fixed in operation.text for fixed in _FIXED):
            first = max(first, made[name])
        todo += operation.operands
    return first


def _is_over(body: Sequence[_Operation], dot: int, until: int) -> bool:
    """Whether a product of one iteration is waited for before a place of the next one."""
    behind = 0
    for operation in [*body[dot + 1 :], *body[: until + 1]]:
        if operation.is_dot:
            behind += 1
        if _WAIT in operation.text and (pending := _PENDING.search(operation.text)):
            # All but the latest so many are over.
            if behind >= int(pending[1]):
                return True
    return False
