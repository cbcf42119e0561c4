"""Compiles every Triton kernel to machine code for one GPU architecture; prints the shared memory each takes.

In a process of its own, since tests elsewhere run with Triton's interpreter, which compiles nothing.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shared.kernels.base import AttentionShape
from shared.kernels.triton_backend import block_sizes
from shared.kernels.triton_kernels import attention, limits, pointwise

TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
INDEX, INT, FLOAT = "*i32", "i32", "fp32"


def compile_kernel(kernel: Any, architecture: int, types: list[str], constants: dict[str, int], **options: int) -> None:
    signature = dict(zip(kernel.arg_names, [*types, *["constexpr"] * len(constants)], strict=True))
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    assert "cubin" in compiled.asm
    print(kernel.__name__, *types[:1], *constants.values(), compiled.metadata.shared)


def compile_attention(dtype: torch.dtype, head_dim: int, architecture: int) -> None:
    shape = AttentionShape(8, 2, head_dim, None)
    block_m, block_n, block_d, stages = block_sizes(torch.empty(0, dtype=dtype), shape)
    data = TYPES[dtype]
    compile_kernel(
        attention.extend_attention,
        architecture,
        [*[data] * 3, *[INDEX] * 5, FLOAT, *[INT] * 5],
        {"GROUP": 4, "HEAD_DIM": head_dim, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_d, "UPCAST": 0},
        num_stages=stages,
    )
    compile_kernel(
        attention.decode_attention,
        architecture,
        [data, data, "*fp32", "*fp32", INDEX, INDEX, FLOAT, *[INT] * 5],
        {"GROUP": 4, "HEAD_DIM": head_dim, "BLOCK_G": 16, "BLOCK_N": block_n, "BLOCK_D": block_d, "UPCAST": 0},
        num_stages=stages,
    )


def main(architecture: int) -> None:
    for dtype, head_dim in ((torch.bfloat16, 128), (torch.float32, 256)):
        compile_attention(dtype, head_dim, architecture)
    merge = {"HEAD_DIM": 128, "BLOCK_S": 32, "BLOCK_D": 128}
    compile_kernel(attention.merge_splits, architecture, ["*fp32", "*fp32", "*bf16", INT], merge)
    row = {"WIDTH": 4096, "BLOCK": 4096}
    compile_kernel(pointwise.rms_norm, architecture, [*["*bf16"] * 3, FLOAT, INT, INT, INT], row)
    compile_kernel(pointwise.add_rms_norm, architecture, [*["*bf16"] * 4, FLOAT], row)
    heads = {"HEAD_DIM": 128, "BLOCK_H": 64, "BLOCK_HALF": 64}
    compile_kernel(pointwise.rope, architecture, [*["*bf16"] * 3, INT, INT, INT], heads)
    compile_kernel(pointwise.silu_and_mul, architecture, ["*bf16", "*bf16", INT], {"BLOCK": 1024})
    compile_kernel(pointwise.store_kv, architecture, ["*bf16", "*i64", "*bf16", INT], {"WIDTH": 2048, "BLOCK": 1024})
    compile_kernel(limits.limit, architecture, [*["*fp32"] * 3, "*i64", "*fp64", INT], {"BLOCK": 4096})


if __name__ == "__main__":
    main(int(sys.argv[1]))
