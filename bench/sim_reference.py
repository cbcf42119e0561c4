"""What a server on `--device sim` must answer: the tokens of each request alone, cache off, without a server."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared.executor.engine_step import EngineStep
from shared.executor.rank import load_rank
from shared.messages import BatchTokenIDOut, PortArgs, SamplingParams, TokenizedGenerateReqInput
from shared.server_args import ServerArgs
from shared.weights.prepare import prepare_model
from shared.weights.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Solo:
    """The answer to one request."""

    ids: list[int]
    text: str


class SimReference:
    """Answers requests on `tiny-random` one after the other."""

    def __init__(self) -> None:
        folder: Path = prepare_model("tiny-random", show_progress=False)
        args = ServerArgs(
            model_path=str(folder), device="sim", sim_decode_ms=0, sim_prefill_us_per_token=0, disable_radix_cache=True
        )
        self._engine = EngineStep(
            load_rank(args, PortArgs("", "", "", "", b""), 0), decode_steps=64, cut_on_stream=False
        )
        self.tokenizer = load_tokenizer(folder)

    def solo(
        self, prompt: str | list[int], new_tokens: int, seed: int | None = None, picture: bytes | None = None
    ) -> Solo:
        """`new_tokens` tokens, greedy without a `seed`."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        if seed is not None:
            params = dataclasses.replace(params, temperature=1.0, seed=seed)
        request = TokenizedGenerateReqInput("solo", np.array(ids, dtype=np.int64), params, image_data=picture)
        outputs = self._engine.step([request])
        while not self._engine.idle:
            outputs += self._engine.step([])
        new = [token for out in outputs if isinstance(out, BatchTokenIDOut) for token in out.new_ids[0]]
        return Solo(new, self.text(new))

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))
