"""A long run of random programs: `make fuzz`, or `python -m tests.fuzz --examples 20000 --seed 1`.

On a GPU the code of each can be judged, that of linears too: `--device cuda --code 1 --batch 20 --jobs 8`.
Each failure is minimised and appended to a file as a script. The exit status is 1 if there was one.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

from bench.common import Results
from tests.fuzz.running import BATCH, KINDS, fuzz, provenance


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=10_000, help="programs of each kind (%(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of the first batch (drawn, and printed)")
    parser.add_argument("--only", choices=sorted(KINDS), action="append", help="one kind (all)")
    parser.add_argument("--out", type=Path, default=Path("fuzz_failures.py"), help="failures (%(default)s)")
    parser.add_argument("--json", type=Path, help="a report, grown batch by batch and resumed")
    parser.add_argument(
        "--code", type=float, default=0.05, metavar="SHARE",
        help="of attentions and masks, judged by Inductor's code for the CPU (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--device", help='such as "cuda": run there, and judge the code of that share of linears as well'
    )
    parser.add_argument("--batch", type=int, default=BATCH, help="programs from one seed (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (%(default)s)")
    options = parser.parse_args(argv)
    number = random.randrange(10**6) if options.seed is None else options.seed
    print(f"seed {number}", file=sys.stderr)
    report = None
    if options.json is not None:
        head = provenance(options.device, seed=number, code=options.code, batch=options.batch)
        report = Results(options.json, head, lambda row: str(row["key"]))
    kinds = options.only or list(KINDS)
    failures = fuzz(
        options.examples, number, kinds, options.out, options.batch, options.code, report, options.jobs,
        options.device,
    )  # fmt: skip
    print(f"{failures} failures", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
