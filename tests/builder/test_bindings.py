"""What the TensorRT executor binds is what TensorRT-RTX sees in the exported graphs. Loading a plan needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from flint_builder import plan
from flint_builder.graph import export_graph
from flint_builder.weights import weight_files
from flint_plugins.library import find_library, find_stub, library_info
from flint_plugins.ops import OPS
from flint_runtime.executors.graph_file import parse_graph
from flint_runtime.executors.staging import RESULT_ARRAYS, largest_sizes, page_table_columns
from flint_runtime.executors.states import States, pool_sizes
from flint_runtime.executors.step import STEP_ARRAYS, Pools
from flint_runtime.executors.tensorrt import DATA_TYPES, TensorInfo, binding_problems, expected_bindings
from flint_runtime.manifest import PHASES, Limits, Phase, WeightFormat
from tests.shapes import NANO

LIMITS = Limits(max_batch=16, max_context=2048, prefill_chunk=256)


@pytest.fixture(scope="module")
def library() -> Path:
    pytest.importorskip("tensorrt_rtx")
    find_stub()
    return find_library()


@pytest.mark.parametrize("weights", ["nvfp4", "bf16"])
@pytest.mark.parametrize("phase", PHASES)
def test_bindings_of_the_network(phase: Phase, weights: WeightFormat, library: Path) -> None:
    """Names, types and shapes of all inputs and outputs."""
    exported = export_graph(NANO, weights, weight_files(NANO, weights, "f32", LIMITS.max_context), LIMITS, phase)
    session = plan._session("tensorrt-rtx")
    session.load_plugins(library)
    trt = session.trt
    builder = trt.Builder(session.logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, session.logger)
    assert parser.parse(exported.model.SerializeToString())
    tensors = [(True, network.get_input(i)) for i in range(network.num_inputs)]
    tensors += [(False, network.get_output(i)) for i in range(network.num_outputs)]
    found: dict[str, TensorInfo] = {t.name: (is_input, t.dtype.name, tuple(t.shape)) for is_input, t in tensors}
    expected = expected_bindings(parse_graph(exported.model))
    assert not binding_problems(expected, found)
    assert set(DATA_TYPES.values()) <= set(trt.DataType.__members__)
    # What of a plan can be seen without a GPU: the names are in it.
    built = plan.build_plan(
        exported.model.SerializeToString(),
        backend="tensorrt-rtx",
        targets=("sm120",),
        library=library,
        profiles=[exported.profile],
    )
    assert not [name for name in expected if name.encode() not in built]


@pytest.mark.parametrize("phase", PHASES)
def test_what_a_step_binds_is_in_the_profile(phase: Phase) -> None:
    """The least and the largest step; every input is a weight, a step's array or a state."""
    files = weight_files(NANO, "nvfp4", "f32", LIMITS.max_context)
    exported = export_graph(NANO, "nvfp4", files, LIMITS, phase)
    file = parse_graph(exported.model)
    states = States([file])
    weights = {tensor.name for weight_file in files for tensor in weight_file.tensors}
    assert file.inputs.keys() == {*weights, *STEP_ARRAYS, *states.inputs}
    assert file.outputs.keys() == {"logits", *RESULT_ARRAYS, *file.aliases()}
    most = largest_sizes(LIMITS, page_table_columns(LIMITS))
    if phase == "decode":
        most = most._replace(tokens=LIMITS.decode_tokens, rows=LIMITS.decode_tokens)
    for sizes, pools in (
        (most, Pools(5000, 300, 90)),
        (most._replace(tokens=1, sequences=1, columns=1, rows=1), Pools(1, 1, 1)),
    ):
        shapes = file.dynamic_shapes({**sizes.by_name(), **pool_sizes(pools)})
        assert shapes.keys() == exported.profile.keys()
        for name, shape in shapes.items():
            least, _, greatest = exported.profile[name]
            assert all(a <= b <= c for a, b, c in zip(least, shape, greatest, strict=True)), name


def test_the_library_is_what_the_executor_registers(library: Path) -> None:
    assert set(library_info(library).ops) >= set(OPS)
