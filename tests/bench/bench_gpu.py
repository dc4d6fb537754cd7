"""Whole steps of the full-size model on a GPU: decode, prefill, sampling (`make bench-gpu`).

Random weights are made on the GPU from a skeleton (`python -m tests.bench.full_size DIR`). Prints a table and writes
one JSON file a run. Decode and short prefill are the median of GPU time by CUDA events, LM head and sampling included,
without the host's part; what is timed by the wall clock says so in its note. Bytes of decode are counted, and the floor
is they at the bandwidth measured in the same run. None: not measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flint_plugins.library import find_library, library_info
from flint_plugins.ops import PAGE_TOKENS
from flint_runtime.executors import cuda
from flint_runtime.executors.plugin_host import PluginHostExecutor
from flint_runtime.executors.step import RowSampling, SequencePart, Step, build_step
from flint_runtime.manifest import Phase, WeightFormat
from tests.bench import full_size
from tests.shapes import FLINT

_SEQUENCES = 32
_MOST_PAGES = 32_767
"""TensorRT counts a tensor's elements in 32 bits."""
SAMPLING = RowSampling(temperature=1.0, top_k=20, top_p=0.95, sample_slot=0)


@dataclass(frozen=True)
class Record:
    """One line of the results; see the performance document for the meaning of the fields."""

    bench: str
    weights: str
    batch: int
    context: int
    tokens: int
    median_ms: float
    p95_ms: float
    bytes: int | None
    floor_ms: float | None
    kernels: int | None
    note: str = ""


class Bench:
    """An executor with random weights and KV pools, and what times its steps."""

    def __init__(self, skeleton: Path, weights: WeightFormat, scratch: Path) -> None:
        self.weights: WeightFormat = weights
        library = find_library()
        self.directory = directory = scratch / weights
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(skeleton / weights, directory)
        info = library_info(library)
        full_size.complete(directory, weights, cuda.device_architecture(), library, info.version)
        with _without_upload():
            self.executor = PluginHostExecutor.open(directory)
        full_size.fill(self.executor._weight_addresses, weights)
        pages = _MOST_PAGES if weights == "nvfp4" else 12_000
        self.executor.allocate(pages, slots=_SEQUENCES, sample_slots=1)
        self._fill_pools()
        self.pages = pages
        self.floor_tb_s = read_bandwidth()

    def _fill_pools(self) -> None:
        memory = self.executor._state_memory
        assert memory is not None
        size = self.executor._layout.sampling_offset
        pattern = torch.randn(1 << 26, device="cuda").bfloat16()
        for offset in range(0, size, pattern.nbytes):
            count = min(pattern.nbytes, size - offset)
            cuda.call(
                "cudaMemcpy", memory.address + offset, pattern.data_ptr(), count,
                cuda._runtime().cudaMemcpyKind.cudaMemcpyDeviceToDevice,
            )  # fmt: skip
        torch.cuda.synchronize()

    def close(self) -> None:
        """Free the GPU memory."""
        self.executor.close()
        torch.cuda.empty_cache()

    def decode_step(self, batch: int, context: int, new: int = 1) -> Step:
        """A decode step: each sequence has `context` tokens after it, its pages spread over the pool."""
        rng = np.random.default_rng(context)
        need = -(-context // PAGE_TOKENS)
        pages = rng.permutation(self.pages)[: batch * need].reshape(batch, need)
        parts = [
            SequencePart(
                rng.integers(0, FLINT.vocab_size, new).tolist(), context - new, pages[b].tolist(), b,
                [(i, SAMPLING) for i in range(new)],
            )
            for b in range(batch)
        ]  # fmt: skip
        return build_step(parts)

    def prefill_step(self, tokens: int, start: int = 0) -> Step:
        """A prefill chunk of one sequence."""
        rng = np.random.default_rng(tokens)
        pages = list(range(-(-(start + tokens) // PAGE_TOKENS)))
        part = SequencePart(rng.integers(0, FLINT.vocab_size, tokens).tolist(), start, pages, 0, [(-1, SAMPLING)])
        return build_step([part])

    def launcher(self, phase: Phase, step: Step) -> Callable[[], object]:
        """Prepare a step (its arrays are on the GPU, its CUDA graph is captured) and return what launches it."""
        for _ in range(2):
            self.executor.run(phase, step)
        return self.executor.launcher(phase, step)

    def time(self, launch: Callable[[], object], samples: int) -> tuple[float, float]:
        """Median and 95th percentile of one launch, in ms."""
        stream = torch.cuda.ExternalStream(self.executor._stream.handle)
        times = []
        for _ in range(samples):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            launch()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end))
        times.sort()
        return statistics.median(times), times[int(0.95 * (len(times) - 1))]

    def decode(self, batch: int, context: int, samples: int = 60) -> Record:
        """Time a decode step of one token per sequence."""
        launch = self.launcher("decode", self.decode_step(batch, context))
        median, p95 = self.time(launch, samples)
        size = decode_bytes(self.weights, batch, context)
        step = self.decode_step(batch, context)
        started = time.perf_counter()
        for _ in range(20):
            self.executor.run("decode", step)
        wall = (time.perf_counter() - started) / 20 * 1e3
        return Record(
            "decode", self.weights, batch, context, batch, round(median, 4), round(p95, 4), size,
            round(size / self.floor_tb_s / 1e9, 4), None, f"wall {wall:.3f} ms with the host's part",
        )  # fmt: skip

    def prefill(self, tokens: int, samples: int = 8) -> Record:
        """Time the prefill of one sequence, in chunks."""
        chunk, note = self.executor.limits.prefill_chunk, ""
        if tokens <= chunk:
            median, p95 = self.time(self.launcher("prefill", self.prefill_step(tokens)), samples)
        else:
            steps = [self.prefill_step(min(chunk, tokens - s), s) for s in range(0, tokens, chunk)]
            times = []
            for _ in range(2):
                started = time.perf_counter()
                for step in steps:
                    self.executor.run("prefill", step)
                times.append((time.perf_counter() - started) * 1e3)
            median, p95, note = min(times), max(times), "wall clock, better and worse of 2 runs"
        return Record(
            "prefill", self.weights, 1, tokens, tokens, round(median, 3), round(p95, 3), None, None, None, note
        )

    def load(self) -> Record:
        """Write the weights to the engine's files, open it anew, and time that up to the first token."""
        names = {t.name: t for file in full_size.files(self.weights) for t in file.tensors}
        for file in full_size.files(self.weights):
            path = self.directory / "weights" / file.name
            with path.open("r+b") as out:
                out.seek(path.stat().st_size - sum(t.bytes for t in file.tensors))
                for tensor in file.tensors:
                    data = full_size.device_tensor(self.executor._weight_addresses[tensor.name], names[tensor.name])
                    out.write(data.view(torch.uint8).cpu().numpy().data)
        size = self.executor._weights.size
        self.close()
        started = time.perf_counter()
        self.executor = PluginHostExecutor.open(self.directory)
        opened = time.perf_counter()
        self.executor.allocate(64, slots=1, sample_slots=1)
        self.executor.run("prefill", self.prefill_step(16))
        taken = (time.perf_counter() - started) * 1e3
        note = f"wall clock, 1 run, files in memory; {size / (opened - started) / 1e9:.1f} GB/s"
        return Record("load", self.weights, 1, 16, 1, round(taken, 1), round(taken, 1), size, None, None, note)

    def sample(self, rows: int) -> Record:
        """Time the Sample op alone."""
        from tests.gpu.ops import time_op

        ones = torch.ones(rows, device="cuda")
        zeros = torch.zeros(rows, device="cuda")
        integers = torch.zeros(rows, dtype=torch.int32, device="cuda")
        inputs = [
            {
                "logits": 3 * torch.randn(rows, FLINT.vocab_size, device="cuda"),
                "temperature": ones, "top_k": integers + 20, "top_p": 0.95 * ones, "min_p": zeros,
                "repetition_penalty": ones, "presence_penalty": zeros, "frequency_penalty": zeros,
                "seed": torch.zeros(rows, 2, dtype=torch.int32, device="cuda"), "draw_index": integers,
                "sample_slot": integers - 1, "forced_token": integers - 1, "sample_flags": integers,
                "token_counts": torch.zeros(1, FLINT.vocab_size, dtype=torch.int32, device="cuda"),
                "last_tokens": integers[:1], "logit_bias": torch.zeros(1, FLINT.vocab_size, device="cuda"),
                "token_mask": torch.zeros(1, FLINT.vocab_size // 32, dtype=torch.int32, device="cuda"),
            }
            for _ in range(4)
        ]  # fmt: skip
        median = time_op("Sample", {}, inputs)
        size = rows * FLINT.vocab_size * 4
        return Record(
            "sample", "", rows, 0, rows, round(median, 5), round(median, 5), size, None, None, "top-k 20, top-p 0.95"
        )

    def profile(self, launch: Callable[[], object], rounds: int = 5) -> tuple[list[tuple[str, int, float]], int]:
        """Kernel name, calls and total microseconds of one launch, largest first; and the number of kernels."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(rounds):
                launch()
            self.executor._stream.wait()
            torch.cuda.synchronize()
        rows = [
            (event.key, event.count // rounds, event.device_time_total / rounds)
            for event in found.key_averages()
            if event.device_time_total
        ]
        rows.sort(key=lambda row: -row[2])
        return rows, sum(row[1] for row in rows)


@contextmanager
def _without_upload() -> Iterator[None]:
    """Let the executor open without reading the weight files, which are holes."""
    from flint_runtime.executors import gpu

    real = gpu.upload_weights
    gpu.upload_weights = lambda *args, **kwargs: None  # type: ignore[assignment]
    try:
        yield
    finally:
        gpu.upload_weights = real


def decode_bytes(weights: WeightFormat, batch: int, context: int) -> int:
    """Fewest bytes that a decode step moves: weights of the layers and of the experts that are expected to be chosen
    (each once), K and V, logits."""
    c = FLINT
    value = 0.5625 if weights == "nvfp4" else 2.0
    h, d = c.hidden_size, c.head_dim
    attention = c.num_hidden_layers * d * h * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)
    dense = len(c.mlp_only_layers) * 3 * h * c.intermediate_size
    moe_layers = c.num_hidden_layers - len(c.mlp_only_layers)
    chosen = c.num_experts * (1 - (1 - c.num_experts_per_tok / c.num_experts) ** batch)
    experts = moe_layers * 3 * h * (chosen * c.moe_intermediate_size + c.shared_expert_intermediate_size)
    router = moe_layers * c.num_experts * h * 4
    head = c.vocab_size * h
    kv = 2 * c.num_key_value_heads * d * 2
    full, sliding = len(c.full_layers), len(c.sliding_layers)
    cache = batch * kv * (full * context + sliding * min(context, c.sliding_window))
    return int((attention + dense + experts + head) * value + router + cache + batch * c.vocab_size * 4)


def read_bandwidth() -> float:
    """TB/s of reading 4 GB, by torch's sum over a matrix."""
    x = torch.randn(1 << 30, device="cuda")
    torch.cuda.synchronize()
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        x.sum()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    del x
    torch.cuda.empty_cache()
    return 4 * (1 << 30) / min(times) / 1e9


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skeleton", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/flint-bench"))
    parser.add_argument("--weights", nargs="+", default=["nvfp4"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 32_768, 100_000, 262_144])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048, 8192, 100_000])
    parser.add_argument("--profile", action="store_true", help="print the kernels of a decode step and a prefill chunk")
    parser.add_argument("--load", action="store_true", help="also time loading the weights from files in memory")
    parser.add_argument("--sample", action="store_true", help="also time sampling alone")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON file")
    args = parser.parse_args()
    records: list[Record] = []
    floor = 0.0
    for weights in args.weights:
        bench = Bench(args.skeleton, weights, args.scratch)
        floor = bench.floor_tb_s
        print(f"{weights}: reads {floor:.2f} TB/s, arena {bench.executor.arena_bytes / 1e6:.0f} MB", flush=True)
        for context in args.contexts:
            for batch in args.batches:
                if batch * -(-context // PAGE_TOKENS) <= bench.pages:
                    records.append(bench.decode(batch, context))
                    print(_line(records[-1]), flush=True)
        for tokens in args.prefill:
            records.append(bench.prefill(tokens))
            print(_line(records[-1]), flush=True)
        if args.profile:
            for name, phase, step in (
                ("decode 1K", "decode", bench.decode_step(1, 1024)),
                ("decode 100K", "decode", bench.decode_step(1, 100_000)),
                ("decode 1K x 8", "decode", bench.decode_step(8, 1024)),
                ("prefill 8192", "prefill", bench.prefill_step(8192)),
            ):
                rows, count = bench.profile(bench.launcher(phase, step))  # type: ignore[arg-type]
                print(f"-- {name}: {count} kernels, {sum(r[2] for r in rows):.0f} us of kernel time")
                for key, calls, total in rows[:18]:
                    print(f"   {total:9.1f} us {calls:4d} x {total / max(calls, 1):8.2f}  {key[:100]}")
        if args.sample:
            for rows in (1, 8, 64):
                records.append(bench.sample(rows))
                print(_line(records[-1]), flush=True)
        if args.load:
            records.append(bench.load())
            print(_line(records[-1]), flush=True)
        bench.close()
        args.sample = False
    if args.out:
        write(args.out, args.commit, floor, records)


def write(folder: Path, commit: str, floor: float, records: list[Record]) -> None:
    """Write the run's JSON file."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    card, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    day = time.strftime("%Y%m%d", time.gmtime())
    report: dict[str, Any] = {
        "card": card,
        "driver": driver,
        "commit": commit,
        "floor_tb_s": round(floor, 3),
        "barrier_us": None,
        "records": [asdict(record) for record in records],
    }
    folder.mkdir(parents=True, exist_ok=True)
    name = card.lower().replace(" ", "-")
    (folder / f"{name}-{day}-{commit or 'none'}.json").write_text(json.dumps(report, indent=1) + "\n")


def _line(record: Record) -> str:
    share = f"{record.floor_ms / record.median_ms:5.0%} of floor" if record.floor_ms else ""
    rate = record.tokens / record.median_ms * 1e3
    return (
        f"{record.bench:8} {record.weights:6} batch {record.batch:3} context {record.context:7,}: "
        f"{record.median_ms:9.3f} ms  {rate:10,.0f} tokens/s  {share}  {record.note}"
    )


if __name__ == "__main__":
    main()
