"""Reading the pickles inside torch files without running anything that is in them. Imports no torch.

A pickle is a small program that may call any importable function. Here the only things it can reach are the few
constructors that make up a tensor, which give a description of where its bytes lie, plain containers, and `Record`,
an inert stand-in that remembers what an object of any other class was made of. So the code that wrote the file need
not be installed, and nothing of it runs.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qwen_edit_zero.errors import CheckpointError

# the format's name of an element type by torch's names of it
_DTYPES = {
    "float64": "F64", "double": "F64", "float32": "F32", "float": "F32", "float16": "F16", "half": "F16",
    "bfloat16": "BF16", "int64": "I64", "long": "I64", "int32": "I32", "int": "I32", "int16": "I16", "short": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "UntypedStorage": "",
}  # fmt: skip
# what no checkpoint needs, and what an attack is made of: worth a refusal, although it would not run here anyway
_HOSTILE_MODULES = {
    "os", "posix", "nt", "subprocess", "sys", "shutil", "socket", "runpy", "importlib", "ctypes", "pty", "commands",
    "webbrowser", "code", "pickle", "_pickle", "multiprocessing", "asyncio", "threading", "operator",
}  # fmt: skip
_HOSTILE_BUILTINS = {"eval", "exec", "compile", "open", "__import__", "input", "breakpoint", "delattr", "globals"}


@dataclass(frozen=True, slots=True)
class Dtype:
    """An element type, by safetensors' name of it."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """A stretch of bytes in the file: `key` names its record; `dtype` is empty if the tensor knows it."""

    key: str
    dtype: str
    count: int


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor over a storage; `first` and `strides` count elements."""

    storage: Storage
    dtype: str
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Record:
    """What an object of an unknown class was made of: its class's name, constructor arguments and state. Inert."""

    kind = ""

    def __new__(cls, *arguments: Any, **named: Any) -> Record:
        self = object.__new__(cls)
        self.arguments, self.named = arguments, named
        self.state = None
        self.items = []
        return self

    arguments: tuple[Any, ...]
    named: dict[str, Any]
    state: Any
    items: list[Any]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        self.items.append(value)

    def extend(self, values: Any) -> None:
        self.items.extend(values)

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute of the object it stands for, wherever its class put attributes."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        for state in states:
            if isinstance(state, dict) and name in state:
                return state[name]
        return default

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def _tensor(storage: Storage, first: int, shape: Any, strides: Any, *_: Any) -> PickledTensor:
    return PickledTensor(storage, storage.dtype, int(first), tuple(shape), tuple(strides))


def _typed_tensor(
    storage: Storage, first: int, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Dtype, *_: Any
) -> PickledTensor:
    return PickledTensor(storage, dtype.name, int(first), tuple(shape), tuple(strides))


def _first(value: Any, *_: Any) -> Any:
    return value


def _from_type(make: Any, _kind: Any, arguments: Any, _state: Any) -> Any:
    return make(*arguments) if make in _CONSTRUCTORS.values() else Record(make, arguments)


def _size(values: Any = ()) -> tuple[int, ...]:
    return tuple(values)


_CONSTRUCTORS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _typed_tensor,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "list"): list,
    ("builtins", "dict"): dict,
    ("builtins", "tuple"): tuple,
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8", errors="surrogateescape")
        self._kinds: dict[tuple[str, str], type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = ("builtins" if module == "__builtin__" else module, name)
        if key in _CONSTRUCTORS:
            return _CONSTRUCTORS[key]
        if module == "torch" and name in _DTYPES:
            return Dtype(_DTYPES[name])
        if module in ("torch", "torch.storage", "torch.cuda") and name in _STORAGES:
            return Dtype(_STORAGES[name])
        if module.split(".")[0] in _HOSTILE_MODULES or (key[0] == "builtins" and name in _HOSTILE_BUILTINS):
            raise CheckpointError(
                f"it asks for {module}.{name}, which no checkpoint needs but an attack would. Nothing of it was run; "
                "find out where this file comes from"
            )
        if key not in self._kinds:
            self._kinds[key] = type("Record", (Record,), {"kind": f"{module}.{name}"})
        return self._kinds[key]

    def persistent_load(self, pid: Any) -> Storage:
        if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage" and isinstance(pid[1], Dtype)):
            raise CheckpointError(f"it refers to something that is no tensor storage ({str(pid)[:80]})")
        return Storage(str(pid[2]), pid[1].name, int(pid[4]))


def load_pickle(content: bytes) -> Any:
    """What the pickle describes, tensors as PickledTensor, unknown objects as Record. No code of it runs.

    Raises CheckpointError, which does not name the file, if it is damaged or hostile.
    """
    try:
        return _Unpickler(content).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise CheckpointError(f"its pickle is damaged ({type(error).__name__}: {error})") from None
