"""Prometheus metrics, in a registry of their own.

Counters of requests and tokens tell what clients got: finished requests only.  Aborted ones have a counter of
their own, and the server's health probes count nowhere.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from shared.frontend.generation import Output
from shared.messages import FinishReason, SchedulerStats

_PREFIX = "process_eras_"
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metrics:
    def __init__(self, model_name: str, dp_size: int) -> None:
        self.registry = CollectorRegistry()
        model = {"model_name": model_name}

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, help, ["model_name", *labels], registry=self.registry)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(_PREFIX + name, help, ["model_name", "dp_rank"], registry=self.registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(_PREFIX + name, help, ["model_name"], buckets=buckets, registry=self.registry)
            return family.labels(**model)

        self._model = model
        self._running = gauge("num_running_reqs", "Requests in the running batch")
        self._waiting = gauge("num_queue_reqs", "Requests in the waiting queue")
        self._usage = gauge("token_usage", "Share of the KV pool's slots that live requests hold")
        self._finished = counter("num_requests", "Requests that finished", "finish_reason")
        self._aborted = counter("num_aborted_requests", "Requests aborted or failed").labels(**model)
        self._prompt = counter("prompt_tokens", "Prompt tokens of finished requests").labels(**model)
        self._cached = counter("cached_tokens", "Prompt tokens from the prefix cache").labels(**model)
        self._generated = counter("generation_tokens", "Tokens of finished requests").labels(**model)
        self._first = histogram("time_to_first_token_seconds", "Arrival to first token of a stream", _LONG_S)
        self._between = histogram("inter_token_latency_seconds", "Time between two tokens of a stream", _SHORT_S)
        self._whole = histogram("e2e_request_latency_seconds", "Arrival to last token", _LONG_S)
        for reason in ("stop", "length"):
            self._finished.labels(**model, finish_reason=reason)
        for dp_rank in range(dp_size):
            for family in (self._running, self._waiting, self._usage):
                family.labels(**model, dp_rank=str(dp_rank))

    def on_stats(self, stats: SchedulerStats) -> None:
        labels = {**self._model, "dp_rank": str(stats.dp_rank)}
        self._running.labels(**labels).set(stats.running)
        self._waiting.labels(**labels).set(stats.waiting)
        used = stats.capacity_tokens - stats.free_tokens - stats.evictable_tokens
        self._usage.labels(**labels).set(used / max(stats.capacity_tokens, 1))  # 0: the replica is gone

    def on_failure(self, dp_size: int) -> None:
        """Nothing runs any more."""
        for dp_rank in range(dp_size):
            for family in (self._running, self._waiting, self._usage):
                family.labels(**self._model, dp_rank=str(dp_rank)).set(0)

    def on_tokens(self, now_s: float, created_s: float, last_output_s: float | None, tokens: int) -> None:
        """`tokens` more of a stream.  Other requests get all of theirs at once, which tells nothing."""
        if last_output_s is None:
            self._first.observe(now_s - created_s)
            return
        for _ in range(tokens):
            self._between.observe((now_s - last_output_s) / tokens)

    def on_finish(self, reason: FinishReason, seconds: float, last: Output, *, counts_prompt: bool) -> None:
        """A request ended, `seconds` after it came; another counts its prompt unless `counts_prompt`."""
        if reason.type == "abort":
            self._aborted.inc()
            return
        self._finished.labels(**self._model, finish_reason=reason.type).inc()
        if counts_prompt:
            self._prompt.inc(last.prompt_tokens)
            self._cached.inc(last.cached_tokens)
        self._generated.inc(last.completion_tokens)
        self._whole.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
