"""One rank, ready to work: its device, its place among its peers, and what its scheduler has to know."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shared.executor.forward_batch import ForwardRunner
from shared.incremental_detokenizer import StopFinder, TextDecoder
from shared.messages import PortArgs, SamplingParams
from shared.parallel.tp_group import TpGroup, init_tp_group
from shared.scheduling.config import SchedulerConfig
from shared.scheduling.determinism import DeterminismChecker
from shared.server_args import ServerArgs
from shared.weights.model_config import ModelConfig
from shared.weights.tokenizer import load_backend

if TYPE_CHECKING:
    from shared.executor.model_runner import ModelRunner

DEFAULT_MAX_RUNNING_REQUESTS = 256


@dataclass(frozen=True)
class Rank:
    """What `load_rank` makes.  `checker` is None without `--check-determinism`."""

    runner: ForwardRunner
    tp_group: TpGroup
    config: SchedulerConfig
    checker: DeterminismChecker | None

    @property
    def ready_message(self) -> dict[str, Any]:
        """For the parent: `status` and the limits of this replica."""
        return {
            "status": "ready",
            "max_total_num_tokens": self.config.max_total_num_tokens,
            "max_running_requests": self.config.max_running_requests,
            "context_length": self.config.context_length,
        }


def load_rank(
    server_args: ServerArgs,
    port_args: PortArgs,
    tp_rank: int,
    dp_rank: int = 0,
    *,
    gpu_id: int | None = None,
    overlap: bool = False,
) -> Rank:
    """Joins the replica's group, loads this rank's share of the model and agrees on the size of the pool.

    Blocks until all ranks of the replica are there.  `gpu_id` is the index of the rank's device on its
    machine, by default in the order of replicas and ranks.
    """
    # Read by torch at its first allocation: 2 MiB pages for weights and pools, where the system grants them.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    model = ModelConfig.from_folder(server_args.model_path)
    context_length = server_args.context_length or model.max_position_embeddings
    tp_group = init_tp_group(
        tp_rank,
        server_args.tp_size,
        dist_init_method(server_args, port_args, dp_rank),
        device=server_args.device,
        loopback=server_args.nnodes == 1,
    )
    decoder = TextDecoder(load_backend(server_args.model_path))
    max_running_requests = server_args.max_running_requests or DEFAULT_MAX_RUNNING_REQUESTS
    runner: ForwardRunner
    if server_args.device == "sim":
        from shared.executor.sim_runner import SimRunner

        forbidden = decoder.special_ids.union(model.eos_token_ids)
        runner = SimRunner(server_args, model.vocab_size, context_length, forbidden)
    else:
        if gpu_id is None:
            tp_size_local = server_args.tp_size // server_args.nnodes
            gpu_id = dp_rank * tp_size_local + tp_rank % tp_size_local
        runner = runner_class(server_args.device)(
            server_args,
            model,
            tp_group,
            context_length=context_length,
            max_running_requests=max_running_requests,
            local_rank=gpu_id,
        )

    def make_stop_finder(params: SamplingParams) -> StopFinder:
        return StopFinder(decoder, params.stop, params.skip_special_tokens)

    chunk = server_args.chunked_prefill_size
    config = SchedulerConfig(
        max_total_num_tokens=tp_group.agree_min(runner.max_total_num_tokens),
        max_running_requests=max_running_requests,
        context_length=context_length,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        make_stop_finder=make_stop_finder,
        prefill_tokens=None if chunk < 0 else chunk,
        policy=server_args.schedule_policy,
        conservativeness=server_args.schedule_conservativeness,
        use_radix_cache=not server_args.disable_radix_cache,
        stream_interval=server_args.stream_interval,
        random_seed=server_args.random_seed,
        dp_rank=dp_rank,
        overlap=overlap,
    )
    checker = DeterminismChecker(tp_group.gather_for_check) if server_args.check_determinism else None
    return Rank(runner, tp_group, config, checker)


def runner_class(device: str) -> type[ModelRunner]:
    """What runs a model on `device`, cpu or cuda."""
    if device == "cuda":
        from shared.executor.cuda_runner import CudaModelRunner

        return CudaModelRunner
    from shared.executor.model_runner import ModelRunner

    return ModelRunner


def dist_init_method(server_args: ServerArgs, port_args: PortArgs, dp_rank: int) -> str:
    """Where the ranks of a replica meet: a file in the run directory, or node 0's address.

    With several nodes replica i meets at the given port plus i.
    """
    if server_args.dist_init_addr is None:
        return f"file://{port_args.run_dir}/ranks-dp{dp_rank}"
    host, port = server_args.dist_init_addr.rsplit(":", 1)
    return f"tcp://{host}:{int(port) + dp_rank}"
