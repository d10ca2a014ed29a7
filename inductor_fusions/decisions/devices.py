"""Which measurements count for a device: its own, and those of others, scaled down."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

import torch

from . import machine, tables
from .problems import FEW_ROWS, SINGLE_ROWS, Row, Section
from .tables import Table


@dataclass(frozen=True)
class Hardware:
    """The properties of a device that kernels depend on.

    Attributes:
        capability: compute capability (major, minor).
        bandwidth: of the device memory in GB/s; 0 where it is not known.
    """

    capability: tuple[int, int]
    multiprocessors: int
    bandwidth: int = 0

    @property
    def shared_bytes(self) -> int:
        """The most shared memory that one thread block has."""
        return shared_bytes(self.capability)


#: KiB of shared memory of one thread block by compute capability, where it differs from others of its kind.
SHARED_KIB = {(8, 0): 163, (8, 7): 163}


def shared_bytes(capability: tuple[int, int]) -> int:
    """The most shared memory that one thread block has on devices of a compute capability."""
    return SHARED_KIB.get(capability, 227 if capability[0] in (9, 10) else 99) * 1024


#: Devices by the beginning of their names, of which the first that fits counts.
KNOWN: dict[str, Hardware] = {
    "nvidia_h200": Hardware((9, 0), 132, 4800),
    "nvidia_gh200": Hardware((9, 0), 132, 4000),
    "nvidia_h100_pcie": Hardware((9, 0), 114, 2000),
    "nvidia_h100_nvl": Hardware((9, 0), 132, 3900),
    "nvidia_h100": Hardware((9, 0), 132, 3350),
    "nvidia_a100_sxm4_40gb": Hardware((8, 0), 108, 1555),
    "nvidia_a100_pcie_40gb": Hardware((8, 0), 108, 1555),
    "nvidia_a100": Hardware((8, 0), 108, 2039),
    "nvidia_a10g": Hardware((8, 6), 80, 600),
    "nvidia_a40": Hardware((8, 6), 84, 696),
    "nvidia_l40s": Hardware((8, 9), 142, 864),
    "nvidia_l40": Hardware((8, 9), 142, 864),
    "nvidia_l4": Hardware((8, 9), 58, 300),
    "nvidia_geforce_rtx_4090": Hardware((8, 9), 128, 1008),
    "nvidia_b200": Hardware((10, 0), 148, 8000),
    "nvidia_geforce_rtx_5090": Hardware((12, 0), 170, 1792),
}
#: Compute capability from which there are kernels of ours.
OLDEST = (8, 0)


def of_another_kind(device: torch.device) -> str:
    """Why a device, of whatever capability, has no kernels of ours; "" for an NVIDIA GPU."""
    if device.type == "cuda" and torch.version.hip is None:
        return ""
    return f"no kernel supports {'AMD GPUs' if device.type == 'cuda' else f'devices of type {device.type}'}"


def too_old(device: torch.device) -> str:
    """Why an NVIDIA GPU has no kernels of ours; "" if its compute capability is high enough."""
    if torch.cuda.get_device_capability(device) < OLDEST:
        return "the device is older than compute capability {}.{}".format(*OLDEST)
    return ""


def unsupported(device: torch.device) -> str:
    """Why a device has no kernels of ours; "" if it has."""
    return of_another_kind(device) or too_old(device)


@functools.cache
def known(name: str) -> Hardware | None:
    """The properties of a device by its name; None if it is unknown."""
    # A part of one (a MIG slice) has fewer multiprocessors than its name says.
    if re.search(r"_mig_", name):
        return None
    return next((found for start, found in KNOWN.items() if re.match(rf"{start}(_|$)", name)), None)


def target(name: str) -> tuple[str, Hardware]:
    """A device that need not be in this machine: the name of its table, and what it is.

    Args:
        name: that of a table or of the driver, or the end of it: "nvidia_h200", "NVIDIA H200", "h200",
            "RTX 4090", "4090". A name without a table stands for the device that has the only table of that
            name and more: "h100" for "nvidia_h100_80gb_hbm3".

    Raises:
        ValueError: the device is unknown; the message names the known ones.
    """
    if not isinstance(name, str):
        raise ValueError(f"a GPU is given by its name, such as 'nvidia_h200', not by {name!r}")
    short = tables.slug(name)
    for found in (short, f"nvidia_{short}", f"nvidia_geforce_{short}", f"nvidia_geforce_rtx_{short}"):
        what = known(found)
        if what is not None:
            longer = [name for name in tables.names() if name.startswith(f"{found}_") and known(name) == what]
            return (longer[0] if found not in tables.names() and len(longer) == 1 else found), what
    names = ", ".join(sorted(start.removeprefix("nvidia_") for start in KNOWN))
    raise ValueError(f"unknown device {name!r}; known devices: {names}")


def hardware(device: torch.device) -> Hardware | None:
    """The properties of a device; None if it is no NVIDIA GPU."""
    if of_another_kind(device):
        return None
    named = known(tables.device_name(device))
    try:
        capability = torch.cuda.get_device_capability(device)
        processors = int(torch.cuda.get_device_properties(device).multi_processor_count)
    except (AssertionError, RuntimeError):
        return named  # it is not in this machine, for which code is compiled elsewhere
    return Hardware(capability, processors, named.bandwidth if named is not None else 0)


@dataclass(frozen=True)
class Source:
    """A table whose rows count for a device.

    Attributes:
        whose, of: the device of the table, and the one that is asked for; None where it is that one.
        is_here: whether it was measured on this machine.
    """

    name: str
    table: Table
    whose: Hardware | None = None
    of: Hardware | None = None
    is_here: bool = False

    @property
    def is_own(self) -> bool:
        """Whether it was measured on this kind of device."""
        return self.of is None

    @property
    def is_alike(self) -> bool:
        """Whether kernels that were tuned there compile to the same code and fit here."""
        return self.whose is None or self.of is None or self.whose.capability == self.of.capability

    def fills(self, section: Section, wanted: Row, row: Row, kernel: str) -> float:
        """What a kernel gains more than in a row by how a problem fills the device: a logarithm."""
        devices = (self.of or known(self.name), wanted), (self.whose or known(self.name), row)
        here, there = (section.fills(r, kernel, d.multiprocessors) if d else 0.0 for d, r in devices)
        return here - there

    @property
    def shift(self) -> float:
        """How many doublings of tokens fill the table's device as full as this one."""
        if self.whose is None or self.of is None:
            return 0.0
        return math.log2(self.whose.multiprocessors / self.of.multiprocessors)


def sources(device: torch.device) -> list[list[Source]]:
    """The tables that count for a device: its own, this machine's and those of its capability; the others."""
    name = tables.device_name(device)
    own, here = tables.load(name), machine.load(device)
    first = [] if own is None else [Source(name, own)]
    if here is not None:
        first.append(Source(name, here, is_here=True))
    of = hardware(device)
    if of is None or of.capability < OLDEST:
        return [first]
    others = []
    for other in tables.names():
        whose = known(other)
        table = tables.load(other) if whose is not None and other != name else None
        if table is not None:
            others.append(Source(other, table, whose, of))
    return [
        [*first, *(source for source in others if source.is_alike)],
        [source for source in others if not source.is_alike],
    ]


@dataclass(frozen=True)
class Carried:
    """How the logarithm of a gain carries over to another device: times `share`, minus `less`."""

    share: float = 1.0
    less: float = 0.0
    doubt: float = 0.0

    def of(self, log: float) -> float:
        """The logarithm on the other device; a loss is not scaled down."""
        return (self.share if log > 0 else 1.0) * log - self.less


#: Of a device with the same kernels: for itself, for each doubling of multiprocessors and of bandwidth.
_ALIKE, _PROCESSORS, _BANDWIDTH = 0.03, 0.1, 0.03
#: The first of these for attention, whose gains differ more between an H100 and an H200 (`bench.regret`).
_ATTENTION = 0.05
#: cuDNN, which SDPA takes on 9.0, is up to 2.3 times as fast as the flash attention that others have.
_FLASH = math.log(2.3)


def carried(source: Source, section: str, kernel: str, row: Row) -> Carried | None:
    """How the gain in a row carries over from another device; None: not at all.

    Between compute capabilities, only gains that follow from memory traffic carry over: attention without
    materialised scores, decoding that reads a cache once, skinny GEMMs that read the large matrix once, and
    weights that are read once for a few rows. Those of grouped GEMMs do not, because how close the library
    comes to the limit differs; nor those of a linear of a few rows by itself, which gains nothing else.
    """
    whose, of = source.whose, source.of
    if whose is None or of is None:
        return Carried()
    if source.is_alike:
        doubt = (_ATTENTION if section == "attention" else _ALIKE) + _PROCESSORS * abs(source.shift)
        if whose.bandwidth and of.bandwidth:
            doubt += _BANDWIDTH * abs(math.log2(whose.bandwidth / of.bandwidth))
        return Carried(0.95, 0.0, doubt)
    if section == "attention":
        # cuDNN's causal bias is told by name, and tiles of flex attention were searched.
        less = {"sdpa": _FLASH, "efficient": 0.3, "flex": 0.5, "short": 0.3}.get(kernel)
        return None if less is None else Carried(1.0, less, 0.15)
    memory = section in ("lora_sums", "lora_dropout", "narrow_mm", "decode_attention")
    few = section in ("lora", "lora_merged") and row["tokens"] <= FEW_ROWS
    return Carried(0.5, 0.0, 0.1) if memory or few or _saves_launches(section, row) else None


def _saves_launches(section: str, row: Row) -> bool:
    """Whether a grouped GEMM of a few rows gains by one launch for what stock does in several."""
    if section != "block_mm" or row["tokens"] > SINGLE_ROWS:
        return False
    alone = row["kind"] == "linear" and not row.get("activation")
    return not alone and (row.get("config") or {"template": "row"})["template"] == "row"
