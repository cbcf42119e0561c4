"""What a rank costs beyond its work: time to ready, and memory.

    python -m bench.ranks [--stage 4] [--rounds 2] [--markdown FILE]

The default model from a warm cache.  Memory is the proportional share (PSS), after one request to every replica: a page
that n processes map counts 1/n for each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from bench.live_server import serving
from bench.plan import Setup
from bench.server_process import end_on_sigterm
from bench.suites import start_memory
from bench.tables import show
from bench.throughput import spread
from shared.weights.prepare import DEFAULT_MODEL, prepare_model

SIZES = ((1, 1), (2, 1), (3, 1), (1, 2))
"""TP and DP."""
POOL_TOKENS = 8192
"""The same for every server, so that what differs is not the KV pool."""


def measure(stage: int, tp: int, dp: int) -> tuple[float, float, float]:
    """Seconds to ready, MB of all processes, MiB of the largest."""
    setup = Setup(stage, tp, dp, device="cpu", flags=("--max-total-tokens", str(POOL_TOKENS)))
    with serving(setup, None) as server:
        server.generate(server.fresh_prompts(4 * dp, 128), 8)
        figures = start_memory.measure(server)
    every = figures.pop("pss_mb_all")
    return figures["ready_s"], every, max(value for name, value in figures.items() if name.startswith("pss_mb_"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ranks", description=__doc__.split("\n")[0])
    parser.add_argument("--stage", type=int, choices=(1, 2, 3, 4), default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to its place in FILE")
    args = parser.parse_args(argv)
    end_on_sigterm()
    prepare_model(DEFAULT_MODEL)
    sizes = [(tp, dp) for tp, dp in SIZES if args.stage > 1 or dp == 1]
    found: dict[tuple[int, int], list[tuple[float, float, float]]] = {size: [] for size in sizes}
    for _ in range(args.rounds):
        for tp, dp in sizes:
            found[tp, dp].append(measure(args.stage, tp, dp))
    alone = statistics.median(total for _, total, _ in found[1, 1])
    rows = [[f"stage {args.stage}", "ready, s", "all processes, MiB", "largest, MiB", "a further rank, MiB"]]
    for (tp, dp), measured in found.items():
        ready, total, largest = zip(*measured, strict=True)
        more = (statistics.median(total) - alone) / (tp * dp - 1) if tp * dp > 1 else None
        cells = [spread(list(ready), ".1f"), spread(list(total), ".0f"), spread(list(largest), ".0f")]
        rows.append([f"TP {tp}, DP {dp}", *cells, "" if more is None else f"{more:.0f}"])
    show(rows, "ranks of the default model", "ranks", args.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
