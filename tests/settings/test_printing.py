"""`--print-settings`, the documentation, and what importing settings costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from qwen_edit_zero.settings.names import known_names
from qwen_edit_zero.settings.reference import with_reference
from qwen_edit_zero.settings.render import settings_yaml
from tests.settings.loading import MINIMAL, load

ROOT = Path(__file__).parents[2]


def test_every_value_is_printed_with_its_source(tmp_path: Path) -> None:
    loaded = load(tmp_path, MINIMAL, overrides=["run.seed=7"])
    text = settings_yaml(loaded)
    lines = {line.split("#")[0].strip(): line.rsplit("# ", 1)[-1] for line in text.splitlines() if "#" in line}
    assert lines["max_steps: 10"] == f"{tmp_path}/r.yaml:2"
    assert lines["seed: 7"] == "override"
    assert lines["micro_size: 1"] == "default"
    leaves = [name for name, is_section in known_names().items() if not is_section and "lora" not in name]
    printed = [line for line in text.splitlines() if "#" in line]  # some settings of two sections share a name
    assert len(printed) == len(leaves) + 1  # model.lora is null


def test_printed_settings_are_a_recipe_with_the_same_settings(tmp_path: Path) -> None:
    recipe = MINIMAL + 'data: {manifest: "1e-5", validation: "null", cache_dir: "a: b # c"}\nmodel: {path: "true"}\n'
    loaded = load(tmp_path, recipe, overrides=["sampling.negative_prompt=模糊, low quality", "optimizer.lr=3e-7"])
    assert load(tmp_path, settings_yaml(loaded)).settings == loaded.settings
    assert loaded.settings.data.manifest == "1e-5"


def test_the_documentation_lists_the_settings_as_they_are() -> None:
    path = ROOT / "docs/settings.md"
    text = path.read_text(encoding="utf-8")
    assert with_reference(text) == text, "run: python -m qwen_edit_zero.settings.reference docs/settings.md"


def test_every_setting_has_a_meaning_in_the_documentation() -> None:
    rows = [
        line for line in (ROOT / "docs/settings.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    ]
    assert len(rows) == len([name for name in known_names() if len(name) > 1])
    assert [row for row in rows if row.rstrip("| ").count(" | ") < 3] == []


def test_loading_settings_imports_nothing_slow() -> None:
    slow = {"torch", "deepspeed", "diffusers", "transformers", "numpy"}
    code = (
        "import sys; import qwen_edit_zero.train, qwen_edit_zero.cli\n"
        "from qwen_edit_zero.settings.load import load_settings; load_settings(None)\n"
        f"print(sorted({slow} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
