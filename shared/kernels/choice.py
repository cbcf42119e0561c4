"""Which backend runs where.  Nothing heavy is imported to find out, so that the main process can ask."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform
import re
import sys
from pathlib import Path
from typing import Final

from shared.server_args import ServerArgs

INTERPRETER: Final = "TRITON_INTERPRET"
CPUINFO: Final = Path("/proc/cpuinfo")
FLASHINFER_HEAD_DIMS: Final = (64, 128, 256)
ATTENTION_ORDER: Final[tuple[str, ...]] = ("flashinfer", "triton", "torch")
"""Quickest first, on a GPU."""
CPU_ATTENTION_ORDER: Final[tuple[str, ...]] = ("llvm", "torch")
SAMPLING_ORDER: Final[tuple[str, ...]] = ("triton", "torch")
"""Without FlashInfer: it cuts ties at the border of top-k and top-p elsewhere than the other two."""


def attention_problem(name: str, device: str, dtype: str, head_dim: int | None = None) -> str | None:
    """Why `--attention-backend name` cannot run, and what to give instead, or None.

    `head_dim` is the model's, None where it is not known yet.
    """
    flag = f"--attention-backend {name}"
    if name == "llvm":
        return _llvm_problem(flag, device, dtype)
    problem = _backend_problem(flag, name, device)
    if problem is not None or name != "flashinfer":
        return problem
    if dtype == "float32":
        return f"{flag} computes in half precision only; give --dtype bfloat16 or another backend"
    if head_dim is not None and head_dim not in FLASHINFER_HEAD_DIMS:
        sizes = ", ".join(map(str, FLASHINFER_HEAD_DIMS))
        return f"{flag} has kernels for heads of {sizes}, not of {head_dim}; give triton or torch"
    return None


def sampling_problem(name: str, device: str) -> str | None:
    """As `attention_problem`, for `--sampling-backend`."""
    return _backend_problem(f"--sampling-backend {name}", name, device)


def flag_problem(args: ServerArgs) -> str | None:
    """What is wrong with the backends in `args`, as far as it shows without the model."""
    attention = attention_problem(args.attention_backend, args.device, args.dtype)
    return attention or sampling_problem(args.sampling_backend, args.device) or _quantization_problem(args)


def _quantization_problem(args: ServerArgs) -> str | None:
    if args.quantization is None:
        return None
    flag = f"--quantization {args.quantization}"
    if args.device != "cpu" or args.attention_backend not in ("auto", *CPU_ATTENTION_ORDER):
        return f"{flag} needs --device cpu and --attention-backend llvm or torch"
    if args.quantization == "float16" and platform.machine() not in ("x86_64", "AMD64"):
        return f"{flag} has products for x86 only; give int8, or --dtype bfloat16"
    return None


def resolve_backends(args: ServerArgs, head_dim: int) -> ServerArgs:
    """`args` with names in place of `auto`.  Raises ValueError where a backend cannot run this model.

    For `sim`, which computes nothing, they stay as they are.
    """
    if args.device == "sim":
        return args
    attention, sampling = args.attention_backend, args.sampling_backend
    problem = attention_problem(attention, args.device, args.dtype, head_dim) or sampling_problem(sampling, args.device)
    if problem is not None:
        raise ValueError(problem)
    if attention == "auto":
        order = ATTENTION_ORDER if args.device == "cuda" else CPU_ATTENTION_ORDER
        attention = next(name for name in order if not attention_problem(name, args.device, args.dtype, head_dim))
    if sampling == "auto":
        order = SAMPLING_ORDER if args.device == "cuda" else ("torch",)
        sampling = next(name for name in order if not sampling_problem(name, args.device))
    return dataclasses.replace(args, attention_backend=attention, sampling_backend=sampling)


def _llvm_problem(flag: str, device: str, dtype: str) -> str | None:
    if device != "cpu":
        return f"{flag} has kernels for the CPU only; it needs --device cpu"
    if dtype != "float32":
        return f"{flag} computes in float32 only; give --dtype float32 or torch"
    if not sys.platform.startswith("linux") or not _has_cpu_flag("avx2"):
        return f"{flag} needs Linux on an x86 processor with AVX2; give torch"
    if importlib.util.find_spec("llvmlite") is None:
        return f"{flag} needs the package llvmlite, which is not installed: pip install llvmlite"
    return None


def _has_cpu_flag(name: str) -> bool:
    try:
        flags = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)
    except OSError:
        return False
    return flags is not None and name in flags[1].split()


def _backend_problem(flag: str, name: str, device: str) -> str | None:
    if name in ("auto", "torch"):
        return None
    if device == "sim":
        return f"{flag} needs a device that computes; --device sim takes no backend"
    if name == "flashinfer" and device == "cpu":
        return f"{flag} needs --device cuda; on the CPU give torch"
    for package in ("triton", "flashinfer") if name == "flashinfer" else ("triton",):
        if importlib.util.find_spec(package) is None:
            return f"{flag} needs the package {package}, which is not installed: pip install 'process-eras[gpu]'"
    if name == "triton" and device == "cpu" and os.environ.get(INTERPRETER) != "1":
        return (
            f"{flag} needs --device cuda; on the CPU give torch, or set {INTERPRETER}=1 for Triton's slow interpreter"
        )
    return None
