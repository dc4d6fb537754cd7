"""What is mutated, and what then reads it: one target per kind of file.

A target's files lie in a folder of their own, as links to the seeds; only what a mutant changes is written. What reads
them are the entry points of build-engine and run-engine.
"""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import ClassVar

import onnx
from blake3 import blake3

from flint_builder.build import BuildOptions, build_engine, plan_build
from flint_builder.checkpoint import gguf_metadata
from flint_builder.checkpoint.assets import read_assets
from flint_plugins.library import find_library, library_info
from flint_runtime.config import ModelConfig
from flint_runtime.config_keys import HARMLESS, NEUTRAL
from flint_runtime.engine import Engine
from flint_runtime.executors import cuda
from flint_runtime.executors.engine_check import check_contents
from flint_runtime.executors.plugin_host import PluginHostExecutor
from flint_runtime.executors.reference import ReferenceExecutor
from flint_runtime.executors.step import RowSampling, SequencePart, build_step
from flint_runtime.manifest import MANIFEST_NAME, Limits
from flint_runtime.rope_parameters import ROPE_KEYS
from flint_runtime.tokenizer import Tokenizer
from tests.builder.checkpoint import tiny
from tests.fuzz.containers import GgufParts, mutate_gguf, mutate_safetensors
from tests.fuzz.graphs import mutate_graph
from tests.fuzz.mutate import mutate_bytes, mutate_json, mutate_template
from tests.runtime.engines import build_reference_engine, encode_document, rewrite_manifest
from tests.runtime.fake_cuda import FakeCuda
from tests.shapes import NANO_DIRECTORY

_LIMITS = Limits(max_batch=2, max_context=48, prefill_chunk=16)
_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
"""Shorter than flint-nano's, which takes longer to compile than all the rest of a checkpoint to read."""
_ARCHITECTURE = gguf_metadata.ARCHITECTURE
_GGUF_KEYS = (
    *(f"{_ARCHITECTURE}.{key}" for key in (*gguf_metadata._FIELDS, *gguf_metadata._DERIVED, *gguf_metadata._NEUTRAL)),
    *(f"{_ARCHITECTURE}.{key}" for key in sorted(gguf_metadata._known_to_gguf())),
    *("general.architecture", "general.alignment", "general.type", "split.count", "general.tensor_extra.x"),
    *("general.name", "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "x", "a.prec_a4", "é" * 100),
)
_CONFIG_WORDS = (
    *(*ModelConfig.model_fields, *sorted(NEUTRAL), *sorted(HARMLESS), *sorted(ROPE_KEYS)),
    *("rope_scaling", "rope_parameters", "quantization_config", "architectures", "no_rope_layer_indices", "rope_type"),
    *("full_attention", "sliding_attention", "yarn", "linear", "type", "default", "bfloat16", "silu", "flint"),
)

Files = Mapping[str, bytes]


def make_seeds(folder: Path) -> Path:
    """Write what all targets start from: both checkpoints, flint-nano's tokenizer and an engine."""
    gguf = tiny.nvfp4(folder / "gguf")
    tiny.bf16(folder / "safetensors", max_shard_bytes=600_000)
    for name in ("gguf", "safetensors"):
        (folder / name / "chat_template.jinja").write_text(_TEMPLATE)
    shutil.copytree(NANO_DIRECTORY, folder / "tokenizer", ignore=shutil.ignore_patterns("*.gguf", "*.safetensors"))
    engine = build_reference_engine(gguf, folder / "engine", _LIMITS)
    info = library_info(find_library())
    rewrite_manifest(engine, plugins_version=info.version, targets=list(info.architectures))
    return folder


class Target(ABC):
    """Files of one kind. `directory` holds the seed's files, with those of a mutant in their place."""

    kind: ClassVar[str]
    seed: ClassVar[str]
    """Its folder below the seeds."""

    def __init__(self, seeds: Path, place: Path) -> None:
        self.original = seeds / self.seed
        self.directory = shutil.copytree(self.original, place / self.kind, copy_function=os.link)

    @abstractmethod
    def mutate(self, random: Random) -> Files:
        """Contents of the files that a mutant changes, by name."""

    @abstractmethod
    def read(self, deep: bool) -> None:
        """Read the files as the programs do; if `deep`, use what was read."""

    @contextmanager
    def placed(self, files: Files) -> Iterator[None]:
        """The folder with a mutant in it."""
        for name, data in files.items():
            (self.directory / name).unlink()  # it is a link to the seed's
            (self.directory / name).write_bytes(data)
        try:
            yield
        finally:
            for name in files:
                (self.directory / name).unlink()
                os.link(self.original / name, self.directory / name)

    def content(self, name: str) -> bytes:
        """A file of the seed."""
        return (self.original / name).read_bytes()


class _Checkpoint(Target):
    """A checkpoint, read as build-engine reads it."""

    def __init__(self, seeds: Path, place: Path) -> None:
        super().__init__(seeds, place)
        self._output = place / f"{self.kind}-engine"
        self._target = library_info(find_library()).architectures[0]

    def read(self, deep: bool) -> None:
        path = self.directory / "tiny.gguf" if self.seed == "gguf" else self.directory
        plan = plan_build(
            BuildOptions(str(path), (self._target,), self._output, "plugin-host", prefill_chunk=16, max_batch=2)
        )
        if not deep:
            return
        try:
            build_engine(plan)
        finally:
            shutil.rmtree(self._output, ignore_errors=True)


class Gguf(_Checkpoint):
    kind = seed = "gguf"

    def __init__(self, seeds: Path, place: Path) -> None:
        super().__init__(seeds, place)
        self._file = self.content("tiny.gguf")
        self._parts = GgufParts.split(self._file)

    def mutate(self, random: Random) -> Files:
        return {"tiny.gguf": mutate_gguf(random, self._file, self._parts, _GGUF_KEYS)}


class Safetensors(_Checkpoint):
    kind = seed = "safetensors"

    def mutate(self, random: Random) -> Files:
        names = sorted(path.name for path in self.original.glob("model*"))
        found: dict[str, bytes] = {}
        for name in random.sample(names, random.choice((1, 1, 1, 2))):
            data = self.content(name)
            if name.endswith(".json"):
                found[name] = mutate_json(random, data, ("..", "/etc/passwd", "weight_map", "metadata", *names))
            else:
                found[name] = mutate_safetensors(random, data)
        return found


class Config(_Checkpoint):
    """config.json, which both formats need."""

    kind, seed = "config.json", "gguf"

    def mutate(self, random: Random) -> Files:
        return {"config.json": mutate_json(random, self.content("config.json"), _CONFIG_WORDS)}


class TokenizerTarget(Target):
    """The tokenizer's files, read as the build and the runtime do, and used."""

    kind = seed = "tokenizer"

    def __init__(self, seeds: Path, place: Path) -> None:
        super().__init__(seeds, place)
        self._config = ModelConfig.from_file(self.original / "config.json")

    def mutate(self, random: Random) -> Files:
        name = random.choice(
            ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
        )
        data = self.content(name)
        # Without it, flint-nano's template would take most of the time.
        short = {} if name == "chat_template.jinja" else {"chat_template.jinja": _TEMPLATE.encode()}
        if name == "chat_template.jinja":
            return {name: mutate_template(random, random.choice((data, _TEMPLATE.encode(), _TEMPLATE.encode())))}
        words = ("default", "name", "template", "chat_template", "eos_token", "content", "eos_token_id", "temperature")
        words += ("top_k", "top_p", "min_p", "repetition_penalty", "<|endoftext|>", "[UNK]", "ByteLevel", "BPE", "type")
        words += ("Sequence", "Replace", "Regex", "WordPiece", "Unigram", "Fuse", "Metaspace", "Digits", "NFC", "Strip")
        return {name: mutate_json(random, data, words), **short}

    def read(self, deep: bool) -> None:
        read_assets(self.directory, self.directory, self._config)
        tokenizer = Tokenizer(self.directory)
        if not deep:
            return
        for text in ("Hello, wörld 123 \0 <think> <|endoftext|>", "ab " * 2000):
            ids = tokenizer.encode(text)
            tokenizer.least_tokens(text)
            tokenizer.decode(ids[:200])
            stream = tokenizer.stream()
            stream.add(ids[:200])
            stream.finish()
        tokenizer.encode_chat(
            [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": ""},
            ]
        )


class _EngineTarget(Target):
    """An engine, opened as run-engine opens it, and run by both executors. Digests are repaired in most mutants."""

    seed = "engine"

    def __init__(self, seeds: Path, place: Path) -> None:
        super().__init__(seeds, place)
        self._library = find_library()
        self._document = json.loads(self.content(MANIFEST_NAME))

    def read(self, deep: bool) -> None:
        engine = Engine.open(self.directory)
        check_contents(engine)
        if not deep:
            return
        Tokenizer(self.directory)
        number = int(library_info(self._library).architectures[0][2:])
        fake = FakeCuda(capability=divmod(number, 10))
        cuda._runtime = lambda: fake
        reference = ReferenceExecutor(engine)
        reference.allocate(4, 2, 2)
        reference.begin_sequence(0, [1, 2, 3])
        for phase, ids, start in (("prefill", [1, 2, 3], 0), ("decode", [4], 3)):
            step = build_step([SequencePart(ids, start, [1], 1, [(-1, RowSampling(sample_slot=0))])])
            reference.run(phase, step)  # type: ignore[arg-type]
        PluginHostExecutor(engine, self._library).close()

    def repaired(self, random: Random, name: str, data: bytes) -> Files:
        """A changed file, mostly with size and hash as engine.json then must have them."""
        if random.random() < 0.05:
            return {name: data}
        document = json.loads(json.dumps(self._document))
        for entry in document["files"]:
            if entry["path"] == name:
                entry |= {"size": len(data), "blake3": blake3(data).hexdigest()}
        return {name: data, MANIFEST_NAME: encode_document(document)}


class EngineJson(_EngineTarget):
    kind = "engine.json"

    def mutate(self, random: Random) -> Files:
        words = (*_CONFIG_WORDS, *self._document, *(entry["path"] for entry in self._document["files"]))
        words += ("../outside.bin", "/etc/passwd", "a//b", "nvfp4", "bf16", "tensorrt", "tensorrt-rtx", "sm90")
        data = mutate_json(random, self.content(MANIFEST_NAME), words)
        try:
            document = json.loads(data)
            if random.random() < 0.9 and isinstance(document, dict):
                data = encode_document(document)
        except (ValueError, RecursionError):
            pass
        return {MANIFEST_NAME: data}


class Graph(_EngineTarget):
    kind = "graph"

    def __init__(self, seeds: Path, place: Path) -> None:
        super().__init__(seeds, place)
        self._graphs = {name: self.content(name) for name in ("graph/prefill.onnx", "graph/decode.onnx")}
        self._models = {name: onnx.load_model_from_string(data) for name, data in self._graphs.items()}

    def mutate(self, random: Random) -> Files:
        name = random.choice(sorted(self._graphs))
        if random.random() < 0.4:
            data = mutate_bytes(random, self._graphs[name])
        else:
            data = mutate_graph(random, self._models[name]).SerializeToString()
        return self.repaired(random, name, data)


class Weights(_EngineTarget):
    kind = "weights"

    def mutate(self, random: Random) -> Files:
        name = random.choice([e["path"] for e in self._document["files"] if e["path"].startswith("weights/")])
        return self.repaired(random, name, mutate_safetensors(random, self.content(name)))


TARGETS: tuple[type[Target], ...] = (Gguf, Safetensors, Config, TokenizerTarget, EngineJson, Graph, Weights)
