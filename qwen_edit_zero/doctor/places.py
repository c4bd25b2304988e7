"""The folders that a run writes to: which they are, how much they must hold, and what is found about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qwen_edit_zero.doctor.file_systems import FileSystem, file_system_of, free_bytes
from qwen_edit_zero.doctor.findings import Finding, Level
from qwen_edit_zero.doctor.needs import Needs
from qwen_edit_zero.doctor.nodes import Node, listed
from qwen_edit_zero.doctor.sharing import PATIENCE_SECONDS, Answer, Asked, Question
from qwen_edit_zero.edit_data.wording import byte_count
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training import run_folder

_SLOW_SECONDS = 1.0  # until another node sees a new file
_STEPS = "step-*"


@dataclass(frozen=True)
class Place:
    """A folder, the setting that names it, and how many checkpoints come into it. `by_all`: all nodes use it, so that
    they must share it; else rank 0's node alone."""

    setting: str
    path: Path
    checkpoints: int
    by_all: bool = True


@dataclass(frozen=True)
class Seen:
    """A place as one node sees it; `free` bytes, None if unknown."""

    file_system: FileSystem
    free: int | None


def places_of(settings: Settings) -> list[Place]:
    """The run's folder, the cache if it is elsewhere, and the backup if it is a folder."""
    run, cache = run_folder.run_folder(settings), run_folder.cache_folder(settings)
    keep = settings.checkpoint.keep
    found = [Place("run.dir", run, 1 if keep is None else keep + 1)]  # the next is written before the oldest goes
    if not cache.is_relative_to(run):
        found.append(Place("data.cache_dir", cache, 0))
    backup = settings.checkpoint.backup
    if backup is not None and (backup.startswith("file://") or "://" not in backup):
        place = Path(backup.removeprefix("file://")).expanduser().absolute() / settings.run.name
        found.append(Place("checkpoint.backup", place, found[0].checkpoints, by_all=False))
    return found


def look(places: Sequence[Place]) -> list[Seen]:
    """How this node sees them."""
    return [Seen(file_system_of(place.path), free_bytes(place.path)) for place in places]


def judge_space(place: Place, seen: Mapping[str, Seen], needs: Needs | None) -> Finding:
    """Whether there is room for checkpoints: on the node with least; `seen` by node, rank 0's first."""
    users = list(seen.items()) if place.by_all else list(seen.items())[:1]
    known = {name: found.free for name, found in users if found.free is not None}
    if not known:
        return Finding("folders", "space", Level.UNCHECKED, f"{place.setting} {place.path}: its file system tells none")
    node = min(known, key=lambda name: known[name])
    free = known[node]
    text = f"{place.setting} {place.path}: {byte_count(free)} free" + (f" on {node}" if len(set(known)) > 1 else "")
    if needs is None or not place.checkpoints:
        return Finding("folders", "space", Level.OK, text)
    one = needs.checkpoint_bytes
    there = sum(1 for _ in (place.path / run_folder.CHECKPOINTS).glob(_STEPS)) if place.setting == "run.dir" else 0
    wanted = one * max(1, place.checkpoints - there)
    text += f"; a checkpoint of this run takes {byte_count(one)}"
    if free < one:
        return Finding("folders", "space", Level.FAILURE, text, f"free some space, or set {place.setting} elsewhere")
    if free < wanted:
        text += f", and {place.checkpoints} are to fit (checkpoint.keep, and the next)"
        return Finding("folders", "space", Level.WARNING, text, "free some space, or lower checkpoint.keep")
    return Finding("folders", "space", Level.OK, text)


def settle(
    place: Place,
    nodes: Sequence[Node],
    asked: Asked,
    answers: Sequence[Answer],
    seen: Mapping[str, Seen],
    *,
    patience: float = PATIENCE_SECONDS,
) -> Finding:
    """Whether a place is one folder on all nodes, when they have answered; on the rank that asked."""
    heard = [] if asked.question.error else [number for number, told in enumerate(answers) if not told.error]
    unseen = asked.missing(heard, patience=patience) if heard else []
    return judge_sharing(place, nodes, asked.question, answers, unseen, [seen[node.name] for node in nodes])


def judge_sharing(
    place: Place,
    nodes: Sequence[Node],
    question: Question,
    answers: Sequence[Answer],
    unseen: Sequence[int],
    seen: Sequence[Seen],
) -> Finding:
    """Whether a place is the same folder on all nodes.

    `answers` and `seen` by node; `unseen`: numbers of nodes whose answers the first node does not see.
    """
    first = nodes[0].name
    what = f"{place.setting} {place.path}"

    def finding(level: Level, text: str, advice: str = "") -> Finding:
        return Finding("folders", "shared", level, text, advice)

    if question.error:
        return finding(
            Level.FAILURE, f"{what} {question.error} (on {first})", f"make it writable, or set {place.setting}"
        )
    wrong: dict[str, list[int]] = {}
    for number, told in enumerate(answers):
        if told.error:
            wrong.setdefault(told.error, []).append(number)
    if wrong:
        parts = []
        for error, numbers in wrong.items():
            where = f"{seen[numbers[0]].file_system}"
            parts.append(f"{what} {error}, on {listed([nodes[n].name for n in numbers])}: {where}")
        text = f"{'; '.join(parts)}; on {first}: {seen[0].file_system}"
        return finding(
            Level.FAILURE, text, f"mount the same file system on all nodes, or set {place.setting} to a folder on one"
        )
    if unseen:
        names = listed([nodes[n].name for n in unseen])
        return finding(
            Level.FAILURE,
            f"{what}: {first} does not see what {names} wrote",
            "the file system must show files of one node to the others within seconds",
        )
    kinds = ", ".join(dict.fromkeys(found.file_system.kind for found in seen))
    slowest = max(range(len(answers)), key=lambda n: answers[n].seconds)
    delay = answers[slowest].seconds
    text = f"{what}: all {len(nodes)} nodes see one folder ({kinds}), and what others write within {delay:.1f} s"
    if not all(found.file_system.renames_whole for found in seen):
        advice = (
            "a file system whose renames are whole is needed for checkpoints: NFS, Lustre ...; copies to a bucket: "
        )
        return finding(Level.WARNING, f"{text}; {kinds} renames file by file", f"{advice}checkpoint.backup")
    if delay > _SLOW_SECONDS:
        return finding(Level.WARNING, f"{text} (slowest: {nodes[slowest].name})", "mount it with lookupcache=none")
    return finding(Level.OK, text)
