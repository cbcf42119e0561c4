"""Stand-ins for the parts of torch.cuda that order work, for a device that is always done at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


class FakeEvent:
    def __init__(self) -> None:
        self.recorded = 0
        self.waits = 0

    def record(self) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        self.waits += 1


class FakeCapture:
    """A graph that runs its function again, over the same tensors, into the same output."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        output = function()
        self.captured += 1

        def replay() -> Tensor:
            self.replayed += 1
            return output.copy_(function())

        return replay


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
