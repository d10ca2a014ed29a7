"""Profitability: which kernel a problem gets on a device, and from which measurements.

The only reader of the gains and of the tiles in the tables. `problems` has the kinds of problems, `tables`
the files with their rows, and `machine` what was measured on this machine.
"""

from .attention import attention, flex_backward, flex_options
from .deciding import (
    Decision,
    Pending,
    Query,
    Span,
    asked,
    bracket,
    decide,
    decide_for_all,
    measured_together,
    once,
    row_with_tiles,
    tiles,
)
from .devices import hardware, of_another_kind, target, too_old, unsupported
from .measuring import measurer
from .trying import configured, trial
