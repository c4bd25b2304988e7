"""Nodes, Slurm and MPI for the tests of this folder; skipped in one line where this machine cannot have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.lab import missing
from tests.cluster.lab.nodes import Nodes
from tests.cluster.lab.slurm import Slurm
from tests.cluster.launched import Reference, make_reference


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Eight nodes, node1 to node8, which reach each other by ssh without a password."""
    if lacking := missing.nodes():
        pytest.skip(lacking)
    with Nodes(tmp_path_factory.mktemp("nodes") / "lab", [f"node{number}" for number in range(1, 9)]) as started:
        yield started


@pytest.fixture(scope="session")
def slurm(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Slurm:
    """Slurm on the first three nodes, each with 96 processors and 8 GPUs by name."""
    if lacking := missing.packages(missing.SLURM):
        pytest.skip(lacking)
    cluster = Slurm(nodes, tmp_path_factory.mktemp("slurm") / "lab", 3)
    cluster.start()
    return cluster


@pytest.fixture(scope="session")
def reference(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A run of a single process, which launches are compared with; makes the cache warm."""
    return make_reference(recipe, tmp_path_factory.mktemp("launched"))


@pytest.fixture
def own_names_are_loopback(nodes: Nodes, tmp_path: Path) -> Iterator[None]:
    """node1 and node2 resolve their own names to 127.0.1.1, as Debian installs them."""
    hosts = (nodes.folder / "hosts").read_text()
    for name in ("node1", "node2"):
        (tmp_path / name).write_text(hosts.replace(f"{nodes.address(name)} ", "127.0.1.1 "))
        done = nodes.run(name, "mount", "--bind", tmp_path / name, "/etc/hosts", cwd=tmp_path)
        assert done.status == 0, done.text
    yield
    for name in ("node1", "node2"):
        assert nodes.run(name, "umount", "/etc/hosts", cwd=tmp_path).status == 0
