"""Where the stages are."""

from __future__ import annotations

from pathlib import Path

ALL_STAGES = (1, 2, 3, 4)
ROOT = Path(__file__).parent.parent


def existing_stages() -> list[int]:
    """The stages that have a server."""
    return [stage for stage in ALL_STAGES if list(ROOT.glob(f"stage{stage}_*/server.py"))]
