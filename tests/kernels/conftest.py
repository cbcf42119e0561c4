"""Where kernels run here.  Triton reads TRITON_INTERPRET when it is imported, which these tests do later."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

HAS_TRITON = importlib.util.find_spec("triton") is not None
TRITON = pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"))
