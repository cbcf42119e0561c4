"""One file for ui.perfetto.dev: the spans of every process, and arrows that follow each request.

The format is Chrome's trace event format: "X" events are spans, "M" events name processes and threads, and
"s", "t" and "f" events of one id are the arrows.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.trace.reader import Span, Trace, read

TRACE_FILE = "trace.json"


def merge(folder: str | Path) -> Path:
    """Writes `trace.json` from the spans in `folder`; returns its path."""
    trace = read(folder)
    path = Path(folder) / TRACE_FILE
    with open(path, "w") as file:
        file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
        for number, event in enumerate(_events(trace)):
            file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")
    return path


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    threads: dict[tuple[int, str], int] = {}
    for pid, title in trace.processes.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": title}}
    for span in trace.spans:
        key = (span.pid, span.thread)
        if key not in threads:
            threads[key] = len(threads) + 1
            yield {
                "ph": "M",
                "name": "thread_name",
                "pid": span.pid,
                "tid": threads[key],
                "args": {"name": span.thread},
            }
        yield {
            "ph": "X",
            "name": span.name,
            "ts": span.start_ns / 1000,
            "dur": (span.end_ns - span.start_ns) / 1000,
            "pid": span.pid,
            "tid": threads[key],
            "args": {
                name: value
                for name in ("step", "rids", "bytes", "running")
                if (value := getattr(span, name)) not in (None, ())
            },
        }
    for flow_id, (rid, spans) in enumerate(flows(trace).items()):
        for place, span in enumerate(spans):
            phase = "s" if place == 0 else "f" if place == len(spans) - 1 else "t"
            event = {
                "ph": phase,
                "name": "request",
                "cat": "request",
                "id": flow_id,
                "ts": span.start_ns / 1000,
                "pid": span.pid,
                "tid": threads[span.pid, span.thread],
                "args": {"rid": rid},
            }
            yield event | ({"bp": "e"} if phase == "f" else {})


def flows(trace: Trace) -> dict[str, list[Span]]:
    """For each request the spans that carry its id, in order."""
    found: defaultdict[str, list[Span]] = defaultdict(list)
    for span in trace.spans:
        for rid in span.rids:
            found[rid].append(span)
    return {rid: spans for rid, spans in found.items() if len(spans) > 1}
