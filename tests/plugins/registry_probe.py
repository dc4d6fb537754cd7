"""Puts the plugin library through the plugin registry of a real TensorRT, as TensorRT itself would.

Finds each creator, creates each plugin from fields, asks for its capabilities and for the fields that a plan would
hold, and creates the plugin that a plan would give back. Needs no GPU. Run it as a program, one TensorRT a process:

    python -m tests.plugins.registry_probe MODULE PLUGIN_LIBRARY < cases

A case is a line of JSON, [op, fields]. Its answer is a line of JSON: {"outputs": number of outputs, "aliases": per
output the input whose memory it shares or -1, "fields": the serialised fields}. The first line of the output lists the
creators of our namespace.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from typing import Any

import numpy as np

from flint_plugins.ops import DOMAIN, VERSION, FieldValue

FLOAT32, INT32, CHAR = 1, 5, 6
"""nvinfer1::PluginFieldType. Checked against the module's own below."""
GET_FIELDS_TO_SERIALIZE, GET_ALIASED_INPUT = 8, 15
"""Places in the virtual tables of v_1_0::IPluginV3OneRuntime and v_2_0::IPluginV3OneBuild of namespace nvinfer1, behind
the four of IVersionedInterface. TensorRT's Python modules have these two functions for plugins in Python only."""


class PluginField(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
    )


class PluginFieldCollection(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int32), ("fields", ctypes.POINTER(PluginField)))


def virtual(capability: Any, place: int, result: Any, *arguments: int) -> Any:
    """Call a virtual function of a plugin's capability (a pybind11 object: its third word points to the C++ object)."""
    this = ctypes.c_void_p.from_address(id(capability) + 2 * ctypes.sizeof(ctypes.c_void_p)).value or 0
    table = ctypes.c_void_p.from_address(this).value or 0
    entry = ctypes.c_void_p.from_address(table + place * ctypes.sizeof(ctypes.c_void_p)).value or 0
    return ctypes.CFUNCTYPE(result, ctypes.c_void_p, *(ctypes.c_int32 for _ in arguments))(entry)(this, *arguments)


def serialised_fields(plugin: Any, kinds: Any) -> dict[str, FieldValue]:
    """What a plan would hold of a plugin."""
    runtime = plugin.get_capability_interface(kinds.RUNTIME)
    collection = virtual(runtime, GET_FIELDS_TO_SERIALIZE, ctypes.POINTER(PluginFieldCollection)).contents
    values: dict[str, FieldValue] = {}
    for field in collection.fields[: collection.count]:
        name = field.name.decode()
        if field.type == CHAR:
            values[name] = ctypes.string_at(field.data, field.length).decode()
        else:
            kind = {INT32: ctypes.c_int32, FLOAT32: ctypes.c_float}[field.type]
            assert field.length == 1
            values[name] = kind.from_address(field.data).value
    return values


class Registry:
    """A TensorRT module's registry with the plugin library in it."""

    def __init__(self, module: str, library: str) -> None:
        trt = importlib.import_module(module)
        self.trt = trt if hasattr(trt, "get_plugin_registry") else trt.tensorrt_lean
        types = self.trt.PluginFieldType
        assert (types.FLOAT32.value, types.INT32.value, types.CHAR.value) == (FLOAT32, INT32, CHAR)
        self.registry = self.trt.get_plugin_registry()
        assert self.registry.load_library(library) is not None, "the registry did not take the library"

    def creators(self) -> list[str]:
        """Names of the creators in our namespace."""
        found = self.registry.all_creators
        return [c.name for c in found if getattr(c, "plugin_namespace", "") == DOMAIN and c.plugin_version == VERSION]

    def create(self, op: str, values: dict[str, FieldValue], phase: Any) -> Any:
        """A plugin."""
        trt, fields = self.trt, []
        for name, value in values.items():
            if isinstance(value, str):
                fields.append(trt.PluginField(name, value.encode(), trt.PluginFieldType.CHAR))
            elif isinstance(value, int):
                fields.append(trt.PluginField(name, np.array([value], np.int32), trt.PluginFieldType.INT32))
            else:
                fields.append(trt.PluginField(name, np.array([value], np.float32), trt.PluginFieldType.FLOAT32))
        creator = self.registry.get_creator(op, VERSION, DOMAIN)
        plugin = creator.create_plugin("probe", trt.PluginFieldCollection(fields), phase)
        assert plugin is not None, f"{op} was not created from {values}"
        return plugin

    def probe(self, op: str, values: dict[str, FieldValue]) -> dict[str, Any]:
        """Take a plugin through its life up to the first enqueue."""
        kinds, phases = self.trt.PluginCapabilityType, self.trt.TensorRTPhase
        plugin = self.create(op, values, phases.BUILD)
        core = plugin.get_capability_interface(kinds.CORE)
        assert (core.plugin_name, core.plugin_version, core.plugin_namespace) == (op, VERSION, DOMAIN)
        build = plugin.get_capability_interface(kinds.BUILD)
        held = serialised_fields(plugin, kinds)
        restored = self.create(op, held, phases.RUNTIME)
        assert serialised_fields(restored, kinds) == held
        aliases = [virtual(build, GET_ALIASED_INPUT, ctypes.c_int32, i) for i in range(build.num_outputs)]
        return {"outputs": build.num_outputs, "aliases": aliases, "fields": held}


def main() -> None:
    registry = Registry(*sys.argv[1:])
    print(json.dumps(registry.creators()))
    for line in sys.stdin:
        print(json.dumps(registry.probe(*json.loads(line))))


if __name__ == "__main__":
    main()
