"""Speed and memory of the repacking, against the project's limits.

    python -m tests.bench.bench_repack [--layers N] [--record] [--output DIR]

Makes an NVFP4 checkpoint of the released model's width (once; it stays below build/bench), repacks it in a fresh
process, and prints bytes of the GGUF file per second, CPU seconds and peak memory, what of the CPU seconds the hash
alone takes, and what the disk alone can do. Exit code 1 if a limit is missed. 49 layers are the released model: 22.9
GB, and as much again for the output.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from blake3 import blake3

from flint_builder.checkpoint import open_checkpoint
from flint_builder.repack import write_weights
from flint_builder.weights import weight_files
from tests.tools.checkpoints import flint_config, random_checkpoint

LEAST_MB_PER_S = 400
MOST_MIB = 1536
LAYERS = 10
"""Of which 8 have 256 experts: 4.5 GB."""
BYTES_PER_LAYER = 400_000_000
"""At least, on average."""

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "bench"
RESULTS = Path(__file__).parent / "results" / "repack.jsonl"


def checkpoint_path(layers: int) -> Path:
    """The checkpoint, made if it is not there; written under another name first, so that a killed run leaves none."""
    directory = WORK / f"flint-{layers}-layers"
    path = directory / "flint.gguf"
    if not path.exists():
        print(f"Making {path} …", flush=True)
        random_checkpoint(directory / "unfinished.gguf", flint_config(layers=layers), "nvfp4").rename(path)
    assert path.stat().st_size >= layers * BYTES_PER_LAYER, path
    return path


def disk_mb_per_s(directory: Path) -> float:
    """Speed of plain writes to a new file below `directory`, synced, in MB/s: no repacking can be faster for long."""
    data, count = os.urandom(1 << 20), 1024
    start = time.perf_counter()
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        for _ in range(count):
            file.write(data)
        os.fsync(file.fileno())
    return len(data) * count / (time.perf_counter() - start) / 1e6


def hash_seconds_per_byte() -> float:
    """CPU seconds of the hash that every byte of an engine goes through, best of 8 runs on data in the cache."""
    data = os.urandom(1 << 18)
    seconds = []
    for _ in range(8):
        digest, start = blake3(), time.thread_time()
        for _ in range(32):
            digest.update(data)
        seconds.append(time.thread_time() - start)
    return min(seconds) / (32 * len(data))


def repack(path: Path, directory: Path) -> dict[str, float]:
    """Repack once below `directory` and measure this process; the output is removed."""
    output = Path(tempfile.mkdtemp(dir=directory))
    try:
        checkpoint = open_checkpoint(str(path))
        config = checkpoint.config
        files = weight_files(config, checkpoint.weights, checkpoint.router_dtype, config.max_position_embeddings)
        checkpoint.check(files)
        start, start_cpu = time.perf_counter(), time.process_time()
        entries = write_weights(checkpoint, files, output, lambda count: None)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    finally:
        shutil.rmtree(output)
    return {
        "gigabytes": round(checkpoint.bytes / 1e9, 3),
        "seconds": round(seconds, 2),
        "mb_per_s": round(checkpoint.bytes / seconds / 1e6),
        "cpu_seconds": round(cpu_seconds, 1),
        "hash_cpu_seconds": round(sum(entry.size for entry in entries) * hash_seconds_per_byte(), 1),
        "peak_mib": round(peak_bytes() / 2**20),
    }


def peak_bytes() -> int:
    """Peak resident memory of this process. Linux's ru_maxrss would include what the parent had when it forked."""
    try:
        status = Path("/proc/self/status").read_text().split()
        return int(status[status.index("VmHWM:") + 1]) << 10
    except (OSError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the repacking of a checkpoint.")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the checkpoint")
    parser.add_argument("--record", action="store_true", help=f"append the result to {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--output", type=Path, default=WORK, help="where to write; a tmpfs leaves out the disk")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(repack(arguments.child, arguments.output)))
        return 0
    target = str(arguments.output.resolve())
    path = str(checkpoint_path(arguments.layers))
    command = [sys.executable, "-m", "tests.bench.bench_repack", "--output", target, "--child", path]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    result = json.loads(output) | {"disk_mb_per_s": round(disk_mb_per_s(arguments.output))}
    print(
        f"Repacked {result['gigabytes']} GB in {result['seconds']} s: {result['mb_per_s']} MB/s (at least "
        f"{LEAST_MB_PER_S}) in {result['cpu_seconds']} CPU seconds, of which BLAKE3 {result['hash_cpu_seconds']}, on "
        f"{os.cpu_count()} cores; peak memory {result['peak_mib']} MiB (at most {MOST_MIB}). Plain synced writes: "
        f"{result['disk_mb_per_s']} MB/s; load of the machine {os.getloadavg()[0]:.1f}."
    )
    if arguments.record:
        RESULTS.parent.mkdir(exist_ok=True)
        facts = {"date": datetime.date.today().isoformat(), "machine": platform.machine(), "cpus": os.cpu_count()}
        with RESULTS.open("a") as file:
            file.write(json.dumps(facts | result) + "\n")
    return int(result["mb_per_s"] < LEAST_MB_PER_S or result["peak_mib"] > MOST_MIB)


if __name__ == "__main__":
    sys.exit(main())
