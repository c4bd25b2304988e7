"""Where a run goes on: which checkpoint, whether it fits, and at which step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qwen_edit_zero.checkpoints.manifest import load_head
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.checkpoints.validity import find_checkpoint, latest_checkpoint, verify_checkpoint
from qwen_edit_zero.cluster.collectives import from_rank_0, gather_objects
from qwen_edit_zero.errors import CheckpointError

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
    """

    model_fingerprint: str
    data_fingerprint: str
    global_size: int
    seed: int
    lora: dict[str, Any] | None
    frozen: list[str]


_SETTING = {
    "model_fingerprint": "model.path (another model)",
    "data_fingerprint": "data.manifest or data.vae_area (other samples, another order or other sizes)",
    "global_size": "batch.global_size",
    "seed": "run.seed",
    "lora": "model.lora",
    "frozen": "model.freeze",
}


_IDENTITY_SETTINGS = ("model.path", "data.manifest", "batch.global_size", "run.seed", "model.lora", "model.freeze")


def choose_checkpoint(
    resume: str, checkpoints: Path, say: Callable[[str], None], *, rank: int, world_size: int
) -> Path | None:
    """The checkpoint that `--resume` means; None to start from the base model. Collective, the same on every rank.

    `auto` takes the newest sound one of the run and says why newer ones were passed over; a path takes that one
    (or a run's newest). Rank 0 decides: nodes may see a shared folder differently for a while. Every byte is compared
    with its checksum, the files dealt out to the ranks: a rank that later reads a part of what another number of ranks
    wrote cannot check it. Raises CheckpointError on all ranks if a path leads to none.
    """
    if resume == NONE:
        return None

    def look(path: Path) -> None:
        """On rank 0: have all ranks look at this one."""
        from_rank_0(path)
        reports = gather_objects(_seen(path, rank, world_size))
        if faults := [fault for found, _ in reports for fault in found]:
            raise CheckpointError(f"{path} is damaged: {'; '.join(faults[:3])}")
        if len({save_id for _, save_id in reports}) > 1:
            raise CheckpointError(f"{path} is another save to some ranks than to others: is run.dir a shared folder?")

    outcome: _Outcome
    if rank == 0:
        outcome = _search(resume, checkpoints, look)
        from_rank_0(outcome)
    else:
        while not isinstance(told := from_rank_0(None), _Outcome):
            gather_objects(_seen(told, rank, world_size))
        outcome = told
    for path, reason in outcome.passed_over:
        say(f"passing over checkpoint {path.name}: {reason}")
    if outcome.error is not None:
        raise CheckpointError(outcome.error)
    return outcome.path


@dataclass(frozen=True)
class _Outcome:
    """What rank 0 found."""

    path: Path | None
    passed_over: tuple[tuple[Path, str], ...] = ()
    error: str | None = None


def _search(resume: str, checkpoints: Path, look: Callable[[Path], None]) -> _Outcome:
    try:
        source = Path(resume).expanduser()
        found = latest_checkpoint(checkpoints, look) if resume == AUTO else find_checkpoint(source, look)
    except CheckpointError as error:
        return _Outcome(None, (), str(error))
    if found.path is None and found.passed_over:
        return _Outcome(
            None,
            found.passed_over,
            f"none of the {len(found.passed_over)} checkpoints in {checkpoints} can be used; starting from the base "
            "model would end in their place. Restore one of them, or start over with --resume none, which "
            "keeps them beside the new run",
        )
    return _Outcome(found.path, found.passed_over)


def _seen(path: Path, rank: int, world_size: int) -> tuple[list[str], str]:
    """Faults in this rank's share of a checkpoint, and the save it is."""
    try:
        return [str(f) for f in verify_checkpoint(path, share=(rank, world_size))], load_head(path).save_id
    except CheckpointError as error:
        return [f"rank {rank}: {error}"], ""


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

    With `accept` the list is told instead; tensors that do not fit are still refused by `ParallelEngine.load_state`.
    """
    saved = reader.run_state["identity"]
    imported = "imported" in reader.manifest.settings  # by another program, which knew of no such things
    differing = [
        f"  {_SETTING[key]}: {saved.get(key)} there, {value} here"
        for key, value in asdict(identity).items()
        if (key in saved or not imported) and saved.get(key) != value
    ]
    if not differing:
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
    return list(_differences(there, settings, ""))


def _differences(there: Any, here: Any, name: str) -> Iterator[str]:
    if there == here or name.startswith(_IDENTITY_SETTINGS):
        return
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in [*there, *(key for key in here if key not in there)]:
            yield from _differences(there.get(key), here.get(key), f"{name}.{key}" if name else key)
    else:
        shown = ["given" if isinstance(value, Mapping) else value for value in (there, here)]
        yield f"{name}: {shown[0]} there, {shown[1]} here"
