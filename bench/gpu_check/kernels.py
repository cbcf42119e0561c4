"""Every kernel of a backend against float64, in the types that it can run in."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_check.cases import TOLERANCE, make_batch, make_case, reference_attention
from bench.gpu_check.report import Report
from shared.executor.forward_batch import ForwardMode, SamplingBatch
from shared.kernels import make_kernels, make_sampling_kernels
from shared.kernels.base import AttentionShape, Kernels
from shared.kernels.choice import attention_problem, sampling_problem
from shared.layers.sampler import Sampler

POINTWISE_TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
"""Over the largest value: the last bits of each type."""
EPS = 1e-5
TIED_SHARE = 0.98
"""Of its draws FlashInfer, which cuts ties elsewhere, shares at least so many with the reference."""


def check_kernels(report: Report, backend: str, device: str, longest: int, vocab_size: int) -> None:
    """`longest` is the longest context that is tried, `vocab_size` what is sampled from."""
    for dtype in TOLERANCE:
        name = str(dtype).removeprefix("torch.")
        problem = attention_problem(backend, device, name, 64)
        if problem is not None:
            report.skip(problem)
            continue
        kernels = make_kernels(backend, torch.device(device))
        for what, difference, tolerance in _differences(kernels, device, dtype, longest):
            detail = f"{difference:.1e} of {tolerance:.0e}"
            report.check(f"{backend} {name} {what}", difference <= tolerance, detail)
    if sampling_problem(backend, device) is None:
        share = _share_of_equal_draws(backend, device, vocab_size)
        report.check(f"{backend} draws", share >= (TIED_SHARE if backend == "flashinfer" else 1.0), f"{share:.1%}")


def _differences(kernels: Kernels, device: str, dtype: torch.dtype, longest: int) -> Iterator[tuple[str, float, float]]:
    """Each kernel's name, largest difference and what it may be."""
    mixed = [(0, 5), (30, 1), (7, 40), (0, longest // 4), (longest - 9, 9)]
    decodes = [(0, 1), (63, 1), (64, 1), (longest - 1, 1), (longest // 3, 1)]
    for head_dim in (64, 128):
        for window in (None, 100):
            for what, requests in (("extend", mixed), ("decode", decodes)):
                case = make_case(requests, AttentionShape(8, 2, head_dim, window), dtype, device=device)
                out = kernels.attention(case.q, case.pool, kernels.plan_attention(case.batch, case.shape, case.pool))
                name = f"{what} D={head_dim}" + (f" window={window}" if window else "")
                yield name, _largest(out, reference_attention(case)), TOLERANCE[dtype]
    for name, run in _pointwise(kernels).items():
        actual, expected = run(lambda *shape: torch.randn(*shape, device=device).to(dtype))
        yield name, _largest(actual, expected), POINTWISE_TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))


def _pointwise(kernels: Kernels) -> dict[str, Callable[[Callable[..., Tensor]], tuple[Tensor, Tensor]]]:
    """For each kernel, from a maker of random tensors, what it gives and what it should."""

    def rms_norm(make: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        x, weight = make(7, 2048), make(2048)
        return kernels.rms_norm(x, weight, EPS), F.rms_norm(x.double(), (2048,), weight.double(), EPS)

    def add_rms_norm(make: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        x, residual, weight = make(7, 2048), make(7, 2048), make(2048)
        expected = F.rms_norm((x + residual).double(), (2048,), weight.double(), EPS)
        return kernels.add_rms_norm(x, residual, weight, EPS), expected

    def rope(make: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        heads, angles = make(7, 12, 128), make(7, 1, 64).float()
        cos, sin = (
            torch.cat(halves, -1).to(heads.dtype) for halves in ([angles.cos()] * 2, [-angles.sin(), angles.sin()])
        )
        qk = heads[:, :10]
        expected = qk.double() * cos.double() + qk.double().roll(64, dims=-1) * sin.double()
        kernels.rope(qk, cos, sin)
        return qk, expected

    def silu_and_mul(make: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        gate_up = make(7, 2 * 5632)
        gate, up = gate_up.double().chunk(2, dim=-1)
        expected = F.silu(gate) * up
        return kernels.silu_and_mul(gate_up), expected

    def store_kv(make: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        pool, kv = make(50, 2, 4, 64), make(7, 13, 64)[:, 5:].view(7, 2, 4, 64)
        slots = torch.tensor([9, 0, 49, 3, 17, 30, 8], device=pool.device)
        expected = pool.double().index_copy(0, slots, kv.double())
        kernels.store_kv(pool, slots, kv)
        return pool, expected

    def linear(make: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        x, weight, bias = make(7, 512), make(2080, 512), make(2080)
        expected = F.linear(x.double(), weight.double(), bias.double())
        return kernels.linear(x, kernels.pack_linear(weight), bias), expected

    return {one.__name__: one for one in (rms_norm, add_rms_norm, rope, silu_and_mul, store_kv, linear)}


def _largest(actual: Tensor, expected: Tensor) -> float:
    """The largest difference; infinite where something is not a number."""
    difference = (actual.double().cpu() - expected.cpu()).abs().max()
    return float(difference) if difference.isfinite() else float("inf")


def _share_of_equal_draws(backend: str, device: str, vocab_size: int, rows: int = 60) -> float:
    """Of tokens drawn under limits of all kinds, how many are those of the torch backend on the same device."""
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0)).mul_(2).to(device)
    batch = make_batch([(9, 1)] * rows, 10 * rows, 0, ForwardMode.DECODE, vocab_size)
    batch.sampling = _limits(rows, vocab_size)
    drawn = [Sampler(make_sampling_kernels(name)).sample(logits, batch).token_ids.cpu() for name in ("torch", backend)]
    return float((drawn[0] == drawn[1]).double().mean())


def _limits(rows: int, vocab_size: int) -> SamplingBatch:
    random = np.random.default_rng(1)
    return SamplingBatch(
        greedy=np.zeros(rows, dtype=np.bool_),
        temperature=random.uniform(0.5, 1.5, rows).astype(np.float32),
        top_k=np.where(np.arange(rows) % 3 == 0, random.integers(1, 200, rows), vocab_size),
        top_p=np.where(np.arange(rows) % 4 < 3, random.uniform(0.3, 1.0, rows), 1.0).astype(np.float32),
        min_p=np.where(np.arange(rows) % 5 == 0, 0.05, 0.0).astype(np.float32),
        frequency_penalty=np.zeros(rows, dtype=np.float32),
        presence_penalty=np.zeros(rows, dtype=np.float32),
        repetition_penalty=np.ones(rows, dtype=np.float32),
        seed=np.arange(rows, dtype=np.uint64),
        counts=[None] * rows,
        logit_bias=[None] * rows,
        blocked_until=[None] * rows,
        all_greedy=False,
        any_adjustment=False,
    )
