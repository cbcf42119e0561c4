"""Where kernels run here.  Triton reads TRITON_INTERPRET when it is imported, which these tests do later."""

from __future__ import annotations

import functools
import importlib.util
import os

import pytest
import torch

from shared.kernels import make_kernels
from shared.kernels.base import Kernels
from shared.kernels.choice import attention_problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

HAS_TRITON = importlib.util.find_spec("triton") is not None
TRITON = pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"))

_LLVM_PROBLEM = attention_problem("llvm", DEVICE, "float32")
_NEEDS_LLVM = pytest.mark.skipif(_LLVM_PROBLEM is not None, reason=str(_LLVM_PROBLEM))
LLVM = pytest.param("llvm", marks=_NEEDS_LLVM)
LLVM_AVX2 = pytest.param("llvm for AVX2", marks=_NEEDS_LLVM)
"""The code that a processor without AVX-512 gets."""


@functools.cache
def kernels_of(backend: str) -> Kernels:
    """The backend of that name, or of `LLVM_AVX2`'s; one for all tests, since some compile when they are made."""
    if backend == "llvm for AVX2":
        from shared.kernels.llvm_backend import LlvmKernels
        from shared.kernels.llvm_kernels.compiler import AVX2_PROCESSOR

        return LlvmKernels(AVX2_PROCESSOR)
    return make_kernels(backend, torch.device(DEVICE))


def skip_unless_computes_in(dtype: torch.dtype, backend: str) -> None:
    if backend.startswith("llvm") and dtype != torch.float32:
        pytest.skip("float32 only")
