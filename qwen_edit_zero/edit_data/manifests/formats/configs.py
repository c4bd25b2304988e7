"""Configuration files of other trainers that name data sets: musubi-tuner's TOML, ai-toolkit's YAML or JSON."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from qwen_edit_zero.edit_data.manifests.formats.base import Content, Folder, Progress, Reader, name_of
from qwen_edit_zero.edit_data.manifests.formats.mapped import musubi_lines
from qwen_edit_zero.edit_data.manifests.formats.pairs import PairedFolders, PairedPictures
from qwen_edit_zero.edit_data.wording import nearest, shown
from qwen_edit_zero.errors import DataError

_MUSUBI_USED = ("image_directory", "image_jsonl_file", "control_directory", "caption_extension", "num_repeats")
_MUSUBI_IDLE = {  # how musubi-tuner trains; this trainer has settings of its own for it
    "resolution", "batch_size", "enable_bucket", "bucket_no_upscale", "cache_directory", "skip_corrupted_cache",
    "no_resize_control", "control_resolution", "qwen_image_edit_no_resize_control",
    "qwen_image_edit_control_resolution", "flux_kontext_no_resize_control", "debug_dataset",
}  # fmt: skip
_TRIED_BYTES = 1 << 16
_AI_TOOLKIT_USED = (
    "folder_path", "dataset_path", "control_path", "control_path_1", "control_path_2", "control_path_3", "caption_ext",
    "default_caption", "trigger_word", "mask_path", "num_repeats",
)  # fmt: skip


class SeveralReaders(Reader):
    """The rows of several readers one after another, numbered through."""

    def __init__(self, folder: Folder, name: str, title: str, readers: Sequence[Reader], notes: Sequence[str]) -> None:
        super().__init__()
        self.title, self._folder, self._name, self._readers = title, folder, name, readers
        self.unit = readers[0].unit if len({reader.unit for reader in readers}) == 1 else "row"
        self.called = readers[0].called
        self.total = sum(reader.total for reader in readers)
        self.given_notes = [*notes, *(note for reader in readers for note in reader.given_notes)]

    def records(self) -> Iterator[tuple[int, Content]]:
        before = 0
        for reader in self._readers:
            self.called = reader.called
            self.places.append((reader.title, before + 1))
            for number, content in reader.records():
                self.lines = before + number
                yield before + number, content
            before += reader.lines
            self.lines = before
        self.notes = [note for reader in self._readers for note in reader.notes]

    def content_key(self, on_progress: Progress) -> str:
        keys = [self._folder.content_key(self._name, on_progress)] if self._name else []
        return "+".join([*keys, *(reader.content_key(on_progress) for reader in self._readers)])


def musubi_config(folder: Folder, name: str) -> Reader:
    """The data sets of a musubi-tuner TOML. Raises DataError."""
    where = f"manifest {shown(name_of(folder, name))}"
    config = _loaded(folder, name)
    general = config.get("general", {})
    sets = config.get("datasets")
    if not isinstance(general, dict) or not isinstance(sets, list) or not all(isinstance(s, dict) for s in sets):
        raise DataError(f"{where}: it needs [[datasets]] tables and at most one [general] table, as musubi-tuner's")
    readers: list[Reader] = []
    notes: list[str] = []
    for number, own in enumerate(sets, start=1):
        values = {**general, **own}
        title = f"data set {number}"
        if any(key.startswith("video_") for key in values):
            raise DataError(f"{where}, {title}: it is one of videos; leave it out")
        for key in values:
            if key not in _MUSUBI_USED and key not in _MUSUBI_IDLE:
                notes.append(f"not used: {shown(key)}")
        repeats = _number(values, "num_repeats", f"{where}, {title}")
        if "image_jsonl_file" in values:
            lines = _text(values, "image_jsonl_file", f"{where}, {title}")
            readers.append(musubi_lines(folder, lines, weight=repeats))
        elif "image_directory" in values:
            ending = _text(values, "caption_extension", f"{where}, {title}")
            pairs = PairedFolders(
                _text(values, "image_directory", f"{where}, {title}"),
                (_text(values, "control_directory", f"{where}, {title}"),),
                caption_ending=ending,
                is_numbered=True,
                weight=repeats,
            )
            readers.append(PairedPictures(folder, f"{title} ({pairs.targets})", [pairs]))
        else:
            raise DataError(f"{where}, {title}: it has neither image_directory nor image_jsonl_file")
    if not readers:
        raise DataError(f"{where}: it has no [[datasets]]")
    return SeveralReaders(folder, name, "musubi-tuner TOML", readers, list(dict.fromkeys(notes)))


def ai_toolkit_config(folder: Folder, name: str) -> Reader:
    """The data sets of an ai-toolkit job (YAML or JSON), or of a list of its `datasets` entries. Raises DataError."""
    where = f"manifest {shown(name_of(folder, name))}"
    sets = ai_toolkit_sets(_loaded(folder, name))
    if not sets:
        raise DataError(f"{where}: it has no datasets with a folder_path, as ai-toolkit's jobs have")
    readers: list[Reader] = []
    notes: list[str] = []
    for number, values in enumerate(sets, start=1):
        here = f"{where}, data set {number}"
        controls = values.get("control_path")
        controls = list(controls) if isinstance(controls, list) else [controls] if controls else []
        controls += [values[key] for key in ("control_path_1", "control_path_2", "control_path_3") if values.get(key)]
        if not controls or not all(isinstance(path, str) for path in controls):
            raise DataError(f"{here}: it has no control_path, so there are no references to edit")
        for key in values:
            if key not in _AI_TOOLKIT_USED and key in ("caption_dropout_rate", "flip_x", "flip_y", "is_reg"):
                notes.append(f"not used: {shown(key)}")
        ending = values.get("caption_ext") or "txt"
        pairs = PairedFolders(
            _text(values, "folder_path" if values.get("folder_path") else "dataset_path", here),
            tuple(controls),
            caption_ending=f".{str(ending).lstrip('.')}",
            default_caption=values.get("default_caption") or None,
            trigger=values.get("trigger_word") or None,
            masks=values.get("mask_path") or None,
            weight=_number(values, "num_repeats", here),
        )
        readers.append(PairedPictures(folder, f"data set {number} ({pairs.targets})", [pairs]))
    return SeveralReaders(folder, name, "ai-toolkit config", readers, list(dict.fromkeys(notes)))


def ai_toolkit_sets(config: Any) -> list[dict[str, Any]]:
    """The `datasets` entries of a whole job, of a process, of a list, or a single one; [] if it is none of them."""
    if isinstance(config, Mapping):
        if "folder_path" in config or "dataset_path" in config:
            return [dict(config)]
        if isinstance(config.get("datasets"), list):
            return ai_toolkit_sets(config["datasets"])
        inner = config.get("config")
        processes = inner.get("process") if isinstance(inner, Mapping) else config.get("process")
        config = processes if isinstance(processes, list) else []
    if isinstance(config, list):
        return [found for entry in config if isinstance(entry, Mapping) for found in ai_toolkit_sets(entry)]
    return []


def loaded_config(folder: Folder, name: str) -> Any:
    """The content of a TOML, YAML or JSON file if it is one, judged by its name or tried where it is small."""
    if not name.lower().endswith((".yaml", ".yml", ".json", ".toml")) and folder.size(name) > _TRIED_BYTES:
        return None
    try:
        return _loaded(folder, name)
    except DataError:
        return None


def _loaded(folder: Folder, name: str) -> Any:
    where = f"manifest {shown(name_of(folder, name))}"
    with folder.open(name) as file:
        raw = file.read((1 << 20) + 1)
    if len(raw) > 1 << 20:
        raise DataError(f"{where}: it is over 1 MiB, too long for a configuration file")
    try:
        text = raw.decode("utf-8-sig")
        return tomllib.loads(text) if name.lower().endswith(".toml") else yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start + 1} is not UTF-8") from None
    except RecursionError:
        raise DataError(f"{where}: it is nested too deeply") from None
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{where}: {' '.join(str(error).split())}") from None


def _text(values: Mapping[str, Any], key: str, where: str) -> str:
    value = values.get(key)
    if not isinstance(value, str) or not value:
        near = nearest(key, values)
        hint = f"; the nearest key is {shown(near)}" if near and near != key else ""
        raise DataError(f"{where}: {key} is {'not text' if key in values else 'missing'}{hint}")
    return value


def _number(values: Mapping[str, Any], key: str, where: str) -> float:
    value = values.get(key, 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DataError(f"{where}: {key} is {value!r}, not a whole number from 1")
    return float(value)
