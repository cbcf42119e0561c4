"""The LLVM backend: float32 on a CPU, with kernels compiled for it when the backend is made.

Widths that are no whole vectors have none; there it does what the torch backend does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shared.executor.forward_batch import ForwardBatch
from shared.kernels.base import AttentionShape
from shared.kernels.llvm_kernels import attention, extend, linear, pointwise
from shared.kernels.llvm_kernels.builder import Build
from shared.kernels.llvm_kernels.compiler import Compiled, Run, float_bits
from shared.kernels.torch_backend import ManyTokens, TorchKernels, attend_many, plan_many
from shared.messages import IntArray

SMALL = 1 << 14
"""Numbers that one thread has worked through before a second has woken."""


@dataclass(frozen=True)
class _PackedLinear:
    panels: Tensor
    """[panels, in, outputs of a panel]"""
    zeros: Tensor
    """[out], for a layer without bias"""
    outputs: int
    """Without those that only fill up the panel of a layer narrower than one."""


@dataclass(frozen=True)
class _SingleTokens:
    """The requests with one new token."""

    tokens: Tensor | None
    """[n] indices into T; None for all of them in order"""
    run: Run
    slots: Tensor
    """int32"""
    ranges: Tensor
    """int64 [2, n]: where each request's slots begin and end"""
    parts: Tensor
    """int64 [threads + 1]"""
    scores: Tensor
    """[threads, room]"""


@dataclass(frozen=True)
class _Extends:
    """The requests with several."""

    run: Run
    slots: Tensor
    """int32"""
    requests: Tensor
    """int64 [m, 4]"""
    window: int
    blocks: Tensor
    """int64 [b, 2]"""
    parts: Tensor
    """int64 [threads + 1]"""
    scratch: Tensor
    """[threads, room]"""


@dataclass(frozen=True)
class _Plan:
    single: _SingleTokens | None
    extends: _Extends | None
    many: list[ManyTokens]
    """Requests with several new tokens whose heads have no kernel."""


class LlvmKernels(TorchKernels):
    """`shared.kernels.base.Kernels`; the kernels of a shape of attention are compiled at its first plan."""

    def __init__(self, processor: str | None = None) -> None:
        """For this processor, or for one named as LLVM names it.  Raises RuntimeError without OpenMP."""
        self._processor = processor
        compiled = Compiled([linear.build, pointwise.build], processor)
        self._target = compiled.target
        self._linear = compiled.kernel("linear")
        self._rms_norm, self._add_rms_norm = compiled.kernel("rms_norm"), compiled.kernel("add_rms_norm")
        self._rope, self._silu_and_mul = compiled.kernel("rope"), compiled.kernel("silu_and_mul")
        self._store_kv = compiled.kernel("store_kv")
        self._attention: dict[tuple[str, AttentionShape], Run] = {}

    def pack_linear(self, weight: Tensor) -> Any:
        outputs, width = weight.shape[0], linear.panel_width(self._target)
        if outputs < width:
            weight = torch.cat([weight, weight.new_zeros(width - outputs, weight.shape[1])])
        starts = [min(start, len(weight) - width) for start in range(0, len(weight), width)]
        panels = weight.new_empty((len(starts), weight.shape[1], width))
        for panel, start in zip(panels, starts, strict=True):
            panel.copy_(weight[start : start + width].t())
        return _PackedLinear(panels, weight.new_zeros(len(weight)), outputs)

    def linear(self, x: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()
        (rows, inputs), outputs = x.shape, len(packed.zeros)
        out = torch.empty(rows, outputs)
        is_narrow = packed.outputs < outputs
        first_sum = packed.zeros if bias is None or is_narrow else bias
        self._linear(
            x.data_ptr(), x.stride(0), packed.panels.data_ptr(), first_sum.data_ptr(), out.data_ptr(),
            rows, inputs, outputs, is_small=rows * packed.panels.numel() < SMALL,
        )  # fmt: skip
        if not is_narrow:
            return out
        out = out[:, : packed.outputs].contiguous()
        return out if bias is None else out.add_(bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
        if width % self._target.lanes or x.stride(-1) != 1 or (heads > 1 and x.stride(1) != width):
            return super().rms_norm(x, weight, eps)
        out = torch.empty(x.shape)
        self._rms_norm(
            x.data_ptr(), x.stride(0), heads, weight.data_ptr(), out.data_ptr(), x.numel() // width, width,
            float_bits(eps), is_small=x.numel() < SMALL,
        )  # fmt: skip
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, width = residual.shape
        if width % self._target.lanes or not x.is_contiguous():
            return super().add_rms_norm(x, residual, weight, eps)
        out = torch.empty_like(residual)
        self._add_rms_norm(
            x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, float_bits(eps),
            is_small=x.numel() < SMALL,
        )  # fmt: skip
        return out

    def rope(self, qk: Tensor, cos: Tensor, sin: Tensor) -> None:
        tokens, heads, head_dim = qk.shape
        if head_dim % (2 * self._target.lanes):
            super().rope(qk, cos, sin)
        else:
            self._rope(
                qk.data_ptr(), qk.stride(0), cos.data_ptr(), sin.data_ptr(), tokens, heads, head_dim // 2,
                is_small=tokens * heads * head_dim < SMALL,
            )  # fmt: skip

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if width % self._target.lanes:
            return super().silu_and_mul(gate_up)
        self._silu_and_mul(gate_up.data_ptr(), rows, width, is_small=rows * width < SMALL)
        return gate_up[:, :width]

    def store_kv(self, pool: Tensor, loc: Tensor, kv: Tensor) -> None:
        rows, width = kv.shape[0], pool[0].numel()
        if width % self._target.lanes:
            super().store_kv(pool, loc, kv)
        else:
            self._store_kv(
                pool.data_ptr(), loc.data_ptr(), kv.data_ptr(), kv.stride(0), rows, width,
                is_small=rows * width < SMALL,
            )  # fmt: skip

    def plan_attention(self, batch: ForwardBatch, shape: AttentionShape, pool: Tensor) -> Any:
        is_single = batch.extend_lens == 1
        starts = np.cumsum(batch.extend_lens) - batch.extend_lens
        single, several = np.flatnonzero(is_single), np.flatnonzero(~is_single)
        extends, many = None, []
        if len(several) and extend.can_attend(shape, self._target):
            extends = self._plan_extends(batch, several, starts, shape)
        else:
            many = [plan_many(batch, int(row), int(starts[row]), shape, pool) for row in several]
        return _Plan(self._plan_single(batch, single, starts, shape) if len(single) else None, extends, many)

    def attention(self, q: Tensor, pool: Tensor, plan: Any) -> Tensor:
        if plan.extends is None and not plan.many:
            return self._attend_single(q, pool, plan.single)
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2])
        if plan.extends is not None:
            self._attend_extends(q, pool, plan.extends, out)
        for many in plan.many:
            out[many.start : many.stop] = attend_many(q[many.start : many.stop], pool, many).flatten(1)
        if plan.single is not None:
            out[plan.single.tokens] = self._attend_single(q[plan.single.tokens], pool, plan.single)
        return out

    def _plan_extends(self, batch: ForwardBatch, rows: IntArray, starts: IntArray, shape: AttentionShape) -> _Extends:
        ends, counts = batch.seq_lens[rows], batch.extend_lens[rows]
        lengths = ends if shape.sliding_window is None else np.minimum(ends, counts + shape.sliding_window - 1)
        firsts = [np.arange(0, count, extend.BLOCK_TOKENS) for count in counts.tolist()]
        blocks = np.stack([np.repeat(np.arange(len(rows)), list(map(len, firsts))), np.concatenate(firsts)], axis=1)
        request, first = blocks.T
        tokens = np.minimum(counts[request] - first, extend.BLOCK_TOKENS)
        work = tokens * (lengths[request] - counts[request] + first + tokens)
        parts = _parts(work, torch.get_num_threads())
        room = extend.scratch_room(shape, int(lengths.max()), self._target)
        return _Extends(
            run=self._kernel("extend_attention", extend.builder_of, shape),
            slots=torch.from_numpy(_slots(batch, rows, lengths)),
            requests=torch.from_numpy(np.stack([np.cumsum(lengths) - lengths, lengths, starts[rows], counts], axis=1)),
            window=shape.sliding_window or int(lengths.max()),
            blocks=torch.from_numpy(blocks),
            parts=torch.from_numpy(parts),
            scratch=torch.empty(len(parts) - 1, room),
        )

    def _attend_extends(self, q: Tensor, pool: Tensor, plan: _Extends, out: Tensor) -> None:
        """Writes the rows of `out`, `[T, heads * D]`, that are tokens of these requests."""
        plan.run(
            q.data_ptr(), q.stride(0), pool.data_ptr(), plan.slots.data_ptr(), plan.requests.data_ptr(), plan.window,
            out.data_ptr(), plan.scratch.data_ptr(), plan.scratch.shape[1], plan.blocks.data_ptr(),
            plan.parts.data_ptr(), len(plan.parts) - 1,
        )  # fmt: skip

    def _plan_single(
        self, batch: ForwardBatch, rows: IntArray, starts: IntArray, shape: AttentionShape
    ) -> _SingleTokens:
        lengths = batch.seq_lens[rows]
        if shape.sliding_window is not None:
            lengths = np.minimum(lengths, shape.sliding_window)
        ends = np.cumsum(lengths)
        parts = _parts(np.repeat(lengths, shape.kv_heads), torch.get_num_threads())
        room = attention.scores_room(shape, int(lengths.max()), self._target)
        return _SingleTokens(
            tokens=None if len(rows) == len(batch.input_ids) else torch.from_numpy(starts[rows]),
            run=self._kernel("decode_attention", attention.builder_of, shape),
            slots=torch.from_numpy(_slots(batch, rows, lengths)),
            ranges=torch.from_numpy(np.stack([ends - lengths, ends])),
            parts=torch.from_numpy(parts),
            scores=torch.empty(len(parts) - 1, room),
        )

    def _attend_single(self, q: Tensor, pool: Tensor, plan: _SingleTokens) -> Tensor:
        """`[n, heads, D]` to `[n, heads * D]`."""
        count, heads, head_dim = q.shape
        out = torch.empty(count, heads * head_dim)
        begins, ends = plan.ranges
        plan.run(
            q.data_ptr(), q.stride(0), pool.data_ptr(), plan.slots.data_ptr(), begins.data_ptr(), ends.data_ptr(),
            out.data_ptr(), plan.scores.data_ptr(), plan.scores.shape[1], plan.parts.data_ptr(), len(plan.parts) - 1,
            is_small=len(plan.slots) * heads * head_dim < SMALL,
        )  # fmt: skip
        return out

    def _kernel(self, name: str, builder_of: Callable[[AttentionShape], Build], shape: AttentionShape) -> Run:
        """The kernel `name` for heads of this shape, compiled when it is first asked for."""
        sizes = dataclasses.replace(shape, sliding_window=None)  # not part of the code
        if (name, sizes) not in self._attention:
            self._attention[name, sizes] = Compiled([builder_of(sizes)], self._processor).kernel(name)
        return self._attention[name, sizes]


def _slots(batch: ForwardBatch, rows: IntArray, lengths: IntArray) -> npt.NDArray[np.int32]:
    """The last slots of each of these requests, so many, one request after the other."""
    contexts = np.stack([batch.req_pool_indices[rows], batch.seq_lens[rows] - lengths, batch.seq_lens[rows]])
    return np.concatenate([batch.req_to_token[row, begin:end] for row, begin, end in contexts.T.tolist()])


def _parts(work: IntArray, count: int) -> IntArray:
    """Where each of `count` parts of the pieces begins, `[count + 1]`; one ends where the work so far is its share."""
    done = np.cumsum(work)
    borders = done[-1] * np.arange(1, count) / count
    ends = np.searchsorted(done, borders, side="left") + 1
    return np.concatenate([[0], ends, [len(work)]]).clip(max=len(work))
