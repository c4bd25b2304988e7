"""`qwen-edit-zero data check`: what training would make of every row of a manifest. Imports no torch."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import yaml

from qwen_edit_zero.edit_data.cache.locks import CacheLock
from qwen_edit_zero.edit_data.check.checking import Asked, Checked, check_table
from qwen_edit_zero.edit_data.check.columns import RowColumns
from qwen_edit_zero.edit_data.check.held_out import FOLDER, HeldOutChecked, held_out_lines
from qwen_edit_zero.edit_data.check.leaks import leaks
from qwen_edit_zero.edit_data.check.page import write_page
from qwen_edit_zero.edit_data.check.rules import RowRules
from qwen_edit_zero.edit_data.check.terminal import report_lines
from qwen_edit_zero.edit_data.instructions.prepare import Instructions, Prepared
from qwen_edit_zero.edit_data.manifests.samples import Sample
from qwen_edit_zero.edit_data.manifests.table import SampleTable
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.edit_model.folder import Variant, open_model_folder
from qwen_edit_zero.edit_model.instruction_limit import InstructionLimit, instruction_limit_of
from qwen_edit_zero.errors import ModelFolderError, StorageError
from qwen_edit_zero.settings.load import LoadedSettings, load_for_manifest, load_settings
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training.datasets import DEMO, MANIFESTS, chosen_of, training_table, whole_held_out_table
from qwen_edit_zero.training.making import making_held_out, making_of
from qwen_edit_zero.training.progress import LateProgress
from qwen_edit_zero.training.run_folder import cache_folder
from qwen_edit_zero.training.texts import TrainingTexts

_RECIPE_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True)
class CheckCommand:
    """A parsed command.

    Attributes:
        what: a manifest, or a recipe.
        overrides: section.key=value.
        out: folder for the results; None: data_check/NAME.
        form: as data.format; None: as the settings say. Given, `what` is a manifest.
        strict: rows with warnings are left out of the clean manifest, and any finding makes the exit status 2.
        workers: processes; None: one a processor.
    """

    what: str
    overrides: tuple[str, ...] = ()
    out: Path | None = None
    form: str | None = None
    strict: bool = False
    workers: int | None = None


@dataclass(frozen=True)
class RulesOf:
    """Makes the rules for rows from settings, in whatever process it is called.

    Attributes:
        model: folder whose tokenizer counts; None: it is not known.
        pictured: None: of the training set. Of the held-out set the ids of the samples that are pictured.
    """

    settings: Settings
    variant: Variant
    model: Path | None
    pictured: frozenset[str] | None = None

    def __call__(self) -> RowRules:
        data = self.settings.data
        instructions = Instructions(data)
        texts = TrainingTexts(instructions)
        making = (
            making_of(self.settings, self.variant, texts)
            if self.pictured is None
            else making_held_out(self.settings, self.variant, instructions, self.pictured)
        )
        prepared: Callable[[Sample], Prepared] = texts.prepared
        if data.safety == "off":  # what the word filter would find is told all the same
            looking = lru_cache(1 << 14)(Instructions(data.model_copy(update={"safety": "flag"})).prepare)

            def prepared(sample: Sample) -> Prepared:
                return looking(sample.instruction)

        limit = None if self.model is None else _LateLimit(self.model).check
        return RowRules(making, prepared, limit, data.safety)


class _LateLimit:
    """The tokenizer is loaded when the first text comes."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._limit: InstructionLimit | None = None

    def check(self, text: str) -> int:
        if self._limit is None:
            self._limit = instruction_limit_of(self._model)
        return self._limit.check(text)


def run_check(command: CheckCommand, say: Callable[[str], None] = print) -> int:
    """Check, write the results, print a report, and return the exit status (see `Checked.exit_status`).

    Raises:
        UserError: settings, manifest or model cannot be used.
        RunError: a store does not answer, or the results cannot be written.
    """
    is_recipe = command.form is None and _is_recipe(command.what)
    loaded = _settings_of(command, is_recipe=is_recipe)
    settings = loaded.settings
    model, variant, note = _model_of(loaded, is_recipe=is_recipe)
    out = command.out or Path("data_check") / _name_of(command.what)
    cache = cache_folder(settings) if is_recipe or settings.data.cache_dir else (out / "cache").absolute()
    most = settings.data.max_references if variant.takes_several_references else 1
    skipping = settings.model_copy(update={"data": settings.data.model_copy(update={"on_error": "skip"})})
    table = training_table(skipping, most, index_folder=cache / MANIFESTS)
    held_table = whole_held_out_table(skipping, most, index_folder=cache / MANIFESTS)
    held_out: HeldOutChecked | None = None
    asked = Asked(
        table=table,
        references=most,
        new_rules=RulesOf(settings, variant, model),
        area=settings.data.vae_area,
        align=settings.data.align,
        step=settings.batch.global_size,
        tokens=model is not None,
        cache=cache,
        out=out,
        strict=command.strict,
        workers=command.workers,
    )
    if held_table is not None:

        def check_held_out(columns: RowColumns) -> None:
            nonlocal held_out
            held_out = _check_held_out(asked, columns, held_table, skipping, RulesOf(settings, variant, model))

        asked = replace(asked, then=check_held_out)
    try:
        with CacheLock(cache, exclusive=False) as lock:
            lock.share()  # nobody deletes there meanwhile, and runs may begin
            checked = check_table(asked, lambda title, total: _Bar(title, total))
        told = _told_settings(settings, note)
        if held_out is not None:
            write_page(held_out.checked, told)
        page = write_page(checked, told, held_out)
    except OSError as error:
        raise StorageError(
            f"the results of the check cannot be written to {shown(out)} ({error.strerror or error}); --out names "
            "another folder"
        ) from error
    for line in report_lines(checked):
        say(line)
    if held_out is not None:
        say("")
        for line in held_out_lines(held_out):
            say(line)
    for line in _ending(checked, held_out, settings, note, page):
        say(line)
    status = checked.exit_status(strict=command.strict)
    return status if held_out is None else max(status, held_out.exit_status(strict=command.strict))


def _check_held_out(
    training: Asked, columns: RowColumns, table: SampleTable, settings: Settings, rules: RulesOf
) -> HeldOutChecked:
    """Check all held-out rows, and look for them in the training set, whose columns these are."""
    used = chosen_of(table, settings)
    asked = replace(
        training,
        table=table,
        new_rules=replace(rules, pictured=used.pictured_ids()),
        step=1,  # their loss is computed one by one, in whatever buckets they are
        out=training.out / FOLDER,
        with_wrong_rows=table.name != training.table.name,
        more=lambda held_columns: leaks(training.table, columns, table, held_columns),
        then=None,
    )
    validated = int(used.validated.sum()) if settings.validation.every is not None else None
    checked = check_table(asked, lambda title, total: _Bar(f"held-out set: {title}", total))
    return HeldOutChecked(checked, used.pictured, validated)


def _settings_of(command: CheckCommand, *, is_recipe: bool) -> LoadedSettings:
    if is_recipe:
        return load_settings(Path(command.what), overrides=command.overrides)
    if command.what == DEMO:
        return load_settings(None, overrides=command.overrides)
    form = () if command.form is None else (f"data.format={command.form}",)
    return load_for_manifest(command.what, overrides=(*command.overrides, *form))


def _is_recipe(what: str) -> bool:
    """Whether it is settings of ours: a YAML file with a section of them, or the name of one that is not there."""
    if not what.endswith(_RECIPE_ENDINGS):
        return False
    try:
        content = yaml.safe_load(Path(what).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, yaml.YAMLError):
        return True  # what is wrong with it is told when it is read
    return isinstance(content, dict) and bool(Settings.model_fields.keys() & content.keys())


def _model_of(loaded: LoadedSettings, *, is_recipe: bool) -> tuple[Path | None, Variant, str]:
    """(its folder if it is here, its variant, what should be told about it)."""
    path = loaded.settings.model.path
    if not is_recipe and loaded.sources["model.path"] == "default":
        return None, Variant.EDIT_2509, "no model is named (model.path): instructions are measured in characters"
    try:
        folder = open_model_folder(path, without_weights=True)
    except ModelFolderError as error:
        if not is_recipe:
            raise
        return None, Variant.EDIT_2509, f"instructions are measured in characters, for want of a tokenizer: {error}"
    return folder.path, folder.variant, ""


def _name_of(what: str) -> str:
    """A folder's name for the results of a manifest, a folder or a pattern."""
    last = what.rstrip("/").rpartition("/")[2]
    stem = last.rpartition(".")[0] or last
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in stem).strip(".") or "manifest"


def _told_settings(settings: Settings, note: str) -> list[tuple[str, str]]:
    """The settings that a check depends on, for the page."""
    data = settings.data
    told = [
        ("data.vae_area", f"{data.vae_area:,} pixels"),
        ("data.align", data.align),
        ("data.max_references", str(data.max_references)),
        ("data.on_error", data.on_error),
        ("data.safety", data.safety),
        ("data.normalise", str(data.normalise).lower()),
        ("batch.global_size", str(settings.batch.global_size)),
    ]
    return [*told, ("note", note)] if note else told


def _ending(
    checked: Checked, held_out: HeldOutChecked | None, settings: Settings, note: str, page: Path
) -> Sequence[str]:
    lines = [note] if note else []
    refused = checked.refused + (0 if held_out is None else held_out.checked.refused)
    if refused and settings.data.on_error == "stop":
        lines.append("training ends at rows that are refused (data.on_error=stop); data.on_error=skip leaves them out")
    lines.append(f"written: {page}")
    for name in ("findings.jsonl", "clean.jsonl"):
        rows = f" ({checked.clean_rows:,} rows)" if name.startswith("clean") else ""
        lines.append(f"written: {checked.out / name}{rows}")
    if held_out is not None:
        lines.append(f"written: {held_out.checked.out}, the same of the held-out set")
    if checked.outside:
        setting = shlex.quote(f"data.outside={json.dumps(checked.outside[:5], ensure_ascii=False)}")
        more = f" and {len(checked.outside) - 5:,} more folders" if len(checked.outside) > 5 else ""
        lines.append(f"to train on the clean manifest where it is, give {setting}{more}")
    return lines


class _Bar:
    """A bar on a terminal; a line now and then elsewhere; on the error stream, so that the report can be piped."""

    def __init__(self, title: str, total: int) -> None:
        self._bar = LateProgress(title, total, rank=0, stream=sys.stderr)

    def advance(self, units: int = 1, text: str = "") -> None:
        self._bar.advance(units, text)

    def close(self) -> None:
        self._bar.close()
