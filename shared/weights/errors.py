"""The one error of this package."""

from __future__ import annotations


class ModelPreparationError(Exception):
    """A model that cannot be found, fetched, read or run.  The message is one line that says what to do."""
