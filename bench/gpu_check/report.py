"""What a run found: checks that held or did not, and figures."""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Figure:
    name: str
    value: float
    unit: str


@dataclass
class Report:
    """Grows while the run goes on, so that a run that ends early has something to show."""

    device: str
    checks: list[Check] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0
    _console: Console = field(default_factory=Console, repr=False)

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        self.checks.append(Check(name, passed, detail))
        self._console.print(
            f"{'ok    ' if passed else 'FAILED'} {name}  {detail}", markup=False, highlight=False, soft_wrap=True
        )

    def figure(self, name: str, value: float, unit: str) -> None:
        self.figures.append(Figure(name, value, unit))
        self._console.print(f"       {name}: {value:.4g} {unit}", markup=False, highlight=False, soft_wrap=True)

    def value(self, name: str) -> float:
        """Of the figure `name`.  Raises StopIteration where there is none."""
        return next(figure.value for figure in self.figures if figure.name == name)

    def skip(self, what: str) -> None:
        self.skipped.append(what)
        self._console.print(f"left   {what}", markup=False, highlight=False, soft_wrap=True)

    @property
    def failures(self) -> int:
        return sum(not check.passed for check in self.checks)

    def save(self, folder: Path) -> Path:
        """Writes `gpu_check-TIME.json` into `folder`, which is made if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"gpu_check-{time.strftime('%Y%m%d-%H%M%S')}.json"
        content = {
            "device": self.device,
            "versions": versions(),
            "seconds": round(self.seconds, 1),
            "checks": [asdict(check) for check in self.checks],
            "figures": [asdict(figure) for figure in self.figures],
            "skipped": self.skipped,
        }
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return path

    def show(self) -> None:
        """Prints the figures as a table."""
        table = Table(title=f"{self.device}: {len(self.checks)} checks, {self.failures} failed")
        table.add_column("figure")
        table.add_column("", justify="right")
        table.add_column("unit")
        for figure in self.figures:
            table.add_row(figure.name, f"{figure.value:.4g}", figure.unit)
        self._console.print(table)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for package in ("triton", "flashinfer-python"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
