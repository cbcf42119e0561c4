"""Throughput of a rank without any server, against the measured rates of the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.gpu_check.cases import make_batch
from bench.gpu_check.model import ModelSize
from bench.gpu_check.report import Report
from shared.executor.forward_batch import ForwardMode
from shared.executor.model_runner import ModelRunner
from shared.executor.rank import runner_class
from shared.kernels.choice import attention_problem
from shared.parallel.tp_group import TpGroup
from shared.server_args import ServerArgs
from shared.weights.model_config import ModelConfig

DTYPE, ITEM_BYTES = "bfloat16", 2
MEMORY, PRODUCTS = "memory", f"matrix products in {DTYPE}"


def measure_device(report: Report, device: str, copied: int) -> None:
    """The memory's rate, shown by a copy of `copied` bytes, and that of matrix products of the same size."""
    report.figure(MEMORY, _bandwidth(device, copied) / 1e9, "GB/s")
    report.figure(PRODUCTS, _matmul_rate(device, round((copied / 8) ** 0.5)) / 1e12, "TFLOP/s")


def measure_rates(
    report: Report,
    backend: str,
    folder: Path,
    size: ModelSize,
    device: str,
    *,
    context: int,
    batches: tuple[int, ...],
) -> None:
    """Prefill of `context` tokens and decodes at that context, for every number of requests in `batches`.

    Beside what `measure_device` has found.
    """
    problem = attention_problem(backend, device, DTYPE, size.head_dim)
    if problem is not None:
        report.skip(problem)
        return
    bandwidth, flops = report.value(MEMORY) * 1e9, report.value(PRODUCTS) * 1e12
    most = max(batches)
    args = ServerArgs(
        model_path=str(folder),
        device=device,
        dtype=DTYPE,
        attention_backend=backend,
        max_total_tokens=most * (context + 1),
        cuda_graph_max_bs=most,
    )
    runner: ModelRunner = runner_class(device)(
        args, ModelConfig.from_folder(folder), TpGroup(0, 1), context_length=context + 8, max_running_requests=most
    )
    prefill = make_batch([(0, context)], context, 0, ForwardMode.EXTEND, size.vocab)
    seconds = _seconds(lambda: runner.launch(prefill).wait(), device)
    attention = 2 * size.layers * size.heads * size.head_dim * context**2
    done = 2 * size.multiplied_weights * context + attention
    report.figure(f"{backend}: prefill of {context}", context / seconds, "tokens/s")
    report.figure(f"{backend}: prefill of {context}, of the rate of matrix products", done / seconds / flops * 100, "%")
    for count in batches:
        decode = make_batch([(context, 1)] * count, count * (context + 1), 0, ForwardMode.DECODE, size.vocab)
        seconds = _seconds(lambda decode=decode: runner.launch(decode).wait(), device)  # type: ignore[misc]
        read = ITEM_BYTES * (size.multiplied_weights + count * context * size.kv_values_per_token)
        report.figure(f"{backend}: decode of {count} at {context}", count / seconds, "tokens/s")
        report.figure(
            f"{backend}: decode of {count} at {context}, of the memory's rate", read / seconds / bandwidth * 100, "%"
        )


def _bandwidth(device: str, copied: int) -> float:
    """Bytes read and written a second by a copy."""
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * copied / _seconds(lambda: target.copy_(source), device)


def _matmul_rate(device: str, width: int) -> float:
    """Operations a second in a square product."""
    left, right = (torch.randn(width, width, device=device).to(getattr(torch, DTYPE)) for _ in range(2))
    return 2 * width**3 / _seconds(lambda: left @ right, device)


def _seconds(run: Callable[[], object], device: str, least: float = 0.3) -> float:
    """Of one run, the mean over as many as fill `least` seconds, after three that do not count."""
    for _ in range(3):
        run()
    _wait(device)
    start, runs = time.perf_counter(), 0
    while time.perf_counter() - start < least:
        run()
        runs += 1
    _wait(device)
    return (time.perf_counter() - start) / runs


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
