"""run-engine as a person or a script meets it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flint_builder.build import BuildOptions, build_engine, plan_build
from flint_runtime.llm import LLM
from flint_runtime.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def engine(random_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("engines") / "nano"
    build_engine(
        plan_build(
            BuildOptions(
                str(random_nano),
                ("sm120",),
                output,
                backend="plugin-host",
                weights="nvfp4",
                max_context=512,
                prefill_chunk=64,
            )
        )
    )
    return output


def run(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.argv[0] = 'run-engine'; from flint_runtime.cli import main; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, input=stdin)


def test_inspect(engine: Path) -> None:
    shown = run("inspect", engine)
    assert shown.returncode == 0, shown.stderr
    for part in ("plugin-host, for sm120", "6 layers (3 full, 3 sliding with window 33)", "512 tokens of context"):
        assert part in " ".join(shown.stdout.split())
    report = json.loads(run("inspect", engine, "--json").stdout)
    assert report["targets"] == ["sm120"] and report["gpu_memory"]["context"] == 512
    assert report["bytes"] == sum(report["files"].values())


def test_verify(engine: Path) -> None:
    shown = run("verify", engine)
    assert shown.returncode == 0 and "all as built" in shown.stdout, shown.stderr
    assert json.loads(run("verify", engine, "--json").stdout) == {"engine": str(engine), "ok": True, "problems": []}


@pytest.mark.parametrize("name", ["weights/layer-03.safetensors", "libflint_plugins.so", "graph/decode.onnx"])
def test_e4_verify_names_the_damaged_file(engine: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(engine, tmp_path / "copy"))
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 3] ^= 4
    (copy / name).write_bytes(data)
    shown = run("verify", copy)
    assert shown.returncode == 4
    assert f"{name} has sha256" in shown.stderr
    report = json.loads(run("verify", copy, "--json").stdout)
    assert not report["ok"] and len(report["problems"]) == 1


def test_e5_library_of_another_version(engine: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(engine, tmp_path / "copy"))
    manifest = json.loads((copy / "engine.json").read_text())
    (copy / "engine.json").write_text(json.dumps(manifest | {"plugins_version": "9.9.9"}))
    shown = run("verify", copy)
    assert shown.returncode == 4
    assert "libflint_plugins.so is version" in shown.stderr and "9.9.9" in shown.stderr


def test_generate_streams_text(engine: Path) -> None:
    shown = run("generate", engine, "Hello", "--executor", "reference", "--max-tokens", "8", "--seed", "1")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("<think>")
    report = run("generate", engine, "-", "--max-tokens", "8", "--seed", "1", "--json", stdin="Hello")
    assert json.loads(report.stdout)["text"] == shown.stdout.removesuffix("\n")
    assert "stopped at the token limit" in shown.stderr or len(json.loads(report.stdout)["token_ids"]) <= 8


def test_generate_raw_is_greedy_at_temperature_zero(engine: Path) -> None:
    arguments = ("generate", engine, "some text", "--raw", "--temperature", "0", "--max-tokens", "5", "--json")
    first, second = (json.loads(run(*arguments).stdout) for _ in range(2))
    assert first == second and first["prompt"] == "some text"


def test_chat_remembers(engine: Path) -> None:
    """Each turn is the answer to the whole conversation; blank lines are no turns, and /exit ends it."""
    options = ("--executor", "reference", "--temperature", "0", "--max-tokens", "6", "--no-thinking")
    shown = run("chat", engine, *options, stdin="Hello\n\nAgain\n/exit\nNever\n")
    assert shown.returncode == 0, shown.stderr
    expected, history = [], []
    with LLM(engine, "reference") as llm:
        for message in ("Hello", "Again"):
            history.append({"role": "user", "content": message})
            params, quick = SamplingParams(temperature=0, max_tokens=6), {"enable_thinking": False}
            (output,) = llm.chat(history, params, chat_template_kwargs=quick, use_tqdm=False)
            expected.append(output.outputs[0].text)
            history.append({"role": "assistant", "content": expected[-1]})
    assert shown.stdout == "".join(text + "\n" for text in expected)


def test_a_conversation_that_outgrows_the_context(engine: Path) -> None:
    shown = run("chat", engine, "--max-tokens", "500", stdin="Hello " * 600)
    assert shown.returncode == 2 and "context is 512 tokens" in " ".join(shown.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "ENGINE", ""], 2, "prompt is empty"),
        (["generate", "ENGINE", "x " * 600], 2, "context is 512 tokens"),
        (["generate", "ENGINE", "x", "--max-tokens", "0"], 2, "max_tokens must be"),
        (["generate", "ENGINE", "x", "--temperature", "-1"], 2, "temperature"),
        (["generate", "ENGINE", "x", "--executor", "magic"], 2, "Invalid value"),
        (["inspect", "/nowhere"], 4, "is not an engine"),
        (["verify", "/nowhere"], 4, "is not an engine"),
    ],
)
def test_errors(engine: Path, arguments: list[str], code: int, message: str) -> None:
    shown = run(*[str(engine) if a == "ENGINE" else a for a in arguments])
    assert shown.returncode == code, shown.stderr
    assert message in " ".join(shown.stderr.split())


def test_import_is_light() -> None:
    """The package alone imports neither torch nor onnx."""
    code = "import sys, flint_runtime; print([m for m in ('torch', 'onnx', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
