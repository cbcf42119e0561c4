"""A whole scheduler on a GPU, where there is one: the tokens are those of the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.conftest import DEVICE, TRITON
from tests.stage4.scripted import Answers, request, run

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")

PROMPTS = [[1, 40, 41, 42, 43], [1, 60], [1, 40, 41, 42, 77, 78], list(range(3, 80))]
PENALTIES: dict[str, Any] = {"frequency_penalty": 0.5, "repetition_penalty": 1.2}


def generate(**flags: Any) -> dict[str, list[int]]:
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 7}, PENALTIES, {}]
    requests = [
        request(f"r{i}", prompt, max_new_tokens=20, ignore_eos=True, **params)
        for i, (prompt, params) in enumerate(zip(PROMPTS, settings, strict=True))
    ]
    answers: Answers = run({0: requests[:2], 3: requests[2:]}, context_length=256, max_total_tokens=2000, **flags)
    return {rid: answer.ids for rid, answer in answers.items()}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("disable_cuda_graph", [True, False])
@pytest.mark.parametrize("backend", ["torch", TRITON])
def test_a_gpu_generates_the_tokens_of_the_cpu(backend: str, disable_cuda_graph: bool, overlap: bool) -> None:
    expected = generate(overlap=False)
    flags = {"attention_backend": backend, "sampling_backend": backend, "disable_cuda_graph": disable_cuda_graph}
    assert generate(overlap=overlap, device="cuda", **flags) == expected
