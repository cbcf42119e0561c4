"""`bench.gpu_check` on a machine without a GPU: what it says there, and its parts in small on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_check import kernels
from bench.gpu_check.kernels import check_kernels
from bench.gpu_check.model import ONE_BILLION, SMALL, write_model
from bench.gpu_check.rates import measure_device, measure_rates
from bench.gpu_check.report import Report
from shared.kernels.torch_backend import TorchKernels
from shared.weights.model_config import ModelConfig


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_succeeds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu_check", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout == "gpu_check: torch sees no GPU on this machine, so nothing was checked\n"
    assert not list(tmp_path.iterdir())


def test_right_kernels_pass_and_one_that_is_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report("CPU")
    check_kernels(report, "torch", "cpu", 40, 500)
    assert len(report.checks) == 3 * 14 + 1
    assert not report.failures

    class Off(TorchKernels):
        def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
            return super().silu_and_mul(gate_up) * 1.05

    monkeypatch.setattr(kernels, "make_kernels", lambda name, device: Off())
    report = Report("CPU")
    check_kernels(report, "torch", "cpu", 40, 500)
    assert [check.name.split()[-1] for check in report.checks if not check.passed] == ["silu_and_mul"] * 3


def test_rates_are_of_the_model_that_was_made_and_saved_with_the_checks(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL, "cpu")
    config = ModelConfig.from_folder(tmp_path)
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (128, 64, 500)
    report = Report("CPU")
    measure_device(report, "cpu", 1 << 16)
    measure_rates(report, "torch", tmp_path, SMALL, "cpu", context=40, batches=(1, 2))
    report.check("something", False, "why")
    saved: dict[str, Any] = json.loads(report.save(tmp_path / "results").read_text())
    assert saved["checks"] == [{"name": "something", "passed": False, "detail": "why"}]
    assert len(saved["figures"]) == 2 + 2 + 2 * 2
    assert all(figure["value"] > 0 for figure in saved["figures"])


def test_the_large_model_has_a_billion_weights() -> None:
    assert ONE_BILLION.multiplied_weights + ONE_BILLION.hidden * ONE_BILLION.vocab == pytest.approx(1.1e9, rel=0.05)
