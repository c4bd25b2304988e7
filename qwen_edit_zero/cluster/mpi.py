"""What only MPI itself can tell or do: where rank 0 is, and ending all ranks."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace

from qwen_edit_zero.cluster.identity import Identity
from qwen_edit_zero.cluster.interfaces import own_address
from qwen_edit_zero.errors import ClusterError


def agree(identity: Identity) -> Identity:
    """Fill in where rank 0 is met, if mpirun did not say: rank 0 tells the others through MPI. Collective.

    Raises ClusterError if MPI cannot be used from Python.
    """
    if identity.master_addr:
        return identity
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ClusterError(
            f"mpirun started ranks on several nodes, and where rank 0 is can only be asked through MPI, which does not "
            f"work here ({error}); say it: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ..."
        ) from None
    place: tuple[str, int] | None = None
    if identity.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            place = (own_address(), int(probe.getsockname()[1]))
    address, port = MPI.COMM_WORLD.bcast(place, root=0)
    return replace(identity, master_addr=address, master_port=port)


def abort_if_initialised(status: int) -> None:
    """End all ranks of an MPI job: without this, a rank that leaves would wait for the others in MPI_Finalize."""
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and not module.Is_finalized():
        module.COMM_WORLD.Abort(status)
