"""One rank's model on its device: a `ForwardBatch` in, one sampled token per request out."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared import trace
from shared.executor.forward_batch import ForwardBatch, ForwardMode, ForwardResult, PendingForward
from shared.executor.kv_pool import make_kv_pools, num_slots_that_fit
from shared.executor.to_device import to_device
from shared.kernels import make_kernels, make_sampling_kernels
from shared.kernels.choice import resolve_backends
from shared.layers.loader import WeightLoader
from shared.layers.sampler import Sampler
from shared.messages import IntArray
from shared.models.llama import CausalLM, ForwardInputs
from shared.parallel.tp_group import TpGroup
from shared.server_args import ServerArgs
from shared.weights.files import WeightFiles
from shared.weights.model_config import ModelConfig

SPARE_SLOTS = 1
"""At the end of every pool, for rows that only fill up a batch."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEEP_BLOCKS_OF_BYTES = 32 << 20  # the most that glibc takes
_KEEP_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class CompletedForward:
    """A `PendingForward` of a device that computes while it launches."""

    result: ForwardResult

    @property
    def device_token_ids(self) -> IntArray:
        return self.result.next_token_ids

    def wait(self) -> ForwardResult:
        return self.result


class ModelRunner:
    """A `ForwardRunner` in torch.  Holds the weights and the KV pools of one rank.

    `max_total_num_tokens` is the smallest capacity of any rank.
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
        """Reads the weights from the folder `server_args.model_path`; a collective call of all ranks.

        `local_rank` is the index of this rank's device among those of its machine.  Raises ValueError for a
        model or a size that cannot run.
        """
        local_ranks = server_args.tp_size * server_args.dp_size // server_args.nnodes
        self.device = torch.device("cuda", local_rank) if server_args.device == "cuda" else torch.device("cpu")
        if self.device.type == "cpu":
            _share_cores(local_ranks)
            _keep_freed_memory()
        dtype: torch.dtype = getattr(torch, server_args.dtype)
        server_args = resolve_backends(server_args, config.head_dim)
        self.kernels = make_kernels(server_args.attention_backend, self.device, server_args.quantization)
        self._sampler = Sampler(make_sampling_kernels(server_args.sampling_backend))
        self._trace = trace.track(trace.DEVICE_THREAD)
        with torch.inference_mode(), WeightFiles(Path(server_args.model_path)) as files:
            loader = WeightLoader(files, dtype, self.device)
            # Under overlap a request at its last position may run once more; that token is thrown away.
            self._model = CausalLM(config, context_length + 1, loader, self.kernels, tp_group)
            shape = self._model.attention_shape
            bytes_per_slot = config.num_hidden_layers * 2 * shape.kv_heads * shape.head_dim * dtype.itemsize
            fitting = num_slots_that_fit(
                server_args, max_running_requests * context_length, bytes_per_slot, local_ranks, self.device
            )
            self.max_total_num_tokens = tp_group.agree_min(fitting)
            self._pools = make_kv_pools(
                self.max_total_num_tokens + SPARE_SLOTS,
                config.num_hidden_layers,
                shape.kv_heads,
                shape.head_dim,
                dtype,
                self.device,
            )

    def to_device(self, array: IntArray) -> Any:
        return array

    def launch(self, batch: ForwardBatch) -> PendingForward:
        """Computes one forward and samples from it."""
        start_ns = self._trace.now()
        logits = self.forward(batch)
        sampling_ns = self._trace.now()
        self._trace.span("forward", start_ns, sampling_ns)
        result = self._sampler(logits, batch)
        self._trace.span("sample", sampling_ns)
        return CompletedForward(result)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits `[bs, vocab]` for the token after each request's last one.

        Writes the KV of the batch's tokens.
        """
        last_tokens = None
        if batch.mode is ForwardMode.EXTEND:
            last_tokens = self._to_device(np.cumsum(batch.extend_lens) - 1)
        inputs = ForwardInputs(
            input_ids=self._to_device(batch.input_ids),
            positions=self._to_device(batch.positions),
            out_cache_loc=self._to_device(batch.out_cache_loc),
            last_tokens=last_tokens,
            attention_plan=self.kernels.plan_attention(batch, self._model.attention_shape, self._pools[0]),
        )
        return self._model.forward(inputs, self._pools)

    def _to_device(self, array: IntArray | Tensor) -> Tensor:
        return array if isinstance(array, Tensor) else to_device(array, self.device)


def _keep_freed_memory() -> None:
    """Tells glibc to keep what is freed for the next forward.

    Else the activations of a prefill go back to the kernel after every layer, and come again page by page, each
    page cleared: a tenth of a prefill's time.  Elsewhere than on glibc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEEP_BLOCKS_OF_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
        mallopt(_M_ARENA_MAX, 1)  # only the first arena keeps much, and a forward may have a thread of its own


def _share_cores(local_ranks: int) -> None:
    """Divides the cores that torch would use alone among the ranks of this machine."""
    torch.set_num_threads(max(1, torch.get_num_threads() // local_ranks))
