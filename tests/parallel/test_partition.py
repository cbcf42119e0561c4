"""How a model is shared among ranks."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.parallel.partition import Partition, allowed_tp_sizes, split_evenly
from shared.weights.model_config import ModelConfig

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    rope_scaling=None,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    sliding_window=None,
    bos_token_id=1,
    eos_token_ids=(2,),
)


@given(total=st.integers(0, 500), parts=st.integers(1, 40))
def test_a_split_covers_everything_once_and_evenly(total: int, parts: int) -> None:
    ranges = split_evenly(total, parts)
    assert [index for part in ranges for index in part] == list(range(total))
    sizes = [len(part) for part in ranges]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1


@given(
    kv_heads=st.integers(1, 12),
    group=st.integers(1, 8),
    size=st.integers(1, 12),
    vocab_size=st.integers(20, 70),
)
def test_query_heads_stay_with_the_kv_head_they_read(kv_heads: int, group: int, size: int, vocab_size: int) -> None:
    config = dataclasses.replace(
        SMOLLM2,
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * group,
        vocab_size=vocab_size,
    )
    if size > kv_heads:
        assert size not in allowed_tp_sizes(config, 12)
        with pytest.raises(ValueError, match="cannot be split"):
            Partition.of(config, 0, size)
        return
    parts = [Partition.of(config, rank, size) for rank in range(size)]
    for part in parts:
        assert {head // group for head in part.query_heads} == set(part.kv_heads)
        assert len(part.kv_heads) >= 1
    assert [head for part in parts for head in part.query_heads] == list(range(kv_heads * group))
    assert [token for part in parts for token in part.vocab] == list(range(vocab_size))


def test_smollm2_splits_over_two_ranks_as_two_groups_and_one() -> None:
    assert allowed_tp_sizes(SMOLLM2, 8) == [1, 2, 3]
    first, second = Partition.of(SMOLLM2, 0, 2), Partition.of(SMOLLM2, 1, 2)
    assert (len(first.kv_heads), len(first.query_heads)) == (2, 6)
    assert (len(second.kv_heads), len(second.query_heads)) == (1, 3)


def test_partition_and_a_group_of_one_import_no_torch() -> None:
    code = (
        "import sys, shared.parallel.partition, shared.parallel.tp_group as t;"
        "t.init_tp_group(0, 1, 'unused').broadcast_pyobj([1]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
