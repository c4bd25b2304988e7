"""python -m benchmarks.faults [--minutes 20] [--faults 60] [--seed 1] [--engine fsdp2]

A training over three nodes (network namespaces) goes wrong as often as asked, is started again each time, and is
compared with one that nobody disturbed. Writes runs/benchmarks/faults/{faults.json,faults.md,faults.png}. On SIGTERM it
makes no further fault, and reports. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DISK = "500m"  # of the run's file system


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.faults", description=__doc__.splitlines()[2])
    parser.add_argument("--minutes", type=float, default=20, help="over which the faults are spread")
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1, help="decides the order of faults, and what each one hits")
    parser.add_argument("--engine", default="fsdp2", choices=["fsdp2", "ddp", "zero1", "zero2", "zero3"])
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/faults"))
    parser.add_argument("--cache", type=Path, help="of encoded pictures, to keep from one campaign to the next")
    parser.add_argument("--calm", type=Path, help="an undisturbed run to compare with; else one is made at the end")
    given = parser.parse_args()

    from tests.cluster.lab import missing

    if lacking := missing.nodes():
        print(lacking, file=sys.stderr)
        return 2
    if os.environ.get("FAULTS_MOUNTS") != "own":  # so that the run's file system goes with this process
        os.environ["FAULTS_MOUNTS"] = "own"
        own = ["unshare", "--mount", "--propagation", "private", "--"]
        os.execvp(own[0], [*own, sys.executable, "-m", "benchmarks.faults", *sys.argv[1:]])
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        disk = Path(folder) / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "disk", disk], check=True)
        try:
            _measure(given, Path(folder))
        finally:
            subprocess.run(["umount", "--lazy", disk], check=False)
    return 0


def _measure(given: argparse.Namespace, folder: Path) -> None:
    from benchmarks.faults import report, training
    from benchmarks.faults.campaign import Campaign, Recorder, as_json
    from benchmarks.faults.kinds import plan
    from benchmarks.faults.site import Site

    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

    disk, cache = folder / "disk", given.cache or folder / "cache"
    run, calm = disk / "disturbed", folder / "calm"

    def command(path: Path, steps: int) -> list[str]:
        return training.command(cache, path, max_steps=steps, engine=given.engine)

    with Site(folder) as site:
        say("three nodes are warm")
        recorder = Recorder(run)
        campaign = Campaign(site, run, command(run, 10**6), recorder, disk / "ballast", given.seed, say)
        first = campaign.finish(command(folder / "first", 1))  # fills the cache
        assert first.launcher.returncode == 0, first.text()
        training.spoil_a_sample(cache)
        signal.signal(signal.SIGTERM, lambda number, frame: setattr(campaign, "enough", True))
        with recorder:
            recorder.began = time.monotonic()
            campaign.go(plan(given.faults, given.seed), given.minutes)
            seconds = recorder.now()
            campaign.stop()
        steps = training.last_step(run) + 3
        last = campaign.finish(command(run, steps))
        assert last.launcher.returncode == 0, last.text()
        say(f"{len(campaign.outcomes)} faults, {steps} steps")
        measured = {
            "outcomes": as_json(campaign.outcomes), "points": recorder.points, "seconds": seconds, "seed": given.seed,
            "engine": given.engine, "unplanned": campaign.unplanned,
        }  # fmt: skip
        (given.out / "measured.json").write_text(json.dumps(measured), encoding="utf-8")
        training.keep(run, given.out / run.name)
        if given.calm is None:
            say("now the same without faults")
            reference = campaign.finish(command(calm, steps), 7200)
            assert reference.launcher.returncode == 0, reference.text()
            training.keep(calm, given.out / calm.name)
    result = report.result(given.out / run.name, given.calm or given.out / calm.name, measured)
    (given.out / "faults.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    text = report.markdown(result)
    (given.out / "faults.md").write_text(text, encoding="utf-8")
    report.picture(result, given.out / "faults.png")
    print(text)


if __name__ == "__main__":
    sys.exit(main())
