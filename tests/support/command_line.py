"""The command line as a user meets it."""

from __future__ import annotations

import sys

import pytest

from inductor_fusions import cli


def refuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line on stderr of a command that the user got wrong."""
    monkeypatch.setattr(sys, "argv", ["inductor-fusions", *arguments])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    out, err = capsys.readouterr()
    assert (exit.value.code, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("inductor-fusions: "), err
    return err
