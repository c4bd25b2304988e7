"""Batch arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.batch import derive_accumulation
from qwen_edit_zero.settings.load import load_settings
from qwen_edit_zero.settings.models import BatchSettings
from tests.settings.loading import MINIMAL, load, message

SIZES = st.integers(1, 200)


@given(st.integers(1, 5000), SIZES, SIZES)
def test_accumulation_makes_the_product_or_there_is_an_error(total: int, micro: int, world: int) -> None:
    batch = BatchSettings(global_size=total, micro_size=micro)
    try:
        steps = derive_accumulation(batch, world)
    except SettingsError:
        assert total % (micro * world)
    else:
        assert steps * micro * world == total


@given(st.integers(1, 5000), SIZES, SIZES)
def test_the_sizes_that_the_message_lists_do_fit(total: int, micro: int, world: int) -> None:
    if total % (micro * world) == 0:
        return
    with pytest.raises(SettingsError) as caught:
        derive_accumulation(BatchSettings(global_size=total, micro_size=micro), world)
    globals_, micros, worlds = (line.split(": ", 1)[1] for line in str(caught.value).splitlines()[1:])
    fits = [BatchSettings(global_size=int(n), micro_size=micro) for n in globals_.split(", ")]
    assert fits
    for batch in fits:
        derive_accumulation(batch, world)
    for text in micros.split(", "):
        if text.isdigit():
            derive_accumulation(BatchSettings(global_size=total, micro_size=int(text)), world)
    for text in worlds.split(", "):
        if text.isdigit():
            derive_accumulation(BatchSettings(global_size=total, micro_size=micro), int(text))


def test_an_uneven_batch_is_found_while_loading_with_the_places(tmp_path: Path) -> None:
    text = message(tmp_path, MINIMAL + "batch:\n  global_size: 8\n", world_size=3, overrides=["batch.micro_size=2"])
    assert text.startswith(
        "batch.global_size 8 (r.yaml:4) does not divide over 3 ranks with batch.micro_size 2 (override)"
    )
    assert "global sizes that fit: 6, 12, 18" in text
    assert "numbers of ranks that fit both as they are: 1, 2, 4" in text


def test_groups_that_split_sequences_count_as_one_rank(tmp_path: Path) -> None:
    batch = BatchSettings(global_size=12, micro_size=2)
    assert derive_accumulation(batch, 6, sequence_parallel=3) == derive_accumulation(batch, 2) == 3
    split = ["engine.sequence_parallel=4"]
    recipe = MINIMAL + "batch: {global_size: 2, micro_size: 1}\n"
    assert load(tmp_path, recipe, world_size=8, overrides=split).settings.engine.sequence_parallel == 4
    text = message(tmp_path, recipe, world_size=16, overrides=split)
    assert "does not divide over 4 groups of 4 ranks with batch.micro_size 1" in text
    assert "numbers of ranks that fit both as they are: 4, 8" in text
    text = message(tmp_path, recipe, world_size=6, overrides=split)
    assert "engine.sequence_parallel 4 (override) does not divide 6 ranks; sizes that do: 1, 2, 3, 6" in text


def test_the_demo_without_a_recipe_is_split_over_groups() -> None:
    size = load_settings(None).settings.batch.global_size
    batch = load_settings(None, world_size=4 * size, overrides=["engine.sequence_parallel=4"]).settings.batch
    assert (batch.global_size, batch.micro_size) == (size, 1)


@pytest.mark.parametrize("world", [1, 2, 4, 8, 16, 64, 512])
def test_the_demo_without_a_recipe_is_split_over_any_number_of_ranks_that_divides_or_exceeds_it(world: int) -> None:
    stated = load_settings(None).settings.batch
    assert stated.global_size % 2 == 0
    if world < stated.global_size and stated.global_size % world:
        return
    batch = load_settings(None, world_size=world).settings.batch
    assert batch.global_size == max(stated.global_size, world)
    assert 1 <= batch.micro_size <= stated.micro_size
    derive_accumulation(batch, world)


def test_the_demo_on_ranks_that_do_not_divide_it_is_an_error() -> None:
    world = load_settings(None).settings.batch.global_size - 1
    with pytest.raises(SettingsError, match=f"does not divide over {world} ranks"):
        load_settings(None, world_size=world)


def test_what_the_command_line_says_about_the_demo_batch_is_not_changed() -> None:
    with pytest.raises(SettingsError, match="does not divide over 4 ranks"):
        load_settings(None, world_size=4, overrides=["batch.global_size=6", "batch.micro_size=1"])


def test_an_elastic_run_lowers_the_micro_size_for_the_ranks_it_has_and_never_the_global_one(tmp_path: Path) -> None:
    recipe = MINIMAL + "batch: {global_size: 48, micro_size: 4}\n"
    assert "does not divide over 16 ranks" in message(tmp_path, recipe, world_size=16)
    elastic = ["run.elastic=true"]
    sizes = {
        world: load(tmp_path, recipe, world_size=world, overrides=elastic).settings.batch for world in (4, 8, 12, 16)
    }
    assert {batch.global_size for batch in sizes.values()} == {48}
    assert {world: batch.micro_size for world, batch in sizes.items()} == {4: 4, 8: 2, 12: 4, 16: 1}
    loaded = load(tmp_path, recipe, world_size=16, overrides=elastic)
    assert "lowered from 4 for 16 ranks" in loaded.sources["batch.micro_size"]
    assert "numbers of ranks that fit both as they are" in message(tmp_path, recipe, world_size=5, overrides=elastic)
