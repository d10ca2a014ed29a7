"""Import it, and stock `torch.compile` emits fused kernels.

>>> import inductor_fusions
>>> compiled = torch.compile(model)

Nothing else is needed. `inductor_fusions.report()` says what was fused and why the rest was not;
`INDUCTOR_FUSIONS=0` switches it off (see `inductor_fusions.config` for each toggle).
"""

import sys
from pathlib import Path

try:
    from . import config
except ValueError as error:  # of an environment variable: one line, where the command line runs
    _program = (sys.argv or [""])[0]
    if Path(_program).name == "inductor-fusions" or (_program == "-m" and __name__ in sys.orig_argv):
        print(f"inductor-fusions: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    raise
from .registration import disable, enable, enabled
from .reporting import Report, Site, clear, report

__version__ = "0.1.0"
__all__ = ["Report", "Site", "__version__", "clear", "config", "disable", "enable", "enabled", "report"]

enable()
