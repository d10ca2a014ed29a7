"""How many mutants of the package's source the quick part of the tests kills, and how many all tests kill.

`python -m tests.mutants --jobs 14` makes the mutants of a random sample of the places in guards and readers
that `tests/mutating.py` can change. A mutant is killed if a test fails with it.

1. The tests of the quick part run once without a mutant. The places are marked, to see which test reaches
   which.
2. For each mutant, the tests that reach it run, the cheap ones first, until one fails.
3. The mutants that survive go through both steps with the rest of the tests.

Journals beside the result hold what has run, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests import selection
from tests.durations import entries
from tests.mutating import ROOT, Site, sites

#: Where guards and readers are; kernels and their code are tested on a GPU as well.
SOURCES = (
    "fusions/**/*.py", "effects/*.py", "layouts/copies.py", "layouts/leaving.py", "layouts/keeping.py",
    "operands.py",
)  # fmt: skip
#: A run with a mutant may take SLOWER times as long as its tests took, and START seconds. One that takes
#: longer loops, and the mutant is killed.
SLOWER, START = 5.0, 240.0
#: A process runs tests of so many seconds; those of one mutant may be in several.
CHUNK = 60.0


@dataclass(frozen=True)
class Ran:
    """A test in the run with marks."""

    nodeid: str
    passed: bool
    seconds: float
    reached: frozenset[str]


def sample(count: int, seed: int, patterns: Sequence[str] = SOURCES) -> list[Site]:
    """So many mutants, each site as likely as another; fewer where there are fewer."""
    package = ROOT / "inductor_fusions"
    files = sorted({path for pattern in patterns for path in package.glob(pattern)})
    found = [site for path in files for site in sites(path)]
    random.Random(seed).shuffle(found)
    return found[:count]


def pytest_run(wanted: dict[str, Any], arguments: Sequence[str], timeout: float | None = None) -> int | None:
    """pytest with the plugin; its exit status, None if it took too long."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(wanted, file)
        file.flush()
        env = {**os.environ, "MUTATING": file.name, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutating", "-p", "no:cacheprovider"]
        try:
            return subprocess.run(
                [*command, *arguments], cwd=ROOT, env=env, capture_output=True, timeout=timeout
            ).returncode
        except subprocess.TimeoutExpired:
            return None


def reach(chosen: Sequence[Site], part: str, args: argparse.Namespace, journal: Path) -> list[Ran]:
    """The tests of a part, run with the sites marked."""
    wanted = {"sites": [str(site) for site in chosen], "within": args.tests}
    options = [f"--part={part}", f"--seed={args.seed}", f"--budget={args.budget}", f"-n{args.jobs}"]
    code = pytest_run(wanted, [*options, "--maxschedchunk=4", f"--journal={journal.resolve()}"])
    if code not in (0, 1, 5):
        raise SystemExit(f"the tests could not be run (pytest: {code}); what has run is in {journal}")
    return [
        Ran(e["test"], e["outcome"] != "failed", e["cpu seconds"], frozenset(e["reached"]))
        for e in entries(journal)
    ]


def chunks(site: Site, ran: Sequence[Ran]) -> list[list[Ran]]:
    """The tests that pass without a mutant and reach it, the cheap ones first, in runs of CHUNK seconds."""
    tests = sorted((t for t in ran if t.passed and str(site) in t.reached), key=lambda t: t.seconds)
    found: list[list[Ran]] = []
    seconds = math.inf
    for test in tests:
        if seconds + test.seconds > CHUNK:
            found.append([])
            seconds = 0.0
        found[-1].append(test)
        seconds += test.seconds
    return found


def killer(site: Site, tests: Sequence[Ran]) -> str | None:
    """The first of some tests that fails with the mutant."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder, "journal")
        wanted = {"mutant": str(site), "tests": [t.nodeid for t in tests]}
        files = sorted({t.nodeid.partition("::")[0] for t in tests})
        limit = START + SLOWER * sum(t.seconds for t in tests)
        code = pytest_run(wanted, ["-x", "-pno:xdist", f"--journal={journal}", *files], limit)
        failed = [entry["test"] for entry in entries(journal) if entry["outcome"] == "failed"]
    return None if code == 0 else failed[0] if failed else f"pytest: {code}"


def judge(left: Sequence[Site], ran: Sequence[Ran], jobs: int) -> Iterator[tuple[Site, str | None, int]]:
    """Each mutant as soon as it is judged: the test that kills it, if one does, and how many reach it."""
    runs = {site: chunks(site, ran) for site in left}
    waiting = {site: len(found) for site, found in runs.items()}
    yield from ((site, None, 0) for site in left if not runs[site])
    order = sorted((i, site) for site in left for i in range(len(runs[site])))
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(killer, site, runs[site][i]): site for i, site in order}
        for future in as_completed(futures):
            site = futures[future]
            if future.cancelled() or not waiting[site]:
                continue
            by = future.result()
            waiting[site] = 0 if by else waiting[site] - 1
            if not waiting[site]:
                yield site, by, sum(map(len, runs[site]))
                for other in (f for f, its in futures.items() if its is site):
                    other.cancel()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("tests", nargs="*", help="only tests whose ids begin so")
    parser.add_argument("--sample", type=int, default=100, help="mutants")
    parser.add_argument("--sources", nargs="+", default=SOURCES, help="patterns below inductor_fusions")
    parser.add_argument("--seed", type=int, default=0, help="of the sample, and of the quick part")
    parser.add_argument("--budget", type=float, default=selection.BUDGET, help="of the quick part")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "mutants_cpu.json")
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Judge the mutants of a sample, and write what became of them."""
    chosen = sample(args.sample, args.seed, args.sources)
    journal = args.json.with_suffix(".verdicts.journal")
    verdicts: dict[str, dict[str, Any]] = {str(site): {} for site in chosen}
    for site, found in entries(journal):
        verdicts[site] |= found
    alive = chosen
    for part in ("quick", "rest"):
        ran = reach(chosen, part, args, args.json.with_suffix(f".{part}.journal"))
        print(f"{part}: {len(ran)} tests, {sum(not t.passed for t in ran)} fail without a mutant", flush=True)
        left = [site for site in alive if part not in verdicts[str(site)]]
        for site, by, tests in judge(left, ran, args.jobs):
            found = {part: by, f"{part} tests": tests}
            verdicts[str(site)] |= found
            with journal.open("a") as file:
                file.write(json.dumps([str(site), found]) + "\n")
            print(f"{site}: {by or 'survives'} ({tests} tests of the {part} part reach it)", flush=True)
        alive = [site for site in alive if verdicts[str(site)][part] is None]
    rows = [{"mutant": site, **found} for site, found in verdicts.items()]
    quick = sum(row["quick"] is not None for row in rows)
    result = {
        "about": {
            "torch": torch.__version__,
            "seed": args.seed,
            "budget": args.budget,
            "sources": [*args.sources],
            "tests": args.tests,
        },
        "mutants": len(rows),
        "killed by the quick part": quick,
        "killed by all tests": quick + sum(row.get("rest") is not None for row in rows),
        "rows": rows,
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def main() -> int:
    result = run(parser().parse_args())
    quick, every = result["killed by the quick part"], result["killed by all tests"]
    print(f"of {result['mutants']} mutants all tests kill {every}, the quick part {quick}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
