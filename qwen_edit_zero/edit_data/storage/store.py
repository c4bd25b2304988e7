"""One object store as this process sees it: requests with time-outs and retries, and what was answered lately."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from qwen_edit_zero.edit_data.storage.faults import Fault, FaultKind, fault_of, has_code, without_secrets
from qwen_edit_zero.edit_data.storage.files import NotThereError, Stamp, refusal
from qwen_edit_zero.edit_data.storage.kinds import kind_of, make_file_system
from qwen_edit_zero.edit_data.storage.options import StorageOptions
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import QwenEditError, SettingsError, StorageError

T = TypeVar("T")

FIRST_WAIT = 0.5  # seconds before the first retry; twice as long before each further one, less a random part
_LONGEST_WAIT = 30.0
_SLOWEST = 1 << 18  # bytes a second; a store that is slower counts as one that does not answer
_PAGE = 1000
_RECENT_SECONDS = 60.0
_RECENT = 8192  # objects whose stamps are held

_random = random.SystemRandom()  # its draws move no generator that a run's results depend on


@dataclass(frozen=True, slots=True)
class Target:
    """An object, or a folder of objects.

    Attributes:
        url: for messages.
        path: fsspec's path of it, BUCKET/KEY without a scheme.
        what: what messages call it.
    """

    url: str
    path: str
    what: str = "picture"


class ObjectChangedError(Exception):
    """An object was replaced between asking about it and reading it."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A name under a prefix."""

    name: str
    is_folder: bool
    size: int


class Store:
    """Made by `store_of`; for one process, whose threads share it.

    What is the object's fault raises DataError, what the user has to set up SettingsError, and a store that does not
    answer after all retries StorageError.
    """

    def __init__(self, scheme: str, url: str, options: StorageOptions) -> None:
        self._kind = kind_of(scheme, url)
        self._options = options
        self._fs = make_file_system(self._kind, options, url)
        self._recent: OrderedDict[str, tuple[float, Stamp]] = OrderedDict()
        self._lock = threading.Lock()

    def stamp(self, target: Target) -> Stamp:
        """Ask about an object."""
        path = target.path
        found = self._tried(target, lambda: self._ask("info", path))
        if found.get("type") == "directory":
            raise refusal(target.url, "it is a folder", target.what)
        stamp = _stamp_of(found)
        with self._lock:
            self._recent[path] = (time.monotonic(), stamp)
            self._recent.move_to_end(path)
            if len(self._recent) > _RECENT:
                self._recent.popitem(last=False)
        return stamp

    def recent_stamp(self, target: Target) -> Stamp:
        """As `stamp`, or what was answered in the last minute."""
        with self._lock:
            known = self._recent.get(target.path)
        if known is not None and time.monotonic() - known[0] < _RECENT_SECONDS:
            return known[1]
        return self.stamp(target)

    def forget(self, target: Target) -> None:
        """Do not trust what was answered about an object."""
        with self._lock:
            self._recent.pop(target.path, None)

    def fetch(self, target: Target, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of an object, which must lie inside it.

        Raises ObjectChangedError if the object is not as long as that any more.
        """
        length = stop - start
        if length <= 0:
            return b""
        end = stop - 1 if self._kind.end_is_inclusive else stop

        def ask() -> bytes:
            data: bytes = self._ask("cat_file", target.path, start=start, end=end, seconds=length / _SLOWEST)
            return data

        data = self._tried(target, ask)
        if len(data) != length:
            self.forget(target)
            raise ObjectChangedError
        return data

    def listed(self, folder: Target, *, most: int | None = None, prefix: str = "") -> list[Listed]:
        """Names (`most` of them) directly under a folder, those with the prefix where the store can select them.

        Raises DataError if they may not be listed; a folder without anything is an empty list.
        """

        def ask() -> Any:
            if self._kind.protocol == "s3":  # s3fs asks for twice as many a page, and stores allow 1,000
                few = most if most is not None and most <= _PAGE // 2 else None
                return self._ask("lsdir", folder.path, max_items=few, prefix=prefix)
            return self._ask("ls", folder.path, detail=True)

        try:
            found = self._tried(folder, ask, explain=False)
        except NotThereError:
            return []
        root = folder.path.strip("/") + "/"
        entries = []
        for info in found:
            name = str(info["name"]).lstrip("/").removeprefix(root).rstrip("/")
            if name:
                entries.append(Listed(name, info["type"] == "directory", int(info["size"] or 0)))
        return entries[:most]

    def target(self, root: str, name: str = "", what: str = "picture") -> Target:
        """What a URL, or a name under it, means. The name is taken literally."""
        path = str(self._fs._strip_protocol(root)).rstrip("/")
        return Target(f"{root.rstrip('/')}/{name}", f"{path}/{name}", what) if name else Target(root, path, what)

    def _ask(self, method: str, *arguments: Any, seconds: float = 0.0, **named: Any) -> Any:
        """Call a method of the file system, which must answer within the time-out and `seconds`."""
        fs = self._fs
        if not getattr(fs, "async_impl", False):
            return getattr(fs, method)(*arguments, **named)
        from fsspec.asyn import sync

        # the package's own time-outs end most waits before this one, which stands behind them
        limit = 2 * self._options.timeout_seconds + seconds + 1
        return sync(fs.loop, getattr(fs, f"_{method}"), *arguments, timeout=limit, **named)

    def _tried(self, target: Target, call: Callable[[], T], *, explain: bool = True) -> T:
        fault: Fault | None = None
        for attempt in range(self._options.retries + 1):
            if attempt:
                longest = min(_LONGEST_WAIT, FIRST_WAIT * 2 ** (attempt - 1))
                time.sleep(longest * _random.uniform(0.5, 1.0))
            try:
                return call()
            except QwenEditError:
                raise
            except Exception as error:  # every package raises its own
                fault = fault_of(error, self._kind.credentials)
                if explain and fault.kind is not FaultKind.PASSING and not has_code(error):
                    fault = self._explained(target.path, fault)
                if fault.kind is not FaultKind.PASSING:
                    raise self._error(target, fault) from error
        assert fault is not None
        tries = self._options.retries + 1
        raise StorageError(
            f"{target.what} {shown(target.url)}: the store did not give it in {tries} "
            f"{'tries' if tries > 1 else 'try'}; the last answer was {fault.answer}. "
            f"Start again when it answers, or raise data.storage.retries ({self._options.retries}) "
            f"or data.storage.timeout_seconds ({self._options.timeout_seconds:g})"
        )

    def _explained(self, path: str, bare: Fault) -> Fault:
        """Ask for a byte of an object, because a refused HEAD request says no more than a number."""
        try:
            self._ask("cat_file", path, start=0, end=1)
        except Exception as error:
            fault = fault_of(error, self._kind.credentials)
            return fault if fault.kind in (FaultKind.MISSING, FaultKind.DENIED, FaultKind.SETUP) else bare
        return bare

    def _error(self, target: Target, fault: Fault) -> QwenEditError:
        if fault.kind is FaultKind.MISSING:
            return NotThereError(f"{target.what} {shown(target.url)}: there is no such object")
        if fault.kind is FaultKind.DENIED:
            advice = "give the account whose credentials are in the environment the right to read it"
            return refusal(target.url, f"access is denied ({fault.answer}); {advice}", target.what)
        where = f"{target.what} {shown(target.url)}"
        if fault.kind is FaultKind.SETUP:
            return SettingsError(f"{where} cannot be read: {fault.advice} (the store answered {fault.answer})")
        return StorageError(f"{where} cannot be read: {fault.answer}")


_stores: dict[tuple[str, StorageOptions], Store] = {}
_stores_lock = threading.Lock()


_of_parent: list[object] = []


def _after_fork() -> None:
    # The thread that runs fsspec's event loop does not live on in a child, and locks may be held for ever. The parent's
    # stores are kept, unused: dropping them would close connections on a loop that does not run.
    global _stores, _stores_lock
    _of_parent.append(_stores)
    _stores, _stores_lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def store_of(url: str, options: StorageOptions) -> Store:
    """The store of a URL in this process, set up on first use. Raises SettingsError if that cannot be done."""
    scheme = url.split("://", 1)[0].lower()
    with _stores_lock:
        store = _stores.get((scheme, options))
        if store is None:
            store = _stores[scheme, options] = Store(scheme, url, options)
        return store


def _stamp_of(info: dict[str, Any]) -> Stamp:
    size = int(info.get("size") or 0)
    for key in ("ETag", "etag", "content_md5", "md5Hash", "generation"):
        if info.get(key):
            return Stamp(size, str(info[key]).strip('"'))
    for key in ("LastModified", "last_modified", "updated", "mtime", "created"):
        when = info.get(key)
        if when:
            seconds = when.timestamp() if isinstance(when, datetime) else when
            changed = int(seconds * 1e9) if isinstance(seconds, int | float) else 0
            return Stamp(size, without_secrets(str(when)), changed)
    return Stamp(size, "", time.time_ns())  # nothing to know it by: never settled
