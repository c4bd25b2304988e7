"""Time to be divided between the parts of the check."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """Seconds that are left. A part that will not fit is left out, and said to be.

    Attributes:
        left_out: names of the parts that were not started.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self.left_out: list[str] = []

    @property
    def left(self) -> float:
        """Seconds until the end, negative after it."""
        return self._end - self._clock()

    def allows(self, part: str, seconds: float, *, keep: float = 0.0) -> bool:
        """Whether a part that takes about so long may start, with `keep` seconds for later ones; notes it otherwise."""
        if self.left >= seconds + keep:
            return True
        later = f", {keep:.0f} s of them for later parts" if keep else ""
        self.left_out.append(f"{part} (needs about {seconds:.0f} s, {max(self.left, 0):.0f} s are left{later})")
        return False
