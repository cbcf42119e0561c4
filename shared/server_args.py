"""One dataclass of settings, one argparse builder; a stage declares which flags it takes.

Flag names are SGLang's wherever it has one.  A bad flag is one line on stderr with the fix, and exit status 2.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn


def _flag(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    low: float | None = None,
    high: float | None = None,
    only: str | None = None,
) -> Any:
    """A dataclass field with what argparse needs.  `only` names the group of stages that take the flag."""
    meta = {"help": help, "choices": choices, "metavar": metavar, "low": low, "high": high, "only": only}
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class ServerArgs:
    """Settings of one server.  A field with `only` is taken by the stages that list that word in `takes`."""

    # Model
    model_path: str = _flag(
        "SmolLM2-135M-Instruct",
        "a folder in Hugging Face layout, a .gguf file, a hub id, or a built-in name "
        "(SmolLM2-135M-Instruct, tiny-random)",
        metavar="PATH",
    )
    served_model_name: str | None = _flag(
        None, "name in /v1/models (default: the last part of --model-path)", metavar="NAME"
    )
    chat_template: str | None = _flag(None, "a Jinja file to use instead of the model's own", metavar="FILE")
    dtype: str = _flag("float32", "weights and activations", choices=("float32", "bfloat16", "float16"))
    quantization: str | None = _flag(
        None,
        "weights of the linear layers, activations stay in --dtype (default: in --dtype too; cpu)",
        choices=("float16", "int8"),
    )
    context_length: int | None = _flag(None, "tokens per request (default: the model's)", metavar="N", low=2)

    # HTTP
    host: str = _flag("127.0.0.1", "address to listen on; anything but loopback opens the server to others")
    port: int = _flag(30000, "HTTP port", metavar="N", low=0, high=65535)
    api_key: str | None = _flag(None, "key that every route except /health asks for", metavar="KEY")
    log_level: str = _flag("info", "", choices=("debug", "info", "warning", "error"))

    # Device
    device: str = _flag("cpu", "where the model runs; sim only takes time", choices=("cpu", "cuda", "sim"))
    attention_backend: str = _flag(
        "auto",
        "kernels of the model (auto: the device's quickest)",
        choices=("auto", "torch", "llvm", "triton", "flashinfer"),
    )
    sampling_backend: str = _flag(
        "auto",
        "kernels of the sampler (auto: the device's quickest that draws exactly the same tokens)",
        choices=("auto", "torch", "triton", "flashinfer"),
    )
    disable_cuda_graph: bool = _flag(False, "launch every kernel of a decode by itself (cuda)")
    cuda_graph_max_bs: int = _flag(128, "largest batch with a CUDA graph of its own (cuda)", metavar="N", low=1)
    sim_decode_ms: float = _flag(8.0, "device time of one decode forward (sim)", metavar="MS", low=0)
    sim_prefill_us_per_token: float = _flag(50.0, "device time of one prefilled token (sim)", metavar="US", low=0)

    # Parallelism
    tp_size: int = _flag(1, "tensor-parallel ranks", metavar="N", low=1)
    dp_size: int = _flag(1, "data-parallel replicas", metavar="N", low=1, only="dp")
    load_balance_method: str = _flag(
        "round_robin", "how a replica is chosen", choices=("round_robin", "shortest_queue"), only="dp"
    )
    dp_queue: str = _flag("mp", "queue to a replica", choices=("mp", "thread"), only="dp_queue")
    broadcast_codec: str = _flag(
        "list",
        "how broadcast bytes become a tensor: through a Python list (0.2.0) or a buffer view",
        choices=("list", "buffer"),
        only="broadcast_codec",
    )
    disable_overlap_schedule: bool = _flag(False, "schedule and execute in turn", only="overlap")
    nnodes: int = _flag(1, "machines that share the ranks", metavar="N", low=1, only="nnodes")
    node_rank: int = _flag(0, "which of them this is", metavar="N", low=0, only="nnodes")
    dist_init_addr: str | None = _flag(None, "host:port of node 0", metavar="ADDR", only="nnodes")

    # Scheduling and memory
    max_running_requests: int | None = _flag(None, "requests in one batch at most (default: 256)", metavar="N", low=1)
    max_total_tokens: int | None = _flag(
        None, "token slots of the KV pool (default: from --mem-fraction-static)", metavar="N", low=8
    )
    mem_fraction_static: float = _flag(
        0.5, "share of the free memory for the KV pool, over all ranks", metavar="F", low=0.01, high=0.95
    )
    max_queued_requests: int = _flag(4096, "waiting requests at which a new one is answered 503", metavar="N", low=1)
    chunked_prefill_size: int = _flag(
        2048, "prompt tokens of one forward at most; -1 for whole prompts", metavar="N", low=-1
    )
    schedule_policy: str = _flag("lpm", "order of the waiting queue", choices=("lpm", "fcfs", "dfs-weight", "random"))
    schedule_conservativeness: float = _flag(
        1.0, "above 1 admits fewer requests, and retracts fewer", metavar="F", low=0
    )
    disable_radix_cache: bool = _flag(False, "keep no prefixes")
    num_continuous_decode_steps: int | None = _flag(
        None, "decode forwards per step (default: the era's: ten, in stage 4 one)", metavar="N", low=1
    )
    stream_interval: int = _flag(1, "tokens between two chunks of a stream", metavar="N", low=1)
    random_seed: int = _flag(0, "seed of the random policy", metavar="N", low=0)

    # Behaviour
    sleep_on_idle: bool = _flag(False, "be quiet without work instead of the era's own idling")
    check_determinism: bool = _flag(False, "compare a hash of every step across ranks; stop on a difference")
    trace_dir: str | None = _flag(
        None, "an empty or new folder: record where every process spends its time (docs/traces.md)", metavar="DIR"
    )
    print_process_tree: bool = _flag(False, "print the processes these flags would start, and exit")

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.served_model_name or self.model_path.rstrip("/").rsplit("/", 1)[-1]


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where there is one value; a help text that has another says so itself."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _bounded(kind: type[int] | type[float], low: float | None, high: float | None) -> Any:
    def parse(text: str) -> int | float:
        value = kind(text)
        if (low is not None and value < low) or (high is not None and value > high) or value != value:
            bounds = f"at least {low}" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text} is out of range, give {bounds}")
        return value

    parse.__name__ = kind.__name__
    return parse


def parse_server_args(prog: str, takes: frozenset[str], argv: Sequence[str] | None = None) -> ServerArgs:
    """The settings of a stage that takes the common flags and the groups in `takes`.

    Ends the process with status 2 and one line on stderr for a bad flag.
    """
    parser = _Parser(prog=prog, allow_abbrev=False, formatter_class=_Formatter)
    for spec in dataclasses.fields(ServerArgs):
        meta = spec.metadata
        if meta["only"] is not None and meta["only"] not in takes:
            continue
        name = "--" + spec.name.replace("_", "-")
        if spec.type == "bool":
            parser.add_argument(name, action="store_true", help=meta["help"])
            continue
        kind: Any = str
        if spec.type.startswith("int"):
            kind = _bounded(int, meta["low"], meta["high"])
        elif spec.type.startswith("float"):
            kind = _bounded(float, meta["low"], meta["high"])
        parser.add_argument(
            name,
            type=kind,
            default=spec.default,
            choices=meta["choices"],
            metavar=meta["metavar"],
            help=meta["help"] or " ",
        )
    args = ServerArgs(**vars(parser.parse_args(argv)))
    problem = _contradiction(args)
    if problem:
        parser.error(problem)
    return args


def check_server_args(args: ServerArgs) -> None:
    """For settings that no command line has checked.  ValueError names the flag and what it may be."""
    for spec in dataclasses.fields(args):
        meta, value = spec.metadata, getattr(args, spec.name)
        name = "--" + spec.name.replace("_", "-")
        if meta["choices"] is not None and value not in (*meta["choices"], spec.default):
            raise ValueError(f"{name} {value!r} is none of {', '.join(meta['choices'])}")
        if value is None or (meta["low"] is None and meta["high"] is None):
            continue
        kind = int if spec.type.startswith("int") else float
        if not isinstance(value, int if kind is int else int | float):
            raise ValueError(f"{name} {value!r} is not {'an integer' if kind is int else 'a number'}")
        try:
            _bounded(kind, meta["low"], meta["high"])(str(value))
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{name}: {error}") from None
    problem = _contradiction(args)
    if problem:
        raise ValueError(problem)


def _contradiction(args: ServerArgs) -> str | None:
    """What is wrong with flags that are each in range, or None."""
    from shared.kernels.choice import flag_problem  # imports this module

    backend_problem = flag_problem(args)
    if backend_problem is not None:
        return backend_problem
    if args.chunked_prefill_size == 0:
        return "--chunked-prefill-size 0 would never prefill anything; give -1 or a positive size"
    if args.nnodes > 1 and args.dist_init_addr is None:
        return "--nnodes above 1 needs --dist-init-addr host:port of node 0"
    if args.node_rank >= args.nnodes:
        return f"--node-rank {args.node_rank} is not below --nnodes {args.nnodes}"
    if args.tp_size % args.nnodes:
        return f"--tp-size {args.tp_size} cannot be shared by --nnodes {args.nnodes}; give a multiple"
    return None
