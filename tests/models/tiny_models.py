"""Small random checkpoints made by `transformers`, and a hand-driven runner to compare with its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from bench.gpu_check.cases import greedy_sampling
from shared.executor.forward_batch import ForwardBatch, ForwardMode
from shared.executor.model_runner import ModelRunner
from shared.parallel.tp_group import TpGroup
from shared.server_args import ServerArgs
from shared.weights.model_config import ModelConfig

CONTEXT_LENGTH = 96
SIZES: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 96,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "max_position_embeddings": CONTEXT_LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_all_heads_alike": ("Llama", {"num_key_value_heads": 6}),
    "llama_linear_rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama_llama3_rope": ("Llama", {"rope_parameters": LLAMA3_SCALING}),
    "llama_yarn_rope": ("Llama", {"rope_parameters": YARN_SCALING}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_sliding_window": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {"head_dim": None}),
    "qwen2_tied": ("Qwen2", {"head_dim": None, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
}


def save_tiny_model(variant: str, folder: Path) -> Any:
    """Makes a random model of `variant`, saves it in `folder` and returns it, in float32."""
    family, changes = VARIANTS[variant]
    settings = {key: value for key, value in {**SIZES, **changes}.items() if value is not None}
    if family == "Mistral":
        settings["sliding_window"] = changes["sliding_window"]
    if "rope_parameters" in settings:
        settings["rope_parameters"] = {"rope_theta": 10000.0, **settings["rope_parameters"]}
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights of one and biases of zero would hide their absence.
            parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name or "bias" in name else 0.05))
    model.save_pretrained(folder)
    return model


def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits `[len(ids), vocab]` of `transformers`."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def make_runner(folder: Path, tp_group: TpGroup | None = None, **changes: Any) -> ModelRunner:
    tp_group = tp_group or TpGroup(0, 1)
    settings = {"model_path": str(folder), "max_total_tokens": 400, "tp_size": tp_group.size, **changes}
    return ModelRunner(
        ServerArgs(**settings),
        ModelConfig.from_folder(folder),
        tp_group,
        context_length=CONTEXT_LENGTH,
        max_running_requests=16,
    )


class HandScheduler:
    """Requests with slots from a shuffled pool, so that nothing works only because slots are in order."""

    def __init__(self, num_requests: int, num_slots: int = 400, seed: int = 3) -> None:
        self.table = np.zeros((num_requests, CONTEXT_LENGTH + 1), dtype=np.int32)
        self.lengths = [0] * num_requests
        self.free = list(np.random.default_rng(seed).permutation(num_slots))

    def share(self, source: int, target: int, length: int) -> None:
        """Gives `target` the slots of the first `length` tokens of `source`, written or about to be."""
        self.table[target, :length] = self.table[source, :length]
        self.lengths[target] = length

    def extend(self, tokens: dict[int, list[int]], mode: ForwardMode = ForwardMode.EXTEND) -> ForwardBatch:
        """A batch that adds `tokens` to each request, in the dict's order."""
        for row, ids in tokens.items():
            end = self.lengths[row] + len(ids)
            self.table[row, self.lengths[row] : end] = [self.free.pop() for _ in ids]
            self.lengths[row] = end
        return self.batch(tokens, mode)

    def batch(self, tokens: dict[int, list[int]], mode: ForwardMode) -> ForwardBatch:
        """The batch whose last tokens, already given slots, are `tokens`."""
        rows = np.array(list(tokens), dtype=np.int64)
        seq_lens = np.array([self.lengths[row] for row in rows], dtype=np.int64)
        extend_lens = np.array([len(ids) for ids in tokens.values()], dtype=np.int64)
        spans = [np.arange(end - count, end) for end, count in zip(seq_lens, extend_lens, strict=True)]
        return ForwardBatch(
            step=0,
            mode=mode,
            rids=[str(row) for row in rows],
            input_ids=np.array([token for ids in tokens.values() for token in ids], dtype=np.int64),
            positions=np.concatenate(spans),
            req_pool_indices=rows,
            seq_lens=seq_lens,
            extend_lens=extend_lens,
            out_cache_loc=np.concatenate([self.table[row, span] for row, span in zip(rows, spans, strict=True)]).astype(
                np.int64
            ),
            req_to_token=self.table,
            emits=np.ones(len(rows), dtype=np.bool_),
            output_lens=np.zeros(len(rows), dtype=np.int64),
            sampling=greedy_sampling(len(rows), SIZES["vocab_size"]),
            top_logprobs_nums=None,
        )
