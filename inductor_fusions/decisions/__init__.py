"""One answer to one question: which kernel for this problem on this device, and how do we know?

The only reader of the gains and of the tiles in the tables.
"""

from .attention import attention, flex_backward, flex_options
from .deciding import Decision, Query, Span, bracket, decide, decide_for_all, once, tiles
from .devices import hardware, target
from .measuring import measurer
from .trying import configured, some, trial
