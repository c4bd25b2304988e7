"""The cache without a training run: filling it for a recipe, looking after it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from qwen_edit_zero.cluster import process_group
from qwen_edit_zero.cluster.device_setup import set_numerics
from qwen_edit_zero.cluster.identity import Identity
from qwen_edit_zero.edit_data.cache.entries import Kind
from qwen_edit_zero.edit_data.cache.manage import KindFolder, Pruning, kind_folders, prune
from qwen_edit_zero.edit_data.cache.prepared import needed_by
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.cache.sets import Needed, SetSpec
from qwen_edit_zero.edit_data.cache.sorted_table import Keys, SortedKeys, as_keys
from qwen_edit_zero.edit_data.cache.store import MASKS, ConditioningCache, told
from qwen_edit_zero.edit_data.instructions.prepare import Instructions
from qwen_edit_zero.edit_data.wording import byte_count
from qwen_edit_zero.edit_model.encoders import ConditioningEncoder
from qwen_edit_zero.edit_model.folder import ModelFolder, open_model_folder
from qwen_edit_zero.errors import DataError, SettingsError
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training import run_folder
from qwen_edit_zero.training.conditioning import condition, encoder_dtype, entry_kinds
from qwen_edit_zero.training.datasets import MANIFESTS, held_out_table, training_table
from qwen_edit_zero.training.making import making_held_out, making_of
from qwen_edit_zero.training.progress import LateProgress
from qwen_edit_zero.training.texts import TrainingTexts

_WORDS: dict[Kind, str] = {"latent": "latents", "prompt": "embeddings", "mask": "masks"}


def fill_cache(
    settings: Settings,
    identity: Identity,
    *,
    take_over: bool = False,
    check: Callable[[ModelFolder], None] | None = None,
) -> int:
    """Have everything in the cache that a run of these settings needs; on all ranks of a launcher. Returns the exit
    status. `check` looks at all ranks' nodes when they have met. Raises UserError and RunError."""
    folder = open_model_folder(settings.model.path, without_weights=True)
    device = process_group.start(
        identity, timeout_seconds=settings.engine.timeout_seconds, device=settings.engine.device
    )
    set_numerics(settings, device)
    path, cache = run_folder.run_folder(settings), run_folder.cache_folder(settings)
    try:
        if check is not None:
            check(folder)
        with run_folder.take(path, take_over=take_over) if identity.rank == 0 else nullcontext():
            conditioned = condition(
                settings,
                folder,
                cache_folder=cache,
                work=path / run_folder.WORK,
                left_out=path / run_folder.LEFT_OUT,
                device=device,
                rank=identity.rank,
                world_size=identity.world_size,
            )
            with conditioned.cache:
                prepared = conditioned.training.prepared
                if identity.rank == 0:
                    left_out = f" ({prepared.refused.count:,} rows left out)" if prepared.refused.count else ""
                    print(
                        f"{len(prepared):,} samples{left_out} in {len(prepared.buckets):,} buckets are ready in "
                        f"{cache}; {prepared.made:,} entries were made now",
                        flush=True,
                    )
        return 0
    finally:
        process_group.stop()


def status_text(cache: Path, settings: Settings | None) -> str:
    """What a cache holds, and what the run of these settings still needs. Reads no picture. Raises DataError."""
    lines = [f"cache {cache}"]
    lines += [_line(made) for made in kind_folders(cache)] or ["  it holds no entries"]
    if settings is not None:
        lines += _still_needed(cache, settings)
    return "\n".join(lines)


def prune_text(cache: Path, recipes: Sequence[tuple[str, Settings]], *, delete: bool) -> str:
    """Delete what none of these recipes uses, or say what that would be. Raises DataError."""
    used: dict[str, list[Keys]] = {}
    for name, settings in recipes:
        if run_folder.cache_folder(settings) != cache:
            raise SettingsError(
                f"recipe {name}: its cache is {run_folder.cache_folder(settings)}, not {cache}; prune each by itself"
            )
        with tempfile.TemporaryDirectory(prefix="cache-") as work:
            for folder, keys in _used(cache, settings, Path(work)).items():
                used.setdefault(folder, []).append(keys)
    with told(cache, "pruning it"):
        done = prune(cache, {folder: np.concatenate(keys) for folder, keys in used.items()}, delete=delete)
    return "\n".join(_pruned(done, delete=delete))


def _line(made: KindFolder) -> str:
    about = {key: value for key, value in made.about.items() if key not in ("format", "code", "decoder", "libraries")}
    by = ", ".join(f"{key} {_short(str(value))}" for key, value in sorted(about.items()))
    partial = f" and {made.partial} being written" if made.partial else ""
    shards = f"{len(made.shards)} shard{'' if len(made.shards) == 1 else 's'}{partial}"
    return (
        f"  {_WORDS[made.kind]:<11}{made.entries:>11,} in {shards}, {byte_count(made.size)}{f'  ({by})' if by else ''}"
    )


def _short(value: str) -> str:
    """Digests by their beginnings."""
    return value[:12] if len(value) == 32 and not set(value) - set("0123456789abcdef") else value


class _Needs:
    """What the sets of a run need."""

    def __init__(self, cache: Path, settings: Settings, folder: ModelFolder, work: Path, *, read: bool) -> None:
        self.settings, self.folder = settings, folder
        self.dtype = encoder_dtype(settings, _device(settings))
        instructions = Instructions(settings.data)
        most = settings.data.max_references if folder.variant.takes_several_references else 1
        table = training_table(settings, most, index_folder=cache / MANIFESTS)
        specs = [SetSpec("train", table, making_of(settings, folder.variant, TrainingTexts(instructions)))]
        held_out = held_out_table(settings, most, index_folder=cache / MANIFESTS)
        if held_out is not None:
            making = making_held_out(settings, folder.variant, instructions, held_out.pictured_ids())
            specs.append(SetSpec("held-out", held_out.table, making, required=False))
        kinds = entry_kinds(folder, self.dtype)
        with ConditioningCache(cache, *kinds, Ranks(), work=work) as opened:
            found = [
                needed_by(
                    spec,
                    opened,
                    references=most,
                    on_error=settings.data.on_error,
                    new_bar=lambda title, total: LateProgress(title, total, rank=0),
                    read=read,
                )
                for spec in specs
            ]
            self.sets: list[Needed] = found
            self.samples = len(table)
            columns = zip(*((n.latents, n.prompts, n.masks) for n in found), strict=True)
            kinds_and_columns = zip((opened.latents, opened.prompts, opened.masks), columns, strict=True)
            self.keys = {entries.kind.kind: _different(parts) for entries, parts in kinds_and_columns}
            self.missing = {
                entries.kind.kind: int(entries.missing(self.keys[entries.kind.kind]).sum()) for entries in opened.kinds
            }

    def keys_by_folder(self) -> dict[str, Keys]:
        """The keys by folder of a kind and make, whichever device and so which precision the run computes with."""
        by_folder: dict[str, Keys] = {MASKS.folder_name: self.keys["mask"]}
        for dtype in {self.dtype, torch.float32, torch.bfloat16}:
            for kind in entry_kinds(self.folder, dtype):
                by_folder[kind.folder_name] = self.keys[kind.kind]
        return by_folder


def _used(cache: Path, settings: Settings, work: Path) -> dict[str, Keys]:
    folder = open_model_folder(settings.model.path, without_weights=True)
    return _Needs(cache, settings, folder, work, read=True).keys_by_folder()


def _still_needed(cache: Path, settings: Settings) -> list[str]:
    folder = open_model_folder(settings.model.path, without_weights=True)
    with tempfile.TemporaryDirectory(prefix="cache-") as work:
        needs = _Needs(cache, settings, folder, Path(work), read=False)
    unread = sum(found.unread for found in needs.sets)
    refused = sum(found.refused.count for found in needs.sets)
    dtype = str(needs.dtype).removeprefix("torch.")
    lines = [f"run {settings.run.name}: {needs.samples:,} samples, encoded in {dtype} (see engine.device)"]
    for kind, keys in needs.keys.items():
        if len(keys):
            missing = needs.missing[kind]
            lines.append(
                f"  {_WORDS[kind]:<11}{len(keys):>11,} needed, {len(keys) - missing:,} there, {missing:,} missing"
            )
    if refused:
        lines.append(f"  {refused:,} rows cannot be used and are left out")
    if unread:
        lines.append(f"  {unread:,} samples besides, of which a picture is new or has changed")
    lines.append(f"  about {byte_count(_whole_size(needs))} when all is there")
    return lines


def _whole_size(needs: _Needs) -> float:
    """Bytes of what the known samples need, by the mean over them."""
    settings, folder = needs.settings, needs.folder
    encoder = ConditioningEncoder(
        folder, vae_area=settings.data.vae_area, condition_area=settings.data.condition_area, dtype=needs.dtype
    )
    total = 0.0
    sides = np.concatenate([found.prepared.reshape(-1, 2) for found in needs.sets])
    sides = sides[sides.min(-1) > 0]
    if len(sides):
        latent = encoder.latent_bytes(8, 8) * float((sides.astype(np.int64).prod(-1) // 64).mean())
        total += len(needs.keys["latent"]) * latent
        references = len(sides) / max(sum(len(found.prepared) for found in needs.sets), 1) - 1
        area = settings.data.condition_area if folder.variant.takes_several_references else settings.data.vae_area
        side = round(area**0.5)
        one, none = encoder.prompt_bytes([(side, side)], "x" * 60), encoder.prompt_bytes([], "x" * 60)
        total += len(needs.keys["prompt"]) * (none + references * (one - none))
    return total


def _different(parts: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]) -> Keys:
    """The different keys in columns of keys, zeros left out."""
    found = [as_keys(part[np.asarray(part).any(-1)]) for part in parts]
    keys = SortedKeys.of(np.concatenate(found))
    return np.stack([keys.high, keys.low], axis=1)


def _pruned(done: Pruning, *, delete: bool) -> list[str]:
    what = "deleted" if delete else "would be deleted"
    lines = [
        f"{done.deleted:,} entries {what}, which frees {byte_count(done.freed)}; {done.kept:,} are in use and stay"
    ]
    lines += [f"  all of {made.name}: {_line(made).strip()}" for made in done.folders]
    if not delete and done.freed:
        lines.append("nothing has been changed; --delete deletes them")
    return lines


def _device(settings: Settings) -> str:
    chosen = settings.engine.device
    if chosen == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return chosen


def cache_folder_of(folder: Path | None, settings: Settings | None) -> Path:
    """The cache that a command is about. Raises DataError if it says none."""
    if folder is not None:
        return folder.expanduser().absolute()
    if settings is None:
        raise DataError("no cache is named: give a recipe, or --dir FOLDER")
    return run_folder.cache_folder(settings)
