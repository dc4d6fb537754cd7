"""The plugin host (plugins/host/host.h) in Python: graphs of plugin nodes, shape inference, runs. Needs no TensorRT.

Only `Run.launch` needs a GPU. Imports neither torch nor CUDA bindings: addresses and streams are integers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from flint_plugins.ops import DType, FieldValue

Shape = Sequence[int]
DYNAMIC = -1
"""The size of a dimension that varies from run to run."""
RunKind = Literal["eager", "captured", "replayed"]

_DTYPES: dict[DType, int] = {"f32": 0, "i8": 2, "i32": 3, "bf16": 7}
"""As nvinfer1::DataType."""
_DTYPE_NAMES: dict[int, DType] = {code: name for name, code in _DTYPES.items()}
_STORAGES: tuple[Literal["input", "output", "arena"], ...] = ("input", "output", "arena")
_RUN_KINDS: tuple[RunKind, ...] = ("eager", "captured", "replayed")
_MAX_RANK = 8


class HostError(RuntimeError):
    """The host or a plugin refused a graph, shapes or a run; the message names node and binding."""


class _Field(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("type", c_int32), ("integer", c_int32), ("real", c_float), ("text", c_char_p))


class _Placement(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("storage", "binding", "root", "first", "last")),
        ("offset", c_int64),
        ("bytes", c_int64),
    )


@dataclass(frozen=True)
class Placement:
    """Where a tensor lies: in a graph input's or output's memory, or `offset` bytes into the arena.

    `first` and `last` are the first and last node that needs it; `bytes` its size at the largest shapes.
    """

    storage: Literal["input", "output", "arena"]
    offset: int
    bytes: int
    first: int
    last: int


_INT32S, _INT64S = POINTER(c_int32), POINTER(c_int64)
_PROTOTYPES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "flintHostLastError": (c_char_p, ()),
    "flintHostCreate": (c_void_p, ()),
    "flintHostDestroy": (None, (c_void_p,)),
    "flintHostAddInput": (c_int32, (c_void_p, c_char_p, c_int32, c_int32, _INT64S)),
    "flintHostAddNode": (
        c_int32,
        (
            c_void_p, c_char_p, c_char_p, POINTER(_Field), c_int32, _INT32S, c_int32, POINTER(c_char_p), c_int32,
            _INT32S,
        ),
    ),
    "flintHostMarkOutput": (c_int32, (c_void_p, c_int32, c_int32)),
    "flintHostPrepare": (c_int32, (c_void_p, _INT64S, _INT64S, _INT64S, c_int32)),
    "flintHostArenaBytes": (c_int64, (c_void_p,)),
    "flintHostWorkspaceBytes": (c_int64, (c_void_p,)),
    "flintHostTensorPlacement": (c_int32, (c_void_p, c_int32, POINTER(_Placement))),
    "flintHostWorkspacePlacement": (c_int32, (c_void_p, c_int32, POINTER(_Placement))),
    "flintHostSetShapes": (c_int32, (c_void_p, _INT64S, c_int32)),
    "flintHostTensorShape": (c_int32, (c_void_p, c_int32, _INT32S, _INT64S)),
    "flintHostRun": (c_int32, (c_void_p, _INT64S, c_int32, _INT64S, c_int32, c_int64, c_void_p, c_int32)),
    "flintHostSetPoison": (c_int32, (c_void_p, c_int32)),
    "flintHostLifeCycle": (c_char_p, (c_void_p, c_int32)),
    "flintHostPlanMemory": (c_int64, (c_int32, _INT64S, _INT32S, _INT32S, _INT64S)),
}  # fmt: skip


class HostLibrary:
    """A loaded plugin library, as host."""

    def __init__(self, path: Path) -> None:
        """Load the library at `path`. Raises HostError where it cannot be loaded or has no host."""
        try:
            self.c = ctypes.CDLL(str(path.absolute()))
            for name, (result, arguments) in _PROTOTYPES.items():
                function = getattr(self.c, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise HostError(f"The plugin library {path} cannot be used as plugin host: {error}.") from None

    def check(self, result: int) -> int:
        """Return a call's result, or raise HostError with the library's message where it failed."""
        if result is None or result < 0:
            raise HostError(self.c.flintHostLastError().decode(errors="replace"))
        return result

    def plan_memory(self, blocks: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
        """Offsets of blocks (bytes, first node, last node) in one arena, and the arena's bytes."""
        count = len(blocks)
        size, first, last = zip(*blocks, strict=True) if blocks else ((), (), ())
        offsets = (c_int64 * count)()
        lists = (c_int64 * count)(*size), (c_int32 * count)(*first), (c_int32 * count)(*last)
        total = self.check(self.c.flintHostPlanMemory(count, *lists, offsets))
        return list(offsets), total


class HostGraph:
    """A graph of plugin nodes; every method raises HostError where the host refuses. Not thread-safe."""

    def __init__(self, library: HostLibrary) -> None:
        self._library, self._c = library, library.c
        self._handle = c_void_p(self._c.flintHostCreate())
        self._tensors: dict[str, int] = {}
        self._nodes: dict[str, int] = {}
        self.inputs: dict[str, tuple[int, ...]] = {}
        """Declared shapes of the graph inputs, DYNAMIC where a size varies."""
        self.outputs: list[str] = []

    def close(self) -> None:
        """Free the plugins and CUDA graphs; nothing of it may be running."""
        if self._handle:
            self._c.flintHostDestroy(self._handle)
            self._handle = c_void_p()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.close()

    # --- Build ----------------------------------------------------------------------------------------------------

    def add_input(self, name: str, dtype: DType, shape: Shape) -> None:
        """Add a graph input; DYNAMIC in `shape` where a size varies."""
        dims = (c_int64 * len(shape))(*shape)
        code = _DTYPES.get(dtype, -1)
        self._tensors[name] = self._check(
            self._c.flintHostAddInput(self._handle, name.encode(), code, len(shape), dims)
        )
        self.inputs[name] = tuple(shape)

    def add_node(
        self, op: str, name: str, fields: Mapping[str, FieldValue], inputs: Sequence[str], outputs: Sequence[str]
    ) -> None:
        """Add a node behind those that are there, reading tensors that exist and making those named `outputs`."""
        values = (_Field * len(fields))()
        for slot, (key, value) in zip(values, fields.items(), strict=True):
            slot.name = key.encode()
            if isinstance(value, str):
                slot.type, slot.text = 2, value.encode()
            elif isinstance(value, int):
                slot.type, slot.integer = 0, value
            else:
                slot.type, slot.real = 1, value
        sources = (c_int32 * len(inputs))(*map(self._tensor, inputs))
        names = (c_char_p * len(outputs))(*(output.encode() for output in outputs))
        made = (c_int32 * len(outputs))()
        self._nodes[name] = self._check(
            self._c.flintHostAddNode(
                self._handle, op.encode(), name.encode(), values, len(fields), sources, len(inputs), names,
                len(outputs), made,
            )
        )  # fmt: skip
        self._tensors |= dict(zip(outputs, made, strict=True))

    def mark_output(self, name: str, *, in_arena: bool = False) -> None:
        """Make a tensor a graph output.

        Args:
            in_arena: it stays in the arena until the next run and takes no address of the caller's.
        """
        self._check(self._c.flintHostMarkOutput(self._handle, self._tensor(name), int(in_arena)))
        self.outputs.append(name)

    def prepare(
        self,
        most: Mapping[str, Shape],
        least: Mapping[str, Shape] | None = None,
        usual: Mapping[str, Shape] | None = None,
    ) -> None:
        """Configure the plugins for a range of input shapes (static inputs may be left out) and plan the arena.

        Args:
            most, least, usual: greatest, smallest and most frequent shapes; the latter two are `most` if None.
        """
        corners = [self._dims(most if corner is None else corner) for corner in (least, usual, most)]
        lists = [dims.ctypes.data_as(_INT64S) for dims in corners]
        self._check(self._c.flintHostPrepare(self._handle, *lists, len(corners[0])))

    @property
    def arena_bytes(self) -> int:
        """Bytes that a run needs for activations and workspace."""
        return self._check(self._c.flintHostArenaBytes(self._handle))

    @property
    def workspace_bytes(self) -> int:
        """Workspace of the node that asks for most; part of the arena."""
        return self._check(self._c.flintHostWorkspaceBytes(self._handle))

    def placement(self, tensor: str) -> Placement:
        """Where a tensor lies."""
        found = _Placement()
        self._check(self._c.flintHostTensorPlacement(self._handle, self._tensor(tensor), ctypes.byref(found)))
        return _placement(found)

    def workspace_placement(self, node: str) -> Placement:
        """Where a node's workspace lies."""
        found = _Placement()
        self._check(self._c.flintHostWorkspacePlacement(self._handle, self._nodes[node], ctypes.byref(found)))
        return _placement(found)

    def life_cycle(self, node: str) -> list[str]:
        """The functions of a node's plugin in the order in which each was first called."""
        text: bytes | None = self._c.flintHostLifeCycle(self._handle, self._nodes[node])
        assert text is not None
        return text.decode().split()

    # --- Run ------------------------------------------------------------------------------------------------------

    def set_shapes(self, shapes: Mapping[str, Shape]) -> None:
        """Infer all shapes and tell the plugins. `Run.launch` does it, too."""
        dims = self._dims(shapes)
        self._check(self._c.flintHostSetShapes(self._handle, dims.ctypes.data_as(_INT64S), len(dims)))

    def shape(self, tensor: str) -> tuple[DType, tuple[int, ...]]:
        """A tensor's type and its shape for the shapes set last."""
        dtype, dims = c_int32(), (c_int64 * _MAX_RANK)()
        rank = self._check(self._c.flintHostTensorShape(self._handle, self._tensor(tensor), ctypes.byref(dtype), dims))
        return _DTYPE_NAMES[dtype.value], tuple(dims[:rank])

    def poison(self, on: bool) -> None:
        """For tests: fill each node's outputs and workspace with 0xFF before it runs, without CUDA graphs."""
        self._check(self._c.flintHostSetPoison(self._handle, int(on)))

    def bind(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int], arena: int) -> Run:
        """A run with these shapes (static inputs may be left out) and device addresses.

        Args:
            addresses: of all inputs, and of the outputs that do not share an input's memory or lie in the arena.
            arena: address of `arena_bytes` bytes, a multiple of 256.
        """
        found = [addresses.get(name, 0) for name in (*self.inputs, *self.outputs)]
        return Run(self, self._dims(shapes), np.array(found, np.int64), arena)

    def launch(self, run: Run, stream: int, use_graph: bool) -> RunKind:
        """See `Run.launch`."""
        kind = self._c.flintHostRun(
            self._handle, run.dims_pointer, len(run.dims), run.addresses_pointer, len(run.addresses), run.arena, stream,
            use_graph,
        )  # fmt: skip
        return _RUN_KINDS[self._check(kind)]

    # --- Helpers --------------------------------------------------------------------------------------------------

    def _check(self, result: int) -> int:
        return self._library.check(result)

    def _tensor(self, name: str) -> int:
        try:
            return self._tensors[name]
        except KeyError:
            raise HostError(f"the graph has no tensor {name}") from None

    def _dims(self, shapes: Mapping[str, Shape]) -> npt.NDArray[np.int64]:
        dims: list[int] = []
        for name, declared in self.inputs.items():
            shape = shapes.get(name, declared)
            if len(shape) != len(declared):
                raise HostError(f"input {name} must have {len(declared)} dimensions, found {list(shape)}")
            dims += shape
        return np.array(dims, np.int64)


class Run:
    """A graph with shapes and addresses, ready to launch any number of times."""

    def __init__(
        self, graph: HostGraph, dims: npt.NDArray[np.int64], addresses: npt.NDArray[np.int64], arena: int
    ) -> None:
        self._graph, self.arena = graph, arena
        self.dims, self.addresses = dims, addresses
        self.dims_pointer, self.addresses_pointer = dims.ctypes.data_as(_INT64S), addresses.ctypes.data_as(_INT64S)

    def launch(self, stream: int, *, use_graph: bool = False) -> RunKind:
        """Put the run on a stream and return at once.

        Args:
            stream: a cudaStream_t; with `use_graph` not the default one.
            use_graph: capture a combination of shapes and addresses the second time it is seen, then replay it.
        Raises:
            HostError: shapes, addresses, or a plugin's launch.
        """
        return self._graph.launch(self, stream, use_graph)


def _placement(found: _Placement) -> Placement:
    return Placement(_STORAGES[found.storage], found.offset, found.bytes, found.first, found.last)
