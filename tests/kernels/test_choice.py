"""Which backend is chosen, and what is said of one that cannot run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.kernels import choice
from shared.kernels.choice import flag_problem, resolve_backends
from shared.launch.stage import BadFlag, resolve_model
from shared.server_args import ServerArgs
from shared.weights.tiny_random import write_tiny_random


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages and the processor's abilities that seem to be there."""
    packages: set[str] = set()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(choice, "_has_cpu_flag", lambda name: name in packages)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in packages else None)
    monkeypatch.delenv(choice.INTERPRETER, raising=False)
    return packages


def chosen(head_dim: int = 64, **settings: Any) -> tuple[str, str]:
    args = resolve_backends(ServerArgs(**settings), head_dim)
    return args.attention_backend, args.sampling_backend


@pytest.mark.parametrize(
    ("packages", "settings", "expected"),
    [
        ({"triton", "flashinfer", "avx2"}, {"device": "cpu"}, ("torch", "torch")),
        ({"llvmlite"}, {"device": "cpu"}, ("torch", "torch")),
        ({"llvmlite", "avx2"}, {"device": "cpu"}, ("llvm", "torch")),
        ({"llvmlite", "avx2"}, {"device": "cpu", "quantization": "int8"}, ("llvm", "torch")),
        ({"llvmlite", "avx2"}, {"device": "cpu", "dtype": "bfloat16"}, ("torch", "torch")),
        ({"llvmlite", "avx2"}, {"device": "cpu", "attention_backend": "torch"}, ("torch", "torch")),
        ({"llvmlite", "avx2", "triton"}, {"device": "cuda"}, ("triton", "triton")),
        ({"triton", "flashinfer"}, {"device": "cuda", "dtype": "bfloat16"}, ("flashinfer", "triton")),
        ({"triton", "flashinfer"}, {"device": "cuda", "dtype": "float32"}, ("triton", "triton")),
        ({"triton", "flashinfer"}, {"device": "cuda", "dtype": "float16", "head_dim": 80}, ("triton", "triton")),
        ({"triton"}, {"device": "cuda", "dtype": "bfloat16"}, ("triton", "triton")),
        (set(), {"device": "cuda", "dtype": "bfloat16"}, ("torch", "torch")),
        ({"triton", "flashinfer"}, {"device": "sim"}, ("auto", "auto")),
        ({"triton"}, {"device": "cuda", "attention_backend": "torch"}, ("torch", "triton")),
        (
            {"triton", "flashinfer"},
            {"device": "cuda", "sampling_backend": "flashinfer", "attention_backend": "triton"},
            ("triton", "flashinfer"),
        ),
    ],
)
def test_the_quickest_backend_that_can_run_is_chosen(
    installed: set[str], packages: set[str], settings: dict[str, Any], expected: tuple[str, str]
) -> None:
    installed |= packages
    assert chosen(**settings) == expected


@pytest.mark.parametrize(
    ("packages", "settings", "complaint"),
    [
        ({"triton"}, {"attention_backend": "triton"}, "--attention-backend triton needs --device cuda"),
        ({"triton"}, {"sampling_backend": "triton"}, "--sampling-backend triton needs --device cuda"),
        ({"flashinfer"}, {"attention_backend": "flashinfer"}, "needs --device cuda; on the CPU give torch"),
        ({"triton"}, {"device": "cuda", "attention_backend": "flashinfer"}, "needs the package flashinfer"),
        (set(), {"device": "cuda", "sampling_backend": "triton"}, "needs the package triton"),
        ({"triton", "flashinfer"}, {"device": "cuda", "attention_backend": "flashinfer"}, "give --dtype bfloat16"),
        ({"triton"}, {"device": "sim", "attention_backend": "triton"}, "--device sim takes no backend"),
        ({"llvmlite", "avx2"}, {"device": "cuda", "attention_backend": "llvm"}, "for the CPU only"),
        ({"llvmlite", "avx2"}, {"device": "sim", "attention_backend": "llvm"}, "for the CPU only"),
        ({"llvmlite", "avx2"}, {"dtype": "float16", "attention_backend": "llvm"}, "in float32 only"),
        ({"llvmlite"}, {"attention_backend": "llvm"}, "needs Linux on an x86 processor with AVX2"),
        ({"avx2"}, {"attention_backend": "llvm"}, "needs the package llvmlite"),
        (set(), {"device": "sim", "quantization": "int8"}, "--quantization int8 needs --device cpu"),
        ({"triton"}, {"device": "cuda", "quantization": "int8"}, "--quantization int8 needs --device cpu"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_in_one_line(
    installed: set[str], packages: set[str], settings: dict[str, Any], complaint: str
) -> None:
    installed |= packages
    problem = flag_problem(ServerArgs(**settings))
    assert problem is not None and complaint in problem and "\n" not in problem


def test_a_head_size_without_kernels_is_refused_once_the_model_is_known(installed: set[str]) -> None:
    installed |= {"triton", "flashinfer"}
    settings = {"device": "cuda", "dtype": "bfloat16", "attention_backend": "flashinfer"}
    assert chosen(64, **settings) == ("flashinfer", "triton")
    with pytest.raises(ValueError, match="heads of 64, 128, 256, not of 80"):
        chosen(80, **settings)


def test_the_interpreter_lets_triton_run_on_the_cpu(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed.add("triton")
    monkeypatch.setenv(choice.INTERPRETER, "1")
    assert chosen(attention_backend="triton", sampling_backend="triton") == ("triton", "triton")


def test_the_launcher_hands_on_what_was_chosen_and_refuses_what_the_model_rules_out(
    installed: set[str], tmp_path: Path
) -> None:
    write_tiny_random(tmp_path)
    resolved = resolve_model(ServerArgs(model_path=str(tmp_path)))
    assert (resolved.attention_backend, resolved.sampling_backend) == ("torch", "torch")
    installed |= {"triton", "flashinfer"}
    with pytest.raises(BadFlag, match="heads of 64, 128, 256, not of 8"):
        settings = {"device": "cuda", "dtype": "bfloat16", "attention_backend": "flashinfer"}
        resolve_model(ServerArgs(model_path=str(tmp_path), **settings))


def test_the_server_refuses_with_status_2() -> None:
    command = [sys.executable, "-m", "stage1_rpyc.server", "--attention-backend", "flashinfer"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "--attention-backend flashinfer needs --device cuda" in done.stderr


def test_choosing_imports_nothing_heavy() -> None:
    script = (
        "import sys; from shared.server_args import parse_server_args;"
        "from shared.kernels.choice import resolve_backends;"
        "resolve_backends(parse_server_args('x', frozenset(), []), 64);"
        "print([name for name in ('torch', 'triton', 'flashinfer', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_llvm_needs_linux(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed |= {"llvmlite", "avx2"}
    monkeypatch.setattr(sys, "platform", "darwin")
    assert chosen() == ("torch", "torch")


def test_the_processor_is_asked_on_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx avx512f\nbugs\t\t: avx2\n")
    monkeypatch.setattr(choice, "CPUINFO", cpuinfo)
    assert choice._has_cpu_flag("avx512f") and not choice._has_cpu_flag("avx2")
    monkeypatch.setattr(choice, "CPUINFO", tmp_path / "missing")
    assert not choice._has_cpu_flag("avx512f")
