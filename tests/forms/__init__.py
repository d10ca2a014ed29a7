"""Attention, adapters, gates and loss heads as people of many fields write them, in two tables of cases."""

import importlib

from .form import FORMS, Form
from .linear_form import LINEAR_FORMS, LinearForm

__all__ = ["FORMS", "LINEAR_FORMS", "Form", "LinearForm"]

for name in (
    "language matching memories modules pooling products scores sequences softmaxes structures unnormalised "
    "vision weights adapters gates gates_in_place gates_of_channels parts_in_front functions_of_gates losses "
    "several_losses classes_in_front log_probabilities entropies other_adapters functions_of_adapters "
    "from_the_left probabilities chosen_weights"
).split():
    importlib.import_module(f"{__name__}.{name}")
