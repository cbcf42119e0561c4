"""Triton's compiler takes every kernel, also on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shared.kernels.choice import INTERPRETER
from tests.kernels.conftest import HAS_TRITON

SHARED_MEMORY_BYTES = 99 << 10
"""What a program can have on the smallest GPU since Ampere (compute capability 8.6)."""


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_every_kernel_compiles_and_fits_the_shared_memory_of_an_ampere_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_kernels", "80"],
        env={name: value for name, value in os.environ.items() if name != INTERPRETER},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert {kernel[0] for kernel in kernels} == {
        "extend_attention", "decode_attention", "merge_splits", "rms_norm", "add_rms_norm", "rope", "silu_and_mul",
        "store_kv", "limit",
    }  # fmt: skip
    assert max(int(kernel[-1]) for kernel in kernels) <= SHARED_MEMORY_BYTES
