"""`qwen-edit-zero VERB`: a thin function a verb."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from qwen_edit_zero import train as train_script
from qwen_edit_zero.cluster.failure import run_guarded
from qwen_edit_zero.commands import cache as cache_command
from qwen_edit_zero.commands import check as check_command
from qwen_edit_zero.commands import doctor as doctor_command
from qwen_edit_zero.commands import launch as launch_command
from qwen_edit_zero.settings.command_line import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["train"]:
        return train_script.main(given[1:], prog="qwen-edit-zero train")
    if given[:1] == ["cache"]:
        if {*cache_command.VERBS, "-h", "--help"} & set(given[1:2]):
            return run_guarded(lambda: cache_command.run(given[1:], _bytes_bar))
        return train_script.main([*given[1:], "--cache-only"], prog="qwen-edit-zero cache")
    if given[:2] == ["data", "check"]:
        return run_guarded(lambda: check_command.run(given[2:]))
    if given[:1] == ["doctor"]:
        return doctor_command.run(given[1:])
    if given[:1] == ["launch"]:
        return run_guarded(lambda: launch_command.launch(given[1:]))
    if given[:1] == ["hostfile"]:
        return run_guarded(lambda: launch_command.hostfile(given[1:]))
    if given[:1] == ["plan"]:
        return run_guarded(lambda: _plan(given[1:]))
    return run_guarded(lambda: _run(given))


def _plan(given: list[str]) -> int:
    from qwen_edit_zero.commands.plan import plan

    return plan(given)


def _run(given: list[str]) -> int:
    parsed = _parser().parse_args(given)
    status: int = parsed.verb(parsed)
    return status


def _parser() -> ArgumentParser:
    parser = Parser(prog="qwen-edit-zero", description="Train Qwen-Image-Edit, and work with what a run leaves behind.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    verbs.add_parser("train", help="train; see qwen-edit-zero train --help", add_help=False)
    verbs.add_parser("cache", help="fill the cache of a recipe, or look after one", add_help=False)
    verbs.add_parser("doctor", help="look at nodes, folders and network before training", add_help=False)
    verbs.add_parser("launch", help="start training on a cluster, or show the command that does", add_help=False)
    verbs.add_parser("plan", help="say what a run needs before a GPU is rented: memory, time, cost", add_help=False)
    verbs.add_parser("hostfile", help="check a hostfile, or write it for another launcher", add_help=False)
    verb = verbs.add_parser("consolidate", help="turn a checkpoint into a model folder that diffusers loads")
    verb.add_argument(
        "checkpoint",
        type=Path,
        metavar="SOURCE",
        help="a folder such as RUN/checkpoints/step-00000200, or RUN: its newest; or one that DeepSpeed or torch (DCP) "
        "wrote, told by its content",
    )
    verb.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    verb.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="of the weights (default bf16; of an exported adapter fp32)"
    )
    verb.add_argument(
        "--base",
        type=Path,
        metavar="MODEL",
        help="the model folder, if it has moved since the run; with a DeepSpeed or DCP folder: the model to make "
        "(without it, only the weights are written, under their own names)",
    )
    verb.add_argument(
        "--fill", action="store_true", help="of a DeepSpeed or DCP folder: take weights that it lacks from MODEL"
    )
    verb.add_argument(
        "--weights", choices=("model", "ema"), default="model", help="the weights, or their running average"
    )
    verb.add_argument("--shard-size", type=_bytes, metavar="SIZE", help="of weight files at most (default 10GB)")
    verb.add_argument(
        "--threads", type=_count, metavar="N", help="that read and write (default: one a processor, up to 4)"
    )
    verb.add_argument(
        "--components",
        choices=("link", "copy", "none"),
        help="text encoder, VAE ...: hard links to the base model's files (default), copies, or left out",
    )
    verb.add_argument("--overwrite", action="store_true", help="replace OUT if this command wrote it before")
    verb.add_argument(
        "--lora",
        choices=("merge", "export"),
        default="merge",
        help="of a LoRA run: the model with the adapter merged into it (default), or only the adapter, for "
        "pipeline.load_lora_weights(OUT)",
    )
    verb.add_argument("--adapter", dest="lora", action="store_const", const="adapter", help="the same as --lora export")
    verb.set_defaults(verb=_consolidate)
    verb = verbs.add_parser("report", help="draw the contact sheet and the loss plot of a run")
    verb.add_argument("run", type=Path, help="the folder of a run, such as runs/demo")
    verb.set_defaults(verb=_report)
    checkpoint = verbs.add_parser("checkpoint", help="look at checkpoints").add_subparsers(
        required=True, metavar="VERB"
    )
    for name, what in (
        ("list", "the checkpoints of a run, and whether each is valid"),
        ("show", "what a checkpoint holds and where it comes from"),
        ("verify", "read every byte and compare it with its checksum; exit status 2 if something is wrong"),
    ):
        verb = checkpoint.add_parser(name, help=what, description=what)
        verb.add_argument("path", type=Path, help="a run, such as runs/demo, or one of its checkpoints")
        verb.set_defaults(verb=_checkpoint, action=name)
    what = "bring a checkpoint of DeepSpeed or torch (DCP) into a run folder, moments included, to go on from it here"
    verb = checkpoint.add_parser("import", help=what, description=what)
    verb.add_argument("source", type=Path, metavar="SOURCE", help="the folder that DeepSpeed or torch wrote")
    verb.add_argument("run", type=Path, metavar="RUN", help="run.dir/run.name of the run that is to go on")
    verb.add_argument(
        "--base", type=Path, required=True, metavar="MODEL", help="the model folder that was trained from"
    )
    verb.add_argument(
        "--trust-frozen",
        action="store_true",
        help="do not compare frozen parameters with those of MODEL, which reads all of both",
    )
    verb.set_defaults(verb=_import)
    data = verbs.add_parser("data", help="look at data sets").add_subparsers(required=True, metavar="VERB")
    data.add_parser("check", help="look at every row and picture of a data set, and report", add_help=False)
    for name, help_, described in (
        ("normalise", "show instructions before and after normalisation, with the rules", "data.normalise"),
        ("safety", "show what the word filter finds in instructions", "data.safety_rules"),
    ):
        verb = data.add_parser(name, help=help_, description=help_)
        verb.add_argument(
            "what", nargs="+", metavar="TEXT|MANIFEST", help="an instruction, a manifest, demo, or - for lines of stdin"
        )
        verb.add_argument(
            "--rules", type=Path, metavar="FILE", help=f"YAML file, as {described} (default: the shipped)"
        )
        verb.add_argument("--all", action="store_true", help="of a manifest: every row in question, not the first 20")
        verb.set_defaults(verb=_instructions, action=name)
    what = "write a data set of another format as our JSON Lines; pictures in archives become files beside it"
    verb = data.add_parser("convert", help=what, description=what)
    verb.add_argument("source", metavar="SOURCE", help="a manifest, a folder or a pattern of a format in docs/data.md")
    verb.add_argument("out", type=Path, metavar="OUT.jsonl", help="the manifest to write; it must not exist")
    verb.add_argument("--format", default="auto", help="of SOURCE, as data.format (default: told by content)")
    verb.add_argument("--columns", metavar="{target: NAME, ...}", help="as data.columns")
    verb.add_argument("--split", help="write only rows of this split, as data.split")
    verb.add_argument(
        "--outside", action="append", default=[], metavar="FOLDER", help="as data.outside; may be repeated"
    )
    verb.add_argument("--skip", action="store_true", help="leave wrong rows out, as data.on_error=skip")
    verb.add_argument(
        "--max-references", type=_count, default=3, metavar="N", help="as data.max_references (default 3)"
    )
    verb.add_argument(
        "--strict",
        action="store_true",
        help="exit status 2 if any row names a picture that is not there, not only if all do",
    )
    verb.set_defaults(verb=_convert)
    return parser


def _export_adapter(parsed: Namespace) -> Path:
    from qwen_edit_zero.checkpoints.adapter_export import export_adapter
    from qwen_edit_zero.edit_model.lora import save_lora
    from qwen_edit_zero.errors import SettingsError
    from qwen_edit_zero.settings.models import LoraSettings

    option = "--adapter" if parsed.lora == "adapter" else "--lora export"
    for name in ("base", "fill", "shard_size", "threads", "components"):
        if getattr(parsed, name):
            raise SettingsError(
                f"--{name.replace('_', '-')} is of no use with {option}, which writes one small file; leave it out"
            )
    return export_adapter(
        parsed.checkpoint,
        parsed.out,
        save=lambda folder, tensors, lora: save_lora(folder, tensors, LoraSettings.model_validate(lora.model_dump())),
        option=option,
        dtype=parsed.dtype or "fp32",
        weights=parsed.weights,
        overwrite=parsed.overwrite,
    )


def _consolidate(parsed: Namespace) -> int:
    print(f"written: {_write_model(parsed) if parsed.lora == 'merge' else _export_adapter(parsed)}")
    return 0


def _write_model(parsed: Namespace) -> Path:
    from qwen_edit_zero.checkpoints.consolidate import SHARD_BYTES, consolidate
    from qwen_edit_zero.edit_model.folder import open_model_folder

    with _bytes_bar() as progress:
        return consolidate(
            parsed.checkpoint,
            parsed.out,
            dtype=parsed.dtype or "bf16",
            open_model=lambda path: open_model_folder(path, without_weights=True),
            base_model=parsed.base,
            weights=parsed.weights,
            fill=parsed.fill,
            shard_bytes=parsed.shard_size or SHARD_BYTES,
            components=parsed.components or "link",
            overwrite=parsed.overwrite,
            threads=parsed.threads,
            progress=progress,
        )


@contextmanager
def _bytes_bar() -> Iterator[Callable[[int, int], None] | None]:
    """A bar of bytes done, speed and time left; nothing where nobody would see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, dynamic_ncols=True) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def _bytes(text: str) -> int:
    """`10GB`, `500 MB`, `2GiB` or a number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", text.strip())
    size = float(found[1]) * (1024 if found[3] else 1000) ** " kMGT".index(found[2] or " ") if found else 0
    if size < 1:
        raise ArgumentTypeError(f"{text!r} is no size; give one such as 5GB")
    return int(size)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _report(parsed: Namespace) -> int:
    from qwen_edit_zero.training.report import write_report

    for path in write_report(parsed.run):
        print(f"written: {path}")
    return 0


def _checkpoint(parsed: Namespace) -> int:
    from qwen_edit_zero.checkpoints.describe import list_checkpoints, show_checkpoint, verify_text

    if parsed.action == "verify":
        with _bytes_bar() as progress:
            text, is_sound = verify_text(parsed.path, progress)
        print(text)
        return 0 if is_sound else 2
    print(list_checkpoints(parsed.path) if parsed.action == "list" else show_checkpoint(parsed.path))
    return 0


def _import(parsed: Namespace) -> int:
    from qwen_edit_zero.checkpoints.importing import import_checkpoint
    from qwen_edit_zero.edit_model.folder import open_model_folder
    from qwen_edit_zero.training.run_folder import take

    with _bytes_bar() as progress:
        base = open_model_folder(str(parsed.base))
        written = import_checkpoint(
            parsed.source, parsed.run, base=base, trust_frozen=parsed.trust_frozen, hold=take, progress=progress
        )
    print(f"written: {written}")
    return 0


def _instructions(parsed: Namespace) -> int:
    from qwen_edit_zero.edit_data.instructions.commands import show_normalised, show_safety

    show = show_normalised if parsed.action == "normalise" else show_safety
    return show(parsed.what, rules=parsed.rules, everything=parsed.all)


def _convert(parsed: Namespace) -> int:
    from qwen_edit_zero.edit_data.manifests.commands import convert

    text, status = convert(
        parsed.source,
        parsed.out,
        form=parsed.format,
        columns=parsed.columns,
        split=parsed.split,
        outside=parsed.outside,
        on_error="skip" if parsed.skip else "stop",
        max_references=parsed.max_references,
        strict=parsed.strict,
    )
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
