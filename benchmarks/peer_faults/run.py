"""What accelerate, torchrun, Lightning, DeepSpeed and this project do on the same faults.

    python benchmarks/peer_faults/run.py [--tools ours,torchrun] [--faults stop_rank] [--lightning FOLDER]

Two nodes of namespaces, one rank each, gloo; needs root. Results go to results.json beside this file, cell by cell;
`table.py` makes the table of docs/staying_alive.md from them. About 10 minutes a tool.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    sys.modules["benchmarks.peer_faults.run"] = sys.modules["__main__"]

from benchmarks.peer_faults.bench import Bench, as_json
from benchmarks.peer_faults.faults import FAULTS
from benchmarks.peer_faults.results import RESULTS, store
from benchmarks.peer_faults.tools import NODES, all_tools
from tests.cluster.lab import missing
from tests.cluster.lab.nodes import Nodes

_APART = "PEER_FAULTS_APART"  # set in the copy of this process that has mounts of its own
LIMITED_BYTES = 600 * 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen cells; 2 where nodes cannot be made."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tools", default="", help="names, with commas; none: all")
    parser.add_argument("--faults", default="", help=f"of {', '.join(FAULTS)}; none: all")
    parser.add_argument("--lightning", type=Path, help="folder with Lightning's packages (pip install --target)")
    parser.add_argument("--scratch", type=Path, help="folder for the jobs; none: a temporary one")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    if lacking := missing.nodes():
        print(lacking, file=sys.stderr)
        return 2
    if given.lightning:
        sys.path.append(str(given.lightning))
    if given.scratch:
        return run(given, given.scratch.resolve())
    with tempfile.TemporaryDirectory(prefix="peer-faults-") as scratch:
        return run(given, Path(scratch))


def run(given: argparse.Namespace, scratch: Path) -> int:
    """Run the chosen cells with files in `scratch`."""
    tools = all_tools(scratch, given.lightning)
    names = [name for name in given.tools.split(",") if name] or list(tools)
    faults = [name for name in given.faults.split(",") if name] or list(FAULTS)
    if unknown := [*(set(names) - set(tools)), *(set(faults) - set(FAULTS))]:
        print(f"no such tool or fault: {', '.join(unknown)}", file=sys.stderr)
        return 2
    if importlib.util.find_spec("lightning") is None and "lightning" in names:
        print("the row of Lightning needs lightning: pip install lightning; it is left out", file=sys.stderr)
        names.remove("lightning")
    limited = scratch / "limited"
    for name in names:
        (limited / name).mkdir(parents=True, exist_ok=True)
        size = f"size={LIMITED_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "limited", limited / name], check=True)
        for stale in sorted((scratch / "labs").glob(f"{name}-*")):
            subprocess.run(["rm", "-rf", stale], check=True)
        lab = scratch / "labs" / f"{name}-{os.getpid()}"
        with Nodes(lab, NODES) as nodes:
            bench = Bench(tools[name], nodes, scratch / "jobs", limited / name)
            for fault in faults:
                began = time.monotonic()
                try:
                    cell = as_json(FAULTS[fault](bench))
                except (RuntimeError, OSError) as error:
                    print(f"{name}, {fault}: not measured: {error}", file=sys.stderr, flush=True)
                    continue
                store(given.results, name, tools[name].title, tools[name].versions(), fault, cell)
                print(f"{name}, {fault} ({time.monotonic() - began:.0f} s): {json.dumps(cell)}", flush=True)
    return 0


if __name__ == "__main__":
    if _APART not in os.environ:  # mounts end with this process, however it ends
        apart = ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv]
        os.execvpe(apart[0], apart, {**os.environ, _APART: "1"})
    sys.exit(main())
