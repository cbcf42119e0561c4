"""RMSNorm, RoPE, SiLU-and-multiply and the KV store, each in one pass over its rows."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from shared.kernels.llvm_kernels.builder import FLOAT, INT, Kernel, Target, Value, integer, number

RMS_NORM: Final = ("x_ptr", "token_stride", "heads", "weight_ptr", "out_ptr", "rows", "width", "eps_f32")
"""x `[rows / heads, heads, width]`, heads next to each other; out contiguous.  Strides of all kernels here are in
elements, widths whole vectors."""
ADD_RMS_NORM: Final = ("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "rows", "width", "eps_f32")
"""x, residual and out contiguous; the sum is written to residual."""
ROPE: Final = ("qk_ptr", "token_stride", "cos_ptr", "sin_ptr", "tokens", "heads", "half")
"""qk `[tokens, heads, 2 * half]`, heads next to each other; cos and sin `[tokens, 2 * half]`."""
SILU_AND_MUL: Final = ("gate_up_ptr", "rows", "width")
"""gate_up `[rows, 2 * width]`, the product in place of gate."""
STORE_KV: Final = ("pool_ptr", "loc_ptr", "kv_ptr", "kv_stride", "rows", "width")
"""loc int64 `[rows]`, the rows of the pool; kv `[rows, width]`."""


def build(module: Any, target: Target) -> None:
    """Adds `rms_norm`, `add_rms_norm`, `rope`, `silu_and_mul` and `store_kv`."""
    _build_rms_norm(module, target.lanes)
    _build_add_rms_norm(module, target.lanes)
    _build_rope(module, target.lanes)
    _build_silu_and_mul(module, target.lanes)
    _build_store_kv(module, target.lanes)


def _build_rms_norm(module: Any, lanes: int) -> None:
    k = Kernel(module, "rms_norm", RMS_NORM)
    a = k.args
    with k.loop(*k.share(a["rows"])) as row:
        token, head = k.ir.sdiv(row, a["heads"]), k.ir.srem(row, a["heads"])
        x = k.at(a["x_ptr"], k.add(k.mul(token, a["token_stride"]), k.mul(head, a["width"])))
        squares = _sum_of_squares(k, lanes)
        with k.loop(integer(0), a["width"], lanes) as at:
            squares.add(k.load(k.at(x, at), lanes))
        squares.normed(x, k.at(a["out_ptr"], k.mul(row, a["width"])))
    k.end()


def _build_add_rms_norm(module: Any, lanes: int) -> None:
    k = Kernel(module, "add_rms_norm", ADD_RMS_NORM)
    a = k.args
    with k.loop(*k.share(a["rows"])) as row:
        x, residual, out = (k.at(a[name], k.mul(row, a["width"])) for name in ("x_ptr", "residual_ptr", "out_ptr"))
        squares = _sum_of_squares(k, lanes)
        with k.loop(integer(0), a["width"], lanes) as at:
            added = k.ir.fadd(k.load(k.at(residual, at), lanes), k.load(k.at(x, at), lanes))
            k.store(added, k.at(residual, at))
            squares.add(added)
        squares.normed(residual, out)
    k.end()


class _sum_of_squares:
    """Of one row, vector by vector, and what follows from it."""

    def __init__(self, k: Kernel, lanes: int) -> None:
        self.k, self.lanes = k, lanes
        self.kind = ir.VectorType(FLOAT, lanes)
        self.place = k.variable(self.kind, k.constant(0.0, lanes))

    def add(self, vector: Value) -> None:
        self.k.ir.store(self.k.fma(vector, vector, self.k.get(self.place, self.kind)), self.place)

    def normed(self, row: Value, out: Value) -> None:
        """Writes `row / rms * weight` to `out`."""
        k, width = self.k, self.k.args["width"]
        mean = k.ir.fdiv(k.sum(k.get(self.place, self.kind)), k.ir.sitofp(width, FLOAT))
        rms = k.intrinsic("llvm.sqrt.f32", FLOAT, k.ir.fadd(mean, k.args["eps_f32"]))
        factor = k.splat(k.ir.fdiv(number(1.0), rms), self.lanes)
        with k.loop(integer(0), width, self.lanes) as at:
            x, weight = (k.load(k.at(pointer, at), self.lanes) for pointer in (row, k.args["weight_ptr"]))
            k.store(k.ir.fmul(k.ir.fmul(x, factor), weight), k.at(out, at))


def _build_rope(module: Any, lanes: int) -> None:
    k = Kernel(module, "rope", ROPE)
    a = k.args
    head_dim = k.mul(a["half"], integer(2))
    with k.loop(*k.share(a["tokens"])) as token:
        token_at, angle_at = k.mul(token, a["token_stride"]), k.mul(token, head_dim)
        with k.loop(integer(0), a["heads"]) as head:
            low = k.at(a["qk_ptr"], k.add(token_at, k.mul(head, head_dim)))
            high = k.at(low, a["half"])
            with k.loop(integer(0), a["half"], lanes) as at:
                low_at, high_at = k.add(angle_at, at), k.add(angle_at, a["half"], at)
                first, second = k.load(k.at(low, at), lanes), k.load(k.at(high, at), lanes)
                turned = []
                for mine, other, angle in ((first, second, low_at), (second, first, high_at)):
                    cos, sin = (k.load(k.at(a[name], angle), lanes) for name in ("cos_ptr", "sin_ptr"))
                    turned.append(k.fma(other, sin, k.ir.fmul(mine, cos)))
                k.store(turned[0], k.at(low, at))
                k.store(turned[1], k.at(high, at))
    k.end()


def _build_silu_and_mul(module: Any, lanes: int) -> None:
    k = Kernel(module, "silu_and_mul", SILU_AND_MUL)
    a = k.args
    with k.loop(*k.share(a["rows"])) as row:
        gate = k.at(a["gate_up_ptr"], k.mul(row, a["width"], integer(2)))
        up = k.at(gate, a["width"])
        with k.loop(integer(0), a["width"], lanes) as at:
            x, y = k.load(k.at(gate, at), lanes), k.load(k.at(up, at), lanes)
            below = k.ir.fadd(k.constant(1.0, lanes), k.exp(k.ir.fneg(x)))
            k.store(k.ir.fmul(k.ir.fdiv(x, below), y), k.at(gate, at))
    k.end()


def _build_store_kv(module: Any, lanes: int) -> None:
    k = Kernel(module, "store_kv", STORE_KV)
    a = k.args
    with k.loop(*k.share(a["rows"])) as row:
        slot = k.get(k.at(a["loc_ptr"], row, INT), INT)
        source = k.at(a["kv_ptr"], k.mul(row, a["kv_stride"]))
        to = k.at(a["pool_ptr"], k.mul(slot, a["width"]))
        with k.loop(integer(0), a["width"], lanes) as at:
            k.store(k.load(k.at(source, at), lanes), k.at(to, at))
    k.end()
