"""Decodes as CUDA graphs: captured once per batch size at the start, replayed with other contents.

A batch runs in the smallest graph that holds it.  The rows left over decode token 0 at position 0, write its KV
to a slot that no request ever gets, and see nothing but that slot.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.executor.forward_batch import ForwardBatch
from shared.executor.to_device import to_device
from shared.kernels.base import AttentionShape, GraphKernels
from shared.kernels.paged import PagedKv, paged_kv
from shared.models.llama import ForwardInputs

Replay = Callable[[], Tensor]
"""Runs a graph and returns its output, which the next run of any graph may overwrite."""
Capture = Callable[[Callable[[], Tensor]], Replay]
WARM_UPS = 2
"""Runs before a capture, in which libraries allocate and tune what they must not while one is going on."""


def graph_sizes(most: int) -> list[int]:
    """Batch sizes that get a graph: close together where padding would cost most, never above `most`."""
    return [size for size in (1, 2, 4, *range(8, 32, 8), *range(32, most + 1, 16)) if size < most] + [most]


class GpuCapture:
    """A `Capture`.  All graphs share one pool of memory: only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Tensor]) -> Replay:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process, NCCL's for one, go on with their own calls meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = function()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


@dataclass(frozen=True)
class _Graph:
    inputs: ForwardInputs
    replay: Replay


class DecodeGraphs:
    """A graph for each of `sizes`, captured when this is made, the largest first so that the others fit its memory."""

    def __init__(
        self,
        forward: Callable[[ForwardInputs], Tensor],
        kernels: GraphKernels,
        shape: AttentionShape,
        pool: Tensor,
        *,
        sizes: list[int],
        context_length: int,
        spare_slot: int,
        capture: Capture,
    ) -> None:
        """`forward` gives the logits `[bs, vocab]`; `pool` is any layer's; `spare_slot` is in it and nobody's."""
        self._kernels = kernels
        self._spare_slot = spare_slot
        self._sizes = sizes
        self._graphs: dict[int, _Graph] = {}
        device = pool.device
        token_ids, positions, out_cache_loc = torch.zeros((3, sizes[-1]), dtype=torch.int64, device=device).unbind()
        out_cache_loc.fill_(spare_slot)
        kv_indices = torch.full((sizes[-1] * context_length,), spare_slot, dtype=torch.int32, device=device)
        for size in reversed(sizes):
            plan = kernels.plan_for_graph(size, kv_indices, context_length, shape, pool)
            kernels.refill(plan, _nothing_but_padding(size, spare_slot))
            inputs = ForwardInputs(token_ids[:size], positions[:size], out_cache_loc[:size], None, plan)
            self._graphs[size] = _Graph(inputs, capture(_bind(forward, inputs)))

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> Tensor | None:
        """Logits `[bs, vocab]`, good until the next run; None for a batch that no graph holds.

        Waits for nothing.
        """
        count = len(batch.seq_lens)
        at = bisect.bisect_left(self._sizes, count)
        if at == len(self._sizes):
            return None
        size = self._sizes[at]
        graph = self._graphs[size]
        inputs = graph.inputs
        _fill(inputs.input_ids, batch.input_ids, 0)
        _fill(inputs.positions, batch.positions, 0)
        _fill(inputs.out_cache_loc, batch.out_cache_loc, self._spare_slot)
        self._kernels.refill(inputs.attention_plan, paged_kv(batch).padded(size, self._spare_slot))
        return graph.replay()[:count]


def _bind(forward: Callable[[ForwardInputs], Tensor], inputs: ForwardInputs) -> Callable[[], Tensor]:
    return lambda: forward(inputs)


def _fill(buffer: Tensor, values: Any, padding: int) -> None:
    """`values` (an array, or a tensor on the buffer's device) into the buffer, and `padding` behind them."""
    tensor = values if isinstance(values, Tensor) else to_device(values, buffer.device)
    buffer[: len(tensor)].copy_(tensor)
    buffer[len(tensor) :].fill_(padding)


def _nothing_but_padding(size: int, slot: int) -> PagedKv:
    none = np.zeros(1, dtype=np.int32)
    return PagedKv(none, none, none[:0]).padded(size, slot)
