"""Settings of every single rank: ranks of one node that were started with different recipes or arguments.

All else is compared by nodes, which have one checkout and one disk; a command line each rank has of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwen_edit_zero.cluster.collectives import gather_objects
from qwen_edit_zero.doctor.agreement import compare
from qwen_edit_zero.doctor.facts import digest, settings_facts
from qwen_edit_zero.doctor.findings import Finding
from qwen_edit_zero.doctor.nodes import Node
from qwen_edit_zero.settings.models import Settings


def settings_digest(settings: Settings) -> str:
    """What each rank tells of its settings."""
    return digest(settings_facts(settings))


def unlike_within_nodes(settings: Settings, nodes: Sequence[Node], digests: Sequence[str]) -> list[Finding]:
    """Which ranks have other settings than most, if ranks of one node differ. Collective, and gathers only then.

    `digests`: `settings_digest` of every rank. Nodes that differ as a whole are named by `agreement.compare`.
    """
    if all(len({digests[rank] for rank in node.ranks}) == 1 for node in nodes):
        return []
    told = gather_objects(settings_facts(settings))
    return compare("settings", {f"rank {rank}": facts for rank, facts in enumerate(told)})
