"""Where a run goes on: which checkpoint, whether it fits, and at which step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qwen_edit_zero.checkpoints.coordination import Coordinator
from qwen_edit_zero.checkpoints.given_up import go_back
from qwen_edit_zero.checkpoints.manifest import load_head
from qwen_edit_zero.checkpoints.optimizer_groups import group_changes, groups_of, saved_groups
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.checkpoints.validity import find_checkpoint, latest_checkpoint
from qwen_edit_zero.cluster.collectives import from_rank_0, gather_objects
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.settings.models import OptimizerSettings, RunSettings, Settings

AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class RunIdentity:
    """What must be the same for a checkpoint to be continued: it decides which samples and draws a step has.

    Attributes:
        model_fingerprint: of the base model.
        data_fingerprint: of the training samples, their order and buckets.
        global_size: samples of an optimizer step.
        seed: of the run.
        lora: rank, alpha and targets of the adapters; None for full fine-tuning.
        frozen: patterns of the parameters that do not train.
        order: how samples are drawn: the rule, balance and what weights mean.
        content: of what samples show and say, as it is prepared. Another one is told, not refused: a target that was
            mended, or a rule file, changes no order.
    """

    model_fingerprint: str
    data_fingerprint: str
    global_size: int
    seed: int
    lora: dict[str, Any] | None
    frozen: list[str]
    order: dict[str, Any] = field(default_factory=dict)
    content: str = ""


_SETTING = {
    "model_fingerprint": "model.path (another model)",
    "data_fingerprint": "data.manifest or data.vae_area (other samples, another order or other sizes)",
    "global_size": "batch.global_size",
    "seed": "run.seed",
    "lora": "model.lora",
    "frozen": "model.freeze",
    "order": "data.balance, data.weights, or a version that draws samples in another order",
}


_IDENTITY_SETTINGS = (
    "model.path", "data.manifest", "data.balance", "data.weights", "batch.global_size", "run.seed", "model.lora",
    "model.freeze",
)  # fmt: skip
_UNKNOWN = "nothing"  # how a setting is told that one of the two versions of this package does not have
_DEFAULTS = Settings(run=RunSettings(max_steps=1)).model_dump(mode="json")


class CheckpointChoice:
    """Which checkpoint `--resume` means: every rank asks at the same time, and rank 0 decides.

    `auto` takes the newest sound one of the run and says why newer ones were passed over; a path takes that one (or a
    run's newest). `next` looks at names, sizes and manifests; whoever finds damage while reading tells `refuse`, and
    asks for the next.
    """

    def __init__(self, resume: str, checkpoints: Path, say: Callable[[str], None], *, rank: int) -> None:
        self._resume, self._checkpoints, self._say, self._rank = resume, checkpoints, say, rank
        self._refused: dict[Path, str] = {}
        self._told: set[Path] = set()

    def refuse(self, path: Path, reason: str) -> None:
        """Do not give this one again. The same call on every rank."""
        self._refused[path] = reason

    def went_on_from(self, checkpoint: Path) -> None:
        """Note that the run goes on from this one. Collective. Raises StorageError or CheckpointError on all ranks.

        If it was asked for by its path, later ones of the run count no more: started again, it would go on from those.
        """
        if self._resume in (AUTO, NONE):
            return
        ranks, left = Coordinator(), list[Path]()
        with ranks.together(f"going back to {checkpoint}"):
            if self._rank == 0 and self._checkpoints.is_dir():
                left = go_back(self._checkpoints, checkpoint)
        if left:
            self._say(
                f"given up, since this run goes on from another one: {', '.join(path.name for path in left[:5])}"
                f"{', ...' if len(left) > 5 else ''}. They stay, and --resume auto passes over them from now on"
            )

    def next(self) -> Path | None:
        """The checkpoint to go on from, the same on every rank; None to start from the base model. Collective.

        Raises CheckpointError on all ranks if a path leads to none, or if there are some and none can be used.
        """
        if self._resume == NONE:
            return None
        if self._rank == 0:
            outcome = self._search()
            from_rank_0(outcome)
        else:
            while not isinstance(told := from_rank_0(None), _Outcome):
                gather_objects(_seen(told, self._rank))
            outcome = told
        for path, reason in outcome.passed_over:
            if path not in self._told:
                self._told.add(path)
                self._say(f"passing over checkpoint {path.name}: {reason}")
        if outcome.error is not None:
            raise CheckpointError(outcome.error)
        return outcome.path

    def _search(self) -> _Outcome:
        try:
            if self._resume == AUTO:
                found = latest_checkpoint(self._checkpoints, self._look)
            else:
                found = find_checkpoint(Path(self._resume).expanduser(), self._look)
        except CheckpointError as error:
            return _Outcome(None, (), str(error))
        if found.path is None and found.passed_over:
            return _Outcome(
                None,
                found.passed_over,
                f"none of the {len(found.passed_over)} checkpoints in {self._checkpoints} can be used; starting from "
                "the base model would end in their place. Restore one of them, or start over with --resume none, which "
                "keeps them beside the new run",
            )
        return _Outcome(found.path, found.passed_over)

    def _look(self, path: Path) -> None:
        """On rank 0: have all ranks see whether this one is there for them, too: nodes may see a folder late."""
        if path in self._refused:
            raise CheckpointError(self._refused[path])
        from_rank_0(path)
        reports = gather_objects(_seen(path, self._rank))
        if faults := [fault for fault, _ in reports if fault is not None]:
            raise CheckpointError("; ".join(faults[:3]))
        if len({save_id for _, save_id in reports}) > 1:
            raise CheckpointError(f"{path} is another save to some ranks than to others: is run.dir a shared folder?")


@dataclass(frozen=True)
class _Outcome:
    """What rank 0 found."""

    path: Path | None
    passed_over: tuple[tuple[Path, str], ...] = ()
    error: str | None = None


def _seen(path: Path, rank: int) -> tuple[str | None, str]:
    """Why this rank cannot use a checkpoint, and the save it is."""
    try:
        return None, load_head(path).save_id
    except CheckpointError as error:
        return f"rank {rank}: {error}", ""


def run_state(
    identity: RunIdentity, *, step: int, epoch: int, samples_seen: int, engine: Mapping[str, Any]
) -> dict[str, Any]:
    """The counters of a checkpoint; `step` is the number of steps done and the sampler's whole state."""
    return {
        "step": step,
        "epoch": epoch,
        "samples_seen": samples_seen,
        "identity": asdict(identity),
        "engine": dict(engine),
    }


def check_identity(
    reader: CheckpointReader, identity: RunIdentity, *, accept: bool = False, say: Callable[[str], None] = print
) -> None:
    """Raise CheckpointError listing what differs between the checkpoint's run and this one.

    Other content of the same rows is only told. With `accept` the list is told instead, too; tensors that do not fit
    are still refused by `ParallelEngine.load_state`.
    """
    saved = reader.run_state.get("identity")
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{reader.path} does not say of which run it is, so it is none that training wrote")
    imported = "imported" in reader.manifest.settings  # by another program, which knew of no such things
    differing = [
        f"  {_SETTING[key]}: {saved.get(key)} there, {value} here"
        for key, value in asdict(identity).items()
        if key != "content" and (key in saved or not imported) and saved.get(key) != value
    ]
    if not differing:
        if saved.get("content", identity.content) != identity.content:
            say(
                "pictures, masks or texts of the training set, or what prepares them, are not as they were when "
                f"{reader.path.name} was written; going on with what is there now"
            )
        return
    told = f"{reader.path} belongs to a run that differs in what decides its samples and noise:\n" + "\n".join(
        differing
    )
    if accept:
        say(f"{told}\nGoing on all the same, as --accept-changes says: samples of this epoch may repeat or be left out")
        return
    raise CheckpointError(
        f"{told}\nRestore the settings; or go on with the changes by --accept-changes (samples of this epoch may then "
        "repeat or be left out); or give this run a name of its own (run.name=...), or start over with --resume none"
    )


def changed_settings(reader: CheckpointReader, settings: Mapping[str, Any]) -> list[str]:
    """One line for each setting that differs from the checkpoint's run, but for what `check_identity` looks at."""
    there = reader.manifest.settings
    if "imported" in there:  # another program's settings are not known
        return []
    return list(_differences(there, settings, _DEFAULTS, ""))


def changed_groups(reader: CheckpointReader, settings: OptimizerSettings) -> list[str]:
    """One line for each option that some parameters had otherwise, where settings do not say so anyway."""
    groups = saved_groups(reader.run_state)
    if len(groups) == 1 and "imported" not in reader.manifest.settings:
        return []  # a weight decay of all, which is among the settings
    return group_changes(groups, groups_of(settings), reader.names())


def _differences(there: Any, here: Any, default: Any, name: str) -> Iterator[str]:
    if there == here or name.startswith(_IDENTITY_SETTINGS):
        return
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in [*there, *(key for key in here if key not in there)]:
            usual = default.get(key, _UNKNOWN) if isinstance(default, Mapping) else _UNKNOWN
            if key not in there and here[key] == usual:
                continue  # the checkpoint is of a version that did not have this setting
            yield from _differences(
                there.get(key, _UNKNOWN), here.get(key, _UNKNOWN), usual, f"{name}.{key}" if name else key
            )
    else:
        shown = ["given" if isinstance(value, Mapping) else value for value in (there, here)]
        yield f"{name}: {shown[0]} there, {shown[1]} here"
