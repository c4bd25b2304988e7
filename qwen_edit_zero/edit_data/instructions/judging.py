"""The user's classifier as a judge of rows: of an instruction, its references and its target together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from qwen_edit_zero.edit_data.instructions.classifier import CATEGORY, Classifier
from qwen_edit_zero.edit_data.instructions.safety import Finding, Level, blocked_by

_FORMAT = b"verdict 1"


@dataclass(frozen=True)
class RowJudge:
    """Asks about rows; what it says of a row depends on what `key` covers alone.

    Attributes:
        blocks: data.safety=block: a row that the classifier would block is refused.
        note: is given each finding of a row that is looked at.
    """

    classifier: Classifier
    blocks: bool
    note: Callable[[Finding], None] = lambda finding: None

    def key(self, instruction: str, pictures: Sequence[bytes]) -> bytes:
        """16 bytes over the classifier's name and version, the instruction as written, and the contents.

        Args:
            pictures: 16-byte digests of the references in order, and of the target, last.
        """
        digest = hashlib.blake2b(_FORMAT, digest_size=16)
        for text in (self.classifier.name, self.classifier.version, instruction):
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        digest.update(b"".join(pictures))
        return digest.digest()

    def ask(self, instruction: str, pictures: Sequence[Any]) -> Finding | None:
        """What the classifier says. Raises RunError if it fails.

        Args:
            pictures: files of the references in order, and of the target, last.
        """
        return self.classifier.judge(instruction, pictures)

    def finding(self, level: Level, reason: str) -> Finding:
        """What the classifier said before."""
        return Finding(self.classifier.name, CATEGORY, level, reason, 0)

    def refusal(self, finding: Finding | None) -> str | None:
        """Why a row with this finding is refused; None if it is not."""
        return blocked_by([finding]) if self.blocks and finding is not None else None
