"""Sets of samples prepared for training: exactly what is missing is made, by any number of ranks, whatever happens."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from qwen_edit_zero.edit_data.cache import needs, shard
from qwen_edit_zero.edit_data.cache.needs import Making, needs_of
from qwen_edit_zero.edit_data.cache.survey import Chunk
from qwen_edit_zero.edit_data.manifests.samples import Sample
from qwen_edit_zero.edit_data.pictures.decode import load_picture
from qwen_edit_zero.edit_data.pictures.draws import PLAIN, Draw
from qwen_edit_zero.edit_data.pictures.prepare import Areas
from qwen_edit_zero.edit_data.storage.local import LocalFile, LocalPlace
from qwen_edit_zero.errors import DataError, StorageError
from qwen_edit_zero.settings.models import AugmentSettings
from tests.edit_data.builders import quadrants, row, save_pictures, write_manifest
from tests.edit_data.cache.filling import AREAS, Encoders, Filled, equal_samples, fill, same

ROWS = [row(i, references=1 + i % 3) for i in range(11)]
PICTURES = sum(1 + len(r["source"]) for r in ROWS)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    save_pictures(tmp_path, ROWS)
    return write_manifest(tmp_path, ROWS)


def test_the_result_does_not_depend_on_the_number_of_ranks(manifest: Path, tmp_path: Path) -> None:
    one, three = fill(manifest, tmp_path / "1"), fill(manifest, tmp_path / "3", ranks=3)
    assert same(one.set, three.set)
    assert all(equal_samples(a, b) for a, b in zip(one.samples, three.samples, strict=True))
    assert one.set.made == three.set.made == PICTURES + 11
    assert sorted(len(e.prompts) for e in three.encoders) == [3, 4, 4]
    assert max(e.latents for e in three.encoders) - min(e.latents for e in three.encoders) <= 1


def test_a_sample_gets_its_own_pictures_in_order_and_its_own_text(manifest: Path, tmp_path: Path) -> None:
    filled, encoders = fill(manifest, tmp_path / "c", ranks=2), Encoders()
    for i, entry in enumerate(filled.samples):
        names = [filled.table[i].target_name, *filled.table[i].source_names]
        prepared = [load_picture(tmp_path / name).resize((64, 64), Image.Resampling.LANCZOS) for name in names]
        made = [encoders.latent(picture) for picture in prepared]
        assert torch.equal(entry.target_latent, made[0])
        assert len(entry.reference_latents) == len(made) - 1
        assert all(map(torch.equal, entry.reference_latents, made[1:]))
        shown = [load_picture(tmp_path / name).resize((32, 32), Image.Resampling.LANCZOS) for name in names[1:]]
        assert torch.equal(entry.prompt_embeds, encoders.prompt(shown, filled.table[i].instruction))


def test_a_full_cache_serves_any_number_of_ranks_without_an_encoder(manifest: Path, tmp_path: Path) -> None:
    first = fill(manifest, tmp_path / "c", ranks=3)
    again = fill(manifest, tmp_path / "c", ranks=4)
    assert same(first.set, again.set)
    assert (again.set.made, again.latents, again.prompts) == (0, 0, [])


def test_known_pictures_are_not_read_again(manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen_edit_zero.edit_data.storage.files._TOO_YOUNG_NS", -1)
    before = fill(manifest, tmp_path / "c", ranks=2)
    read: list[str] = []
    real = LocalFile.read
    monkeypatch.setattr(LocalFile, "read", lambda self, limit: read.append(self.name) or real(self, limit))
    assert same(fill(manifest, tmp_path / "c").set, before.set)
    assert read == []
    changed = tmp_path / "t3.png"
    times = (changed.stat().st_atime_ns, changed.stat().st_mtime_ns)
    content = changed.read_bytes()
    changed.write_bytes(content)
    os.utime(changed, ns=times)  # its size and modification time are as they were
    fill(manifest, tmp_path / "c")
    assert read == [str(changed)]


def test_a_young_picture_is_not_remembered(manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen_edit_zero.edit_data.storage.files._TOO_YOUNG_NS", 10**15)
    fill(manifest, tmp_path / "c")
    read: list[str] = []
    real = LocalFile.read
    monkeypatch.setattr(LocalFile, "read", lambda self, limit: read.append(self.name) or real(self, limit))
    fill(manifest, tmp_path / "c")
    assert len(read) == PICTURES


def change_target(folder: Path) -> dict[str, Any]:
    quadrants(40, 40).save(folder / "t4.png")
    return {}


def change_reference(folder: Path) -> dict[str, Any]:
    quadrants(40, 40).save(folder / "s4_0.png")
    return {}


def swap_references(folder: Path) -> dict[str, Any]:
    a, b = folder / "s4_0.png", folder / "s4_1.png"
    one, two = a.read_bytes(), b.read_bytes()
    a.write_bytes(two)
    b.write_bytes(one)
    return {}


def change_instruction(folder: Path) -> dict[str, Any]:
    rows = [dict(r) for r in ROWS]
    rows[4]["instruction"] = "other"
    write_manifest(folder, rows)
    return {}


def rename(folder: Path) -> dict[str, Any]:
    (folder / "t4.png").rename(folder / "new.png")
    rows = [dict(r) for r in ROWS]
    rows[4] |= {"target": "new.png", "id": "z", "category": "c", "weight": 3}
    write_manifest(folder, rows)
    return {}


CHANGES = {  # (pictures encoded, texts encoded)
    "nothing": (lambda folder: {}, (0, 0)),
    "a target": (change_target, (1, 0)),
    "a reference": (change_reference, (1, 1)),
    "the order of references": (swap_references, (0, 1)),
    "an instruction": (change_instruction, (0, 1)),
    "names, ids, weights": (rename, (0, 0)),
    "the VAE": (lambda folder: {"vae": {"vae": "two"}}, (PICTURES, 0)),
    "the text encoder": (lambda folder: {"text_encoder": {"text_encoder": "two"}}, (0, 11)),
    "the VAE's area": (lambda folder: {"making": Making(replace(AREAS, vae=96 * 96))}, (PICTURES, 0)),
    "the text encoder's area": (lambda folder: {"making": Making(replace(AREAS, condition=64 * 64))}, (0, 11)),
    "more texts": (lambda folder: {"making": Making(AREAS, texts=lambda s: (s.instruction, "", "more"))}, (0, 22)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_exactly_what_a_change_concerns_is_made_again(name: str, manifest: Path, tmp_path: Path) -> None:
    change, (latents, prompts) = CHANGES[name]
    before = fill(manifest, tmp_path / "c")
    options = change(tmp_path)
    after = fill(manifest, tmp_path / "c", **options)
    assert (after.latents, len(after.prompts)) == (latents, prompts)
    assert same(fill(manifest, tmp_path / "new", **options).set, after.set)
    if options:
        back = fill(manifest, tmp_path / "c")
        assert back.set.made == 0, "settings can be changed back and forth"
        assert same(back.set, before.set)


def test_one_instruction_with_other_references_is_another_entry(tmp_path: Path) -> None:
    rows = [{**row(i, references=2), "instruction": "same"} for i in range(3)]
    save_pictures(tmp_path, rows)
    rows.append({**rows[0], "id": "swapped", "source": rows[0]["source"][::-1]})
    rows.append({**rows[0], "id": "fewer", "source": rows[0]["source"][:1]})
    rows.append({**rows[0], "id": "twice", "source": rows[0]["source"][:1] * 2})
    rows.append({**rows[0], "id": "twin", "weight": 3})
    filled = fill(write_manifest(tmp_path, rows), tmp_path / "c", ranks=2)
    prompts = [filled.set.key(i).prompt for i in range(7)]
    assert len(set(prompts)) == 6
    assert prompts[6] == prompts[0]
    assert filled.latents == 9, "a picture is encoded once, however many samples show it"
    assert len(filled.prompts) == 6


def test_what_one_killed_rank_left_undone_is_split_evenly(manifest: Path, tmp_path: Path) -> None:
    filled = fill(manifest, tmp_path / "c", ranks=2)
    folder = tmp_path / "c"
    shards = sorted(folder.glob("prompt-*/shards/*.safetensors"))
    lost = len(shard.read_records(shards[0]))
    shard.delete_shard(shards[0])
    again = fill(manifest, tmp_path / "c", ranks=2)
    assert sum(len(e.prompts) for e in again.encoders) == lost
    assert sorted(len(e.prompts) for e in again.encoders) == [lost // 2, lost - lost // 2]
    assert same(filled.set, again.set)


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damage_is_found_and_only_that_is_made_again(damage: str, manifest: Path, tmp_path: Path) -> None:
    filled = fill(manifest, tmp_path / "c")
    (path,) = (tmp_path / "c").glob("latent-*/shards/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content if damage == "flip" else content[:-1])
    if damage == "flip":
        with pytest.raises(DataError, match="struck out"):
            fill(manifest, tmp_path / "c")
    again = fill(manifest, tmp_path / "c", ranks=2)
    assert (again.latents, again.prompts) == (1, [])
    assert all(equal_samples(a, b) for a, b in zip(filled.samples, again.samples, strict=True))


def spoil(folder: Path) -> None:
    """Row 2 names a file that is not there, row 6 a picture cut in the middle, row 9 one that is no picture."""
    (folder / "s1_0.png").unlink()
    data = (folder / "t5.png").read_bytes()
    (folder / "t5.png").write_bytes(data[: len(data) // 2])
    (folder / "s8_1.png").write_text("<html>")


def test_unusable_rows_stop_all_ranks_with_one_message(manifest: Path, tmp_path: Path) -> None:
    spoil(tmp_path)
    with pytest.raises(DataError) as caught:
        fill(manifest, tmp_path / "c", ranks=3)
    text = str(caught.value)
    assert "2 rows cannot be used" in text or "3 rows cannot be used" in text
    assert 'line 2 ("a1"): picture "s1_0.png" is not there: the manifest\'s folder has no "s1_0.png"' in text
    assert "s8_1.png" in text
    assert "data.on_error=skip" in text


@pytest.mark.parametrize("ranks", [1, 3])
def test_unusable_rows_are_left_out_on_every_rank_by_name(ranks: int, manifest: Path, tmp_path: Path) -> None:
    spoil(tmp_path)
    for _ in range(2):  # the second time nothing is left to encode but what cannot be
        filled = fill(manifest, tmp_path / "c", ranks=ranks, on_error="skip")
        assert filled.ids == [f"a{i}" for i in range(11) if i not in (1, 5, 8)]
        assert filled.set.refused.count == 3
        assert sorted(r.id or "" for r in filled.set.refused.first) == ["a1", "a5", "a8"]
    assert filled.prompts == []
    assert filled.set.made == 0


def test_an_instruction_that_the_encoder_refuses_leaves_out_its_row(manifest: Path, tmp_path: Path) -> None:
    def refusing() -> Encoders:
        return Encoders(refuse=lambda text: text == "改成 3")

    with pytest.raises(DataError, match=r"line 4 .*too long"):
        fill(manifest, tmp_path / "c", new_encoders=refusing)
    filled = fill(manifest, tmp_path / "c", ranks=2, on_error="skip", new_encoders=refusing)
    assert [r.id for r in filled.set.refused.first] == ["a3"]
    assert len(filled.ids) == 10


def test_a_set_without_one_usable_row_is_refused(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, ROWS)
    with pytest.raises(DataError, match=r"no row can be used: 11 rows cannot be used"):
        fill(manifest, tmp_path / "c", on_error="skip")


def test_numbers_that_are_not_finite_never_reach_the_cache(manifest: Path, tmp_path: Path) -> None:
    class Overflowing(Encoders):
        def latent(self, picture: Any) -> torch.Tensor:
            return super().latent(picture) * float("inf")

    with pytest.raises(DataError, match=r"line 1 .*not finite"):
        fill(manifest, tmp_path / "c", new_encoders=Overflowing)
    assert not list((tmp_path / "c").glob("latent-*/shards/*"))


def test_a_full_disk_is_said_and_what_was_written_stays(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = os.pwrite, []

    def full(fd: int, data: Any, offset: int) -> int:
        if len(written) == 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(offset)
        return real(fd, data, offset)

    monkeypatch.setattr(shard.os, "pwrite", full)
    with pytest.raises(StorageError, match=r"writing an entry failed \(No space left.* are free.*data\.cache_dir"):
        fill(manifest, tmp_path / "c")
    monkeypatch.undo()
    assert len(fill(manifest, tmp_path / "c").prompts) == 11 - 6


def test_a_disk_that_will_be_full_is_said_before_anything_is_encoded(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Encoders] = []

    def noted() -> Encoders:
        made.append(Encoders())
        return made[-1]

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    expected = r"about [0-9.]+ kB of latents and embeddings are missing, and 10 kB are free.*data\.cache_dir"
    with pytest.raises(StorageError, match=expected):
        fill(manifest, tmp_path / "c", ranks=2, new_encoders=noted)
    assert [e.latents for e in made] == [0, 0]


def test_a_picture_that_changes_while_the_run_begins_is_refused(manifest: Path, tmp_path: Path) -> None:
    class Meddling(Encoders):
        def prompt(self, references: Any, instruction: str) -> torch.Tensor:
            quadrants(20, 20).save(tmp_path / "t7.png")
            return super().prompt(references, instruction)

    with pytest.raises(DataError, match=r"line 8 .*t7\.png.*has changed since"):
        fill(manifest, tmp_path / "c", new_encoders=Meddling)


def test_masks_and_variants_and_texts_have_entries_of_their_own(tmp_path: Path) -> None:
    rows = [{**row(i, references=2), **({"mask": f"m{i}.png"} if i % 2 else {})} for i in range(4)]
    save_pictures(tmp_path, rows)
    for i in (1, 3):
        mask = Image.new("L", (48, 32))
        mask.paste(255, (0, 0, 24, 32))
        mask.save(tmp_path / f"m{i}.png")
    augment = AugmentSettings(crop=0.6)
    making = Making(AREAS, variants=3, augment=augment, seed=1, texts=lambda s: (s.instruction, f"{s.id}!", ""))
    manifest = write_manifest(tmp_path, rows)
    filled = fill(manifest, tmp_path / "c", ranks=2, making=making)
    found = filled.set
    assert found.variants == 3
    assert [found.texts_of(i) for i in range(4)] == [3, 3, 3, 3]
    keys = {found.key(i, variant=v, text=t) for i in range(4) for v in range(3) for t in range(3)}
    assert len({k.target for k in keys}) == 12, "each variant is cropped in its own way"
    assert len({k.prompt for k in keys}) == 36
    assert [found.key(i).mask is not None for i in range(4)] == [False, True, False, True]
    mask_entry = filled.samples[1].mask
    assert mask_entry is not None
    assert mask_entry.dtype == torch.uint8
    assert mask_entry.shape == filled.samples[1].target_latent.shape[1:]
    assert mask_entry[0, 0] == 255
    assert mask_entry[-1, -1] == 0
    plain = fill(manifest, tmp_path / "c")
    assert plain.set.made == 0, "the first variant is the plain one, and the first text the instruction"


def test_buckets_are_the_sizes_of_the_latents(tmp_path: Path) -> None:
    rows = [row(i, references=1 + i % 2) for i in range(8)]
    save_pictures(tmp_path, rows)
    for i in range(8):
        quadrants(40 + 16 * (i % 4), 48).save(tmp_path / f"t{i}.png")
    filled = fill(write_manifest(tmp_path, rows), tmp_path / "c", ranks=3)
    for i, sample in enumerate(filled.samples):
        sides = filled.set.buckets[filled.set.bucket_codes[i]].tolist()
        latents = (sample.target_latent, *sample.reference_latents)
        assert [[t.shape[2] * 8, t.shape[1] * 8] for t in latents] == [side for side in sides if side[0]]
    assert len(filled.set.buckets) == len({tuple(map(tuple, b)) for b in filled.set.buckets.tolist()})


def test_prompt_lengths_are_known_before_anything_is_read(manifest: Path, tmp_path: Path) -> None:
    filled = fill(manifest, tmp_path / "c", ranks=2)
    assert filled.set.text_tokens().tolist() == [len(s.prompt_embeds) for s in filled.samples]


def test_the_fingerprint_follows_samples_order_and_buckets(manifest: Path, tmp_path: Path) -> None:
    def fingerprint(filled: Filled) -> str:
        return filled.set.fingerprint(filled.table.fingerprint)

    filled = fill(manifest, tmp_path / "c", ranks=2)
    base, content = fingerprint(filled), filled.set.content()
    again = fill(manifest, tmp_path / "c")
    assert (fingerprint(again), again.set.content()) == (base, content)
    picture = (tmp_path / "t3.png").read_bytes()
    (tmp_path / "t3.png").write_bytes((tmp_path / "t2.png").read_bytes())
    assert fill(manifest, tmp_path / "c").set.content() != content
    (tmp_path / "t3.png").write_bytes(picture)
    quadrants(90, 20).save(tmp_path / "t3.png")
    assert fingerprint(fill(manifest, tmp_path / "c")) != base
    (tmp_path / "t3.png").unlink()
    assert fingerprint(fill(manifest, tmp_path / "c", on_error="skip")) != base


SIDES = st.integers(8, 900)
SIZES = st.tuples(SIDES, SIDES)


@given(st.lists(st.lists(SIZES, min_size=2, max_size=4), min_size=1, max_size=6), st.sampled_from(["none", "crop"]))
@settings(max_examples=150, deadline=None)
def test_the_short_way_to_keys_is_the_long_one(sizes: list[list[tuple[int, int]]], align: Any) -> None:
    nearly = [[s[0], *((min(s[0][0] + i, 900), s[0][1]) for i in range(1, len(s)))] for s in sizes]
    everything = [*sizes, *nearly, *([s[0]] * len(s) for s in sizes)]
    samples = [
        Sample(f"{i}", LocalPlace(Path("/")), tuple("s" * (len(s) - 1)), f"x{i}", "t") for i, s in enumerate(everything)
    ]
    table = np.zeros((len(samples), 5, 2), np.int32)
    for i, s in enumerate(everything):
        table[i, : len(s)] = s
    digests = np.random.default_rng(0).integers(0, 256, (len(samples), 5, 16), np.uint8)
    making = Making(Areas(128 * 128, 56 * 56), align=align)
    with pytest.MonkeyPatch.context() as patch:
        short = needs_of(Chunk(0, samples, table, digests), making)
        patch.setattr(needs, "PLAIN", Draw())  # equal, but not the same: each sample then gets a plan of its own
        patch.setattr(Making, "draws", lambda *_: (PLAIN,))
        long = needs_of(Chunk(0, samples, table, digests), making)
    assert short.reasons == long.reasons
    for name in ("latents", "prompts", "texts"):
        assert np.array_equal(getattr(short, name), getattr(long, name)), name
