"""Load the settings of a run: recipe, command line and DeepSpeed JSON, checked against one another.

Later wins: defaults, numbers of the DeepSpeed JSON, recipe, `--fast-dev-run`, overrides, `--engine` and `--ds`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings import deepspeed_config
from qwen_edit_zero.settings.batch import derive_accumulation
from qwen_edit_zero.settings.checks import cross_field_problems, world_problems
from qwen_edit_zero.settings.files import DEFAULT_DEEPSPEED, DEFAULT_RECIPE, find_file
from qwen_edit_zero.settings.layers import Layer, dotted
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.settings.names import SHORT_FORMS
from qwen_edit_zero.settings.overrides import parse_overrides
from qwen_edit_zero.settings.problems import describe, raise_listed
from qwen_edit_zero.settings.strict_json import read_json
from qwen_edit_zero.settings.yaml_source import read_yaml

_FAST_DEV_RUN: dict[tuple[str, str], Any] = {
    ("run", "max_steps"): 2,
    ("run", "log_every"): 1,
    ("schedule", "warmup_steps"): 0,
    ("checkpoint", "every"): None,
    ("validation", "samples"): 4,
    ("sampling", "every"): None,
    ("sampling", "count"): 1,
    ("sampling", "steps"): 2,
    ("data", "max_samples"): 16,
}
BACKEND = ("engine", "backend")
DEEPSPEED = ("engine", "deepspeed")


@dataclass(frozen=True)
class LoadedSettings:
    """The settings of a run and, by dotted name, where each value was said.

    A source is `default`, `override`, `--engine`, `--ds`, `--fast-dev-run` or a file with its line
    (`recipes/demo.yaml:12`). `engine.deepspeed.*` values may also name the setting that they follow from.
    """

    settings: Settings
    sources: dict[str, str]


def load_settings(
    recipe: Path | None,
    *,
    overrides: Sequence[str] = (),
    ds: Path | None = None,
    engine: str | None = None,
    fast_dev_run: bool = False,
    world_size: int | None = None,
) -> LoadedSettings:
    """Return the settings that `recipe` (None: the demo recipe), `overrides` and the options make together.

    `world_size` is the number of ranks where it is known: then batch and shards are checked against it.
    Raises SettingsError, listing everything that is wrong, each with its place.
    """
    given = recipe if recipe is not None else DEFAULT_RECIPE
    stated = read_yaml(find_file(given, kind="the recipe", folder="recipes"), shown=str(given))
    _write_out(stated)
    said = parse_overrides(overrides)
    if fast_dev_run:
        _lay_fast_dev_run(stated)
    stated.lay_over(said)
    if fast_dev_run:
        _name_fast_dev_run(stated)
    _choose_engine(stated, said, ds=ds, engine=engine)
    json_layer = _deepspeed_json(stated, ds)
    claims: list[deepspeed_config.Claim] = []
    if json_layer is not None:
        problems = deepspeed_config.problems_of(json_layer)
        raise_listed(problems + _field_problems(stated) if problems else [], "settings")
        claims = deepspeed_config.claims_of(json_layer, stated)
        for claim in claims:
            if not stated.has(claim.setting):
                stated.put(claim.setting, claim.value, claim.place)
    if recipe is None:
        _fit_demo_batch(stated, said, world_size)
    _fit_elastic(stated, world_size)
    settings, sources = _validated(stated)
    problems = deepspeed_config.contradictions(claims, settings, sources)
    problems += cross_field_problems(settings, sources)
    if json_layer is not None:
        found = (
            deepspeed_config.frozen_problem(json_layer, settings, sources),
            deepspeed_config.accumulation_problem(json_layer, settings, sources, world_size),
        )
        problems += [problem for problem in found if problem is not None]
    raise_listed(problems, "settings")
    if world_size is not None:
        raise_listed(world_problems(settings, sources, world_size), "settings")
        derive_accumulation(settings.batch, world_size, sources, sequence_parallel=settings.engine.sequence_parallel)
    if json_layer is not None:
        values, places = deepspeed_config.completed(json_layer, settings)
        stated.put(DEEPSPEED, None, "default")
        stated.lay_over(
            Layer(
                {"engine": {"deepspeed": values}},
                {("engine",): "default", DEEPSPEED: "default"} | {(*DEEPSPEED, *p): at for p, at in places.items()},
            )
        )
        settings, sources = _validated(stated)
    return LoadedSettings(settings, sources)


def load_for_manifest(manifest: str, *, overrides: Sequence[str] = ()) -> LoadedSettings:
    """The settings by which a manifest is looked at without a recipe: defaults and `overrides`.

    Raises SettingsError as `load_settings`.
    """
    said = parse_overrides(overrides)
    if said.has(("data", "manifest")):
        raise SettingsError(
            f"{manifest} and data.manifest={said.get(('data', 'manifest'))} both name a manifest; keep one of them"
        )
    stated = Layer()
    stated.put(("run", "max_steps"), 1, "default")
    stated.lay_over(said)
    stated.put(("data", "manifest"), manifest, "command line")
    settings, sources = _validated(stated)
    raise_listed(cross_field_problems(settings, sources), "settings")
    return LoadedSettings(settings, sources)


def _write_out(layer: Layer) -> None:
    """`precision: bf16` becomes `precision: {mode: bf16}`, so that layers can be merged."""
    for section, key in SHORT_FORMS.items():
        value = layer.values.get(section)
        if isinstance(value, str):
            place = layer.places[(section,)]
            layer.put((section,), {key: value}, place)


def _lay_fast_dev_run(stated: Layer) -> None:
    for path, value in _FAST_DEV_RUN.items():
        stated.put(path, value, "--fast-dev-run")
    if stated.has(("run", "epochs")):
        stated.put(("run", "epochs"), None, "--fast-dev-run")


def _name_fast_dev_run(stated: Layer) -> None:
    """Whatever the run's name: a trial starts over each time, and must not move a real run aside."""
    name = stated.get(("run", "name")) if stated.has(("run", "name")) else Settings.model_fields["run"].default.name
    if isinstance(name, str):
        stated.put(("run", "name"), f"{name}-fast-dev-run", "--fast-dev-run")


def _choose_engine(stated: Layer, said: Layer, *, ds: Path | None, engine: str | None) -> None:
    """Lay `--engine` and `--ds` over the rest. Raises SettingsError if they contradict each other or an override."""
    wishes = {f"--engine {engine}": engine} if engine is not None else {}
    if ds is not None:
        wishes[f"--ds {ds}"] = "deepspeed"
    if said.has(BACKEND):
        wishes[f"engine.backend={said.get(BACKEND)}"] = said.get(BACKEND)
    if len(set(wishes.values())) > 1:
        raise SettingsError(f"{' and '.join(wishes)} name different engines (--ds means deepspeed); keep one of them")
    if engine is not None:
        stated.put(BACKEND, engine, "--engine")
    if ds is not None:
        stated.put(BACKEND, "deepspeed", "--ds")


def _deepspeed_json(stated: Layer, ds: Path | None) -> Layer | None:
    """The DeepSpeed JSON of this run: of `--ds`, of the recipe's engine.deepspeed, or the shipped one; None: unused."""
    inline = stated.has(DEEPSPEED) and stated.get(DEEPSPEED) is not None
    if not stated.has(BACKEND) or stated.get(BACKEND) != "deepspeed":
        return None
    if inline and ds is not None:
        raise SettingsError(
            f"engine.deepspeed ({stated.place(DEEPSPEED)}) and --ds {ds} both hold a DeepSpeed configuration; keep one"
        )
    if inline:
        values = stated.get(DEEPSPEED)
        if not isinstance(values, dict):
            return None  # reported with the other wrong values
        n = len(DEEPSPEED)
        return Layer(values, {path[n:]: place for path, place in stated.places.items() if path[:n] == DEEPSPEED})
    given = ds if ds is not None else DEFAULT_DEEPSPEED
    return read_json(find_file(given, kind="the DeepSpeed JSON", folder="ds_configs"), shown=str(given))


def _fit_demo_batch(stated: Layer, said: Layer, world_size: int | None) -> None:
    """Where no recipe is named, split the demo's batch over the ranks: smaller micros, and at least a sample a rank.

    A number of ranks that does not divide the batch stays a mistake, and so does what the command line says itself.
    """
    total, micro = ("batch", "global_size"), ("batch", "micro_size")
    if world_size is None or said.has(total) or said.has(micro) or not (stated.has(total) and stated.has(micro)):
        return
    size, shares = stated.get(total), _shares(stated, world_size)
    if type(size) is not int or size < 1 or shares is None:
        return
    if shares > size:
        stated.put(total, shares, f"{stated.place(total)}, raised from {size} for {world_size} ranks")
    _lower_micro(stated, world_size)


def _fit_elastic(stated: Layer, world_size: int | None) -> None:
    """Under `run.elastic`, lower the micro size where another number of ranks needs it: after nodes have been lost."""
    elastic = ("run", "elastic")
    if world_size is not None and stated.has(elastic) and stated.get(elastic) is True:
        _lower_micro(stated, world_size)


def _lower_micro(stated: Layer, world_size: int) -> None:
    """The largest part of the micro size that divides each rank's samples; unchanged where nothing fits."""
    total, micro = ("batch", "global_size"), ("batch", "micro_size")
    shares = _shares(stated, world_size)
    if shares is None or not (stated.has(total) and stated.has(micro)):
        return
    size, each = stated.get(total), stated.get(micro)
    if type(size) is not int or type(each) is not int or size < 1 or each < 1:
        return
    if size % shares == 0 and size // shares % each:
        fitting = math.gcd(size // shares, each)
        stated.put(micro, fitting, f"{stated.place(micro)}, lowered from {each} for {world_size} ranks")


def _shares(stated: Layer, world_size: int) -> int | None:
    """Ranks, or groups of ranks that split sequences; None if the settings say something impossible."""
    split = ("engine", "sequence_parallel")
    sharing = stated.get(split) if stated.has(split) else 1
    if type(sharing) is not int or sharing < 1 or world_size % sharing:
        return None  # reported with the other mistakes
    return world_size // sharing


def _field_problems(stated: Layer) -> list[str]:
    try:
        _parse(stated)
    except ValidationError as error:
        return describe(error, stated)
    return []


def _parse(stated: Layer) -> Settings:
    return Settings.model_validate_json(json.dumps(stated.values), strict=True)


def _validated(stated: Layer) -> tuple[Settings, dict[str, str]]:
    try:
        settings = _parse(stated)
    except ValidationError as error:
        raise_listed(describe(error, stated), "settings")
        raise AssertionError("a validation error describes itself") from error
    sources = {
        dotted(path): (stated.place(path) or "default") if stated.has(path) else "default"
        for path in _leaves(settings, ())
    }
    return settings, sources


def _leaves(value: Any, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    if isinstance(value, BaseModel):
        items: dict[str, Any] = {name: getattr(value, name) for name in type(value).model_fields}
    elif isinstance(value, dict) and value:
        items = value
    else:
        return [path]
    return [leaf for name, item in items.items() for leaf in _leaves(item, (*path, name))]
