"""Where a run goes on: which checkpoint, whether it fits, and at which step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.checkpoints.validity import find_checkpoint, latest_checkpoint, verify_checkpoint
from qwen_edit_zero.cluster.collectives import gather_objects
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
    """The checkpoint that `--resume` means; None to start from the base model. Collective.

    `auto` takes the newest sound one of the run and says why newer ones were passed over; a path takes that one
    (or a run's newest). Every byte is compared with its checksum, the files dealt out to the ranks: a rank that later
    reads a part of what another number of ranks wrote cannot check it. Raises CheckpointError if a path leads to none.
    """
    if resume == NONE:
        return None

    def look(path: Path) -> None:
        faults = gather_objects([str(f) for f in verify_checkpoint(path, share=(rank, world_size))])
        if found := [fault for of_rank in faults for fault in of_rank]:
            raise CheckpointError(f"{path} is damaged: {'; '.join(found[:3])}")

    source = Path(resume).expanduser()
    found = latest_checkpoint(checkpoints, look) if resume == AUTO else find_checkpoint(source, look)
    for path, reason in found.passed_over:
        say(f"passing over checkpoint {path.name}: {reason}")
    if found.path is None and found.passed_over:
        raise CheckpointError(
            f"none of the {len(found.passed_over)} checkpoints in {checkpoints} can be used; starting from the base "
            "model would end in their place. Restore one of them, or start over with --resume none, which "
            "keeps them beside the new run"
        )
    return found.path


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
    there, here = _flat(reader.manifest.settings), _flat(settings)
    return [
        f"{name}: {there[name]} there, {here[name]} here"
        for name in there
        if name in here and there[name] != here[name] and not name.startswith(_IDENTITY_SETTINGS)
    ]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found
