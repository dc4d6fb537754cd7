"""Opening an engine before it is published."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flint_builder import build as build_module
from flint_builder.build import BuildOptions, build_engine, plan_build
from flint_builder.staged import check_opens
from flint_runtime.engine import Engine
from flint_runtime.errors import FlintError
from flint_runtime.manifest import Limits
from tests.builder.checkpoint import tiny
from tests.runtime.engines import build_reference_engine

LIMITS = Limits(max_batch=2, max_context=48, prefill_chunk=16)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("staged")
    return build_reference_engine(tiny.nvfp4(path / "checkpoint"), path / "engine", LIMITS)


def test_a_whole_engine_opens(built: Path) -> None:
    check_opens(built, Engine.open(built).manifest)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{}", "tokenizer.json"),
        ("tokenizer_config.json", b'{"eos_token": {}}', "eos_token"),
        ("chat_template.jinja", b"{% if %}", "chat template"),
        ("generation_config.json", b"3", "generation_config.json"),
        ("graph/decode.onnx", b"\xff\xff", "decode.onnx"),
        ("graph/prefill.onnx", b"\xff\xff", "prefill.onnx"),
        ("weights/layer-02.safetensors", None, "layer-02.safetensors is missing"),
    ],
)
def test_what_the_runtime_refuses_is_not_published(built: Path, name: str, content: bytes | None, message: str) -> None:
    manifest = Engine.open(built).manifest
    whole = (built / name).read_bytes()
    sizes = tuple(
        entry.model_copy(update={"size": len(content)}) if content is not None and entry.path == name else entry
        for entry in manifest.files
    )
    (built / name).unlink() if content is None else (built / name).write_bytes(content)
    try:
        with pytest.raises(FlintError, match=message) as caught:
            check_opens(built, manifest.model_copy(update={"files": sizes}))
        assert caught.value.exit_code == 1 and "not published" in str(caught.value) and "\n" not in str(caught.value)
    finally:
        (built / name).write_bytes(whole)


def test_a_manifest_that_reads_back_otherwise(built: Path) -> None:
    manifest = Engine.open(built).manifest
    wrong = manifest.model_copy(update={"model": manifest.model.model_copy(update={"rope_theta": float("nan")})})
    with pytest.raises(FlintError, match="rope_theta"):
        check_opens(built, wrong)


def test_the_build_publishes_nothing_that_does_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny.nvfp4(tmp_path / "checkpoint")
    output = tmp_path / "engine"
    plan = plan_build(BuildOptions(str(checkpoint), ("sm120",), output, "plugin-host", prefill_chunk=16, max_batch=2))
    plan.checkpoint.assets["chat_template.jinja"] = b"{{ unclosed"
    with pytest.raises(FlintError, match="cannot be opened, so it is not published"):
        build_engine(plan)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    monkeypatch.setattr(build_module, "check_opens", lambda *_: None)
    build_engine(plan)
    assert output.is_dir()


def test_it_needs_no_torch() -> None:
    code = "import sys; import flint_builder.build, flint_builder.staged; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
