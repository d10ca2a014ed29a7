"""The version of torch, and facts that depend only on it."""

from __future__ import annotations

import re

import torch

OLDEST, NEWEST_TESTED = (2, 11), (2, 15)
#: Operations of aten that stand for `x.T` and the like from torch 2.14 on, where Dynamo had getattr(x, "T").
ATTRIBUTES = {"numpy_T": "T", "mT": "mT", "mH": "mH", "matrix_H": "H"}


def torch_version() -> tuple[int, int]:
    """(major, minor) of the torch in use."""
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if match is None:
        raise RuntimeError(f"cannot read the version of torch: {torch.__version__!r}")
    return int(match[1]), int(match[2])


def version_problem() -> str | None:
    """Why nothing can be registered with this torch, or None."""
    if torch_version() < OLDEST:
        return f"torch {torch.__version__} is older than {OLDEST[0]}.{OLDEST[1]}; no fusion is installed"
    return None


def beyond_tested() -> bool:
    """True where this torch is newer than the newest one that the tests ran on."""
    return torch_version() > NEWEST_TESTED


def patterns_ignore_the_scale() -> bool:
    """Whether Inductor's attention patterns take any divisor of the scores for sqrt(head_dim).

    Seen on 2.11; right on 2.12.
    """
    return torch_version() < (2, 12)


def patterns_ignore_constants() -> bool:
    """Whether Inductor's attention patterns ignore dims, permutations and `alpha` (pytorch#196468, #195320).

    They also take a tensor for a number, and raise (pytorch#191203). Seen on 2.11 to 2.14; 2.15 compares
    dims, and refuses keyword arguments that a pattern does not name.
    """
    return torch_version() < (2, 15)


def patterns_match_decomposed_sdpa() -> bool:
    """Whether Inductor's attention patterns misread what SDPA is decomposed to where no backend takes it.

    Seen on 2.13 and 2.14; 2.12 has no such pattern, and 2.15 reads it rightly.
    """
    return (2, 13) <= torch_version() < (2, 15)


def mask_rows_have_32_bits() -> bool:
    """Whether efficient attention finds a row of a mask by 32 bits (pytorch#187227, fixed in July 2026)."""
    return torch_version() < (2, 15)


def counts_in_32_bits() -> bool:
    """Whether flex attention's kernels count in 32 bits, whatever a captured tensor has (pytorch#145869).

    Read in the sources of 2.11 and 2.13; 2.14 looks at what is captured.
    """
    return torch_version() < (2, 14)


def fails_on_broadcast_numbers() -> bool:
    """Whether the lowering of SDPA reads the last size of an operand without dims.

    Seen on 2.11; the sources of 2.13 look at the number of dims first.
    """
    return torch_version() < (2, 13)


def drops_narrow_casts() -> bool:
    """Whether Inductor takes out a cast to a narrower dtype that another one widens again.

    Seen on 2.11; on 2.13 it stays, so that what is in memory is narrow.
    """
    return torch_version() < (2, 13)


def autocast_beside_the_key() -> dict[str, str]:
    """The dtype of autocast on each device where it is on, if the key of AOTAutograd's cache lacks it.

    On 2.11 the key says whether autocast is on: code for float16 is taken for bfloat16. In 2.13's key.
    """
    if torch_version() >= (2, 13):
        return {}
    devices = filter(torch.is_autocast_enabled, torch._C._autocast_supported_devices())
    return {device: str(torch.get_autocast_dtype(device)) for device in devices}
