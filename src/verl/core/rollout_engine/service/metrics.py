"""What GET /metrics tells, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from verl.core.rollout_engine.service.loop import EngineLoop

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Of one server: answers by route and status with their seconds, and the state of the engine's loop."""

    def __init__(self, loop: EngineLoop):
        self._registry = CollectorRegistry()
        options = {"registry": self._registry}
        self._answers = Counter("verl_http_requests", "Answered requests.", ["route", "status"], **options)
        self._seconds = Histogram(
            "verl_http_request_seconds", "From request to end of answer.", ["route"], buckets=SECONDS, **options
        )
        self._registry.register(_LoopCollector(loop))

    def answered(self, route: str, status: int, seconds: float) -> None:
        self._answers.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _LoopCollector:
    """Reads the loop when it is asked."""

    def __init__(self, loop: EngineLoop):
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        state, totals = self._loop.state(), self._loop.totals
        gauges = {
            "verl_requests_waiting": (state.waiting, "Requests that the engine has not taken."),
            "verl_requests_running": (state.running, "Requests that the engine has taken."),
            "verl_slots_used": (state.samples, "Samples in the engine."),
            "verl_slots": (self._loop.slots, "Samples that the engine may have at once."),
            "verl_weights_version": (state.weights.version, "Version of the weights."),
            "verl_weights_whole": (int(state.weights.label is not None), "Whether whole weights are loaded."),
            "verl_paused": (int(state.paused), "Whether requests are held back."),
            "verl_sleeping": (int(state.sleeping), "Whether the engine sleeps."),
        }
        for name, (value, words) in gauges.items():
            yield GaugeMetricFamily(name, words, value=value)
        yield CounterMetricFamily("verl_prompt_tokens", "Prompt tokens taken.", value=totals.prompt_tokens)
        yield CounterMetricFamily("verl_response_tokens", "Tokens drawn.", value=totals.response_tokens)
        yield CounterMetricFamily("verl_failed_requests", "Requests that the engine failed.", value=totals.failures)
        finished = CounterMetricFamily("verl_samples", "Finished samples.", labels=["finish_reason"])
        for reason in ("stop", "length", "abort"):
            finished.add_metric([reason], getattr(totals, reason))
        yield finished
