"""The operations a model is made of, behind small interfaces (`base`), in four backends.

`torch_backend` runs anywhere and is the reference for the others, `llvm_backend` is the CPU's quickest,
`triton_backend` and `flashinfer_backend` are for GPUs; `choice` says which of them can run.  A backend is imported
when it is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from shared.kernels.base import Kernels, SamplingKernels


def make_kernels(name: str, device: torch.device, quantization: str | None = None) -> Kernels:
    """The attention backend `name` (torch, llvm, triton or flashinfer) for `device`.

    Raises ValueError for another name.  `quantization` is that of the weights; only the CPU's backends have any.
    """
    if name == "torch":
        from shared.kernels.torch_backend import TorchKernels

        return _with_small_weights(TorchKernels, quantization)()
    if name == "llvm":
        from shared.kernels.llvm_backend import LlvmKernels

        return _with_small_weights(LlvmKernels, quantization)()
    if name == "triton":
        from shared.kernels.triton_backend import TritonKernels

        return TritonKernels()
    if name == "flashinfer":
        from shared.kernels.flashinfer_backend import FlashInferKernels

        return FlashInferKernels(device)
    raise ValueError(f"there is no backend {name!r}")


def _with_small_weights(backend: type[Kernels], quantization: str | None) -> type[Kernels]:
    """`backend` with the linear layers of `quantization`, if any."""
    if quantization is None:
        return backend
    from shared.kernels.small_weights import Float16Weights, Int8Weights

    layers = {"float16": Float16Weights, "int8": Int8Weights}[quantization]
    return type(f"{layers.__name__}{backend.__name__}", (layers, backend), {})


def make_sampling_kernels(name: str) -> SamplingKernels:
    """The sampling backend `name`, likewise."""
    if name == "torch":
        from shared.kernels.torch_sampling import TorchSampling

        return TorchSampling()
    if name == "triton":
        from shared.kernels.triton_backend import TritonSampling

        return TritonSampling()
    if name == "flashinfer":
        from shared.kernels.flashinfer_backend import FlashInferSampling

        return FlashInferSampling()
    raise ValueError(f"there is no backend {name!r}")
