"""The doctor's quick part, at every start on several nodes: two small gatherings, well under a second.

What it cannot bear is what would otherwise train wrongly or end hours later: nodes with other code, packages, settings,
data or model, folders that are not shared, and no room for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qwen_edit_zero.cluster.collectives import gather_objects
from qwen_edit_zero.cluster.identity import Identity
from qwen_edit_zero.doctor.agreement import NodeFacts, compare, differing
from qwen_edit_zero.doctor.facts import Facts
from qwen_edit_zero.doctor.findings import Finding, Level, failures
from qwen_edit_zero.doctor.needs import needs_of
from qwen_edit_zero.doctor.nodes import group_nodes, node_key
from qwen_edit_zero.doctor.places import Seen, judge_space, look, places_of, settle
from qwen_edit_zero.doctor.ranks_alike import settings_digest, unlike_within_nodes
from qwen_edit_zero.doctor.sharing import Answer, Asked, Question, answer
from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.errors import ClusterError
from qwen_edit_zero.settings.models import Settings


@dataclass(frozen=True)
class _Record:
    digests: dict[str, str]
    places: list[Seen]
    questions: list[Question]  # rank 0's only


class QuickCheck:
    """To be called where all ranks have met; `environ` is that of before they did.

    Raises ClusterError, which lists everything that must be mended.
    """

    def __init__(self, settings: Settings, identity: Identity, environ: Mapping[str, str]) -> None:
        self._settings, self._identity, self._environ = settings, identity, dict(environ)

    def __call__(self, folder: ModelFolder) -> None:
        """Collective. Warnings are printed on rank 0."""
        if self._identity.local_world_size < self._identity.world_size:
            found = self._compare(folder)
        else:
            found = self._look_here(folder)
        if self._identity.rank == 0:
            tell(found)

    def _look_here(self, folder: ModelFolder) -> list[Finding]:
        """Findings about the one node there is; those about room on rank 0."""
        settings, found = self._settings, list[Finding]()
        if self._identity.world_size > 1:
            keys, digests = zip(*gather_objects((node_key(), settings_digest(settings))), strict=True)
            found += unlike_within_nodes(settings, group_nodes(keys), digests)
        if self._identity.rank == 0:
            needs, places = needs_of(settings, folder), places_of(settings)
            seen = look(places)
            found += [judge_space(place, {"here": at}, needs) for place, at in zip(places, seen, strict=True)]
        return found

    def _compare(self, folder: ModelFolder) -> list[Finding]:
        """Findings about several nodes, on rank 0; none on the others."""
        settings, rank = self._settings, self._identity.rank
        places = places_of(settings)
        facts = NodeFacts(settings, folder, self._environ) if self._identity.local_rank == 0 else None
        shared = [place for place in places if place.by_all]
        asked = [Asked(place.path) for place in shared] if rank == 0 else []
        try:
            record = None
            if facts is not None:
                questions = [one.question for one in asked]
                record = _Record(facts.digests(), look(places), questions)
            gathered: list[tuple[str, str, _Record | None]] = gather_objects(
                (node_key(), settings_digest(settings), record)
            )
            everywhere = group_nodes([key for key, _, _ in gathered])
            unlike = unlike_within_nodes(settings, everywhere, [told for _, told, _ in gathered])
            nodes = [node for node in everywhere if gathered[node.leader][2]]
            records = {node.name: told for node in nodes if (told := gathered[node.leader][2]) is not None}
            odd = differing({name: told.digests for name, told in records.items()})
            mine: tuple[dict[str, Facts], list[Answer]] = ({}, [])
            if facts is not None:
                number = next(number for number, node in enumerate(nodes) if rank in node.ranks)
                asked_of_all = records[nodes[0].name].questions
                mine = facts.details(odd), [answer(question, number) for question in asked_of_all]
            heard = gather_objects(mine)
            if rank:
                return []
            found = unlike
            for subject in [subject for subject in odd if subject != "settings" or not unlike]:
                found += compare(subject, {node.name: heard[node.leader][0][subject] for node in nodes})
            needs = needs_of(settings, folder)
            seen = {p: {name: told.places[i] for name, told in records.items()} for i, p in enumerate(places)}
            found += [judge_space(place, seen[place], needs) for place in places]
            for i, (place, one) in enumerate(zip(shared, asked, strict=True)):
                answers = [heard[node.leader][1][i] for node in nodes]
                found.append(settle(place, nodes, one, answers, seen[place]))
            return found
        finally:
            for one in asked:
                one.clean()


def tell(found: Sequence[Finding]) -> None:
    """Print warnings. Raises ClusterError if something must be mended."""
    if wrong := failures(found):
        shown = "".join(f"\n  {finding}" for finding in wrong)
        raise ClusterError(f"this must be mended before training (the same command with --doctor tells more):{shown}")
    for finding in found:
        if finding.level is Level.WARNING:
            print(f"warning: {finding}", flush=True)
