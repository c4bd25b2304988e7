"""The examination of rows: every picture decoded, every rule of training applied, everything measured."""

from __future__ import annotations

import functools
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash
from PIL import Image

from qwen_edit_zero.edit_data.cache.facts import Facts
from qwen_edit_zero.edit_data.cache.files import load_unchanged, pictures_of
from qwen_edit_zero.edit_data.cache.needs import needs_of
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.cache.survey import Chunk, Surveyor
from qwen_edit_zero.edit_data.cache.verdicts import Verdicts
from qwen_edit_zero.edit_data.check.columns import ACCEPTED, REFUSED, WARNED, RowColumns
from qwen_edit_zero.edit_data.check.findings import Finding, about
from qwen_edit_zero.edit_data.check.held import Held, HeldTable
from qwen_edit_zero.edit_data.check.kinds import KINDS
from qwen_edit_zero.edit_data.check.looks import look_at_mask, look_at_picture
from qwen_edit_zero.edit_data.check.memory import Memory, pair_key
from qwen_edit_zero.edit_data.check.pairs import compare
from qwen_edit_zero.edit_data.check.remarks import Row, remarks_on
from qwen_edit_zero.edit_data.check.rules import NewRules
from qwen_edit_zero.edit_data.check.texts import language_of
from qwen_edit_zero.edit_data.instructions.judging import RowJudge
from qwen_edit_zero.edit_data.instructions.safety import Finding as Verdict
from qwen_edit_zero.edit_data.manifests.table import SampleTable
from qwen_edit_zero.edit_data.pictures.alignment import Align, Frames, Size, frames_of
from qwen_edit_zero.edit_data.pictures.decode import load_mask
from qwen_edit_zero.edit_data.storage.files import PictureFile
from qwen_edit_zero.errors import DataError

_HELD_BYTES = 128 << 20  # of files, between being digested and decoded
_DECODED_BYTES = 64 << 20  # of pictures that the next rows may show again
_THREADS = 8  # that read; decoding is done by one


@dataclass(frozen=True)
class CheckJob:
    """What every process of a check needs; small and picklable.

    Attributes:
        references: most reference pictures of a sample.
        cache: folder of what is remembered: facts of training, and measures.
        columns: folder of the columns of this check.
    """

    table: SampleTable
    references: int
    cache: Path
    columns: Path
    new_rules: NewRules


@dataclass
class Examined:
    """What was found in some rows. The rest is in the columns."""

    rows: int
    findings: list[Finding] = field(default_factory=list)
    pictures: int = 0  # of these rows
    decoded: int = 0  # of them, now; the others were known


class Examiner:
    """Examines rows of a job, in one process. A context manager."""

    def __init__(self, job: CheckJob) -> None:
        self._table = job.table
        self._held = Held(_HELD_BYTES)
        self._samples = HeldTable(job.table, self._held)
        self._rules = job.new_rules()
        self._columns = RowColumns(job.columns, len(job.table), job.references, new=False)
        self._facts = Facts(job.cache / "facts", Ranks())
        self._memory = Memory(job.cache)
        self._verdicts = Verdicts(job.cache, Ranks())
        self._surveyor = Surveyor(self._facts, references=job.references, threads=_THREADS)
        self._decoded: OrderedDict[bytes, Image.Image] = OrderedDict()
        self._decoded_bytes = 0
        self._count = 0

    def __enter__(self) -> Examiner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._surveyor.__exit__()
        self._facts.close()
        self._memory.close()
        self._verdicts.close()

    def examine(self, first: int, last: int) -> Examined:
        """Examine rows `first` to `last` - 1, write their columns, and return what was found.

        Raises StorageError if a store does not answer; RunError if the classifier of instructions fails.
        """
        self._count = 0
        self._held.clear()
        (chunk,) = self._surveyor.chunks(self._samples, range(first, last))
        needs = needs_of(chunk, self._rules.making)
        refused = {
            number: ("missing" if number in chunk.missing else "picture", text)
            for number, text in chunk.reasons.items()
        }
        for number, text in needs.reasons.items():
            if number not in refused:
                refused[number] = ("instruction" if text.startswith("the instruction ") else "sizes", text)
        self._fetch_known(chunk, refused)
        done = Examined(last - first)
        states = np.full(last - first, ACCEPTED, np.uint8)
        for number in range(last - first):
            sample = chunk.samples[number]
            done.pictures += 1 + len(sample.source_names) + (sample.mask_name is not None)
            where = self._table.where(sample.line)
            if number not in refused:
                row = self._row(chunk, number)
                reason = self._why_not(row)
                if reason is None:
                    remarks = remarks_on(row, self._rules)
                    done.findings += [about(kind, first + number, sample, where, text) for kind, text in remarks]
                    if any(KINDS[kind].level == "warning" for kind, _ in remarks):
                        states[number] = WARNED
                    self._columns.length[first + number] = row.length
                    self._columns.words[first + number] = xxhash.xxh3_64_intdigest(row.texts[0].encode())
                else:
                    refused[number] = reason
            if number in refused:
                states[number] = REFUSED
                done.findings.append(about(refused[number][0], first + number, sample, where, refused[number][1]))
            self._columns.language[first + number] = language_of(sample.instruction)
        self._columns.sizes[first:last], self._columns.digests[first:last] = chunk.sizes, chunk.digests
        self._columns.state[first:last] = states
        self._memory.save()
        done.decoded = self._count
        return done

    def _row(self, chunk: Chunk, number: int) -> Row:
        sample, sizes = chunk.samples[number], chunk.sizes[number]
        count = 1 + len(sample.source_names)
        row = Row(
            sample,
            [digest.tobytes() for digest in chunk.digests[number]],
            [(int(width), int(height)) for width, height in sizes[:count]],
            self._rules.making.texts(sample),
        )
        making = self._rules.making
        row.frames = _frames(row.sizes[0], tuple(row.sizes[1:]), making.areas.vae, making.align)
        return row

    def _why_not(self, row: Row) -> tuple[str, str] | None:
        """Decode and measure all pictures of a row and judge its texts; (kind, why) if training would refuse it."""
        try:
            self._measure(row)
        except DataError as error:
            return "picture", str(error)
        try:
            tokens = [self._rules.check_text(text) for text in row.texts] if self._rules.check_text else []
        except DataError as error:
            return "instruction", str(error)
        row.length = tokens[0] if tokens else len(row.texts[0])
        judge = self._rules.making.judge
        if judge is not None:
            row.verdict = self._verdict(judge, row)
            if (reason := judge.refusal(row.verdict)) is not None:
                return "instruction", reason
        return None

    def _verdict(self, judge: RowJudge, row: Row) -> Verdict | None:
        """What the classifier says, or has said in training or an earlier check."""
        count = len(row.sizes)
        key = judge.key(row.sample.instruction, [*row.digests[1:count], row.digests[0]])
        known = self._verdicts.known(judge, [key])
        return known[key] if key in known else self._verdicts.ask(judge, key, row.sample)

    def _measure(self, row: Row) -> None:
        """Raises DataError if a picture does not decode."""
        target, references, mask = pictures_of(row.sample)
        files = (target, *references)
        for file, digest in zip(files, row.digests, strict=False):
            look = self._memory.looks.get(digest)
            if look is None:
                look = look_at_picture(self._picture(file, digest))
                self._memory.looks.put(digest, look)
            row.looks.append(look)
        if mask is not None:
            row.mask = self._memory.masks.get(row.digests[-1])
            if row.mask is None:
                self._count += 1
                row.mask = look_at_mask(load_unchanged(mask, row.digests[-1], decode=load_mask))
                self._memory.masks.put(row.digests[-1], row.mask)
        for slot in _one_frame(row.frames):
            key = pair_key(row.digests[slot], row.digests[0], self._rules.making.align)
            pair = self._memory.pairs.get(key)
            if pair is None:
                boxes, one = row.frames.boxes, self._picture(files[slot], row.digests[slot])
                pair = compare(one, boxes[slot], self._picture(target, row.digests[0]), boxes[0])
                self._memory.pairs.put(key, pair)
            row.pairs[slot] = pair

    def _picture(self, file: PictureFile, digest: bytes) -> Image.Image:
        """A decoded picture, of this row or one that has just been."""
        found = self._decoded.get(digest)
        if found is None:
            found = load_unchanged(file, digest)
            self._count += 1
            self._decoded[digest] = found
            self._decoded_bytes += _bytes_of(found)
            while self._decoded_bytes > _DECODED_BYTES and len(self._decoded) > 1:
                _, gone = self._decoded.popitem(last=False)
                self._decoded_bytes -= _bytes_of(gone)
        else:
            self._decoded.move_to_end(digest)
        return found

    def _fetch_known(self, chunk: Chunk, refused: dict[int, tuple[str, str]]) -> None:
        """Ask the memory about all pictures of a chunk at once."""
        looks, masks, pairs = [], [], []
        for number, sample in enumerate(chunk.samples):
            if number in refused:
                continue
            digests = [digest.tobytes() for digest in chunk.digests[number]]
            count = 1 + len(sample.source_names)
            looks += digests[:count]
            pairs += [pair_key(digest, digests[0], self._rules.making.align) for digest in digests[1:count]]
            if sample.mask_name is not None:
                masks.append(digests[-1])
        for measures, keys in (
            (self._memory.looks, looks), (self._memory.masks, masks), (self._memory.pairs, pairs),
        ):  # fmt: skip
            measures.fetch(keys)


def _one_frame(frames: Frames) -> list[int]:
    """References that show, or probably show, the target's frame."""
    return [slot for slot in range(1, len(frames.sizes)) if frames.aligned[slot] or frames.nearly[slot]]


@functools.lru_cache(maxsize=1 << 14)
def _frames(target: Size, references: tuple[Size, ...], area: int, align: Align) -> Frames:
    return frames_of(target, references, area=area, align=align)


def _bytes_of(image: Image.Image) -> int:
    return image.width * image.height * 3
