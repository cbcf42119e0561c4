"""Where the time of every process goes: recorded with `--trace-dir`, read back, summed up.

`recorder` is what the processes use, `reader` gives the spans of a folder, `merge` makes one file for
ui.perfetto.dev, `summary` adds up the parts of a step.
"""

from shared.trace.reader import Span, Trace, read
from shared.trace.recorder import (
    DEVICE_THREAD,
    NullTrack,
    TraceFolderUnusable,
    current_folder,
    flush,
    prepare_folder,
    start,
    stop,
    track,
)

__all__ = [
    "DEVICE_THREAD",
    "NullTrack",
    "Span",
    "Trace",
    "TraceFolderUnusable",
    "current_folder",
    "flush",
    "prepare_folder",
    "read",
    "start",
    "stop",
    "track",
]
