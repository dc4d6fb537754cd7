"""The plugin library in the registries of real TensorRTs: TensorRT-RTX's, and TensorRT 11's in its lean runtime."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flint_plugins import library
from flint_plugins.ops import OPS
from tests.plugins.nodes import combinations

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", ["tensorrt_rtx", "tensorrt_lean_bindings"])
def test_a_registry_finds_creates_and_restores_every_plugin(module: str) -> None:
    pytest.importorskip(module)
    cases = list(combinations())
    # A process of its own: a plugin library serves one TensorRT at a time.
    ran = subprocess.run(
        [sys.executable, "-m", "tests.plugins.registry_probe", module, library.find_library()],
        input="\n".join(json.dumps([op.name, fields]) for op, fields in cases),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr
    creators, *answers = map(json.loads, ran.stdout.splitlines())
    assert set(creators) == set(OPS)
    for (op, fields), answer in zip(cases, answers, strict=True):
        inputs = [binding.name for binding in op.node_inputs(fields)]
        outputs = op.node_outputs(fields)
        assert answer == {
            "outputs": len(outputs),
            "aliases": [inputs.index(output.alias) if output.alias else -1 for output in outputs],
            "fields": {name: float(np.float32(v)) if isinstance(v, float) else v for name, v in fields.items()},
        }
