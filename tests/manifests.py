"""Manifests for tests that need no real build."""

from __future__ import annotations

from typing import Any

from flint_plugins.layout import LAYOUT_VERSION
from flint_runtime.manifest import FORMAT_VERSION, Limits, Manifest
from tests.shapes import NANO


def manifest(**changes: Any) -> Manifest:
    """A valid manifest of flint-nano that lists no files."""
    values: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "generator": "test",
        "model": NANO,
        "weights": "nvfp4",
        "layout_version": LAYOUT_VERSION,
        "targets": ("sm120",),
        "backend": "tensorrt-rtx",
        "backend_version": "1.7.1.116",
        "plugins_version": "0.1.0",
        "limits": Limits(max_batch=4, max_context=1024, prefill_chunk=256),
        "notes": {},
        "files": (),
    }
    return Manifest(**(values | changes))
