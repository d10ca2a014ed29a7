"""Import this package, and stock `torch.compile` emits fused kernels.

>>> import inductor_fusions
>>> compiled = torch.compile(model)

`inductor_fusions.report()` lists what was fused, and why the rest was not;
`explain(model, *args)` lists it for a model that was not compiled yet; `verify(model, *args)` measures errors
against float64. `INDUCTOR_FUSIONS=0` switches the package off; `inductor_fusions.config` has all settings.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from .checking.verifying import Verification, verify
    from .explaining import Explanation, explain

__version__ = "0.1.0"
__all__ = [
    "Explanation",
    "Report",
    "Site",
    "Verification",
    "__version__",
    "clear",
    "config",
    "disable",
    "enable",
    "enabled",
    "explain",
    "report",
    "verify",
]

#: Public names whose modules are imported when they are first used.
_LATER = {
    "Explanation": "explaining",
    "Verification": "checking.verifying",
    "explain": "explaining",
    "verify": "checking.verifying",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_LATER[name]}", __name__), name)


enable()
