"""The pictures of a request, which come as base64."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any

from shared.frontend.errors import invalid, shown

_DATA_URL = re.compile(r"data:[^,;]*(;[^,;]*)*;base64,", re.ASCII)


def decode_pictures(given: Sequence[Any], params: Sequence[str]) -> list[bytes | None]:
    """The bytes of each picture, None where there is none.  `params` are the fields' names.  Raises ApiError 400."""
    return [None if one is None else _decode(one, param) for one, param in zip(given, params, strict=True)]


def _decode(given: Any, param: str) -> bytes:
    """`given` is plain base64 or a `data:` URL.  What the bytes show is the model's business."""
    if not isinstance(given, str):
        raise invalid(param, f"must be a string of base64 or a data URL with it (got {shown(given)})")
    prefix = _DATA_URL.match(given)
    try:
        data = base64.b64decode(given[prefix.end() :] if prefix else given, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid(param, f"is neither base64 nor a data URL with it: {error}") from None
    if not data:
        raise invalid(param, "is an empty picture")
    return data
