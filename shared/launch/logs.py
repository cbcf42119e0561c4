"""One log format for every process: time, who speaks, level, message; to stderr."""

from __future__ import annotations

import logging
import sys


def log_prefix(title: str) -> str:
    """`"stage4: scheduler DP0 TP1"` -> `"[stage4 scheduler DP0 TP1]"`."""
    return f"[{title.replace(':', '', 1)}]"


def set_up_logging(title: str, level: str) -> None:
    """Sends all logging of this process to stderr under the prefix of its `title`.

    `level` is one of `--log-level`: debug, info, warning, error.
    """
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s {log_prefix(title).replace('%', '%%')} %(levelname)s %(message)s",
        force=True,
    )


def current_level() -> str:
    """The level that `set_up_logging` was given, for a child to use the same."""
    return logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
