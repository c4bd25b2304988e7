"""`qwen-edit-zero doctor`: everything that can be told before the first step, on every rank, in half a minute."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from qwen_edit_zero.cluster import failure, process_group
from qwen_edit_zero.cluster.collectives import from_rank_0, gather_numbers, gather_objects
from qwen_edit_zero.cluster.device_setup import set_numerics
from qwen_edit_zero.cluster.identity import Identity
from qwen_edit_zero.cluster.pulse import position
from qwen_edit_zero.doctor import clocks, gpus, machine, network, room, speeds
from qwen_edit_zero.doctor.agreement import SUBJECTS, NodeFacts, compare, differing
from qwen_edit_zero.doctor.facts import Facts
from qwen_edit_zero.doctor.findings import Finding, Level
from qwen_edit_zero.doctor.links import Measured, measure
from qwen_edit_zero.doctor.meeting import RollCall
from qwen_edit_zero.doctor.needs import Needs, needs_of
from qwen_edit_zero.doctor.nodes import Node, group_nodes, listed, node_key
from qwen_edit_zero.doctor.places import Place, Seen, judge_space, places_of, settle
from qwen_edit_zero.doctor.places import look as look_at_places
from qwen_edit_zero.doctor.ranks_alike import settings_digest, unlike_within_nodes
from qwen_edit_zero.doctor.reading import Picture, read_rate, sample_pictures, unreadable
from qwen_edit_zero.doctor.report import Report, write_json
from qwen_edit_zero.doctor.sharing import Answer, Asked, Question, answer
from qwen_edit_zero.doctor.standstill import ENDS_SECONDS, WAITING, Phase, deadline
from qwen_edit_zero.edit_model.folder import ModelFolder, open_model_folder
from qwen_edit_zero.errors import ModelFolderError, QwenEditError
from qwen_edit_zero.settings.load import LoadedSettings
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training.stragglers import DeviceProbe

SECONDS = 30.0  # that ranks are waited for
_PROBES = 3
_PATIENCE_SECONDS = 8.0  # until what another node has written must be seen


@dataclass(frozen=True)
class _Record:
    """What one rank of each node tells of it."""

    digests: dict[str, str]
    counts: dict[str, int]
    places: list[Seen]
    machine: machine.Machine
    health: gpus.Health | None
    interface: network.Interface
    read_rate: float | None
    model_error: str


def examine(loaded: LoadedSettings, identity: Identity, *, seconds: float, json_path: Path | None = None) -> int:
    """Look at everything, and show it on rank 0; returns the exit status on every rank: 0, or 2 if something must be
    mended. `seconds`: how long ranks are waited for. Raises ClusterError if they do not meet."""
    settings, environ = loaded.settings, dict(os.environ)  # before libraries are told of ranks and interfaces
    began = time.monotonic()
    device = process_group.choose_device(identity, settings.engine.device)
    started = process_group.start(
        identity,
        timeout_seconds=int(max(60.0, 4 * seconds)),
        device=settings.engine.device,
        meeting_seconds=int(seconds) + 10,
        met=RollCall(identity, device, seconds),
    )
    failure.expect_signs_within(settings.run.silent_seconds)  # no model is loaded here, which would silence a rank
    set_numerics(settings, started)
    try:
        with deadline(identity.rank, max(ENDS_SECONDS, 3 * seconds)) as phase:
            examination = _Examination(settings, identity, started, environ, seconds, phase)
            report = examination.report(began)
        if identity.rank == 0:
            print(report.text(), flush=True)
            if json_path is not None:
                write_json(report, json_path)
        return int(from_rank_0(report.exit_status))
    finally:
        process_group.stop()


class _Examination:
    """One rank's part."""

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        device: torch.device,
        environ: dict[str, str],
        seconds: float,
        phase: Phase,
    ) -> None:
        self.settings, self.identity, self.device = settings, identity, device
        self.environ, self.seconds, self.phase = environ, seconds, phase
        self.rank, self.patience = identity.rank, min(_PATIENCE_SECONDS, seconds / 4)
        self.backend = dist.get_backend()
        self.places = places_of(settings)
        self.folder: ModelFolder | None = None
        self.nodes: list[Node] = []

    def report(self, began: float) -> Report:
        """All findings; collective. What is measured is the same on all ranks, the findings are right on rank 0."""
        self._say("who is where", by_all=True)
        keys, digests = zip(*gather_objects((node_key(), settings_digest(self.settings))), strict=True)
        self.nodes = group_nodes(keys)
        self._say("each node by itself")
        facts, record = self._look() if self.is_leader else (None, None)
        gathered: list[_Record | None] = gather_objects(record)
        records = {node.name: told for node in self.nodes if (told := gathered[node.leader]) is not None}
        unlike = unlike_within_nodes(self.settings, self.nodes, digests)
        found = self._software(facts, records, unlike)
        found += self._data(records)
        found += self._folders(records)
        found += self._machines(records)
        if len(self.nodes) > 1:
            found += network.judge({name: told.interface for name, told in records.items()}, self.backend)
        else:
            found.append(Finding("network", "interface", Level.UNCHECKED, "there is one node alone"))
        measured, speed = self._speed(records)
        found += speed
        return Report(self.nodes, self.identity.launcher, time.monotonic() - began, found, measured)

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for its node."""
        return any(node.leader == self.rank for node in self.nodes)

    @property
    def needs(self) -> Needs | None:
        """What a checkpoint takes, if the model can be read here."""
        return None if self.folder is None else needs_of(self.settings, self.folder)

    def _say(self, name: str, *, by_all: bool = False) -> None:
        self.phase.name = name
        position.at(name if by_all or self.is_leader else WAITING)
        if self.rank == 0:
            print(f"doctor: {name} ...", flush=True)

    def _look(self) -> tuple[NodeFacts, _Record]:
        error = ""
        rate = None
        position.at(f"reading the model {self.settings.model.path}")
        try:
            self.folder = open_model_folder(self.settings.model.path, without_weights=True)
            rate = read_rate(self.folder)
        except (ModelFolderError, OSError) as problem:
            error = str(problem)
        position.at("reading code, packages, manifest and model")
        facts = NodeFacts(self.settings, self.folder, self.environ)
        position.at("looking at run.dir, the cache, the backup")
        places = look_at_places(self.places)
        position.at("asking nvidia-smi, and about memory and interfaces")
        record = _Record(
            digests=facts.digests(),
            counts={subject: facts.count(subject) for subject in SUBJECTS},
            places=places,
            machine=machine.look(),
            health=gpus.health() if self.device.type == "cuda" else None,
            interface=network.look(self.backend, os.environ),
            read_rate=rate,
            model_error=error,
        )
        position.at(WAITING)
        return facts, record

    def _software(self, facts: NodeFacts | None, records: dict[str, _Record], unlike: list[Finding]) -> list[Finding]:
        """`unlike`: findings about ranks whose settings differ within nodes, which say more than about nodes."""
        self._say("code, packages, settings, data and model")
        odd = differing({name: told.digests for name, told in records.items()})
        details = gather_objects(facts.details(odd) if facts is not None and odd else None) if odd else []
        found: list[Finding] = []
        first = next(iter(records.values()))
        for subject, about in SUBJECTS.items():
            if subject == "settings" and unlike:
                found += unlike
            elif subject in odd:
                told: dict[str, Facts] = {
                    node.name: details[node.leader][subject] for node in self.nodes if details[node.leader]
                }
                found += compare(subject, told)
            elif subject in first.digests:
                same = (
                    f"the same on all {len(records)} nodes" if len(records) > 1 else f"digest {first.digests[subject]}"
                )
                text = f"{same} ({first.counts[subject]} {about.noun})" if first.counts[subject] > 1 else same
                found.append(Finding(about.group, about.name, Level.OK, text))
        return found

    def _data(self, records: dict[str, _Record]) -> list[Finding]:
        wrong: dict[str, list[str]] = {}
        for name, told in records.items():
            if told.model_error:
                wrong.setdefault(told.model_error, []).append(name)
        found = []
        for error, names in wrong.items():
            found.append(Finding("data", "model folder", Level.FAILURE, f"{error} (on {listed(names)})"))
        if not wrong and self.folder is not None:
            files = sum(len(shards.files) for shards in self.folder.shards.values())
            text = f"{self.folder.variant} in {self.folder.path}: {files} weight files, whole by their headers"
            if not self.folder.has_weights:
                text += "; the transformer has none, so only a checkpoint can be gone on from"
            level = Level.OK if self.folder.has_weights else Level.WARNING
            found.append(Finding("data", "model folder", level, text))
        pictures, told_of_sets = from_rank_0(self._pictures() if self.rank == 0 else None)
        found += told_of_sets
        if not pictures:
            return found
        position.at("reading pictures of samples")
        mine = unreadable(pictures, self.settings) if self.is_leader else ""
        position.at(WAITING)
        told_wrong = gather_objects(mine)
        faults: dict[str, list[str]] = {}
        for node in self.nodes:
            if told_wrong[node.leader]:
                faults.setdefault(told_wrong[node.leader], []).append(node.name)
        for error, names in faults.items():
            text, advice = f"{error} (on {listed(names)})", "all nodes must see the pictures under one path"
            found.append(Finding("data", "samples", Level.FAILURE, text, advice))
        if not faults:
            text = f"{len(pictures)} pictures of a few samples can be read on every node"
            found.append(Finding("data", "samples", Level.OK, text))
        return found

    def _pictures(self) -> tuple[list[Picture], list[Finding]]:
        several = self.folder is None or self.folder.variant.takes_several_references
        try:
            pictures, unopened = sample_pictures(self.settings, self.settings.data.max_references if several else 1)
        except (QwenEditError, OSError) as error:
            return [], [Finding("data", "samples", Level.FAILURE, str(error))]
        return pictures, [Finding("data", "samples", Level.UNCHECKED, why) for why in unopened]

    def _folders(self, records: dict[str, _Record]) -> list[Finding]:
        self._say("folders")
        seen = {p: {name: told.places[i] for name, told in records.items()} for i, p in enumerate(self.places)}
        asked = [Asked(place.path) for place in self.places] if self.rank == 0 else []
        try:
            both = zip(self.places, asked, strict=False)
            questions: list[Question] = from_rank_0([one.question for place, one in both if place.by_all])
            mine: list[Answer] = []
            if self.is_leader:
                number = next(n for n, node in enumerate(self.nodes) if node.leader == self.rank)
                mine = [answer(question, number, patience=self.patience) for question in questions]
            position.at(WAITING)
            told = gather_objects(mine)
            found = [judge_space(place, seen[place], self.needs) for place in self.places]
            answers = iter(zip(*(told[node.leader] for node in self.nodes), strict=True))
            for place, one in zip(self.places, asked, strict=False):
                found.append(self._shared(place, one, next(answers) if place.by_all else (), seen[place]))
            return found
        finally:
            for one in asked:
                one.clean()

    def _shared(self, place: Place, asked: Asked, answers: Sequence[Answer], seen: dict[str, Seen]) -> Finding:
        first = self.nodes[0].name
        if asked.question.error or (len(self.nodes) > 1 and place.by_all):
            return settle(place, self.nodes, asked, answers, seen, patience=self.patience)
        text = f"{place.setting} {place.path} can be written ({seen[first].file_system})"
        if not place.by_all:
            return Finding("folders", "backup", Level.OK, f"{text} by {first}, which makes the copies")
        return Finding("folders", "shared", Level.UNCHECKED, f"{text}; there is one node alone")

    def _machines(self, records: dict[str, _Record]) -> list[Finding]:
        self._say("machines", by_all=True)
        everyone: list[gpus.Gpu | None] = gather_objects(gpus.look(self.device))
        healths = {name: told.health for name, told in records.items() if told.health is not None}
        ahead = clocks.offsets(clocks.readings(self.device))
        found = gpus.judge(everyone, healths, self.nodes, precision=self.settings.precision.mode)
        found += room.judge(self.settings, self.folder, everyone, self.nodes)
        found += machine.judge(
            {name: told.machine for name, told in records.items()},
            self.nodes,
            self.needs,
            on_gpus=self.device.type == "cuda",
            asynchronous=self.settings.checkpoint.asynchronous,
        )
        found.append(clocks.judge({node.name: ahead[node.leader] for node in self.nodes}))
        return found

    def _speed(self, records: dict[str, _Record]) -> tuple[Measured, list[Finding]]:
        self._say("devices and network", by_all=True)
        probe = DeviceProbe(self.device)
        mine = torch.tensor([min(probe.seconds() for _ in range(_PROBES))], dtype=torch.float64)
        seconds = gather_numbers(mine, self.device)[:, 0].tolist()
        names = {rank: node.name for node in self.nodes for rank in node.ranks}
        hosts = [names[rank] for rank in range(len(names))]
        found = [speeds.judge_devices(seconds, hosts, self.device.type)]
        rates = {name: told.read_rate for name, told in records.items() if told.read_rate is not None}
        if rates:
            found.append(speeds.judge_reading(rates))
        measured = measure(self.nodes, self.rank, self.device, self.seconds / 2)
        return measured, found + speeds.judge_links(measured, self.nodes)
