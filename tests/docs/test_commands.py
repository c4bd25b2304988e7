"""Every command in the README and in docs/ means something: it is run, or its settings are resolved."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from qwen_edit_zero.assets import demo_manifest
from qwen_edit_zero.commands import cache as cache_command
from tests.end_to_end.commands import BIN, ROOT, run

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TRAIN = ("qwen_edit_zero/train.py", "slurm/train.sbatch")
_SET_UP = {
    "source",
    "cd",
    "export",
    "hf",
    "jq",
    "pip",
    "pdsh",
    "ssh",
    "ssh-copy-id",
    "ssh-keygen",
    "scontrol",
    "scancel",
    "squeue",
    "tail",
}


def commands(page: Path) -> list[str]:
    """The command lines of a page's bash blocks, continuation lines joined, comments dropped."""
    text = page.read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                found.append(shlex.join(words))
    return found


ALL = [(page.name, command) for page in PAGES for command in commands(page)]


@pytest.fixture(scope="module")
def finished_run(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    ended = run("python", recipe, "--fast-dev-run", "--engine", "ddp", f"run.dir={folder}", "run.name=run", cwd=folder)
    assert ended.status == 0, ended.text
    return folder / "run-fast-dev-run"


@pytest.mark.parametrize(("page", "command"), ALL, ids=[f"{p}: {c[:60]}" for p, c in ALL])
def test_command(page: str, command: str, finished_run: Path, recipe: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    while re.match(r"^[A-Z_]+=", words[0]):
        words = words[1:]
    script = next((w for w in words if w.endswith(TRAIN)), None)
    fills = words[:2] == ["qwen-edit-zero", "cache"] and words[2] not in cache_command.VERBS
    if script or words[:2] in (["qwen-edit-zero", "train"], ["qwen-edit-zero", "doctor"]) or fills:
        arguments = words[words.index(script) + 1 :] if script else words[2:]
        ended = run("python", *arguments, *([] if "--print-settings" in words else ["--print-settings"]), cwd=ROOT)
        assert ended.status == 0, ended.text
    elif words[0] == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert set(words[1:]) <= targets
    elif words[0] == "qwen-edit-zero":
        cache = Path(recipe).parent / "cache"
        named = {"recipes/demo.yaml": recipe, "RUN/cache": str(cache)} if words[1] == "cache" else {}
        replaced = [named.get(word) or _real(word, finished_run, tmp_path) for word in words[1:]]
        done = subprocess.run(
            [BIN / "qwen-edit-zero", *replaced], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    elif words[0] == "python" and words[1].startswith(("tools/", "benchmarks/")):
        assert (ROOT / words[1]).is_file()
    elif words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
        module = ROOT / words[2].replace(".", "/")
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()
    elif words[:3] == ["python", "-m", "pytest"]:
        found = subprocess.run(
            [BIN / "python", "-m", "pytest", "--collect-only", *words[3:]],
            cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert found.returncode == 0, found.stdout + found.stderr
    elif words[0] == "sbatch":
        assert (ROOT / next(w for w in words if w.endswith(".sbatch"))).is_file()
    else:
        assert words[0] in _SET_UP, f"{page}: no test knows what to do with {command!r}"


def _real(word: str, finished_run: Path, tmp_path: Path) -> str:
    """The file or folder that a placeholder of the documentation stands for."""
    (checkpoint,) = (finished_run / "checkpoints").glob("step-*")
    known = {
        "RUN": finished_run, "runs/demo": finished_run, "OUT": tmp_path / "out", "CHECKPOINT": checkpoint,
        "SOURCE": demo_manifest("train"), "OUT.jsonl": tmp_path / "out.jsonl", "OUT.svg": tmp_path / "out.svg",
    }  # fmt: skip
    if word in known:
        return str(known[word])
    if re.fullmatch(r"(RUN|runs/demo)/checkpoints/step-\d+", word):
        return str(checkpoint)
    if word.startswith(("RUN/", "runs/demo/")):
        return str(finished_run / word.removeprefix("RUN/").removeprefix("runs/demo/"))
    return word


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}, which is not there"
