"""A picture's place in a prompt.

As in SGLang, a picture stands in the prompt as token ids made from its hash: whoever reads the ids (the prefix cache,
the simulated device) can tell two pictures apart without having to know of pictures.
"""

from __future__ import annotations

import hashlib

import numpy as np

from shared.messages import IntArray

PICTURE_TOKENS = 16
"""Tokens of one picture, whatever its size."""


def picture_ids(image_data: bytes, vocab_size: int) -> IntArray:
    """The ids of a picture, int64 `[PICTURE_TOKENS]`: each is 64 bits of its bytes' hash, cut to the vocabulary."""
    digest = hashlib.shake_128(hashlib.sha256(image_data).digest()).digest(8 * PICTURE_TOKENS)
    ids: IntArray = (np.frombuffer(digest, dtype="<u8") % np.uint64(vocab_size)).astype(np.int64)
    return ids
