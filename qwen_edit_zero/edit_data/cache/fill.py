"""Fill the conditioning cache: what is missing is computed, split evenly over the ranks, before training starts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from qwen_edit_zero.edit_data.cache.digests import DigestMemo
from qwen_edit_zero.edit_data.cache.store import CachedSample, ConditioningCache
from qwen_edit_zero.edit_data.manifests.manifest import OnError, Refusal, Sample
from qwen_edit_zero.edit_data.pictures.decode import load_picture
from qwen_edit_zero.errors import DataError

Encode = Callable[[Sequence[Image.Image], str, Image.Image], CachedSample]
Exchange = Callable[[Any], list[Any]]
Progress = Callable[[str, int, int], None]

_AHEAD = 4  # samples decoded while the encoders work on one


@dataclass(frozen=True)
class FilledCache:
    """The outcome, the same on every rank.

    Attributes:
        samples: those that have an entry, in order.
        keys: the entry of each of them.
        refused: samples left out because a picture cannot be decoded.
        computed: entries computed now, by all ranks.
    """

    samples: tuple[Sample, ...]
    keys: tuple[str, ...]
    refused: tuple[Refusal, ...]
    computed: int


def fill_cache(
    samples: Sequence[Sample],
    cache: ConditioningCache,
    encode: Encode,
    *,
    rank: int = 0,
    world_size: int = 1,
    exchange: Exchange = lambda mine: [mine],
    on_error: OnError = "stop",
    on_progress: Progress = lambda phase, done, total: None,
    verify: bool = False,
) -> FilledCache:
    """Give every sample an entry. Collective if `world_size` is over 1; the result does not depend on the split.

    Ranks first digest their shares of the pictures and tell each other the keys; what has no whole entry is then
    split evenly, whoever had it in an earlier run, and computed. Pictures are decoded by threads, a few samples ahead,
    and each entry is on disk before the next is begun: memory stays bounded, and a killed run loses one entry a rank.

    Args:
        encode: (references, instruction, target) -> entry; called on this thread only.
        exchange: gathers one object a rank into a list in rank order (`all_gather_object`).
        on_error: what a picture that cannot be decoded does: "stop" raises at once on the rank that meets it, "skip"
            leaves the sample out on every rank.
        on_progress: called with ("digest" or "encode", done, total) of this rank's share.
        verify: read every entry there is and compare checksums, instead of trusting header and size. Reading an entry
            for training compares them in any case.

    Raises:
        DataError: as said, or the encoders gave something that is not finite.
        StorageError: the cache cannot be written.
    """
    if rank == 0:
        cache.sweep()
    found = exchange(_look(samples[rank::world_size], cache, rank, on_error, on_progress, verify))
    keys: list[str | None] = [None] * len(samples)
    refused: list[Refusal] = []
    missing: dict[str, Sample] = {}
    for index, sample in enumerate(samples):
        outcome, present = found[index % world_size][index // world_size]
        if isinstance(outcome, Refusal):
            refused.append(outcome)
            continue
        keys[index] = outcome
        if not present:
            missing.setdefault(outcome, sample)  # samples with equal content share an entry

    mine = list(missing.items())[rank::world_size]
    failed: dict[str, str] = {}
    on_progress("encode", 0, len(mine))
    for done, ((key, sample), pictures) in enumerate(_decoded(mine), start=1):
        try:
            references, target = pictures.result()
            entry = encode(references, sample.instruction, target)
            if not all(bool(torch.isfinite(t).all()) for t in entry.tensors().values()):
                raise DataError("the encoders gave numbers that are not finite for it")
            cache.put(key, entry)
        except DataError as error:
            if on_error == "stop":
                raise DataError(f"line {sample.line} (id {sample.id}): {error}") from error
            failed[key] = str(error)
        on_progress("encode", done, len(mine))

    failures = {key: reason for part in exchange(failed) for key, reason in part.items()}
    kept = []
    for sample, entry_key in zip(samples, keys, strict=True):
        if entry_key in failures:
            refused.append(Refusal(sample.line, sample.id, failures[entry_key]))
        elif entry_key is not None:
            kept.append((sample, entry_key))
    return FilledCache(
        tuple(sample for sample, _ in kept),
        tuple(key for _, key in kept),
        tuple(sorted(refused, key=lambda refusal: refusal.line)),
        len(missing) - len(failures),
    )


def _look(
    share: Sequence[Sample],
    cache: ConditioningCache,
    rank: int,
    on_error: OnError,
    on_progress: Progress,
    verify: bool,
) -> list[tuple[str | Refusal, bool]]:
    """The key of each sample, and whether its entry is there; a Refusal if a picture cannot be read."""

    def look(sample: Sample) -> tuple[str | Refusal, bool]:
        try:
            key = cache.key(sample, digest_of=memo.digest)
        except DataError as error:
            if on_error == "stop":
                raise DataError(f"line {sample.line} (id {sample.id}): {error}") from error
            return Refusal(sample.line, sample.id, str(error)), False
        return key, cache.has(key, verify=verify)

    wanted = (path for sample in share for path in (*sample.sources, sample.target))
    results = []
    with (
        DigestMemo(cache.folder / "digests", writer=f"rank-{rank:05d}", wanted=wanted) as memo,
        ThreadPoolExecutor(4, thread_name_prefix="digests") as pool,
    ):
        on_progress("digest", 0, len(share))
        for result in pool.map(look, share):
            results.append(result)
            on_progress("digest", len(results), len(share))
    return results


_Pictures = tuple[list[Image.Image], Image.Image]


def _decoded(todo: list[tuple[str, Sample]]) -> Iterator[tuple[tuple[str, Sample], Future[_Pictures]]]:
    """The samples with their pictures, decoded by threads a few samples ahead."""

    def load(sample: Sample) -> _Pictures:
        return [load_picture(path) for path in sample.sources], load_picture(sample.target)

    pool = ThreadPoolExecutor(2, thread_name_prefix="pictures")
    ahead: deque[tuple[tuple[str, Sample], Future[_Pictures]]] = deque()
    try:
        for item in todo:
            ahead.append((item, pool.submit(load, item[1])))
            if len(ahead) > _AHEAD:
                yield ahead.popleft()
        while ahead:
            yield ahead.popleft()
    finally:
        pool.shutdown(cancel_futures=True)
