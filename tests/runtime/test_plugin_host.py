"""The plugin-host executor without a GPU: a fake CUDA, and the reference ops instead of kernels (see fake_cuda).

Its results must equal the reference executor's bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from flint_plugins import library
from flint_plugins.library import LibraryError
from flint_runtime.engine import Engine
from flint_runtime.errors import EngineError, ResourceError, UnsupportedError
from flint_runtime.executors import cuda, gpu, gpu_memory, open_executor, weight_loader
from flint_runtime.executors.gpu import GpuExecutor
from flint_runtime.executors.host_library import HostLibrary
from flint_runtime.executors.plugin_host import PluginHostExecutor
from flint_runtime.executors.reference import ReferenceExecutor
from flint_runtime.executors.staging import RESULT_ARRAYS, Sizes, pack, page_table_width
from flint_runtime.executors.step import STEP_ARRAYS, RowSampling, SequencePart, build_step
from flint_runtime.manifest import Limits
from tests.runtime.engines import build_reference_engine, rewrite_manifest
from tests.runtime.fake_cuda import FakeCuda, ReferenceHost
from tests.tools.checkpoints import flint_config, random_checkpoint

PROMPT = list(range(40, 150))


# --- Against the reference executor -------------------------------------------------------------------------------


def steps() -> Iterator[tuple[str, list[SequencePart]]]:
    """Chunked prefill, a ragged step, then decode of three sequences with draws of every kind."""
    pages = [[7, 2, 5, 1], [3, 6, 0, 8], [9, 4, 10, 11]]
    how = [
        RowSampling(),
        RowSampling(temperature=0.8, top_k=20, top_p=0.9, seed=(5, 7)),
        RowSampling(repetition_penalty=1.3, frequency_penalty=0.2, sample_slot=1),
    ]
    lengths = [0, 0, 0]

    def part(i: int, count: int, rows: list[int]) -> SequencePart:
        start = lengths[i]
        lengths[i] += count
        tokens = PROMPT[start : start + count]
        return SequencePart(tokens, start, pages[i][: -(-lengths[i] // 64)], i, [(row, how[i]) for row in rows])

    yield "prefill", [part(0, 48, [-1])]
    yield "prefill", [part(0, 30, [0, -1]), part(1, 18, [-1])]
    yield "prefill", [part(2, 40, [-1])]
    for _ in range(3):
        yield "decode", [part(i, 1, [-1]) for i in range(3)]
    yield "decode", [part(1, 3, [0, 1, 2]), part(0, 1, [-1])]


def check_states(host: GpuExecutor, reference: ReferenceExecutor, fake: FakeCuda) -> None:
    """The sampling states are equal, and so is what was written to the KV pools, which must be zero before."""
    host._stream.wait()
    assert host._states.inputs.keys() == reference.states.keys()
    for name, state in reference.states.items():
        dtype = host._states.inputs[name].dtype
        found = fake.tensor(dtype, tuple(state.shape), host._state_addresses[name])
        assert torch.equal(found, state), name


def zero(executor: GpuExecutor) -> None:
    """Fill the KV pools like the reference executor does."""
    assert executor._state_memory is not None
    executor._stream.fill(executor._state_memory.address, 0, executor._layout.sampling_offset)


def test_results_equal_the_reference_executors(host: PluginHostExecutor, directory: Path, fake: FakeCuda) -> None:
    reference = ReferenceExecutor.open(directory)
    for executor in (host, reference):
        executor.allocate(pages=12, slots=3, sample_slots=2)
        executor.begin_sequence(1, [1, 2, 2, 3], generated=[9, 9])
    zero(host)
    for phase, parts in steps():
        step = build_step(parts)
        found, expected = (e.run(phase, step, logits=True) for e in (host, reference))  # type: ignore[arg-type]
        for name in (*RESULT_ARRAYS, "logits"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    check_states(host, reference, fake)


def test_a_step_is_one_copy_each_way(host: PluginHostExecutor, fake: FakeCuda) -> None:
    host.allocate(pages=12, slots=3, sample_slots=2)
    host.poison()
    for phase, parts in steps():
        before = fake.uploads, fake.downloads
        host.run(phase, build_step(parts))  # type: ignore[arg-type]
        assert (fake.uploads - before[0], fake.downloads - before[1]) == (1, 1)


def test_a_growing_sequence_keeps_its_bindings(host: PluginHostExecutor) -> None:
    host.allocate(pages=4, slots=1, sample_slots=1)
    for start in range(0, 140):
        part = SequencePart([1], start, range(start // 64 + 1), 0, [(-1, RowSampling())])
        host.run("decode", build_step([part]))
    assert len(host._prepared) == 1


def test_memory_is_freed(host: PluginHostExecutor, fake: FakeCuda) -> None:
    host.allocate(pages=12, slots=3, sample_slots=2)
    first = fake.used
    host.allocate(pages=12, slots=3, sample_slots=2)
    assert fake.used == first
    host.close()
    assert not fake.device and not fake.pinned


# --- What is refused ----------------------------------------------------------------------------------------------


def test_no_gpu_is_an_error_that_says_so(directory: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UnsupportedError("no cuda-bindings here")

    monkeypatch.setattr(cuda, "_runtime", missing)
    engine = Engine.open(directory)
    with pytest.raises(UnsupportedError, match="needs an NVIDIA GPU, but no cuda-bindings here"):
        PluginHostExecutor(engine, plugins)
    assert isinstance(open_executor(engine, "auto"), ReferenceExecutor)
    with pytest.raises(UnsupportedError, match="needs an NVIDIA GPU"):
        open_executor(engine, "plugin-host")


def test_auto_takes_the_plugin_host_where_it_runs(
    directory: Path, fake: FakeCuda, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(plugins))
    engine = Engine.open(directory)
    assert isinstance(open_executor(engine, "auto"), PluginHostExecutor)
    fake.capability = {"major": 7, "minor": 5}
    assert isinstance(open_executor(engine, "auto"), ReferenceExecutor)


def test_another_gpu_is_refused(directory: Path, fake: FakeCuda, plugins: Path) -> None:
    fake.capability = {"major": 7, "minor": 5}
    with pytest.raises(EngineError, match=r"this GPU is sm75\. Rebuild"):
        PluginHostExecutor(Engine.open(directory), plugins)


def test_weights_that_do_not_fit_are_refused_before_anything_is_loaded(
    directory: Path, fake: FakeCuda, plugins: Path
) -> None:
    """Case E9."""
    fake.total = 1 << 20
    with pytest.raises(ResourceError, match=r"does not fit this GPU[\s\S]*weights[\s\S]*Not even one page") as error:
        PluginHostExecutor(Engine.open(directory), plugins)
    assert error.value.exit_code == 5
    assert not fake.device


def test_pools_that_do_not_fit_are_refused_with_the_largest_context(host: PluginHostExecutor, fake: FakeCuda) -> None:
    """Case E9."""
    fake.total = fake.used + gpu_memory.HEADROOM_BYTES + (1 << 20)
    with pytest.raises(ResourceError) as error:
        host.allocate(pages=1000, slots=1, sample_slots=1)
    message = str(error.value)
    assert "KV cache, full layers (1,000 pages of 64 tokens)" in message
    assert "The largest context that would fit is " in message
    context = int(message.split("would fit is ")[1].split(" ")[0].replace(",", ""))
    host.allocate(pages=-(-context // 64), slots=1, sample_slots=1)


def test_a_damaged_graph_is_refused(
    directory: Path, fake: FakeCuda, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.open(directory)
    monkeypatch.setattr(gpu, "plan_weights", lambda paths: weight_loader.plan_weights(paths[1:]))
    with pytest.raises(EngineError, match=r"no weight file holds .*, an input of prefill\.onnx"):
        PluginHostExecutor(engine, plugins)


# --- Weights ------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[list[Path], dict[str, torch.Tensor]]:
    """Two files of odd sizes, with a tensor larger than a chunk."""
    generator = torch.Generator().manual_seed(1)
    tensors = [
        {
            "a": torch.randint(-128, 127, (3001,), generator=generator).to(torch.int8),
            "b": torch.rand(1),
            "c": torch.rand(3),
        },
        {"d": torch.rand(70_001), "e": torch.rand(5, 7).bfloat16(), "f": torch.arange(9, dtype=torch.int32)},
    ]
    paths = [tmp_path / f"{i}.safetensors" for i in range(2)]
    for path, content in zip(paths, tensors, strict=True):
        save_file(content, path)
    # Clones: what load_file returns are views of the files, which a test cuts off.
    return paths, {name: tensor.clone() for path in paths for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("chunk_bytes", [1000, 4096, 1 << 20])
def test_every_byte_arrives(
    chunk_bytes: int, files: tuple[list[Path], dict[str, torch.Tensor]], fake: FakeCuda
) -> None:
    paths, expected = files
    layout = weight_loader.plan_weights(paths, chunk_bytes)
    memory = cuda.DeviceMemory(layout.size)
    read: list[int] = []
    weight_loader.upload_weights(layout, memory.address, read.append)
    assert set(layout.offsets) == set(expected)
    for name, tensor in expected.items():
        assert layout.offsets[name] % weight_loader.ALIGNMENT == 0
        assert layout.tensors[name].shape == tuple(tensor.shape)
        found = fake.bytes_at(memory.address + layout.offsets[name], tensor.nbytes)
        assert found.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes(), name
    assert sum(read) == sum(tensor.nbytes for tensor in expected.values())
    assert len(layout.chunks) == 2 or chunk_bytes < 1 << 20


def test_damaged_weight_files_are_refused(
    files: tuple[list[Path], dict[str, torch.Tensor]], fake: FakeCuda, tmp_path: Path
) -> None:
    paths, _ = files
    layout = weight_loader.plan_weights(paths)
    memory = cuda.DeviceMemory(layout.size)
    whole = paths[1].read_bytes()
    paths[1].write_bytes(whole[:-1000])
    with pytest.raises(EngineError, match=r"1\.safetensors is cut off at byte"):
        weight_loader.upload_weights(layout, memory.address)
    with pytest.raises(EngineError, match=r"1\.safetensors cannot be read: .*ends behind the file"):
        weight_loader.plan_weights(paths)
    paths[1].write_bytes(b"\x10" + bytes(7) + b"not json at all!")
    with pytest.raises(EngineError, match=r"1\.safetensors cannot be read"):
        weight_loader.plan_weights(paths)
    with pytest.raises(EngineError, match="is in another weight file, too"):
        weight_loader.plan_weights([paths[0], paths[0]])
    paths[0].unlink()
    with pytest.raises(EngineError, match=r"0\.safetensors cannot be read"):
        weight_loader.upload_weights(layout, memory.address)


# --- Staging ------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 4096), st.integers(1, 300))
def test_packed_arrays_lie_apart(tokens: int, sequences: int, columns: int, rows: int) -> None:
    for arrays in (STEP_ARRAYS, RESULT_ARRAYS):
        block = pack(arrays, Sizes(tokens, sequences, columns, rows).by_name())
        memory = np.zeros(block.size, np.uint8)
        views = block.views(memory)
        for index, view in enumerate(views.values(), 1):
            assert view.ctypes.data % 4 == 0
            assert not view.view(np.uint8).any()
            view.view(np.uint8)[...] = index % 250 + 1
        for index, (name, view) in enumerate(views.items(), 1):
            assert (view.view(np.uint8) == index % 250 + 1).all(), name
            assert block.addresses(4096)[name] == 4096 + view.ctypes.data - memory.ctypes.data


def test_page_table_widths() -> None:
    assert [page_table_width(n, 4096) for n in (1, 64, 65, 129, 4096)] == [64, 64, 128, 256, 4096]
    assert page_table_width(3, 4) == 4 and page_table_width(70, 100) == 100


# --- The real library ---------------------------------------------------------------------------------------------


def test_no_torch_on_this_path(run_python: Callable[[str], str]) -> None:
    code = "import sys, flint_runtime.executors.plugin_host; print('torch' in sys.modules)"
    assert run_python(code) == "False"


@pytest.fixture
def run_python() -> Callable[[str], str]:
    import subprocess
    import sys

    def run(code: str) -> str:
        return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()

    return run


def test_the_library_has_a_host(plugins: Path) -> None:
    HostLibrary(plugins)
