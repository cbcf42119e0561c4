"""What is measured: a case is one thing to measure, a setup the server it is measured on.

A suite is a module with `cases(plan)`.  Cases of one setup share a server for the time of a round, and within a round
the stages take turns, so that a drift of the machine's speed hits all alike.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.live_server import LiveServer

ALL_STAGES = (1, 2, 3, 4)
What = Mapping[str, str | int | float | bool]
"""What a case is about: names to values."""

Figures = dict[str, float]
"""Name, with statistic and unit, to number."""

Pending = Callable[[Path], Figures]
"""Figures that are read off the server's trace, in the given folder, once the server has stopped."""

Measure = Callable[["LiveServer"], Figures | Pending]


@dataclass(frozen=True)
class Setup:
    """A server: its stage and flags.  `variant` names what sets it apart from others of its sizes."""

    stage: int
    tp: int = 1
    dp: int = 1
    device: str = "sim"
    decode_ms: float = 0.0
    variant: str = ""
    flags: tuple[str, ...] = ()
    traced: bool = False

    @property
    def name(self) -> str:
        """Unique among the setups, and fit for `pytest -k`."""
        device = f"sim{self.decode_ms:g}ms" if self.device == "sim" else "model"
        words = [f"stage{self.stage}", f"tp{self.tp}", f"dp{self.dp}", device, self.variant]
        return "-".join(filter(None, [*words, "traced" if self.traced else ""]))

    def command_line(self) -> list[str]:
        """The server's flags, but for the port and the folder of the trace."""
        flags = ["--device", self.device, "--tp-size", str(self.tp), "--log-level", "warning", *self.flags]
        if self.stage > 1:
            flags += ["--dp-size", str(self.dp)]
        if self.device == "sim":
            flags += ["--model-path", "tiny-random", "--sim-decode-ms", f"{self.decode_ms:g}"]
            flags += ["--sim-prefill-us-per-token", f"{50 if self.decode_ms else 0}"]
        return flags


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    `measured` is whose figures they are: `stage1` to `stage4`, `bare` or the name of a peer.  `run` is given the server
    of `setup`; without a setup it needs none.  In rounds from `rounds` on (None: in all) it is left out.
    """

    suite: str
    measured: str
    what: What
    run: Measure | Callable[[], Figures] = field(compare=False)
    setup: Setup | None = None
    rounds: int | None = None

    @property
    def unit(self) -> str:
        """Names the cases that are measured together."""
        return self.setup.name if self.setup else self.measured

    @property
    def test_id(self) -> str:
        """Names the test of `pytest bench` that measures this case."""
        return f"{self.suite}-{self.unit}"

    @property
    def key(self) -> str:
        """The same for the same case in another run."""
        return " ".join([self.suite, self.measured, *(f"{name}={value}" for name, value in sorted(self.what.items()))])


@dataclass(frozen=True)
class Plan:
    """What a run is to cover.  `peers` are names and URLs of OpenAI-compatible servers that run already."""

    full: bool = False
    stages: tuple[int, ...] = ALL_STAGES
    suites: tuple[str, ...] = ()
    peers: tuple[tuple[str, str], ...] = ()
    rounds: int = 2

    @property
    def once_in_quick(self) -> int | None:
        """The `rounds` of a case that a quick run has time for only once."""
        return None if self.full else 1

    def units(self) -> list[list[Case]]:
        """The cases of one round, those that are measured together in one list; the stages take turns."""
        from bench import suites

        units: dict[str, list[Case]] = {}
        for name in self.suites or suites.NAMES:
            for case in suites.cases(name, self):
                units.setdefault(case.unit, []).append(case)
        by_measured: dict[str, list[list[Case]]] = {}
        for unit in units.values():
            by_measured.setdefault(unit[0].measured, []).append(unit)
        turns = itertools.zip_longest(*by_measured.values())
        return [unit for turn in turns for unit in turn if unit is not None]


def parse_peer(text: str) -> tuple[str, str]:
    """`NAME=URL` as `(name, url)`."""
    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text} is not NAME=URL, such as vllm=http://127.0.0.1:8000")
    return name, url.rstrip("/").removesuffix("/v1")
