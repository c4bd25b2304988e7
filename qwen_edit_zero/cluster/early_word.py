"""Word of a failure before the ranks have met, where they would have met: on rank 0's port.

Launchers such as pdsh end nobody when one node's ranks have failed. A rank 0 that fails early would leave the others
waiting for its store for minutes; so it stays for a while and tells whoever comes. It does so with a plain socket,
since importing torch only to say so would take longer than everything before. A server of torch's store waits for its
clients to speak; this one speaks first, and so the two cannot be taken for each other.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qwen_edit_zero.cluster.last_words import Failure

STAY_SECONDS = 50.0  # that a rank waits for the others to come and hear
ANSWER_SECONDS = 1.0
_HELLO = b"qwen-edit-zero failed "


def serve(failure: Failure, port: int, ranks: int, *, seconds: float = STAY_SECONDS) -> None:
    """Tell `ranks` other ranks of a failure, as they come; ends when all have heard, or after `seconds`.

    Does nothing where the port is in use: then somebody else serves the store, or another job runs here.
    """
    heard: set[bytes] = set()
    deadline = time.monotonic() + seconds
    line = _HELLO + json.dumps(asdict(failure) | {"detail": ""}).encode() + b"\n"
    with contextlib.suppress(OSError), socket.create_server(("", port), backlog=1024) as server:
        while len(heard) < ranks and time.monotonic() < deadline:
            server.settimeout(max(0.1, deadline - time.monotonic()))
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(ANSWER_SECONDS)
                connection.sendall(line)
                who = connection.recv(64)
                if who.startswith(b"rank "):
                    heard.add(who)


def ask(address: str, port: int, rank: int) -> dict[str, object] | None:
    """What `serve` tells at this place; None if whoever is there says nothing. Raises OSError if nobody is there."""
    with socket.create_connection((address, port), timeout=2 * ANSWER_SECONDS) as connection:
        connection.settimeout(ANSWER_SECONDS)
        data = b""
        with contextlib.suppress(TimeoutError):
            while not data.endswith(b"\n") and _HELLO.startswith(data[: len(_HELLO)]):
                piece = connection.recv(1 << 16)
                if not piece:
                    break
                data += piece
        if not (data.startswith(_HELLO) and data.endswith(b"\n")):
            return None
        with contextlib.suppress(OSError):
            connection.sendall(b"rank %d" % rank)
        found: dict[str, object] = json.loads(data[len(_HELLO) :])
        return found


class Listening:
    """While a rank waits to meet rank 0: a thread that hears whether it has failed. A context manager."""

    def __init__(self, address: str, port: int, rank: int, heard: Callable[[dict[str, object]], None]) -> None:
        self._address, self._port, self._rank, self._heard = address, port, rank, heard
        self._met = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="early word", daemon=True)

    def __enter__(self) -> Listening:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._met.set()

    def _listen(self) -> None:
        while not self._met.wait(0.5):
            try:
                found = ask(self._address, self._port, self._rank)
            except OSError:
                continue  # rank 0 has not come yet
            if found is None:
                return  # it serves the store
            self._heard(found)
