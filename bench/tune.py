"""The tuning scripts under one name: `python -m bench.tune KIND`, where KIND is that of a `bench/tune_*.py`.

Everything behind KIND is for that script: each is resumable (`--out`, `--budget`, `--only`), and says with
`--help` what it measures. The table of a device, `configs/devices/<device>.json`, is written from their
results; `python -m inductor_fusions tune KIND --table` does that as well.

    python -m bench.tune                        # name the kinds
    python -m bench.tune attention --help
    python -m bench.tune projections --out bench/results/projections_h200.json --budget 500
"""

from __future__ import annotations

import runpy
import sys

from inductor_fusions.cli.benching import kinds


def main() -> None:
    """The command line."""
    kind = sys.argv[1] if len(sys.argv) > 1 else ""
    if kind in ("", "-h", "--help"):
        print(f"{__doc__}\nkinds: {', '.join(kinds())}")
        return
    if kind not in kinds():
        sys.exit(f"bench.tune: there is no kind {kind!r}; there are: {', '.join(kinds())}")
    sys.argv = [f"bench.tune_{kind}", *sys.argv[2:]]
    runpy.run_module(f"bench.tune_{kind}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
