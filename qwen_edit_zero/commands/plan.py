"""`qwen-edit-zero plan`: its arguments, and what it prints. Imports no torch."""

from __future__ import annotations

import argparse
import json
import math
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from qwen_edit_zero.errors import SettingsError, UserError
from qwen_edit_zero.planning.advice.sweep import AXES, Row, parse_axes, sweep, sweep_table, write_svg
from qwen_edit_zero.planning.hardware.clusters import (
    Accelerator,
    Cluster,
    known_accelerators,
    load_accelerators,
    parse_gpus,
)
from qwen_edit_zero.planning.hardware.here import gpus_here
from qwen_edit_zero.planning.jobs.job import make_job
from qwen_edit_zero.planning.jobs.wish import Shape, Wish
from qwen_edit_zero.planning.plan import Plan
from qwen_edit_zero.settings.command_line import Parser
from qwen_edit_zero.settings.load import load_settings
from qwen_edit_zero.settings.names import nearest
from qwen_edit_zero.settings.overrides import is_override

_EPILOG = """\
Nothing is started, downloaded or written. model.path may be a model folder, or the name of a released model:
Qwen-Image-Edit-2509, Qwen-Image-Edit-2511, Qwen-Image-Edit, Qwen-Image. Figures are those of the worst rank.

examples:
  qwen-edit-zero plan recipes/full_finetune.yaml --gpus 8xA100-80
  qwen-edit-zero plan recipes/lora.yaml --gpus 8x8xH100,net=50GB/s --ds ds_configs/zero3.json data.vae_area=589824
  qwen-edit-zero plan recipes/lora.yaml --recommend --gpus 8xA100-40 --write my_recipes
  qwen-edit-zero plan recipes/full_finetune.yaml --gpus 8xA100-80 --sweep gpus=8,16,64 area=512,1024 references=1,3
  qwen-edit-zero plan --compare runs/demo
"""
_MODES = ("recommend", "sweep", "compare")
DOES_NOT_FIT = 2  # exit status


def plan_parser() -> Parser:
    """The parser of `plan`."""
    parser = Parser(
        prog="qwen-edit-zero plan",
        description="Say what a run needs before a GPU is rented: memory, time, cost, and what would be better.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "words", nargs="*", metavar="RECIPE.yaml | section.key=value", help="one recipe (none: the demo); any settings"
    )
    parser.add_argument(
        "--gpus", metavar="[NODESx]GPUSxKIND", help="such as 8xA100-80 or 8x8xH100,net=25GB/s (default: those here)"
    )
    parser.add_argument("--ds", type=Path, metavar="FILE.json", help="DeepSpeed with this configuration")
    parser.add_argument("--engine", choices=("ddp", "fsdp2", "deepspeed"), help="the parallel engine")
    parser.add_argument("--references", type=_count, metavar="N", help="of the largest sample (default: by the data)")
    parser.add_argument("--text-tokens", type=_count, metavar="N", help="of its prompt (default: by the data)")
    parser.add_argument("--aspect", type=_aspect, default=1.0, metavar="W:H", help="of its pictures (default 1:1)")
    parser.add_argument(
        "--samples", type=_count, metavar="N", help="of the data set (default: its rows, if it is here)"
    )
    parser.add_argument("--price", type=_price, metavar="P", help="of a GPU-hour")
    parser.add_argument("--accelerators", type=Path, metavar="FILE.yaml", help="more kinds of GPU, or other figures")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, in bytes and seconds")
    modes = parser.add_argument_group("instead of one plan")
    modes.add_argument("--recommend", action="store_true", help="the few best ways to run the recipe on these GPUs")
    modes.add_argument("--write", type=_folder, metavar="DIR", help="with --recommend: write their recipes and JSONs")
    modes.add_argument("--force", action="store_true", help="with --write: overwrite files that are there")
    modes.add_argument("--sweep", action="store_true", help=f"a table over {', '.join(f'{axis}=A,B' for axis in AXES)}")
    modes.add_argument("--svg", type=Path, metavar="FILE", help="with --sweep: draw it, too")
    modes.add_argument("--compare", type=Path, metavar="RUN", help="predicted against measured, of a run that trained")
    return parser


def plan(given: Sequence[str]) -> int:
    """Print what is asked for; returns the exit status. Raises UserError for what cannot be."""
    parsed, words = _parse(given)
    if parsed.compare is not None:
        return _compare(parsed, words)
    axes = [word for word in words if parsed.sweep and word.partition("=")[0] in AXES]
    if parsed.sweep:
        _check_axes(words)
    recipe, overrides = _recipe([word for word in words if word not in axes])
    table = known_accelerators() if parsed.accelerators is None else load_accelerators(parsed.accelerators)
    cluster = _cluster(parsed, table)
    if isinstance(cluster, str) and (parsed.recommend or parsed.sweep):
        what = "--recommend" if parsed.recommend else "--sweep"
        raise UserError(f"{what} needs to know for which GPUs: {cluster}. Say it with --gpus, such as --gpus 8xA100-80")
    if isinstance(cluster, str):
        return _memory_only(parsed, recipe, overrides, cluster)
    wish = _wish(parsed, recipe, overrides, cluster)
    if parsed.recommend:
        return _recommend(parsed, wish)
    if parsed.sweep:
        return _sweep(parsed, sweep(wish, parse_axes(axes)))
    found = _plan(wish, cluster.world, cluster.gpus_per_node, cluster)
    _show(parsed, found, wish)
    return 0 if found.fits else DOES_NOT_FIT


def _parse(given: Sequence[str]) -> tuple[Namespace, list[str]]:
    parser = plan_parser()
    known, rest = parser.parse_known_intermixed_args(given)
    if rest:
        options = [name for action in parser._actions for name in action.option_strings]
        near = nearest(rest[0].split("=")[0], options)
        raise SettingsError(f"unknown option {rest[0]}" + (f"; did you mean {near}?" if near else "; see --help"))
    chosen = [f"--{mode}" for mode in _MODES if getattr(known, mode)]
    if len(chosen) > 1:
        raise SettingsError(f"{' and '.join(chosen)} are given; ask for one of them at a time")
    for option, mode in (("write", "recommend"), ("svg", "sweep")):
        if getattr(known, option) is not None and not getattr(known, mode):
            raise SettingsError(f"--{option} goes with --{mode}")
    if known.force and known.write is None:
        raise SettingsError("--force goes with --write")
    return known, known.words


def _check_axes(words: Sequence[str]) -> None:
    """What looks like an axis but is none, and no setting either: `gpu=8`."""
    for word in words:
        name = word.partition("=")[0]
        if is_override(word) and "." not in name and name not in (*AXES, "precision", "schedule"):
            parse_axes([word])


def _recipe(words: Sequence[str]) -> tuple[Path | None, tuple[str, ...]]:
    recipes = [word for word in words if not is_override(word)]
    if len(recipes) > 1:
        names = " and ".join(recipes)
        raise SettingsError(f"{names} are given; there is one recipe, and the rest must be section.key=value")
    return (Path(recipes[0]) if recipes else None), tuple(word for word in words if is_override(word))


def _cluster(parsed: Namespace, table: Mapping[str, Accelerator]) -> Cluster | str:
    return gpus_here(table) if parsed.gpus is None else parse_gpus(parsed.gpus, table)


def _wish(parsed: Namespace, recipe: Path | None, overrides: tuple[str, ...], cluster: Cluster | None) -> Wish:
    return Wish(
        recipe=recipe,
        overrides=overrides,
        engine=parsed.engine,
        ds=parsed.ds,
        cluster=cluster,
        shape=Shape(parsed.references, parsed.text_tokens, parsed.aspect),
        samples=parsed.samples,
        price=parsed.price,
    )


def _plan(wish: Wish, world: int, gpus_per_node: int, cluster: Cluster | None) -> Plan:
    loaded = load_settings(wish.recipe, overrides=wish.overrides, engine=wish.engine, ds=wish.ds, world_size=world)
    job = make_job(loaded.settings, cluster_world=world, gpus_per_node=gpus_per_node, sample=wish.sample)
    return Plan(job, cluster, wish.known_samples, wish.price)


def _memory_only(parsed: Namespace, recipe: Path | None, overrides: tuple[str, ...], why: str) -> int:
    wish = _wish(parsed, recipe, overrides, None)
    found = _plan(wish, 1, 1, None)
    if not parsed.json:
        print(f"for one rank, memory only: {why}; say for which GPUs with --gpus, such as --gpus 8xA100-80\n")
    _show(parsed, found, wish)
    return 0


def _show(parsed: Namespace, found: Plan, wish: Wish) -> None:
    from qwen_edit_zero.planning.words import page

    if parsed.json:
        from qwen_edit_zero.planning.as_json import as_json

        print(json.dumps(as_json(found), indent=1))
    else:
        print(page(found, sample_is_from=wish.sample_is_from))


def _recommend(parsed: Namespace, wish: Wish) -> int:
    from qwen_edit_zero.planning.advice.in_json import recommendation_json
    from qwen_edit_zero.planning.advice.recommend import recommend, recommendation_text
    from qwen_edit_zero.planning.advice.written import command, write_options

    found = recommend(wish)
    written = [] if parsed.write is None else write_options(found.best, wish, parsed.write, overwrite=parsed.force)
    if parsed.json:
        files = [{"recipe": str(recipe), "ds": None if ds is None else str(ds)} for recipe, ds in written]
        print(json.dumps(recommendation_json(wish, found) | {"written": files}, indent=1))
        return 0
    print(recommendation_text(wish, found))
    if written:
        print()
        for option, (recipe, ds) in zip(found.best, written, strict=True):
            print(f"written: {recipe}" + (f", {ds}" if ds is not None else ""))
            print(f"  {command(option, wish, recipe, ds)}")
    return 0


def _sweep(parsed: Namespace, rows: Sequence[Row]) -> int:
    from qwen_edit_zero.planning.advice.in_json import sweep_json

    print(json.dumps(sweep_json(rows), indent=1) if parsed.json else sweep_table(rows))
    if parsed.svg is not None:
        write_svg(rows, parsed.svg)
        if not parsed.json:
            print(f"written: {parsed.svg}")
    return 0 if any(row.plan is not None and row.plan.fits for row in rows) else DOES_NOT_FIT


def _compare(parsed: Namespace, words: Sequence[str]) -> int:
    from qwen_edit_zero.planning.evidence.compare import compare_run, comparison_json, comparison_text

    if words or parsed.gpus or parsed.ds or parsed.engine:
        raise SettingsError(
            "--compare takes a run folder alone: its settings and its GPUs are those it was trained with"
        )
    found = compare_run(parsed.compare)
    print(json.dumps(comparison_json(found), indent=1) if parsed.json else comparison_text(found))
    return 0


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) <= 10**12:
        raise ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _folder(text: str) -> Path:
    if not text.strip():
        raise ArgumentTypeError("it is empty; name a folder, . for this one")
    return Path(text)


def _aspect(text: str) -> float:
    width, _, height = text.partition(":")
    try:
        value = float(width) / float(height or 1)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not 1 / 200 <= value <= 200:
        raise ArgumentTypeError(f"{text!r} is no aspect; write width:height, such as 16:9, of at most 200:1")
    return value


def _price(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise ArgumentTypeError(f"{text!r} is no price; write a number, of one GPU for one hour")
    return value
