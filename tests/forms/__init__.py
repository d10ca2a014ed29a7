"""Attention as people of many fields write it, in one table of cases."""

from .form import Form
from .language import LANGUAGE
from .modules import MODULES
from .pooling import POOLING
from .sequences import SEQUENCES
from .vision import VISION
from .weights import WEIGHTS

__all__ = ["FORMS", "Form"]

FORMS: dict[str, Form] = {**VISION, **LANGUAGE, **SEQUENCES, **WEIGHTS, **MODULES, **POOLING}
