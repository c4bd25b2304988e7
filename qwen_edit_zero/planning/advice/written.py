"""A recommended recipe as files: YAML whose comments say why, and the DeepSpeed JSON where there is one."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qwen_edit_zero.errors import UserError
from qwen_edit_zero.planning.advice.recommend import summary
from qwen_edit_zero.planning.advice.search import MAX_REFERENCES, Option
from qwen_edit_zero.planning.advice.variants import CHECKPOINTING, MICRO, SEQUENCE
from qwen_edit_zero.planning.jobs.wish import Wish
from qwen_edit_zero.planning.words import sample_line
from qwen_edit_zero.settings.files import find_file
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.settings.render import inline, plain

_LEFT_OUT = {"engine.deepspeed"}  # it is in the JSON


def write_options(
    options: Sequence[Option], wish: Wish, folder: Path, *, overwrite: bool = False
) -> list[tuple[Path, Path | None]]:
    """Write a recipe of each option; returns (recipe, DeepSpeed JSON) of each.

    Raises UserError if a file cannot be written, or is there and is not to be overwritten; then none is written.
    """
    wanted = [file for number, option in enumerate(options, 1) for file in _files(option, folder, number) if file]
    there = [str(file) for file in wanted if file.exists()]
    if there and not overwrite:
        raise UserError(
            f"--write: there is {', '.join(there)} already; name another folder, or add --force to overwrite"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_write(option, wish, folder, number) for number, option in enumerate(options, 1)]
    except OSError as error:
        raise UserError(f"--write: {folder} cannot be written: {error.strerror or error}") from error


def _files(option: Option, folder: Path, number: int) -> tuple[Path, Path | None]:
    """The recipe, and the DeepSpeed JSON where there is one."""
    name = re.sub(r"[^a-z0-9]+", "_", option.family.name.lower()).strip("_")
    json = None if option.family.ds is None else folder / f"{number}_{name}.json"
    return folder / f"{number}_{name}.yaml", json


def _write(option: Option, wish: Wish, folder: Path, number: int) -> tuple[Path, Path | None]:
    recipe, json = _files(option, folder, number)
    if json is not None:
        assert option.family.ds is not None
        source = find_file(option.family.ds, kind="the DeepSpeed JSON", folder="ds_configs")
        json.write_bytes(source.read_bytes())
    recipe.write_text(_recipe(option, wish, command(option, wish, recipe, json)), encoding="utf-8")
    return recipe, json


def command(option: Option, wish: Wish, recipe: Path, json: Path | None) -> str:
    """What starts training with these files."""
    cluster = wish.gpus
    more = f" --ds {json}" if json is not None else ""
    if cluster.nodes > 1:
        return (
            f"qwen-edit-zero launch {recipe} --nodes {cluster.nodes} --gpus-per-node {cluster.gpus_per_node} "
            f"--launcher sbatch" + (f" --{more}" if more else "")
        )
    return f"torchrun --nproc_per_node {cluster.gpus_per_node} qwen_edit_zero/train.py {recipe}{more}"


def _recipe(option: Option, wish: Wish, start: str) -> str:
    about = [
        f"{option.family.name} on {wish.gpus.name}, as `qwen-edit-zero plan --recommend` chose it: {summary(option)}",
        sample_line(wish.sample, wish.sample_is_from),
        *(f"- {reason}" for reason in option.why),
    ]
    lines = [
        line for text in about for line in textwrap.wrap(text, 117, subsequent_indent="  " * text.startswith("- "))
    ]
    return "\n".join([*(f"# {line}" for line in lines), "#", f"#   {start}", *_stated(option), ""])


def _stated(option: Option) -> list[str]:
    """Settings that are not as by default, and those that were chosen, by section."""
    chosen = {override.partition("=")[0] for override in option.overrides}
    values, usual = plain(option.loaded.settings), plain(Settings.model_validate({"run": {"max_steps": 1}}))
    lines: list[str] = []
    for section, settings in values.items():
        inside = _lines(settings, usual[section], section, chosen, option)
        if inside:
            lines += [f"{section}:", *inside]
    return lines


def _lines(
    values: Mapping[str, Any], usual: Mapping[str, Any], path: str, chosen: set[str], option: Option
) -> list[str]:
    lines = []
    indent = "  " * (path.count(".") + 1)
    for key, value in values.items():
        name = f"{path}.{key}"
        if name in _LEFT_OUT or (value == usual.get(key) and not (name in chosen and _says_something(name))):
            continue
        if isinstance(value, dict) and isinstance(usual.get(key), dict):
            inside = _lines(value, usual[key], name, chosen, option)
            lines += [f"{indent}{key}:", *inside] if inside else []
        else:
            why = _why(name, option) if name in chosen else ""
            lines.append(f"{indent}{key}: {inline(value)}" + (f"  # {why}" if why else ""))
    return lines


def _says_something(name: str) -> bool:
    """Whether a chosen value that is the usual one is worth stating."""
    return name in (CHECKPOINTING, MICRO)


def _why(name: str, option: Option) -> str:
    job = option.plan.job
    if name == CHECKPOINTING and option.recompute is not None:
        return option.recompute.name
    if name == MICRO:
        times = f"{job.accumulation} micro-batch{'es' if job.accumulation > 1 else ''} a step"
        return f"on {job.data_ranks} {'GPUs' if job.sequence == 1 else 'groups of GPUs'}: {times}"
    if name == SEQUENCE:
        return "GPUs that share each sample"
    if name == MAX_REFERENCES:
        return "as it was planned for: more need more memory"
    return option.family.why if any(said.startswith(f"{name}=") for said in option.family.options) else ""
