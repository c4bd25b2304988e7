"""Comparing facts over nodes: digests first, all of them only where digests differ; the odd node is named."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qwen_edit_zero.doctor.facts import (
    ABSENT,
    Facts,
    code_facts,
    data_facts,
    digest,
    environment_facts,
    model_details,
    model_facts,
    package_facts,
    settings_facts,
)
from qwen_edit_zero.doctor.findings import Finding, Level
from qwen_edit_zero.doctor.nodes import listed, most_have, odd_nodes, told_apart
from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.settings.models import Settings

_SHOWN = 4  # differences of a kind that are told
# Packages on which results or the meeting of ranks depend; of the others, only a different major or minor version of
# one that this package asks for would.
_DECISIVE = re.compile(
    r"python|torch|torchvision|deepspeed|diffusers|transformers|tokenizers|peft|accelerate|safetensors|numpy|pillow|"
    r"simplejpeg|bitsandbytes|triton|opencc|qwen-edit-zero|nvidia-nccl.*|flash-attn"
)
_NEEDED = re.compile(r"pydantic|pyyaml|xxhash|orjson|pyarrow|fsspec|s3fs|ossfs|gcsfs|adlfs|mpi4py")
# Ranks that differ in these do not meet, or hang
_FATAL_VARIABLES = re.compile(r"NCCL_(ALGO|PROTO|NET|IB_DISABLE|NVLS_ENABLE|COMM_ID|NET_PLUGIN)")


@dataclass(frozen=True)
class Subject:
    """One kind of facts: where it is shown, how bad a difference is, and what to do about it."""

    group: str
    name: str
    level: Callable[[str, Sequence[str]], Level]
    advice: str
    noun: str


def _failure(name: str, values: Sequence[str]) -> Level:
    return Level.FAILURE


def package_level(name: str, values: Sequence[str]) -> Level:
    """How bad it is that a package has these versions on different nodes."""
    if _DECISIVE.fullmatch(name):
        return Level.FAILURE
    minors = {".".join(value.split(".")[:2]) for value in values}
    return Level.FAILURE if _NEEDED.fullmatch(name) and len(minors) > 1 else Level.WARNING


def _variable_level(name: str, values: Sequence[str]) -> Level:
    return Level.FAILURE if _FATAL_VARIABLES.fullmatch(name) else Level.WARNING


SUBJECTS = {
    "code": Subject(
        "software", "code", _failure, "bring the checkouts to one state, or put one on a shared folder", "files"
    ),
    "packages": Subject(
        "software", "packages", package_level, "install the same (make install) there, or share .venv", "packages"
    ),
    "environment": Subject(
        "software", "environment", _variable_level, "set it alike on all nodes (docs/launch.md, Networks)", "variables"
    ),
    "settings": Subject(
        "software", "settings", _failure, "start all nodes with the same recipe and arguments", "settings"
    ),
    "data": Subject("data", "manifest", _failure, "give all nodes the same manifest, best on a shared folder", "files"),
    "model": Subject("data", "model", _failure, "copy the model there again, or put it on a shared folder", "files"),
}


class NodeFacts:
    """The facts of this node. Raises nothing: what cannot be read is a fact, too."""

    def __init__(self, settings: Settings, folder: ModelFolder | None, environ: Mapping[str, str]) -> None:
        self._folder = folder
        self._facts: dict[str, Facts] = {
            "code": code_facts(),
            "packages": package_facts(),
            "environment": environment_facts(environ),
            "settings": settings_facts(settings),
            "data": data_facts(settings),
            "model": {} if folder is None else model_facts(folder),
        }

    def digests(self) -> dict[str, str]:
        """One of each subject, but of a model or manifests that this node has nothing of."""
        return {s: digest(facts) for s, facts in self._facts.items() if facts or s not in ("model", "data")}

    def count(self, subject: str) -> int:
        """How many facts there are of a subject."""
        return len(self._facts[subject])

    def details(self, subjects: Sequence[str]) -> dict[str, Facts]:
        """All facts of these subjects, the model's by component."""
        told = {subject: self._facts[subject] for subject in subjects}
        if "model" in told and self._folder is not None and self._folder.has_weights:
            told["model"] = model_details(self._folder)
        return told


def differing(digests: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The subjects of which nodes have different digests, by node; those that a node has nothing of are left out."""
    found = []
    for subject in SUBJECTS:
        values = {told[subject] for told in digests.values() if subject in told}
        if len(values) > 1:
            found.append(subject)
    return found


def compare(subject: str, details: Mapping[str, Facts]) -> list[Finding]:
    """Findings about facts that differ over the nodes: the worst first, few of many."""
    about = SUBJECTS[subject]
    names = sorted({name for facts in details.values() for name in facts})
    found: dict[Level, list[tuple[str, dict[str, str]]]] = {Level.FAILURE: [], Level.WARNING: []}
    for name in names:
        values = {node: facts.get(name, ABSENT) for node, facts in details.items()}
        if len(set(values.values())) > 1:
            found[about.level(name, list(values.values()))].append((name, values))
    findings = []
    for level, differences in found.items():
        if differences:
            findings.append(Finding(about.group, about.name, level, _told(subject, differences), about.advice))
    return findings


def _told(subject: str, differences: Sequence[tuple[str, dict[str, str]]]) -> str:
    noun = SUBJECTS[subject].noun
    parts = []
    for name, values in differences[:_SHOWN]:
        shown = values if subject in ("packages", "environment", "settings") else _shortened(values)
        parts.append(f"{name} is {told_apart(shown)}")
    rest = len(differences) - _SHOWN
    odd = sorted({node for _, values in differences for node in odd_nodes(values)})
    more = f"; and {rest} more {noun}, on {listed(odd)}" if rest > 0 else ""
    return "; ".join(parts) + more


def _shortened(values: dict[str, str]) -> dict[str, str]:
    """Digests say nothing but that they differ."""
    usual = most_have(values)
    words = {usual: "as it should be" if len(values) > 2 else f"of digest {usual[:8]}"}
    for value in values.values():
        words.setdefault(value, value if value == ABSENT or "unreadable" in value else f"another ({value[:8]})")
    if usual == ABSENT or "unreadable" in usual:
        words[usual] = usual
    return {node: words[value] for node, value in values.items()}
