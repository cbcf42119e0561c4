"""A picture in a prompt, as the scheduler sees it."""

from __future__ import annotations

import numpy as np

from shared.scheduling.picture import PICTURE_TOKENS, picture_ids


def test_ids_depend_on_every_byte_and_are_inside_the_vocabulary() -> None:
    picture = bytes(range(256)) * 16
    ids = picture_ids(picture, 300)
    assert ids.dtype == np.int64 and ids.shape == (PICTURE_TOKENS,)
    assert ids.min() >= 0 and ids.max() < 300
    assert np.array_equal(ids, picture_ids(bytes(picture), 300))
    for place in (0, 2000, len(picture) - 1):
        changed = bytearray(picture)
        changed[place] ^= 1
        assert not np.array_equal(ids, picture_ids(bytes(changed), 300))
    assert not np.array_equal(ids, picture_ids(picture + b"\0", 300))
