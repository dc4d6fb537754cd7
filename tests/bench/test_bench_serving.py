"""The serving benchmark over an executor without a model: it must not fail first where a GPU is paid for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from flint_runtime.engine_core import EngineCore
from flint_runtime.manifest import Limits
from tests.bench.bench_serving import Serving, add_to_results, line
from tests.runtime.cores import check_idle
from tests.runtime.fake_executor import FakeExecutor


@pytest.fixture
def serving() -> Serving:
    limits = Limits(max_batch=8, max_context=2048, prefill_chunk=256)
    return Serving(EngineCore(FakeExecutor(limits)), "nvfp4")


def test_decode(serving: Serving) -> None:
    record = serving.decode(8, context=100, steps=10)
    assert (record.bench, record.batch, record.context, record.tokens) == ("serve:decode", 8, 100, 8)
    assert 0 < record.median_ms <= record.p95_ms and "tokens/s" in record.note and record.note in line(record)
    check_idle(serving.core)


def test_interference(serving: Serving) -> None:
    record = serving.interference(prompt=1000, context=100)
    assert record.bench == "serve:interference" and "gaps" in record.note
    check_idle(serving.core)


def test_prefix(serving: Serving) -> None:
    first, second = serving.prefix(shared=500, own=20, rounds=2)
    assert first.tokens == 520 and second.tokens == 520 - 448 and "448 tokens of it cached" in second.note
    check_idle(serving.core)


def test_results_are_added_to_those_of_the_run(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: SimpleNamespace(stdout="NVIDIA H200, 580.1\n"))
    records = [serving.decode(1, context=64, steps=2)]
    add_to_results(tmp_path, "abc", records)
    (path,) = tmp_path.iterdir()
    report = json.loads(path.read_text())
    report["records"].insert(0, {"bench": "decode"})
    path.write_text(json.dumps(report))
    add_to_results(tmp_path, "abc", records)
    assert [record["bench"] for record in json.loads(path.read_text())["records"]] == ["decode", "serve:decode"]
