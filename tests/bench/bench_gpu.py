"""The full-size model and its ops on a GPU: decode, prefill, sampling, loading (`make bench-gpu`).

Random weights are made on the GPU from a skeleton (`python -m tests.bench.full_size DIR`). Prints a table and writes a
JSON file and a plot. Decode and short prefill are the median of GPU time by CUDA events, LM head and sampling included,
without the host's part; what is timed by the wall clock says so in its note. Floors: `costs` at the bandwidth and the
arithmetic rate that the same run measured.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from flint_plugins.library import find_library, library_info
from flint_plugins.ops import PAGE_TOKENS
from flint_runtime.executors import cuda
from flint_runtime.executors.plugin_host import PluginHostExecutor
from flint_runtime.executors.step import RowSampling, SequencePart, Step, build_step
from flint_runtime.manifest import Phase, WeightFormat
from tests.bench import costs, full_size
from tests.bench.bench_ops import OpBench
from tests.bench.report import Record, Report, line
from tests.gpu.cuda_graph import CudaGraph
from tests.shapes import FLINT

_SEQUENCES = 32
_MOST_PAGES = 32_767
"""TensorRT counts a tensor's elements in 32 bits."""
SAMPLING = RowSampling(temperature=1.0, top_k=20, top_p=0.95, sample_slot=0)


class Bench:
    """An executor with random weights and KV pools, and what times its steps."""

    def __init__(self, skeleton: Path, weights: WeightFormat, scratch: Path, tb_s: float, tflop_s: float) -> None:
        self.weights: WeightFormat = weights
        self.tb_s, self.tflop_s = tb_s, tflop_s
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

    def kernels(self, launch: Callable[..., object]) -> int:
        """Kernels of one launch, counted in a CUDA graph."""
        graph = CudaGraph(self.executor._stream.handle, lambda: launch(use_graph=False))
        graph.close()
        return graph.kernels

    def decode(self, batch: int, context: int, samples: int = 60) -> Record:
        """Time a decode step of one token per sequence."""
        step = self.decode_step(batch, context)
        launch = self.launcher("decode", step)
        median, p95 = self.time(launch, samples)
        cost = costs.step(batch, context - 1, 1, self.weights)
        kernels = self.kernels(launch)
        started = time.perf_counter()
        for _ in range(20):
            self.executor.run("decode", step)
        wall = (time.perf_counter() - started) / 20 * 1e3
        return Record(
            "decode", self.weights, batch, context, batch, round(median, 4), round(p95, 4), int(cost.bytes),
            round(cost.floor_ms(self.tb_s, self.tflop_s), 4), kernels, f"wall {wall:.3f} ms with the host's part",
        )  # fmt: skip

    def prefill(self, tokens: int) -> Record:
        """Time the prefill of one sequence, in chunks."""
        chunk, kernels = self.executor.limits.prefill_chunk, None
        cost = costs.prefill(tokens, chunk, self.weights)
        note = f"{cost.flops / 1e12:.3g} TFLOP at {self.tflop_s:.0f} TFLOP/s"
        if tokens <= chunk:
            launch = self.launcher("prefill", self.prefill_step(tokens))
            median, p95 = self.time(launch, samples=50)
            kernels = self.kernels(launch)
        else:
            steps = [self.prefill_step(min(chunk, tokens - s), s) for s in range(0, tokens, chunk)]
            times = []
            for _ in range(2):
                started = time.perf_counter()
                for step in steps:
                    self.executor.run("prefill", step)
                times.append((time.perf_counter() - started) * 1e3)
            median, p95, note = min(times), max(times), f"wall clock, better and worse of 2 runs; {note}"
        return Record(
            "prefill", self.weights, 1, tokens, tokens, round(median, 3), round(p95, 3), int(cost.bytes),
            round(cost.floor_ms(self.tb_s, self.tflop_s), 3), kernels, note,
        )  # fmt: skip

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


def multiply_rate() -> float:
    """TFLOP/s of torch's BF16 product 8192 x 2048 x 5120: the QKV projection of a chunk."""
    x, w = torch.randn(8192, 2048, device="cuda").bfloat16(), torch.randn(2048, 5120, device="cuda").bfloat16()
    times = []
    for _ in range(30):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        x @ w
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * 8192 * 2048 * 5120 / min(times) / 1e9


def describe_card() -> tuple[str, str]:
    """Name and driver version."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    card, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    return card, driver


def measure(args: argparse.Namespace, tb_s: float, tflop_s: float) -> Iterator[Record]:
    """What the command line asks for."""
    ops = OpBench(tb_s, tflop_s)
    if args.ops:
        for weights in args.weights:
            yield from ops.products(weights)
            yield from ops.decode_attention(weights)
        yield from ops.attention()
    if args.sample:
        yield from map(ops.sample, (1, 8, 64))
    for weights in args.weights:
        bench = Bench(args.skeleton, weights, args.scratch, tb_s, tflop_s)
        print(f"{weights}: arena {bench.executor._arena.size / 1e6:.0f} MB", flush=True)
        for context in args.contexts:
            for batch in args.batches:
                if batch * -(-context // PAGE_TOKENS) <= bench.pages:
                    yield bench.decode(batch, context)
                else:
                    print(f"decode {weights} batch {batch} context {context:,}: more pages than a pool has")
        yield from map(bench.prefill, args.prefill)
        if args.profile:
            print_profiles(bench)
        if args.load:
            yield bench.load()
        bench.close()


def print_profiles(bench: Bench) -> None:
    """The kernels of decode steps and of a prefill chunk."""
    steps: list[tuple[str, Phase, Step]] = [
        ("decode 1K", "decode", bench.decode_step(1, 1024)),
        ("decode 100K", "decode", bench.decode_step(1, 100_000)),
        ("decode 1K x 8", "decode", bench.decode_step(8, 1024)),
        ("prefill 8192", "prefill", bench.prefill_step(8192)),
    ]
    for name, phase, step in steps:
        rows, count = bench.profile(bench.launcher(phase, step))
        print(f"-- {name}: {count} kernels, {sum(r[2] for r in rows):.0f} us of kernel time")
        for key, calls, total in rows[:18]:
            print(f"   {total:9.1f} us {calls:4d} x {total / max(calls, 1):8.2f}  {key[:100]}")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skeleton", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/flint-bench"))
    parser.add_argument("--weights", nargs="+", default=["nvfp4"], choices=["nvfp4", "bf16"])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 32_768, 100_000, 262_144])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048, 8192, 100_000])
    parser.add_argument("--profile", action="store_true", help="print the kernels of decode steps and a prefill chunk")
    parser.add_argument("--ops", action="store_true", help="also time every op alone")
    parser.add_argument("--sample", action="store_true", help="also time sampling alone")
    parser.add_argument("--load", action="store_true", help="also time loading the weights from files in memory")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON file and the plot")
    args = parser.parse_args()
    tb_s, tflop_s = read_bandwidth(), multiply_rate()
    print(f"reads {tb_s:.2f} TB/s, multiplies {tflop_s:.0f} TFLOP/s", flush=True)
    records: list[Record] = []
    try:
        for record in measure(args, tb_s, tflop_s):
            records.append(record)
            print(line(record), flush=True)
    finally:  # A run that is cut short keeps what it measured.
        if args.out:
            card, driver = describe_card()
            day = time.strftime("%Y%m%d", time.gmtime())
            report = Report(card, driver, args.commit, day, round(tb_s, 3), None, tuple(records))
            for path in report.write(args.out):
                print(path)


if __name__ == "__main__":
    main()
