"""Compiles kernels for this processor, and runs them on torch's own OpenMP threads.

Two OpenMP libraries in one process would each keep threads that spin while the other's work, so the one that torch
has loaded is asked to run the team.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding as llvm
from llvmlite import ir

from shared.kernels.llvm_kernels.builder import Build, Target

AVX2_PROCESSOR = "haswell"
"""What a processor is taken for that has no AVX-512, and by tests that want one without."""


class Compiled:
    """Machine code of the kernels that `builds` add to one module."""

    def __init__(self, builds: Sequence[Build], processor: str | None = None) -> None:
        """For this processor, or for one named as LLVM names it."""
        machine, self.target = _machine(processor)
        module = ir.Module()
        for build in builds:
            build(module, self.target)
        parsed = llvm.parse_assembly(str(module))
        parsed.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=1)
        options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False  # done already
        passes = llvm.create_pass_builder(machine, options)
        passes.getModulePassManager().run(parsed, passes)
        self._engine = llvm.create_mcjit_compiler(parsed, machine)
        self._engine.finalize_object()

    def kernel(self, name: str) -> Run:
        return Run(self._engine, name)


class Run:
    """A compiled kernel, to be called with its arguments as Python integers."""

    def __init__(self, engine: Any, name: str) -> None:
        self._engine = engine  # which owns the code
        self._address: int = engine.get_function_address(name)
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)
        self._in_team = _openmp().GOMP_parallel

    def __call__(self, *arguments: int, is_small: bool = False) -> None:
        """By all of torch's threads; by the caller alone where the work is too small to be worth waking them."""
        array = (ctypes.c_int64 * len(arguments))(*arguments)
        threads = 1 if is_small else torch.get_num_threads()
        if threads == 1:
            self._alone(array)
        else:
            self._in_team(self._address, array, threads, 0)


def float_bits(value: float) -> int:
    """An argument whose name ends in `_f32`."""
    return int.from_bytes(struct.pack("<f", value), "little")


def _machine(processor: str | None) -> tuple[Any, Target]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for symbol in ("omp_get_thread_num", "omp_get_num_threads"):
        llvm.add_symbol(symbol, ctypes.cast(getattr(_openmp(), symbol), ctypes.c_void_p).value)
    host = llvm.get_host_cpu_features()
    target = Target(16, 32) if processor is None and host.get("avx512f") else Target(8, 16)
    features = host.flatten() if processor is None else ""
    triple = llvm.Target.from_default_triple()
    name = processor or llvm.get_host_cpu_name()
    return triple.create_target_machine(cpu=name, features=features, opt=3), target


@functools.cache
def _openmp() -> ctypes.CDLL:
    """The OpenMP library in this process.  Raises RuntimeError where there is not exactly one that can be used."""
    found = set(re.findall(r"\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*", Path("/proc/self/maps").read_text()))
    if len(found) != 1:
        raise RuntimeError(f"needs one OpenMP library in the process, found {sorted(found) or 'none'}")
    library = ctypes.CDLL(found.pop())
    library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    library.GOMP_parallel.restype = None
    return library
