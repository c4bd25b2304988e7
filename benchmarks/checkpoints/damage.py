"""Damaged checkpoints, in every way and every kind of file: read right, or refused; never silently wrong."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.checkpoints.training import Job, recipe
from benchmarks.engines.tables import Table
from qwen_edit_zero import cli
from qwen_edit_zero.checkpoints.consolidation_folder import PROVENANCE
from qwen_edit_zero.checkpoints.layout import checkpoint_folders
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.errors import QwenEditError
from qwen_edit_zero.training.resume import CheckpointChoice

TRIALS = 40  # of each way, for each kind of file
Damage = Callable[[Path, random.Random, Path], None]  # of a file, given another checkpoint of the same run


def flip_a_bit(file: Path, drawn: random.Random, other: Path) -> None:
    content = bytearray(file.read_bytes())
    content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
    file.write_bytes(content)


def truncate(file: Path, drawn: random.Random, other: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: drawn.randrange(len(content))])


def lengthen(file: Path, drawn: random.Random, other: Path) -> None:
    file.write_bytes(file.read_bytes() + drawn.randbytes(drawn.randrange(1, 100)))


def zero_a_page(file: Path, drawn: random.Random, other: Path) -> None:
    content = bytearray(file.read_bytes())
    start = drawn.randrange(len(content)) // 4096 * 4096
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    file.write_bytes(content)


def remove(file: Path, drawn: random.Random, other: Path) -> None:
    file.unlink()


def take_from_another_step(file: Path, drawn: random.Random, other: Path) -> None:
    shutil.copyfile(other / file.name, file)


def add_a_stray_copy(file: Path, drawn: random.Random, other: Path) -> None:
    shutil.copyfile(other / file.name, file.with_name(file.name.replace("00000", "00007").replace("manifest", "stray")))


WAYS: dict[str, Damage] = {
    "a flipped bit": flip_a_bit, "truncated": truncate, "lengthened": lengthen, "a page of zeros": zero_a_page,
    "missing": remove, "from another step": take_from_another_step, "a stray file beside": add_a_stray_copy,
}  # fmt: skip


def measure(trials: int = TRIALS, seed: int = 0) -> list[Table]:
    """Damage a checkpoint of a real run `trials` times in each way and kind of file; resume, verify and consolidate."""
    drawn = random.Random(seed)
    counts: dict[tuple[str, str], Counter[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        job = Job(recipe(scratch, name="run", max_steps=4, every=2), scratch / "log.txt")
        job.start()
        assert job.wait(600) == [0, 0], (scratch / "log.txt").read_text()
        older, newer = checkpoint_folders(scratch / "run" / "checkpoints")
        expected = {use: use_of(newer, scratch) for use, use_of in USES.items()}
        assert "refused" not in expected.values()
        for file in sorted(newer.iterdir()):
            for way, damage in WAYS.items():
                for _ in range(trials if way in ("a flipped bit", "truncated", "a page of zeros") else 1):
                    damaged = scratch / "run" / "checkpoints" / "damaged" / newer.name
                    shutil.copytree(newer, damaged)
                    before = _fingerprint(damaged)
                    damage(damaged / file.name, drawn, older)
                    if _fingerprint(damaged) != before:
                        for use, use_of in USES.items():
                            outcome = use_of(damaged, scratch)
                            right = "right" if outcome == expected[use] else "WRONG"
                            counts.setdefault((way, use), Counter())[outcome if outcome == "refused" else right] += 1
                    shutil.rmtree(damaged.parent)
    rows = [[way, use, c.total(), c["refused"], c["right"], c["WRONG"]] for (way, use), c in counts.items()]
    notes = (
        "A checkpoint of the real training command on two ranks, every file of it in turn. Right: the same bytes as "
        "from the undamaged checkpoint, as when a file is added that is not part of it."
    )
    return [
        Table("Damaged checkpoints", ["damage", "use", "trials", "refused", "right", "silently wrong"], rows, notes)
    ]


def _resume(checkpoint: Path, scratch: Path) -> str:
    try:
        chosen = CheckpointChoice(str(checkpoint), checkpoint.parent, lambda _: None, rank=0).next()
        assert chosen is not None
        digest = hashlib.blake2b()
        with CheckpointReader(chosen) as reader:
            digest.update(json.dumps([reader.step, reader.run_state], sort_keys=True).encode())
            for kind in sorted(reader.kinds()):
                for name in sorted(reader.names(kind)):
                    digest.update(f"{kind} {name} {reader.shape(name, kind)}".encode())
                    for piece in reader.stream(name, kind):
                        digest.update(piece)
        return digest.hexdigest()
    except QwenEditError:
        return "refused"


def _verify(checkpoint: Path, scratch: Path) -> str:
    return "accepted" if _command("checkpoint", "verify", str(checkpoint)) == 0 else "refused"


def _consolidate(checkpoint: Path, scratch: Path) -> str:
    out = scratch / "out"
    shutil.rmtree(out, ignore_errors=True)
    return _fingerprint(out) if _command("consolidate", str(checkpoint), str(out)) == 0 else "refused"


USES = {"resume": _resume, "verify": _verify, "consolidate": _consolidate}


def _command(*words: str) -> int:
    """A verb of the command line in this process; `cli.main` would end it at the first refusal."""
    silent = io.StringIO()
    with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
        try:
            return cli._run(list(words))
        except QwenEditError as error:
            return error.exit_status


def _fingerprint(folder: Path) -> str:
    digest = hashlib.blake2b()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != PROVENANCE:  # it names the folder that was read
            digest.update(str(path.relative_to(folder)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
