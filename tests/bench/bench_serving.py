"""Serving the full-size model on a GPU, by the wall clock with everything that the host does (`make bench-gpu`).

The engine core over the plugin-host executor, with random weights from a skeleton (`python -m tests.bench.full_size
DIR`) and greedy requests of random tokens:

serve:decode        a step of 1, 8, 32 and 64 streams of 1,024 tokens and more
serve:interference  the time between the tokens of one stream while a prompt of 100,000 tokens is prefilled
serve:prefix        the time to the first token of two requests, one after the other, that share 50,000 tokens

Prints a table, and adds its records to the run's JSON file. Python's garbage collector does not look at what was there
before the first request, as in a server: with torch loaded, that alone would stall every stream for 0.1 s.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from flint_plugins.library import find_library, library_info
from flint_runtime.engine_core import CoreConfig, EngineCore
from flint_runtime.executors import cuda, gpu
from flint_runtime.executors.base import Executor
from flint_runtime.executors.plugin_host import PluginHostExecutor
from flint_runtime.manifest import WeightFormat
from flint_runtime.request import EngineRequest
from flint_runtime.sampling_params import SamplingParams
from tests.bench import full_size
from tests.bench.report import Record

BATCHES = (1, 8, 32, 64)
CONTEXT = 1024
STEPS = 200
LONG_PROMPT = 100_000
SHARED, OWN = 50_000, 100
"""Tokens that two prompts share, and that each has besides."""
ROUNDS = 3
"""Pairs of such prompts."""
MOST_STALL_MS = 60.0
LEAST_SPEED_UP = 20.0


class Serving:
    """An engine core, and what measures it."""

    def __init__(self, core: EngineCore, weights: WeightFormat) -> None:
        self.core, self.weights = core, weights
        self._params = SamplingParams(temperature=0.0, ignore_eos=True).with_defaults({})
        self._random = np.random.default_rng(0)
        self._count = 0

    def decode(self, batch: int, context: int = CONTEXT, steps: int = STEPS) -> Record:
        """Steps of `batch` streams; the time of one is that from tokens to tokens."""
        core, warm_up = self.core, 20
        names = [self._add(self._tokens(context), core.max_model_len - context) for _ in range(batch)]
        for _ in range(warm_up):  # Until all have been prefilled, and beyond.
            while len(core.step()) < batch:
                pass
        host, started, times = core.stats().host_seconds, time.perf_counter(), []
        for _ in range(steps):
            before = time.perf_counter()
            assert len(core.step()) == batch
            times.append(time.perf_counter() - before)
        rate = batch * steps / (time.perf_counter() - started)
        host_us = (core.stats().host_seconds - host) / steps * 1e6
        self._abort(names)
        return self._record(
            "decode", batch, context, batch, times, f"{rate:,.0f} tokens/s, of a step {host_us:.0f} us of the host"
        )

    def interference(self, prompt: int = LONG_PROMPT, context: int = CONTEXT) -> Record:
        """What a stream notices of a long prompt."""
        core = self.core
        stream = self._add(self._tokens(context), core.max_model_len - context)
        for _ in range(20):
            while not core.step():
                pass
        newcomer = self._add(self._tokens(prompt), 1)
        started = last = time.perf_counter()
        gaps, finished = [], False
        while not finished:
            for output in core.step():
                now = time.perf_counter()
                if output.request_id == stream:
                    gaps.append(now - last)
                    last = now
                finished |= output.request_id == newcomer
        taken = time.perf_counter() - started
        self._abort([stream])
        worst = max(gaps) * 1e3
        note = (
            f"largest {worst:.1f} ms of {len(gaps)} gaps in the {taken:.2f} s that the prompt took; goal "
            f"{MOST_STALL_MS:.0f} ms {'met' if worst <= MOST_STALL_MS else 'MISSED'}"
        )
        return self._record("interference", 1, prompt, 1, gaps, note)

    def prefix(self, shared: int = SHARED, own: int = OWN, rounds: int = ROUNDS) -> list[Record]:
        """Two requests with a prefix in common, a few times with other prefixes."""
        first, second, cached = [], [], 0
        for _ in range(rounds):
            head = self._tokens(shared)
            first.append(self._first_token([*head, *self._tokens(own)])[0])
            seconds, cached = self._first_token([*head, *self._tokens(own)])
            second.append(seconds)
        ratio = statistics.median(first) / statistics.median(second)
        note = (
            f"second request, {cached} tokens of it cached: {ratio:.1f} times sooner; goal {LEAST_SPEED_UP:.0f} "
            f"{'met' if ratio >= LEAST_SPEED_UP else 'MISSED'}"
        )
        length = shared + own
        return [
            self._record("prefix", 1, length, length, first, "time to first token, first request"),
            self._record("prefix", 1, length, length - cached, second, note),
        ]

    def _first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token of a request that is alone, and how many tokens were cached."""
        started = time.perf_counter()
        self._add(prompt, 1)
        while not (outputs := self.core.step()):
            pass
        assert outputs[0].finish_reason == "length", outputs[0].error
        return time.perf_counter() - started, outputs[0].cached_tokens

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self._random.integers(0, self.core.vocab_size, count).tolist()
        return tokens

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        self._count += 1
        name = str(self._count)
        self.core.add(EngineRequest(name, prompt, self._params, max_tokens, frozenset(), frozenset()))
        return name

    def _abort(self, names: list[str]) -> None:
        for name in names:
            self.core.abort(name)
        while self.core.has_work():
            self.core.step()

    def _record(self, name: str, batch: int, context: int, tokens: int, seconds: list[float], note: str) -> Record:
        times = sorted(1e3 * value for value in seconds)
        median, p95 = statistics.median(times), times[round(0.95 * (len(times) - 1))]
        return Record(
            f"serve:{name}", self.weights, batch, context, tokens, round(median, 4), round(p95, 4), None, None, None,
            note,
        )  # fmt: skip


@contextmanager
def open_engine(skeleton: Path, weights: WeightFormat, scratch: Path) -> Iterator[Executor]:
    """The full-size engine with random weights."""
    library, directory = find_library(), scratch / weights
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(skeleton / weights, directory)
    version = library_info(library).version
    full_size.complete(directory, weights, cuda.device_architecture(), library, version)
    with mock.patch.object(gpu, "upload_weights", lambda *args, **kwargs: None):  # Its weight files are holes.
        executor = PluginHostExecutor.open(directory)
    full_size.fill(executor._weight_addresses, weights)
    try:
        yield executor
    finally:
        executor.close()


def add_to_results(folder: Path, commit: str, records: list[Record]) -> None:
    """Put the records into the run's JSON file, in the place of those from an earlier run of this."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    card, driver = found.split(", ")
    day = time.strftime("%Y%m%d", time.gmtime())
    path = folder / f"{card.lower().replace(' ', '-')}-{day}-{commit or 'none'}.json"
    report: dict[str, Any] = {
        "card": card, "driver": driver, "commit": commit, "floor_tb_s": None, "barrier_us": None, "records": [],
    }  # fmt: skip
    if path.exists():
        report = json.loads(path.read_text())
    others = [record for record in report["records"] if not record["bench"].startswith("serve:")]
    report["records"] = others + [asdict(record) for record in records]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def line(record: Record) -> str:
    """A record as a line of the table."""
    return (
        f"{record.bench:18} {record.weights:5} batch {record.batch:2} context {record.context:7,}: "
        f"median {record.median_ms:9.3f} ms  p95 {record.p95_ms:9.3f} ms  {record.note}"
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skeleton", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/flint-bench"))
    parser.add_argument("--weights", default="nvfp4", choices=["nvfp4", "bf16"])
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON file")
    args = parser.parse_args()
    started = time.monotonic()
    records: list[Record] = []
    with open_engine(args.skeleton, args.weights, args.scratch) as executor:
        serving = Serving(EngineCore(executor, CoreConfig()), args.weights)
        gc.collect()
        gc.freeze()
        print(f"engine open after {time.monotonic() - started:.0f} s: {serving.core.kv_cache}", flush=True)

        def add(*found: Record) -> None:
            records.extend(found)
            print(*map(line, found), sep="\n", flush=True)
            if args.out:  # At once: a run that is cut off leaves what it measured.
                add_to_results(args.out, args.commit, records)

        add(*serving.prefix())
        add(serving.interference())
        for batch in BATCHES:
            add(serving.decode(batch))
    print(f"{time.monotonic() - started:.0f} s in all")


if __name__ == "__main__":
    main()
