"""What must be the same on all nodes, as plain text by name: code, packages, environment, settings, data, model."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import qwen_edit_zero
from qwen_edit_zero.assets import demo_manifest
from qwen_edit_zero.edit_data.storage.names import is_url
from qwen_edit_zero.edit_model.fingerprint import fingerprint_file
from qwen_edit_zero.edit_model.folder import COMPONENTS, ModelFolder
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training.datasets import DEMO

Facts = dict[str, str]
ABSENT = "not there"
_CODE = {".py", ".json", ".yaml", ".yml", ".jinja"}
_DISTRIBUTION = re.compile(r"(.+?)-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info")
_PREFIXES = ("NCCL_", "GLOO_", "OMP_", "MKL_", "CUDA_", "CUBLAS_", "TORCH_", "PYTORCH_", "DS_", "OMPI_MCA_btl")
_NAMES = {"LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHASHSEED", "HF_HUB_OFFLINE"}
# What differs rightly: places on a node's own disk, and what is chosen node by node (the network's part looks at it)
_PER_NODE = re.compile(r"CUDA_VISIBLE_DEVICES|GLOO_SOCKET_IFNAME|DS_ENV_FILE|.*_(DIR|HOME|CACHE|PATH_LOCAL)|.*_FILE")
_PER_NODE_SETTINGS = {"data.storage.cache_dir"}
_LISTED = 64  # files of a folder or pattern that are looked at


def code_facts() -> Facts:
    """A digest of every source file of this package, by its path."""
    root = Path(qwen_edit_zero.__file__).parent
    found = {}
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in ("__pycache__", "assets"))
        for name in files:
            if os.path.splitext(name)[1] in _CODE:
                path = Path(folder, name)
                found[path.relative_to(root.parent).as_posix()] = _digest_of(path)
    return found


def package_facts() -> Facts:
    """Versions of Python and of all that is installed, by the names of their folders; no metadata is read."""
    found = {"python": platform.python_version()}
    for place in sys.path:
        try:
            entries = os.listdir(place or ".")
        except OSError:
            continue
        for entry in entries:
            if match := _DISTRIBUTION.fullmatch(entry):
                found.setdefault(re.sub(r"[-_.]+", "-", match[1]).lower(), match[2])
    return found


def environment_facts(environ: Mapping[str, str]) -> Facts:
    """The variables that decide how ranks compute and communicate, but those that differ rightly."""
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(_PREFIXES) or name in _NAMES) and not _PER_NODE.fullmatch(name)
    }


def settings_facts(settings: Settings) -> Facts:
    """Every setting by its dotted name, but those that are about a node's own disk."""
    found: Facts = {}
    _flatten(settings.model_dump(mode="json"), "", found)
    return {name: value for name, value in found.items() if name not in _PER_NODE_SETTINGS}


def data_facts(settings: Settings) -> Facts:
    """What the manifests are, by setting: of files their size and bytes (samples of large ones), of folders and
    patterns their number and the names and sizes of some. Nothing of what lies on an object store, which all share."""
    found = {}
    for name in ("manifest", "validation"):
        location = getattr(settings.data, name)
        if location and not is_url(str(location)):
            found[f"data.{name}"] = _manifest(str(location), name)
    return found


def model_facts(folder: ModelFolder) -> Facts:
    """The fingerprint of the model, which training takes as well."""
    return {"model": folder.fingerprint if folder.has_weights else folder.fingerprint_of(*COMPONENTS)}


def model_details(folder: ModelFolder) -> Facts:
    """Its fingerprint by component."""
    return {component: folder.fingerprint_of(component) for component in COMPONENTS}


def digest(facts: Facts) -> str:
    """16 hex digits over facts."""
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()


def _flatten(value: Any, name: str, into: Facts) -> None:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _flatten(inner, f"{name}.{key}" if name else str(key), into)
    else:
        into[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _manifest(location: str, name: str) -> str:
    path = Path(location).expanduser()
    try:
        if location == DEMO:
            path = demo_manifest("train" if name == "manifest" else "validation")
        if path.is_file():
            return fingerprint_file(path)
        if path.is_dir():
            with os.scandir(path) as entries:
                return _some(sorted(entry.path for entry in islice(entries, 100_000)), path)
        if files := sorted(glob.glob(str(path))):
            return _some(files, path.parent)
        return ABSENT
    except OSError as error:
        return f"unreadable: {error.strerror}"


def _some(paths: Sequence[str], root: Path) -> str:
    """How many there are, and a digest over names and sizes of some."""
    step = max(1, len(paths) // _LISTED)
    looked = [(os.path.relpath(path, root), os.stat(path).st_size) for path in paths[::step] if os.path.isfile(path)]
    return f"{len(paths)} entries, {hashlib.blake2b(repr(looked).encode(), digest_size=8).hexdigest()}"


def _digest_of(path: Path) -> str:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
    except OSError as error:
        return f"unreadable: {error.strerror}"
