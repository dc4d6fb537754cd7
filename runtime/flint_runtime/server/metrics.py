"""/metrics: the engine's snapshot by vLLM's names, read when somebody asks and not per token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from flint_plugins.ops import PAGE_TOKENS
from flint_runtime.server.service import Service

_GAUGES = {
    "vllm:num_requests_running": ("running", "Answers that run."),
    "vllm:num_requests_waiting": ("waiting", "Answers that wait for a place."),
}
_COUNTERS = {
    "vllm:prefix_cache_queries": ("prefix_queries", "Prompt tokens that were looked up in the prefix cache."),
    "vllm:prefix_cache_hits": ("prefix_hits", "Prompt tokens that the prefix cache had."),
    "vllm:prompt_tokens": ("prompt_tokens", "Prompt tokens of finished requests."),
    "vllm:generation_tokens": ("generation_tokens", "Generated tokens."),
    "vllm:num_preemptions": ("preemptions", "Answers that were set back for want of memory."),
    "vllm:spec_decode_num_draft_tokens": ("proposed_tokens", "Tokens that speculation proposed."),
    "vllm:spec_decode_num_accepted_tokens": ("accepted_tokens", "Proposed tokens that were right."),
    "flint:prefill_steps": ("prefill_steps", "Steps that computed prompts."),
    "flint:decode_steps": ("decode_steps", "Steps that decoded."),
    "flint:host_seconds": ("host_seconds", "Time in steps that was not spent waiting for the device."),
}
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "From arrival to the first token.",
    "vllm:inter_token_latency_seconds": "Between the tokens of an answer.",
    "vllm:request_queue_time_seconds": "From arrival to the first step.",
    "vllm:e2e_request_latency_seconds": "From arrival to the end.",
}
_POOLS = {
    "pages": ("used", "cached", "free"),
    "slots": ("used",),
    "snapshots": ("used",),
}


def make_registry(service: Service) -> CollectorRegistry:
    """Metrics of the engine, the server and this process."""
    registry = CollectorRegistry()
    registry.register(_Metrics(service))
    ProcessCollector(registry=registry)
    return registry


class _Metrics(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        """Every metric, of one snapshot."""
        found: dict[str, Any] = self._service.llm.snapshot()
        labels = {"model_name": self._service.settings.model_names[0]}
        for name, (key, text) in _GAUGES.items():
            yield _gauge(name, text, labels, found[key])
        yield _gauge(
            "vllm:kv_cache_usage_perc",
            "Used part of the fuller pool, pages or slots; 1 is all.",
            labels,
            max(_part(found, "pages"), _part(found, "slots")),
        )
        info = InfoMetricFamily("vllm:cache_config", "Of the KV cache.", labels=[*labels])
        info.add_metric([*labels.values()], {"block_size": str(PAGE_TOKENS), "num_gpu_blocks": str(found["pages"])})
        yield info
        for name, (key, text) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=[*labels])
            counter.add_metric([*labels.values()], found[key])
            yield counter
        success = CounterMetricFamily("vllm:request_success", "Finished answers.", labels=[*labels, "finished_reason"])
        for reason, count in found["request_success"].items():
            success.add_metric([*labels.values(), reason], count)
        yield success
        for name, text in _HISTOGRAMS.items():
            yield _histogram(name, text, labels, found[name.removeprefix("vllm:")])
        for pool, states in _POOLS.items():
            family = GaugeMetricFamily(f"flint:{pool}", f"{pool.capitalize()} by state.", labels=[*labels, "state"])
            family.add_metric([*labels.values(), "all"], found[pool])
            for state in states:
                family.add_metric([*labels.values(), state], found[f"{pool}_{state}"])
            yield family
        yield _gauge("flint:tokens_per_second", "Generated lately.", labels, self._service.tokens_per_second)
        yield _gauge("flint:server_load", "Answers that the server has taken.", labels, self._service.load)


def _part(found: Mapping[str, Any], pool: str) -> float:
    used: int = found[f"{pool}_used"]
    every: int = found[pool]
    return used / max(1, every)


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[*labels])
    family.add_metric([*labels.values()], value)
    return family


def _histogram(name: str, text: str, labels: Mapping[str, str], found: Mapping[str, Any]) -> Metric:
    """Prometheus counts in every bucket what lies below it, too."""
    family = HistogramMetricFamily(name, text, labels=[*labels])
    total, buckets = 0, []
    for bound, count in zip([*found["bounds"], "+Inf"], found["counts"], strict=True):
        total += count
        buckets.append((str(bound), total))
    family.add_metric([*labels.values()], buckets, found["sum"])
    return family
