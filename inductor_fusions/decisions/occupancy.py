"""Corrections of estimated gains for how many multiprocessors of a device a problem keeps busy.

Multiprocessors run thread blocks in waves, and the last wave may be nearly empty (wave quantization). Sizes
that differ little may differ by a wave. A kernel with few thread blocks leaves multiprocessors idle.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

#: Tiles of a GEMM's result: those of the kernels for many rows, and all that the library has.
OWN_TILES = ((128, 256), (256, 128), (128, 128), (64, 256), (64, 128), (64, 64))
LIBRARY_TILES = (*OWN_TILES, (192, 192), (192, 128), (128, 192), (256, 192), (320, 128), (256, 64))
#: Queries, or keys in the backward, of a thread block of SDPA's kernels.
BLOCK = 128
#: The share of a correction that is applied: half of it has the least error on rows that were left out.
SHOWN = 0.5


@functools.lru_cache(maxsize=4096)  # an estimate asks for each row of a table
def wave_quantization(rows: int, widths: tuple[int, ...], processors: int) -> float:
    """What a grouped GEMM gains over single ones because its tiles fill the waves better.

    2,048 x 2,304 results are 144 tiles of 128 x 256, which is one more wave than 132 multiprocessors take at
    once, and 132 tiles of 192 x 192, which the library has.

    Args:
        rows, widths: of the results.
        processors: multiprocessors of the device.

    Returns:
        The logarithm of a speedup; negative where the library fills the device better.
    """

    def time(widths: Sequence[int], tiles: Sequence[tuple[int, int]]) -> float:
        found = []
        for m, columns in tiles:
            count = sum(-(-rows // m) * -(-n // columns) for n in widths)
            # A tile reads so much for each result: a small one is limited by that.
            reads = max(1.0, (m + columns) / (m * columns) * (128 * 256) / (128 + 256))
            found.append(-(-count // processors) * m * columns * math.sqrt(reads))
        return min(found)

    single = sum(time((n,), LIBRARY_TILES) for n in widths)
    return SHOWN * math.log(single / time(widths, OWN_TILES))


def idle_multiprocessors(batch_heads: int, queries: int, keys: int, train: bool, processors: int) -> float:
    """What attention by SDPA loses by having fewer thread blocks than the device has multiprocessors.

    The forward has one for each 128 queries of a head, the backward one for each 128 keys. The products with
    materialised scores have one for each tile of scores.

    Returns:
        The logarithm of a speedup, 0 at most.
    """
    count = batch_heads * -(-min(queries, keys if train else queries) // BLOCK)
    return SHOWN * math.log(min(1.0, count / processors))
