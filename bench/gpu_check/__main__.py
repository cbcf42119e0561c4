"""Checks and measures everything that needs a GPU, in under four minutes and without any network.

    python -m bench.gpu_check [--results bench/results]

Writes what it found to a JSON file.  Exit status 1 if a check failed; 0 also on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from bench.server_process import ROOT, end_on_sigterm
from shared.weights.prepare import prepare_model

SECONDS = 180
"""After which no further part is begun."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", help="folder for the result")
    # For working on this program: the same parts, very small, on the CPU.
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU on this machine, so nothing was checked")
        return 0
    end_on_sigterm()
    return _run(args.device, args.results)


def _run(device: str, results: Path) -> int:
    from bench.gpu_check.kernels import check_kernels
    from bench.gpu_check.model import ONE_BILLION, SMALL, write_model
    from bench.gpu_check.rates import measure_device, measure_rates
    from bench.gpu_check.report import Report, device_name
    from bench.gpu_check.servers import check_stages, measure_steps

    start = time.monotonic()
    on_gpu = device == "cuda"
    size = ONE_BILLION if on_gpu else SMALL
    report = Report(device_name(device))
    tiny = str(prepare_model("tiny-random"))
    common = ["--device", device, "--max-total-tokens", "4000", "--cuda-graph-max-bs", "32"]
    # In float32, where rounding does not decide between two tokens, whoever else is in the batch.
    exact, quick = [*common, "--dtype", "float32"], [*common, "--dtype", "bfloat16"]
    plain = "triton" if on_gpu else "torch"
    context, batches, copied = (4000, (1, 32), 1 << 30) if on_gpu else (40, (1, 2), 1 << 20)
    longest, counts, new_tokens = (4000, (1, 32), 64) if on_gpu else (130, (2,), 8)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name)

        def kernels(backend: str) -> None:
            check_kernels(report, backend, device, longest, size.vocab)

        def rates(backend: str) -> None:
            measure_rates(report, backend, model, size, device, context=context, batches=batches)

        parts: dict[str, Callable[[], None]] = {
            "torch's kernels": lambda: kernels("torch"),
            "Triton's kernels": lambda: kernels("triton"),
            "stages, tiny-random": lambda: check_stages(report, "tiny-random", tiny, 291, 24, exact),
            "a large model": lambda: write_model(model, size, device),
            "rates of the device": lambda: measure_device(report, device, copied),
            "rates of the model": lambda: rates(plain),
            "stages, random weights": lambda: check_stages(report, "random weights", name, size.vocab, 16, exact),
            "steps": lambda: measure_steps(
                report, name, size.vocab, new_tokens, counts, [*quick, "--attention-backend", plain]
            ),
            # Last, for FlashInfer compiles what it has not compiled before.
            "FlashInfer's kernels": lambda: kernels("flashinfer"),
            "rates with FlashInfer": lambda: rates("flashinfer"),
        }
        for what, part in parts.items():
            if time.monotonic() - start > SECONDS:
                report.skip(f"{what}: no time left")
                continue
            try:
                part()
            except Exception as error:
                traceback.print_exc()
                report.check(what, False, f"{type(error).__name__}: {error}")
    report.seconds = time.monotonic() - start
    report.show()
    print(f"{report.seconds:.0f} s; written to {report.save(results)}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
