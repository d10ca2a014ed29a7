"""Runs each kernel template once on small tensors, for a tool that watches the kernels:

    python -m tests.gpu.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests.gpu.sanitize
    compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.gpu.sanitize "short attention"

Run it once without the tool: what is compiled is then in the caches. The exit status is 1 if one raised
or gave something that is not finite.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence

import torch

from tests.gpu.templates import TEMPLATES, compiled


def once(name: str, device: str) -> str:
    """What is wrong with a template, or ""."""
    template = TEMPLATES[name]
    try:
        with template.active():
            found = compiled(template)(template.inputs(device))
            if device == "cuda":
                torch.cuda.synchronize()
    except Exception:
        return traceback.format_exc()
    return "" if all(bool(y.isfinite().all()) for y in found) else "not finite"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitize", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"templates, all by default: {', '.join(TEMPLATES)}")
    parser.add_argument("--device", default="cuda", help="cpu tries the script alone (%(default)s)")
    options = parser.parse_args(argv)
    if unknown := set(options.names) - set(TEMPLATES):
        parser.error(f"there is no template {unknown.pop()!r}")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 0
    arch = 100
    if options.device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        arch = 10 * major + minor
    failures = 0
    for name in options.names or TEMPLATES:
        if TEMPLATES[name].least > arch or (options.device == "cpu" and name.startswith("flex")):
            print(f"{name}: skipped, the device has no such kernel", flush=True)
            continue
        started = time.monotonic()
        wrong = once(name, options.device)
        failures += bool(wrong)
        print(f"{name}: {wrong or 'done'}, {time.monotonic() - started:.1f} s", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
