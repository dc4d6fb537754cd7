"""The GGUF reader: the header, and what an NVFP4 checkpoint must and must not hold."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import time
import tracemalloc
from contextlib import nullcontext
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGUFValueType as Kind

from flint_builder.checkpoint import open_checkpoint
from flint_builder.checkpoint.datafile import DataFile
from flint_builder.checkpoint.gguf import GgufHeader, Skipped, read_header
from flint_builder.checkpoint.gguf_metadata import check_metadata
from flint_builder.weights import Source
from flint_runtime.config import ModelConfig
from flint_runtime.errors import CheckpointError
from tests.builder.checkpoint import tiny
from tests.builder.checkpoint.tiny import gguf_entry, gguf_head, gguf_tensor, gguf_text

F32, NVFP4 = int(gguf.GGMLQuantizationType.F32), int(gguf.GGMLQuantizationType.NVFP4)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.nvfp4(tmp_path_factory.mktemp("good"))


def copy_of(path: Path, directory: Path) -> Path:
    """A copy to damage, with config and tokenizer."""
    for file in path.parent.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory / path.name


def refused(path: Path) -> str:
    """The message with which a header is refused."""
    with pytest.raises(CheckpointError) as error:
        read_header(DataFile(path))
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def test_header_agrees_with_gguf_py(good: Path) -> None:
    header, reader = read_header(DataFile(good)), gguf.GGUFReader(good)
    assert list(header.tensors) == [t.name for t in reader.tensors]
    for theirs in reader.tensors:
        ours = header.tensors[theirs.name]
        assert ours.dtype == theirs.tensor_type.name
        assert ours.shape == tuple(int(n) for n in reversed(theirs.shape))
        assert (ours.offset, ours.bytes) == (theirs.data_offset, theirs.n_bytes)
    for key, value in header.metadata.items():
        assert value == reader.fields[key].contents()


def test_tokenizer_metadata_is_stepped_over(tmp_path: Path) -> None:
    path = tmp_path / "tokens.gguf"
    writer = gguf.GGUFWriter(path, "flint")
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" * (i % 7) for i in range(100_000)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 100_000)
    writer.add_array("flint.names", ["a", "", "bc"])
    writer.add_array("flint.numbers", [1, 2, 3])
    writer.add_bool("flint.flag", True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    metadata = read_header(DataFile(path)).metadata
    assert metadata["tokenizer.ggml.tokens"] == metadata["tokenizer.ggml.scores"] == Skipped(100_000)
    assert metadata["flint.names"] == ("a", "", "bc")
    assert metadata["flint.numbers"] == (1, 2, 3)
    assert metadata["flint.flag"] is True


def test_c1_missing_tensor_scale_is_one_if_the_file_says_so(tmp_path: Path) -> None:
    omitted = ["blk.0.attn_q.scale", "blk.2.ffn_gate_exps.scale"]
    path = tiny.nvfp4(tmp_path, omit=omitted)
    with pytest.raises(CheckpointError, match=r"2 NVFP4 tensors without a tensor scale: blk\.0\.attn_q\.weight"):
        tiny.opened(path)
    path = tiny.nvfp4(tmp_path, omit=omitted, metadata={"flint.tensor_scale": 1.0})
    checkpoint, _ = tiny.opened(path)
    assert checkpoint.counts["tensors_without_scale"] == 2
    assert checkpoint.scales(Source("model.layers.0.self_attn.q_proj.weight", (128, 128))) == 1
    assert checkpoint.scales(Source(tiny.GATE, (4, 64, 128))).tolist() == [1, 1, 1, 1]


def test_c1_scalar_tensor_scale_serves_all_experts(tmp_path: Path) -> None:
    scale = {"blk.2.ffn_gate_exps.scale": np.array([0.25], np.float32)}
    path = tiny.nvfp4(tmp_path, omit=list(scale), extra=scale)
    checkpoint, _ = tiny.opened(path)
    assert checkpoint.counts["tensors_without_scale"] == 0
    assert checkpoint.scales(Source(tiny.GATE, (4, 64, 128))).tolist() == [0.25] * 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_unusable_tensor_scale_is_refused(tmp_path: Path, value: float) -> None:
    scale = {"blk.2.ffn_up_exps.scale": np.array([1, 1, value, 1], np.float32)}
    path = tiny.nvfp4(tmp_path, omit=list(scale), extra=scale)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: tensor scale blk\.2\.ffn_up_exps\.scale\[2\] is"):
        tiny.opened(path)


def test_tensor_scale_of_wrong_shape_is_refused(tmp_path: Path) -> None:
    scale = {"blk.2.ffn_up_exps.scale": np.ones(3, np.float32)}
    path = tiny.nvfp4(tmp_path, omit=list(scale), extra=scale)
    with pytest.raises(CheckpointError, match=r"F32 \[3\], expected F32, one value or \[4\]"):
        tiny.opened(path)


@pytest.mark.parametrize("length", [0, 3, 7, 20, 24, 100])
def test_c4_cut_in_the_header(good: Path, tmp_path: Path, length: int) -> None:
    path = copy_of(good, tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match="bytes"):
        tiny.opened(path)


def test_c4_cut_in_the_tensor_table(good: Path, tmp_path: Path) -> None:
    path = copy_of(good, tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"blk.3.attn_k.weight") + 5])
    with pytest.raises(CheckpointError, match=r"the name of tensor .* at byte"):
        tiny.opened(path)


def test_c4_cut_in_a_tensor_names_it_and_both_sizes(good: Path, tmp_path: Path) -> None:
    path = copy_of(good, tmp_path)
    tensor = read_header(DataFile(path)).tensors["blk.1.ffn_down.weight"]
    with path.open("r+b") as file:
        file.truncate(tensor.offset + 10)
    message = refused(path)
    assert (
        tensor.name in message and str(tensor.offset + tensor.bytes) in message and str(tensor.offset + 10) in message
    )


def test_c4_cut_while_reading(good: Path, tmp_path: Path) -> None:
    path = copy_of(good, tmp_path)
    checkpoint, _ = tiny.opened(path)
    (rows,) = checkpoint.rows(Source("lm_head.weight", (768, 128)))
    with path.open("r+b") as file:
        file.truncate(rows.tensor.offset + 100)
    with pytest.raises(CheckpointError, match=r"ends at byte .* tensor output\.weight needs bytes up to"):
        rows.read(0, rows.count)


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def array(item: Kind, count: int, rest: bytes = b"") -> bytes:
    return struct.pack("<I", item) + u64(count) + rest


ALIGNMENT = "general.alignment"
ABSURD = {
    "metadata entries": gguf_head(0, 10**9),
    "tensors": gguf_head(1 << 63, 0),
    "key length": gguf_head(0, 1, u64((1 << 64) - 1)),
    "string length": gguf_head(0, 1, gguf_entry("k", Kind.STRING, u64((1 << 64) - 8))),
    "array length": gguf_head(0, 1, gguf_entry("k", Kind.ARRAY, array(Kind.UINT8, 1 << 63))),
    "array length times width": gguf_head(0, 1, gguf_entry("k", Kind.ARRAY, array(Kind.UINT64, 1 << 61))),
    "strings": gguf_head(0, 1, gguf_entry("k", Kind.ARRAY, array(Kind.STRING, 10**9))),
    "string in array": gguf_head(0, 1, gguf_entry("k", Kind.ARRAY, array(Kind.STRING, 1, u64((1 << 64) - 1)))),
    "token length": gguf_head(0, 1, gguf_entry("tokenizer.t", Kind.ARRAY, array(Kind.STRING, 1, u64(1 << 63)))),
    "nested array": gguf_head(0, 1, gguf_entry("k", Kind.ARRAY, array(Kind.ARRAY, 1, array(Kind.UINT8, 0)))),
    "metadata type": gguf_head(0, 1, gguf_text(b"k") + struct.pack("<I", 99)),
    "item type": gguf_head(0, 1, gguf_entry("k", Kind.ARRAY, struct.pack("<IQ", 99, 1))),
    "key twice": gguf_head(0, 2, 2 * gguf_entry("k", Kind.UINT8, b"\1")),
    "key not UTF-8": gguf_head(0, 1, gguf_text(b"\xff") + struct.pack("<IB", Kind.UINT8, 1)),
    "alignment 0": gguf_head(0, 1, gguf_entry(ALIGNMENT, Kind.UINT32, struct.pack("<I", 0))),
    "alignment 3": gguf_head(0, 1, gguf_entry(ALIGNMENT, Kind.UINT32, struct.pack("<I", 3))),
    "alignment negative": gguf_head(0, 1, gguf_entry(ALIGNMENT, Kind.INT32, struct.pack("<i", -32))),
    "alignment text": gguf_head(0, 1, gguf_entry(ALIGNMENT, Kind.STRING, gguf_text(b"32"))),
    "dimensions": gguf_head(1, 0, gguf_text(b"t") + struct.pack("<I", (1 << 32) - 1)),
    "dimension": gguf_head(1, 0, gguf_tensor("t", [1 << 63], F32, 0)),
    "dimension negative": gguf_head(1, 0, gguf_tensor("t", [(1 << 64) - 1], F32, 0)),
    "dimension zero": gguf_head(1, 0, gguf_tensor("t", [0, 4], F32, 0)),
    "product of dimensions": gguf_head(1, 0, gguf_tensor("t", [1 << 62] * 4, F32, 0)),
    "product that wraps to 0": gguf_head(1, 0, gguf_tensor("t", [1 << 32, 1 << 32], F32, 0)),
    "offset and size overflow": gguf_head(1, 0, gguf_tensor("t", [64], F32, (1 << 64) - 32)),
    "offset": gguf_head(1, 0, gguf_tensor("t", [1], F32, 1 << 40)),
    "offset unaligned": gguf_head(1, 0, gguf_tensor("t", [1], F32, 4)),
    "tensor type": gguf_head(1, 0, gguf_tensor("t", [1], 1000, 0)),
    "tensor twice": gguf_head(2, 0, 2 * gguf_tensor("t", [1], F32, 0)),
    "overlap": gguf_head(2, 0, gguf_tensor("t", [64], F32, 0) + gguf_tensor("u", [64], F32, 32)),
    "part of a block": gguf_head(1, 0, gguf_tensor("t", [32], NVFP4, 0)),
    "version": gguf_head(0, 0, version=2),
    "big endian": gguf_head(0, 0, version=3 << 24),
    "magic": b"GGML" + bytes(100),
}


@pytest.mark.parametrize("header", ABSURD.values(), ids=ABSURD.keys())
@pytest.mark.parametrize("size", [0, 1 << 36], ids=["short", "sparse 64 GiB"])
def test_c5_absurd_headers_are_refused_quickly(tmp_path: Path, header: bytes, size: int) -> None:
    path = tmp_path / "absurd.gguf"
    path.write_bytes(header + bytes(512))
    if size:
        with path.open("r+b") as file:
            file.truncate(size)
    tracemalloc.start()
    start = time.process_time()
    refused(path)
    assert time.process_time() - start < 3  # of a processor that others may use, too
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50 << 20


def test_c5_many_empty_strings_stay_bounded(tmp_path: Path) -> None:
    """As many strings as are accepted, in a file of zeros: the slowest header there is."""
    path = tmp_path / "zeros.gguf"
    entries = [gguf_entry(f"tokenizer.{i}", Kind.ARRAY, array(Kind.STRING, 1 << 19)) + bytes(4 << 20) for i in range(3)]
    path.write_bytes(gguf_head(0, 3, b"".join(entries)))
    start = time.process_time()
    assert "strings" in refused(path)
    assert time.process_time() - start < 3  # of a processor that others may use, too


def test_c5_memory_of_a_whole_process(tmp_path: Path) -> None:
    path = tmp_path / "absurd.gguf"
    path.write_bytes(ABSURD["strings"])
    with path.open("r+b") as file:
        file.truncate(1 << 36)
    script = """
import sys
from pathlib import Path
from flint_builder.checkpoint.datafile import DataFile
from flint_builder.checkpoint.gguf import read_header
from flint_runtime.errors import CheckpointError

try:
    read_header(DataFile(Path(sys.argv[1])))
except CheckpointError:
    print(Path("/proc/self/status").read_text())
"""
    status = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    ).stdout.split()
    # Not ru_maxrss: it includes what the parent had when it forked.
    assert int(status[status.index("VmHWM:") + 1]) < 200 << 10


def test_c6_missing_tensors_are_listed(tmp_path: Path) -> None:
    omitted = ["blk.0.attn_norm.weight", "blk.1.attn_sinks.weight", "output_norm.weight"]
    path = tiny.nvfp4(tmp_path, omit=omitted)
    with pytest.raises(CheckpointError, match="lacks 3 tensors") as error:
        tiny.opened(path)
    assert all(name in str(error.value) for name in omitted)


def test_c6_at_most_ten_missing_tensors_are_listed(tmp_path: Path) -> None:
    names = [f"blk.{i}.{kind}.weight" for i in range(4) for kind in ("attn_norm", "ffn_norm", "attn_q_norm")]
    path = tiny.nvfp4(tmp_path, omit=names)
    with pytest.raises(CheckpointError, match=r"lacks 12 tensors .*, and 2 more"):
        tiny.opened(path)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.4.attn_norm.weight", "token_embd.scale", "extra"])
def test_c6_unknown_tensor_is_refused(tmp_path: Path, name: str) -> None:
    path = tiny.nvfp4(tmp_path, extra={name: np.zeros(4, np.float32)})
    with pytest.raises(CheckpointError, match=f"1 tensor that Flint does not know: {name}"):
        tiny.opened(path)


def test_wrong_type_is_refused(tmp_path: Path) -> None:
    values = tiny.nvfp4_values()
    values["blk.0.attn_k.weight"] = np.zeros((64, 128), np.float32)
    path = tiny.nvfp4(tmp_path, values)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_k\.weight is F32 \[64, 128\], expected NVFP4 \[64, 128\]"):
        tiny.opened(path)


def test_c7_fp4_activations_are_refused(tmp_path: Path) -> None:
    path = tiny.nvfp4(tmp_path, metadata={"general.tensor_extra.prec_a4": True})
    with pytest.raises(CheckpointError, match=r"prec_a4 is set: .* activations in FP4, which are not supported"):
        tiny.opened(path)


def test_c7_unset_flag_is_accepted(tmp_path: Path) -> None:
    tiny.opened(tiny.nvfp4(tmp_path, metadata={"general.tensor_extra.prec_a4": False}))


@pytest.mark.parametrize(("values", "allowed"), [([False, False], True), ([False, True], False), (["q"], False)])
def test_c7_array(good: Path, tmp_path: Path, values: list[bool | str], allowed: bool) -> None:
    kind = Kind.STRING if isinstance(values[0], str) else Kind.BOOL
    items = [gguf_text(v.encode()) if isinstance(v, str) else bytes([v]) for v in values]
    entry = gguf_entry("general.tensor_extra.prec_a4", Kind.ARRAY, array(kind, len(items), b"".join(items)))
    path = tiny.metadata_only(tmp_path / "flags.gguf", entry, 1)
    with nullcontext() if allowed else pytest.raises(CheckpointError, match="prec_a4 is set"):
        open_checkpoint(str(path), hf_config=good.parent)


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        ("block_count", "num_hidden_layers", 5),
        ("expert_count", "num_experts", 8),
        ("expert_used_count", "num_experts_per_tok", 3),
        ("embedding_length", "hidden_size", 256),
        ("vocab_size", "vocab_size", 999),
        ("attention.head_count", "num_attention_heads", 4),
        ("rope.freq_base", "rope_theta", 1e6),
    ],
)
def test_c9_metadata_and_config_disagree(tmp_path: Path, key: str, field: str, value: float) -> None:
    path = tiny.nvfp4(tmp_path, metadata={f"flint.{key}": value})
    with pytest.raises(CheckpointError) as error:
        tiny.opened(path)
    expected = (f"flint.{key} is {value}", str(path), f"{field} is ", str(tmp_path / "config.json"))
    assert all(part in str(error.value) for part in expected)


def test_c9_vocabulary_of_the_embedding(tmp_path: Path) -> None:
    path = tiny.nvfp4(tmp_path, metadata={"flint.vocab_size": 800})
    tiny.edit_config(tmp_path, vocab_size=800)
    with pytest.raises(
        CheckpointError, match=r"token_embd\.weight has 768 rows .* vocab_size is 800 in .*config\.json"
    ):
        tiny.opened(path)


def renamed_scales(directory: Path, old: str, new: str) -> Path:
    """A checkpoint whose tensor scales of names that end with `old` end with `new`."""
    scales = {
        name.removesuffix("weight") + "scale": value.scale
        for name, value in tiny.nvfp4_values().items()
        if hasattr(value, "scale") and (name.removesuffix("weight") + "scale").endswith(old)
    }
    extra = {name.removesuffix(old) + new: value for name, value in scales.items()}
    return tiny.nvfp4(directory, omit=list(scales), extra=extra)


def test_tensor_scales_of_both_names_are_the_same(good: Path, tmp_path: Path) -> None:
    checkpoint, files = tiny.opened(renamed_scales(tmp_path, ".scale", ".weight.scale"))
    expected, _ = tiny.opened(good)
    assert checkpoint.counts["tensors_without_scale"] == 0
    sources = [s for file in files for recipe in file.recipes if "pack" in recipe.kind for s in recipe.sources]
    assert len(sources) > 20
    for source in sources:
        assert np.array_equal(checkpoint.scales(source), expected.scales(source))
        assert checkpoint.scale_bytes(source) == expected.scale_bytes(source)


def test_a_tensor_with_two_scales_is_refused(tmp_path: Path) -> None:
    path = tiny.nvfp4(tmp_path, extra={"blk.0.attn_q.weight.scale": np.ones(1, np.float32)})
    with pytest.raises(
        CheckpointError, match=r"two tensor scales, blk\.0\.attn_q\.scale and blk\.0\.attn_q\.weight\.sc"
    ):
        tiny.opened(path)


def test_scales_of_activations_are_said_to_be_unused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inputs = {f"blk.0.attn_{x}.input_scale": np.ones(1, np.float32) for x in "qkv"}
    checkpoint, _ = tiny.opened(tiny.nvfp4(tmp_path, extra=inputs))
    (record,) = caplog.records
    assert "3 scales of activations, which are not used" in record.getMessage()
    assert checkpoint.counts["tensors_without_scale"] == 0
    for stray in ("token_embd.input_scale", "blk.9.attn_q.input_scale"):
        with pytest.raises(CheckpointError, match=f"1 tensor that Flint does not know: {stray}"):
            tiny.opened(tiny.nvfp4(tmp_path, extra={stray: np.ones(1, np.float32)}))


def test_no_message_advises_to_remove_data(tmp_path: Path) -> None:
    for options in ({"extra": {"surprise": np.ones(1, np.float32)}}, {"omit": ["blk.0.attn_q.scale"]}):
        with pytest.raises(CheckpointError) as error:
            tiny.opened(tiny.nvfp4(tmp_path, **options))
        assert not re.search("remove|delete|drop", str(error.value))


# ------------------------------------------------------------------------------------------------------------ metadata


def metadata_message(good: Path, directory: Path, **metadata: object) -> str | None:
    """The error of a file with these keys (with "__" for dots) beside the usual ones; None where it is accepted."""
    header = read_header(DataFile(good))
    found = {**header.metadata, **{name.replace("__", "."): value for name, value in metadata.items()}}
    header = GgufHeader(header.file, found, header.tensors)  # type: ignore[arg-type]
    try:
        check_metadata(header, ModelConfig.from_hf(tiny.CONFIG, "c"), directory / "config.json")
    except CheckpointError as error:
        assert str(good) in str(error) and "\n" not in str(error)
        return str(error)
    return None


SLIDING = (False, False, True, False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("flint__attention__sliding_window", 15),
        ("flint__attention__sliding_window_pattern", SLIDING),
        ("flint__attention__rope_pattern", SLIDING),
        ("flint__rope__pattern", SLIDING),
        ("flint__attention__head_count_kv", (1, 1, 1, 1)),
        ("flint__feed_forward_length", (192, 192, 64, 64)),
        ("flint__context_length", 4096),
        ("flint__expert_shared_count", 2),
        ("flint__expert_weights_scale", 1.0),
        ("flint__rope__scaling__type", "none"),
        ("flint__rope__freq_base_swa", 10000.0),
        ("flint__final_logit_softcapping", 0.0),
        ("flint__nextn_predict_layers", 0),
        ("general__type", "model"),
        ("general__sampling__temp", 0.7),
        ("general__base_model__0__name", "x"),
        ("general__tensor_extra__name", ("a", "b")),
        ("tokenizer__ggml__tokens", Skipped(768)),
        ("tokenizer__chat_template", Skipped(1)),
        ("quantize__imatrix__file", "x"),
        ("split__count", 1),
    ],
)
def test_metadata_that_agrees_is_silent(
    good: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str, value: object
) -> None:
    assert metadata_message(good, tmp_path, **{key: value}) is None and not caplog.records


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_gating_func", 1, "support only 2"),
        ("expert_gating_func", 0, "support only 2"),
        ("expert_weights_norm", False, "support only True"),
        ("expert_weights_scale", 2.5, "support only 1.0"),
        ("expert_weights_scale", float("nan"), "support only 1.0"),
        ("expert_group_count", 8, "support only 0 or 1"),
        ("rope__scaling__type", "yarn", "support only 'none'"),
        ("rope__scaling__factor", 4.0, "support only 1.0"),
        ("rope__scaling__original_context_length", 4096, "no such thing"),
        ("rope__scaling__new_kind", 1, "no such thing"),
        ("rope__dimension_count", 32, "head_dim is 64"),
        ("rope__dimension_sections", (8, 8, 8, 8), "no such thing"),
        ("rope__freq_base_swa", 5e5, "rope_theta is 10000"),
        ("attention__sliding_window", 32, "16 or 15 follows"),
        ("attention__sliding_window_pattern", (False, True, True, False), "follows from the layers"),
        ("attention__sliding_window_pattern", 4, "follows from the layers"),
        ("attention__rope_pattern", (True,) * 4, "follows from the layers"),
        ("attention__scale", 1.0, "0.125 follows"),
        ("attention__head_count_kv", (1, 1, 2, 1), "num_key_value_heads is 1"),
        ("attention__head_count", "2", "num_attention_heads is 2"),
        ("attention__clamp_kqv", 8.0, "support only 0.0"),
        ("attention__causal", False, "support only True"),
        ("attention__q_lora_rank", 8, "no such thing"),
        ("leading_dense_block_count", 1, "2 follows"),
        ("expert_shared_count", 3, "1 or 2.0 follows"),
        ("nextn_predict_layers", 1, "support only 0"),
        ("final_logit_softcapping", 30.0, "support only 0.0"),
        ("ssm__state_size", 8, "no such thing"),
        ("tensor_scale", 2.0, "support only 1.0"),
        ("block_count", Skipped(70000), "array or text of 70000"),
    ],
)
def test_metadata_that_changes_the_arithmetic_is_refused(
    good: Path, tmp_path: Path, key: str, value: object, message: str
) -> None:
    found = metadata_message(good, tmp_path, **{f"flint__{key}": value})
    assert found is not None and f"flint.{key.replace('__', '.')}" in found and message in found


def test_every_key_of_gguf_py_is_read_checked_or_refused(
    good: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a value that no model has."""
    keys = [
        v for group in (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope, gguf.Keys.SSM) for v in vars(group).values()
    ]
    names = [key.removeprefix("{arch}.") for key in keys if isinstance(key, str) and key.startswith("{arch}.")]
    accepted = [n for n in names if metadata_message(good, tmp_path, **{"flint." + n: 12345.5}) is None]
    assert len(names) > 90 and set(accepted) == {"context_length", "feed_forward_length"} and not caplog.records


def test_unknown_metadata_is_named_once(good: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert metadata_message(good, tmp_path, flint__new_key=1, other__key=2, general__news=3) is None
    (record,) = caplog.records
    text = record.getMessage()
    assert str(good) in text and "3 metadata keys" in text
    assert all(key in text for key in ("'flint.new_key'", "'other.key'", "'general.news'"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general__type", "adapter", "support only 'model'"),
        ("general__quantization_version", 3, "support only 2"),
        ("general__tensor_extra__scale", (1.0,), "no such thing"),
        ("general__architecture", "llama", r"general.architecture is 'llama', expected 'flint'"),
        ("split__count", 3, "one of 3 parts"),
    ],
)
def test_files_of_another_kind(good: Path, tmp_path: Path, key: str, value: object, message: str) -> None:
    assert message in (metadata_message(good, tmp_path, **{key: value}) or "")


def test_a_file_without_architecture_is_refused(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(gguf_head(0, 0))
    with pytest.raises(CheckpointError, match=r"general\.architecture is missing, expected 'flint'"):
        open_checkpoint(str(path), hf_config=good.parent)


def test_git_lfs_pointer_is_named(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "flint.gguf"
    path.write_bytes(tiny.LFS_POINTER)
    with pytest.raises(CheckpointError, match=r"flint\.gguf .*Git LFS pointer.*git lfs pull"):
        open_checkpoint(str(path), hf_config=good.parent)
