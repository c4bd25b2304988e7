"""From tables of samples to sets that can be trained on: every sample surveyed, and all of its entries in the cache."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.edit_data.cache.columns import Column, Part
from qwen_edit_zero.edit_data.cache.fill import Encoders, Filler, NewBar, Rows
from qwen_edit_zero.edit_data.cache.needs import Needs, needs_of
from qwen_edit_zero.edit_data.cache.refusals import RefusalLog, Refused, listed
from qwen_edit_zero.edit_data.cache.sets import Needed, PreparedSet, SetSpec
from qwen_edit_zero.edit_data.cache.sorted_table import as_keys
from qwen_edit_zero.edit_data.cache.store import ConditioningCache, told
from qwen_edit_zero.edit_data.cache.survey import Advance, Chunk, Surveyor
from qwen_edit_zero.edit_data.cache.todo import Missing
from qwen_edit_zero.edit_data.cache.verdicts import Verdicts, keys_of
from qwen_edit_zero.edit_data.instructions.judging import RowJudge
from qwen_edit_zero.edit_data.manifests.samples import OnError
from qwen_edit_zero.edit_data.wording import byte_count, shown
from qwen_edit_zero.errors import DataError, StorageError

_CHUNK = 1 << 18  # rows whose columns are looked at together


def needed_by(
    spec: SetSpec, cache: ConditioningCache, *, references: int, on_error: OnError, new_bar: NewBar, read: bool = True
) -> Needed:
    """What a set needs; for a single process. Pictures that are not known are read, unless `read` is off. A classifier
    is not asked: rows of which it has said nothing yet count as taken.

    Raises DataError as `prepare_sets`, but for pictures that would not decode.
    """
    assert cache.ranks.size == 1
    job = _Job(spec, cache, references)
    bar = new_bar("looking at the pictures", len(job.share))
    try:
        with Surveyor(cache.facts, references=references, read=read) as surveyor:
            job.survey(surveyor, None, bar.advance, cache.verdicts, ask=False)
    finally:
        bar.close()
    refused = job.log.close()
    job.settle(refused, on_error)
    return Needed(
        job.latents.mapped().reshape(-1, 16),
        job.masks.mapped().reshape(-1, 16),
        job.prompts.mapped(),
        job.prepared.mapped(),
        refused,
        job.unread,
    )


def prepare_sets(
    sets: Sequence[SetSpec],
    cache: ConditioningCache,
    encoders: Encoders,
    *,
    references: int,
    on_error: OnError,
    new_bar: NewBar,
) -> list[PreparedSet]:
    """Survey the sets and have all of their entries in the cache. Collective; the result does not depend on the ranks.

    Ranks look at equal shares of the rows, in chunks; what is missing is made unique and split evenly, whoever left it
    undone in an earlier run. Nothing is decoded and no model loaded for what is there.

    Args:
        references: most reference pictures of a sample.
        on_error: "stop" raises if any row cannot be used, on all ranks with the first ten; "skip" leaves such rows out,
            on every rank. A picture that does not decode is met only if it is encoded now; it raises on its rank.

    Raises:
        DataError: as said; or no sample of a required set is left; or the encoders gave something not finite.
        StorageError: the cache cannot be written, or is full.
        RunError: the classifier of rows fails.
    """
    with told(cache.folder):
        jobs = [_Job(spec, cache, references) for spec in sets]
        missing = Missing(cache.columns, {e.kind.kind: e for e in cache.kinds})
        bar = new_bar("looking at the pictures", sum(len(job.share) for job in jobs))
        first = 0
        try:
            with Surveyor(cache.facts, references=references) as surveyor:
                for job in jobs:
                    job.first = first
                    job.survey(surveyor, missing, bar.advance, cache.verdicts, ask=True)
                    first += len(job.spec.table)
        finally:
            bar.close()
            cache.facts.close()
            cache.verdicts.close()
        found = [job.log.close() for job in jobs]
        for job, refused in zip(jobs, found, strict=True):
            job.settle(refused, on_error)
        share = missing.share()
        lacking = cache.ranks.total(sum(len(todo) for todo in share.values()))
        filler = Filler(
            cache, encoders, [job.rows() for job in jobs] if lacking else [], on_error=on_error, new_bar=new_bar
        )
    made = 0
    failures: dict[bytes, str] = {}
    if lacking:  # outside of `told`: what loading a model says is not about the cache
        _check_room(cache, filler.bytes_of(share))
        made = cache.ranks.total(filler.make(share))
    with told(cache.folder):
        if lacking:
            failures = filler.failures()
            for entries in cache.kinds:
                entries.refresh(cache.ranks)
        return [job.finish(cache, refused, failures, on_error, made) for job, refused in zip(jobs, found, strict=True)]


def _check_room(cache: ConditioningCache, mine: int) -> None:
    """Raise StorageError if the disk will certainly be full before all is made. Collective."""
    needed = cache.ranks.total(mine)
    cache.folder.mkdir(parents=True, exist_ok=True)
    free = cache.ranks.from_first(shutil.disk_usage(cache.folder).free)
    if needed > free:
        raise StorageError(
            f"cache folder {shown(cache.folder)}: about {byte_count(needed)} of latents and embeddings are "
            f"missing, and {byte_count(free)} are free. Make room, or name another folder (data.cache_dir)"
        )


class _Job:
    """One set on its way."""

    def __init__(self, spec: SetSpec, cache: ConditioningCache, references: int) -> None:
        self.spec, self.first, self.unread = spec, 0, 0
        self._columns, self._variants = cache.columns, spec.making.variants
        self.share = cache.ranks.share(len(spec.table))
        self.log = RefusalLog(cache.columns, f"{spec.name}-refused")
        pictures = 1 + references

        def part(name: str, dtype: npt.DTypeLike, *shape: int) -> Part:
            return cache.columns.part(f"{spec.name}-{name}", dtype, shape)

        self.sizes, self.digests = part("sizes", np.int32, pictures + 1, 2), part("digests", np.uint8, pictures + 1, 16)
        self.latents = part("needed-latents", np.uint8, self._variants, pictures, 16)
        self.masks = part("needed-masks", np.uint8, self._variants, 16)
        self.texts, self.prompts = part("texts", np.int32), part("needed-prompts", np.uint8, 16)
        self.prepared = part("prepared", np.int32, pictures, 2)
        self.fine = part("fine", np.bool_)
        self.kept = {
            "rows": part("rows", np.int64),
            "latents": part("latents", np.uint8, self._variants, pictures, 16),
            "masks": part("masks", np.uint8, self._variants, 16),
            "prompts": part("prompts", np.uint8, 16),
            "prompt_counts": part("prompt-counts", np.int64),
            "prompt_tokens": part("prompt-tokens", np.int32),
            "sides": part("sides", np.int32, pictures, 2),
        }

    def survey(
        self, surveyor: Surveyor, missing: Missing | None, advance: Advance, verdicts: Verdicts, *, ask: bool
    ) -> None:
        """Look at this rank's rows; `ask`: also ask the classifier about those that it does not know."""
        told = 0  # rows of the chunk: a classifier may take long over each

        def count(rows: int) -> None:
            nonlocal told
            advance(rows)
            told += rows

        def rest(rows: int) -> None:
            nonlocal told
            advance(rows - told)
            told = 0

        for chunk in surveyor.chunks(self.spec.table, self.share, rest):
            needs = needs_of(chunk, self.spec.making)
            if self.spec.making.judge is not None:
                self._judge(self.spec.making.judge, chunk, needs, verdicts, count if ask else None)
            if self.spec.observe is not None:
                for sample in chunk.samples:
                    self.spec.observe(sample)
            for row in sorted(needs.reasons):
                self.log.add(self.spec.refusal(chunk.samples[row], needs.reasons[row]))
            fine = np.ones(len(chunk.samples), bool)
            fine[list(needs.reasons)] = False
            for part, values in (
                (self.sizes, chunk.sizes), (self.digests, chunk.digests), (self.fine, fine),
                (self.latents, needs.latents), (self.masks, needs.masks), (self.prompts, needs.prompts),
                (self.texts, needs.texts), (self.prepared, needs.prepared),
            ):  # fmt: skip
                part.append(values)
            self.unread += int(chunk.unread.sum())
            if missing is not None:
                missing.add(needs, self.first + chunk.first)

    def _judge(self, judge: RowJudge, chunk: Chunk, needs: Needs, verdicts: Verdicts, counts: Advance | None) -> None:
        """Refuse rows that the classifier blocks; without `counts` it is not asked about those it does not know."""
        rows = [row for row in range(len(chunk.samples)) if row not in needs.reasons and not chunk.unread[row]]
        keys = keys_of(judge, chunk, rows)
        said = verdicts.known(judge, keys)
        refused: dict[int, str] = {}
        for row, key in zip(rows, keys, strict=True):
            if key not in said:
                if counts is None:
                    continue
                said[key] = verdicts.ask(judge, key, chunk.samples[row])
                counts(1)
            found = said[key]
            if found is not None:
                judge.note(found)
                if (reason := judge.refusal(found)) is not None:
                    refused[row] = reason
        needs.refuse(refused)

    def settle(self, refused: Refused, on_error: OnError) -> None:
        """Raise if these rows end the run."""
        left = len(self.spec.table) - refused.count
        if refused.count and on_error == "stop":
            raise DataError(f"{self.spec.title}: {listed(refused.count, refused.first)}\n{_SKIP_HINT}")
        if self.spec.required and not left:
            raise DataError(f"{self.spec.title}: no row can be used: {listed(refused.count, refused.first)}")

    def rows(self) -> Rows:
        """Sizes and digests of all rows, for who makes entries. Collective."""
        sizes, digests = self._columns.join(self.sizes, self.digests)
        return Rows(self.first, self.spec.table, self.spec.making, sizes, digests)

    def finish(
        self,
        cache: ConditioningCache,
        refused: Refused,
        failures: dict[bytes, str],
        on_error: OnError,
        made: int,
    ) -> PreparedSet:
        """Leave out rows of which an entry could not be made, and join the columns of those that stay. Collective."""
        log = RefusalLog(cache.columns, f"{self.spec.name}-failed")
        fine, texts = self.fine.mapped(), self.texts.mapped()
        latents, masks, prompts, prepared = (
            part.mapped() for part in (self.latents, self.masks, self.prompts, self.prepared)
        )
        prompt_end = 0
        for start in range(0, len(fine), _CHUNK):
            end = min(start + _CHUNK, len(fine))
            counts = texts[start:end].astype(np.int64) * self._variants
            of_row = np.repeat(np.arange(end - start), counts)
            ends = np.cumsum(counts)
            keys = prompts[prompt_end : prompt_end + len(of_row)]
            prompt_end += len(of_row)
            tokens = cache.prompts.first_sides(as_keys(keys))
            keep = np.array(fine[start:end])
            keep[of_row[tokens == 0]] = False
            for entries, column in ((cache.latents, latents), (cache.masks, masks)):
                part = column[start:end].reshape(end - start, -1, 16)
                needed = part.any(-1)
                lacking = np.zeros(needed.shape, bool)
                lacking[needed] = entries.missing(as_keys(part[needed]))
                keep &= ~lacking.any(1)
            for row in np.flatnonzero(fine[start:end] & ~keep).tolist():
                sample = self.spec.table[self.share.start + start + row]
                all_keys = [
                    *latents[start + row].reshape(-1, 16),
                    *masks[start + row],
                    *keys[ends[row] - counts[row] : ends[row]],
                ]
                reasons = [failures[key.tobytes()] for key in all_keys if key.tobytes() in failures]
                log.add(self.spec.refusal(sample, reasons[0] if reasons else _LOST))
            self.kept["rows"].append(self.share.start + start + np.flatnonzero(keep))
            self.kept["latents"].append(latents[start:end][keep])
            self.kept["masks"].append(masks[start:end][keep])
            self.kept["sides"].append(prepared[start:end][keep])
            self.kept["prompt_counts"].append(counts[keep])
            self.kept["prompts"].append(keys[keep[of_row]])
            self.kept["prompt_tokens"].append(tokens[keep[of_row]])
        failed = log.close()
        refused = refused.and_also(failed)
        if failed.count:
            self.settle(refused, on_error)
        joined = dict(zip(self.kept, self._columns.join(*self.kept.values()), strict=True))
        name = self.spec.name
        if cache.ranks.first:
            self._columns.save(f"{name}-prompt-ends", np.cumsum(joined["prompt_counts"], dtype=np.int64))
            buckets, codes = _bucket_codes(joined["sides"])
            self._columns.save(f"{name}-buckets", buckets)
            self._columns.save(f"{name}-bucket-codes", codes)
        cache.ranks.wait()
        return PreparedSet(
            rows=joined["rows"],
            latents=joined["latents"],
            masks=joined["masks"],
            prompts=joined["prompts"],
            prompt_ends=self._columns.load(f"{name}-prompt-ends"),
            prompt_tokens=joined["prompt_tokens"],
            bucket_codes=self._columns.load(f"{name}-bucket-codes"),
            buckets=self._columns.load(f"{name}-buckets"),
            refused=refused,
            made=made,
        )


def _bucket_codes(sides: Column) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(the different rows of (n, pictures, 2) sides, sorted; for each row its position there)."""
    if not len(sides):
        return np.zeros((0, *sides.shape[1:]), np.int32), np.zeros(0, np.int32)
    flat = np.ascontiguousarray(sides.reshape(len(sides), -1) // 32).astype(np.uint16)  # 2 bytes sort fast, and suffice
    as_one = flat.astype(">u2").view(np.dtype((np.void, flat.shape[1] * 2))).ravel()
    different, codes = np.unique(as_one, return_inverse=True)
    buckets = different.view(">u2").reshape(-1, *sides.shape[1:]).astype(np.int32) * 32
    return buckets, codes.astype(np.int32)


_SKIP_HINT = "Correct them, or leave them out with data.on_error=skip"
_LOST = "an entry of it that was in the cache is gone; start the run again"
