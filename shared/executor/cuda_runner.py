"""One rank's model on a GPU: launches go to the device's stream and return, results come by an event."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from shared.executor.cuda_graphs import DecodeGraphs, GpuCapture, graph_sizes
from shared.executor.forward_batch import ForwardBatch, ForwardMode, ForwardResult
from shared.executor.model_runner import ModelRunner
from shared.executor.to_device import to_device
from shared.kernels.base import GraphKernels
from shared.layers.sampler import Sampled
from shared.messages import IntArray
from shared.parallel.tp_group import TpGroup
from shared.server_args import ServerArgs
from shared.weights.model_config import ModelConfig


class CudaForward:
    """A `PendingForward` on the device's stream."""

    def __init__(self, sampled: Sampled, batch: ForwardBatch) -> None:
        """Call right after `sampled` was computed, on the stream that computes it."""
        self.device_token_ids = sampled.token_ids
        self._batch = batch
        self._on_host = sampled.to_host()
        self._is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._is_copied.record()
        self._result: ForwardResult | None = None
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        """Whether someone has waited for it."""
        return self._result is not None

    def wait(self) -> ForwardResult:
        """May be called by any thread and more than once; only the first counts the tokens."""
        with self._lock:
            if self._result is None:
                self._is_copied.synchronize()
                self._result = self._on_host.result(self._batch)
            return self._result


class CudaModelRunner(ModelRunner):
    """A `ForwardRunner` whose launches do not wait for the device.

    All its work goes to the device's current stream, in order.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        config: ModelConfig,
        tp_group: TpGroup,
        *,
        context_length: int,
        max_running_requests: int,
        local_rank: int = 0,
    ) -> None:
        torch.cuda.set_device(local_rank)
        super().__init__(
            server_args,
            config,
            tp_group,
            context_length=context_length,
            max_running_requests=max_running_requests,
            local_rank=local_rank,
        )
        self._pending: list[CudaForward] = []
        self._graphs: DecodeGraphs | None = None
        if not server_args.disable_cuda_graph and isinstance(self.kernels, GraphKernels):
            sizes = graph_sizes(min(server_args.cuda_graph_max_bs, max_running_requests))
            self._graphs = self._capture(self.kernels, sizes, context_length)

    def to_device(self, array: IntArray) -> Tensor:
        torch.cuda.set_device(self.device)  # of the thread that launches
        return to_device(array, self.device)

    @torch.inference_mode()
    def launch(self, batch: ForwardBatch) -> CudaForward:
        """Queues one forward and one sample.

        Waits only for a batch with penalties, which count the tokens of the forwards before it.
        """
        torch.cuda.set_device(self.device)
        self._pending = [pending for pending in self._pending if not pending.is_over]
        if any(counts is not None for counts in batch.sampling.counts):
            for pending in self._pending:
                pending.wait()
        logits = None
        if self._graphs is not None and batch.mode is ForwardMode.DECODE:
            logits = self._graphs.run(batch)
        if logits is None:
            logits = self.forward(batch)
        pending = CudaForward(self._sampler.sample(logits, batch), batch)
        self._pending.append(pending)
        return pending

    @torch.inference_mode()
    def _capture(self, kernels: GraphKernels, sizes: list[int], context_length: int) -> DecodeGraphs:
        model, pools = self._model, self._pools
        return DecodeGraphs(
            lambda inputs: model.forward(inputs, pools),
            kernels,
            model.attention_shape,
            pools[0],
            sizes=sizes,
            context_length=context_length + 1,
            spare_slot=self.max_total_num_tokens,
            capture=GpuCapture(),
        )
