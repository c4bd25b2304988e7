"""Making what is missing: pictures are decoded by threads ahead of the encoders, and each entry is on disk at once."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from qwen_edit_zero.edit_data.cache.columns import Column, wait_for
from qwen_edit_zero.edit_data.cache.entries import Kind
from qwen_edit_zero.edit_data.cache.files import load_unchanged, pictures_of
from qwen_edit_zero.edit_data.cache.needs import Making
from qwen_edit_zero.edit_data.cache.store import ConditioningCache, told
from qwen_edit_zero.edit_data.cache.survey import Table
from qwen_edit_zero.edit_data.cache.todo import KINDS, TodoList, groups
from qwen_edit_zero.edit_data.manifests.samples import OnError, Sample
from qwen_edit_zero.edit_data.pictures.decode import load_mask
from qwen_edit_zero.edit_data.pictures.draws import Draw
from qwen_edit_zero.errors import DataError

_SAMPLED = 200  # entries of a kind by which the size of all is estimated
_AHEAD = 8  # pictures decoded while the encoders work on one
_THREADS = 4
_TITLES: dict[Kind, str] = {
    "prompt": "encoding instructions",
    "latent": "encoding pictures",
    "mask": "reducing masks",
}
T = TypeVar("T")


class Encoders(Protocol):
    """The frozen models. Each is loaded at the first call that needs it, and released by `release`."""

    def latent(self, picture: Image.Image) -> torch.Tensor:
        """(16, height / 8, width / 8) of a picture at its prepared size. Raises DataError."""

    def prompt(self, references: Sequence[Image.Image], instruction: str) -> torch.Tensor:
        """(L, D) of an instruction and its references at their prepared sizes. Raises DataError."""

    def check_instruction(self, instruction: str) -> None:
        """Raises DataError for one that `prompt` would refuse; loads no model."""

    def latent_bytes(self, width: int, height: int) -> int:
        """Size of the latent of a prepared picture."""

    def prompt_bytes(self, references: Sequence[tuple[int, int]], instruction: str) -> int:
        """About the size of the embedding of an instruction and references of these prepared sizes."""

    def release(self) -> None:
        """Free what was loaded."""


class Bar(Protocol):
    """Shows how work goes."""

    def advance(self, units: int = 1) -> None:
        """Count units as done."""

    def close(self) -> None:
        """Nothing more comes."""


Pictures = Future[list[Image.Image]]
NewBar = Callable[[str, int], Bar]


@dataclass
class Rows:
    """The rows of one set while the cache is filled for it.

    Attributes:
        first: number of its first row, counted through all sets.
        sizes, digests: as in `Chunk`, of all rows.
    """

    first: int
    table: Table
    making: Making
    sizes: Column
    digests: Column


@dataclass(frozen=True)
class _Item:
    """Pictures of one sample's variant on their way to an encoder: what is to be made of them."""

    todo: TodoList
    sample: Sample
    making: Making
    sizes: npt.NDArray[np.int32]
    digests: npt.NDArray[np.uint8]


class Filler:
    """Makes this rank's share of what is missing.

    Args:
        on_error: what something that cannot be encoded does: "stop" raises at once on the rank that meets it, "skip"
            notes it, so that the rows which need it are left out on every rank.
    """

    def __init__(
        self, cache: ConditioningCache, encoders: Encoders, sets: Sequence[Rows], *, on_error: OnError, new_bar: NewBar
    ) -> None:
        self._cache, self._encoders, self._sets = cache, encoders, sets
        self._on_error: OnError = on_error
        self._new_bar = new_bar
        self._failed: dict[bytes, str] = {}
        self._makers = {"prompt": self._prompts, "latent": self._latents, "mask": self._masks}

    def make(self, share: dict[Kind, TodoList]) -> int:
        """Make these entries; returns how many were made. Not collective.

        Raises:
            DataError: see `on_error`.
            StorageError: the cache cannot be written.
        """
        made = 0
        for kind in KINDS:
            todo = share[kind]
            if not len(todo):
                continue
            bar = self._new_bar(_TITLES[kind], len(todo))
            entries = {e.kind.kind: e for e in self._cache.kinds}[kind]
            writing = told(self._cache.folder, "writing an entry")
            try:
                with writing:
                    writer = entries.writer()
                with writer:
                    for key, tensor in self._makers[kind](todo):
                        if tensor is not None:
                            with writing:
                                writer.put(key, tensor)
                            made += 1
                        bar.advance()
                    with writing:
                        writer.close()
            finally:
                bar.close()
                self._encoders.release()
        return made

    def bytes_of(self, share: dict[Kind, TodoList]) -> int:
        """About what these entries will take; from some of them, spread over all."""
        total = 0.0
        for kind, todo in share.items():
            some = todo[np.linspace(0, len(todo) - 1, min(len(todo), _SAMPLED)).astype(np.int64)] if len(todo) else todo
            sizes = [self._bytes_of(kind, item) for item in self._items(some[i : i + 1] for i in range(len(some)))]
            total += len(todo) * float(np.mean(sizes)) if sizes else 0.0
        return round(total)

    def _bytes_of(self, kind: Kind, item: _Item) -> int:
        part = int(item.todo[0]["part"])
        made = item.making.plan(item.sizes, len(item.sample.source_names), _draw(item))
        if kind == "prompt":
            return self._encoders.prompt_bytes([p.size for p in made.shown], item.making.texts(item.sample)[part])
        width, height = (made.target, *made.references)[part].size
        return width * height // 64 if kind == "mask" else self._encoders.latent_bytes(width, height)

    def failures(self) -> dict[bytes, str]:
        """Why entries could not be made, of all ranks, by key. Collective."""
        ranks, folder = self._cache.ranks, self._cache.columns.folder
        path = folder / f"failed.{ranks.rank:05d}.jsonl"
        if self._failed:
            with path.open("w", encoding="utf-8") as file:
                for key, reason in self._failed.items():
                    file.write(json.dumps([key.hex(), reason]) + "\n")
        counts = ranks.exchange(len(self._failed))
        if not any(counts):
            return {}
        joined = folder / "failed.jsonl"
        if ranks.first:
            with joined.open("wb") as out:
                for rank, count in enumerate(counts):
                    if count:
                        other = folder / f"failed.{rank:05d}.jsonl"
                        wait_for(other)
                        out.write(other.read_bytes())
        ranks.wait()
        wait_for(joined)
        with joined.open(encoding="utf-8") as file:
            return {bytes.fromhex(key): reason for key, reason in map(json.loads, file)}

    def _prompts(self, todo: TodoList) -> Iterator[tuple[bytes, torch.Tensor | None]]:
        for item, pictures in _ahead(self._items(groups(todo)), _shown_pictures):
            texts = item.making.texts(item.sample)
            for record in item.todo:
                text = texts[int(record["part"])]

                def encode(item: _Item = item, text: str = text, pictures: Pictures = pictures) -> torch.Tensor:
                    self._encoders.check_instruction(text)
                    return self._encoders.prompt(pictures.result(), text)

                yield record["key"].tobytes(), self._attempt(record["key"].tobytes(), item, encode)

    def _latents(self, todo: TodoList) -> Iterator[tuple[bytes, torch.Tensor | None]]:
        singles = (todo[i : i + 1] for i in range(len(todo)))
        for item, picture in _ahead(self._items(singles), _vae_picture):
            key = item.todo[0]["key"].tobytes()

            def encode(picture: Future[Image.Image] = picture) -> torch.Tensor:
                return self._encoders.latent(picture.result())

            yield key, self._attempt(key, item, encode)

    def _masks(self, todo: TodoList) -> Iterator[tuple[bytes, torch.Tensor | None]]:
        singles = (todo[i : i + 1] for i in range(len(todo)))
        for item, mask in _ahead(self._items(singles), _mask):
            key = item.todo[0]["key"].tobytes()
            yield key, self._attempt(key, item, mask.result)

    def _attempt(self, key: bytes, item: _Item, encode: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        try:
            tensor = encode()
            if not bool(torch.isfinite(tensor).all()):
                raise DataError("the encoders gave numbers that are not finite for it")
        except DataError as error:
            if self._on_error == "stop":
                raise DataError(f"line {item.sample.line} (id {item.sample.id}): {error}") from error
            self._failed[key] = str(error)
            return None
        return tensor

    def _items(self, parts: Iterable[TodoList]) -> Iterator[_Item]:
        for todo in parts:
            row = int(todo[0]["row"])
            rows = next(s for s in reversed(self._sets) if s.first <= row)
            at = row - rows.first
            yield _Item(todo, rows.table[at], rows.making, rows.sizes[at], rows.digests[at])


def _ahead(items: Iterator[_Item], load: Callable[[_Item], T]) -> Iterator[tuple[_Item, Future[T]]]:
    """The items with what `load` makes of them, made by threads a few items ahead."""
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="pictures")
    waiting: deque[tuple[_Item, Future[T]]] = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(load, item)))
            if len(waiting) > _AHEAD:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        pool.shutdown(cancel_futures=True)


def _shown_pictures(item: _Item) -> list[Image.Image]:
    """The references as the text encoder sees them."""
    made = item.making.plan(item.sizes, len(item.sample.source_names), _draw(item))
    files = pictures_of(item.sample)[1]
    return [
        preparation.apply(load_unchanged(file, digest.tobytes()))
        for preparation, file, digest in zip(made.shown, files, item.digests[1:], strict=False)
    ]


def _vae_picture(item: _Item) -> Image.Image:
    """The picture of an item as the VAE sees it."""
    made = item.making.plan(item.sizes, len(item.sample.source_names), _draw(item))
    slot = int(item.todo[0]["part"])
    target, references, _ = pictures_of(item.sample)
    file, preparation = (target, *references)[slot], (made.target, *made.references)[slot]
    return preparation.apply(load_unchanged(file, item.digests[slot].tobytes()))


def _mask(item: _Item) -> torch.Tensor:
    """The mask on the latent's grid, uint8."""
    made = item.making.plan(item.sizes, len(item.sample.source_names), _draw(item))
    file = pictures_of(item.sample)[2]
    assert file is not None
    assert made.mask is not None
    grid = made.mask.apply_to_mask(load_unchanged(file, item.digests[-1].tobytes(), decode=load_mask))
    return torch.from_numpy(np.rint(grid * 255).astype(np.uint8))


def _draw(item: _Item) -> Draw:
    return item.making.draws(item.sample, item.making.texts(item.sample))[int(item.todo[0]["variant"])]
