"""What `--help` says of the flags."""

from __future__ import annotations

import pytest

from shared.server_args import parse_server_args


def test_help_shows_the_defaults_that_are_values_and_no_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_server_args("stage", frozenset(), ["--help"])
    shown = capsys.readouterr().out
    assert "(default: 30000)" in shown
    assert "(default: None)" not in shown
