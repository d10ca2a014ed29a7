"""The environment variables of the package: names, valid values, current values.

Each is declared once, in `config`.
"""

import difflib
import os
import warnings

#: The valid values of a switch, in lower case.
SWITCHES = {
    "1": True,
    "true": True,
    "on": True,
    "yes": True,
    "0": False,
    "false": False,
    "off": False,
    "no": False,
}

#: The valid values of a number, in error messages.
_NUMBER = "a whole number"

_takes: dict[str, tuple[str, ...]] = {}


def variables() -> dict[str, tuple[str, ...]]:
    """The declared variables: name -> valid values, or a description of them."""
    return dict(_takes)


def switch(name: str, default: bool) -> bool:
    """Declare a variable that is on or off: 1, true, on, yes; 0, false, off, no, in any case.

    Raises:
        ValueError: it is set to something else.
    """
    _takes[name] = ("0", "1")
    value = os.environ.get(name)
    if value is None:
        return default
    if value.lower() not in SWITCHES:
        raise _refused(name, value)
    return SWITCHES[value.lower()]


def choice(name: str, *values: str) -> str:
    """Declare a variable that takes one of these values; the first is the default.

    Raises:
        ValueError: it is set to something else.
    """
    _takes[name] = values
    value = os.environ.get(name, values[0])
    if value not in values:
        raise _refused(name, value)
    return value


def text(name: str, meaning: str) -> str | None:
    """Declare a variable that takes any text; `meaning` says what it is."""
    _takes[name] = (meaning,)
    return os.environ.get(name)


def number(name: str) -> str | None:
    """Declare a variable that takes an integer of 0 or more.

    Raises:
        ValueError: it is set to something else.
    """
    value = text(name, _NUMBER)
    if value is not None and not value.isdecimal():
        raise _refused(name, value)
    return value


def check_assigned(name: str, value: object, called: str) -> None:
    """Check a value that is not from the environment.

    Args:
        name: the variable that takes such values.
        called: what was set, for the message.

    Raises:
        ValueError: the value is not valid.
    """
    takes = _takes[name]
    if takes == ("0", "1"):
        valid = value in (True, False)
    elif takes == (_NUMBER,):
        valid = value is None or str(value).isdecimal()  # None: no limit
    else:
        valid = isinstance(value, str) and (len(takes) == 1 or value in takes)
    if not valid:
        raise _refused(name, value, called)


def check() -> None:
    """Warn of variables in the environment that are not declared, with the closest declared name."""
    for name in os.environ:
        if name.startswith("INDUCTOR_FUSIONS") and name not in _takes:
            near = difflib.get_close_matches(name, _takes, n=1, cutoff=0.0)
            warnings.warn(
                f"{name} is not a variable of inductor_fusions; did you mean {near[0]}?", stacklevel=3
            )


def _refused(name: str, value: object, called: str = "") -> ValueError:
    return ValueError(f"{called or name} must be {' or '.join(_takes[name])}, not {value!r}")
