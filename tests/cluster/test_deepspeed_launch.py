"""What is done for the `deepspeed` command before it starts the training script."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from qwen_edit_zero.cluster import deepspeed_launch
from qwen_edit_zero.cluster.deepspeed_launch import extra_options, prepare
from qwen_edit_zero.errors import ClusterError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with an `ssh` that reaches hosts whose names begin with `good`, and a `pdsh`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(
        '#!/bin/bash\necho "$@" >>"$0.log"\n'
        'for word; do [[ $word == *good* ]] && exit 0; done\necho "no route" >&2; exit 255\n'
    )
    (folder / "pdsh").write_text("#!/bin/bash\n")
    for tool in folder.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def hostfile(tmp_path: Path, *names: str) -> str:
    path = tmp_path / "hosts"
    path.write_text("".join(f"{name} slots=2\n" for name in names))
    return str(path)


def test_a_hostfile_of_this_machine_alone_needs_no_ssh(tmp_path: Path) -> None:
    local = ["--no_ssh_check", "--master_addr=127.0.0.1"]
    assert extra_options(["--hostfile", "hostfiles/localhost"]) == local
    assert extra_options([f"--hostfile={ROOT}/hostfiles/localhost"]) == local
    assert extra_options(["-H", hostfile(tmp_path, "localhost"), "--master_addr", "1.2.3.4"]) == ["--no_ssh_check"]
    assert extra_options(["--hostfile", hostfile(tmp_path, socket.gethostname())]) == local


def test_without_a_hostfile_nothing_is_added() -> None:
    assert extra_options(["--num_gpus", "2"]) == []


def test_unreachable_nodes_are_all_named_with_the_reason(tmp_path: Path, tools: Path) -> None:
    names = [hostfile(tmp_path, "good1", "bad2", "bad3")]
    with pytest.raises(ClusterError) as caught:
        extra_options(["--hostfile", *names])
    text = str(caught.value)
    assert text.startswith("2 of the 3 nodes of ")
    assert "bad2: no route\n  bad3: no route" in text
    assert "good1" not in text
    assert extra_options(["--hostfile", *names, "--include", "good1@bad2:0", "--no_ssh_check"]) == []


def test_only_the_nodes_that_the_filters_leave_are_tried(tmp_path: Path, tools: Path) -> None:
    file = hostfile(tmp_path, "good1", "good2", "bad3")
    assert extra_options(["--hostfile", file, "--exclude", "bad3", "--ssh_port", "2222"]) == []
    assert "-p 2222" in (tools / "ssh.log").read_text()
    assert extra_options(["--hostfile", file, "--num_nodes", "2"]) == []


def test_a_missing_pdsh_is_said(tmp_path: Path, tools: Path) -> None:
    (tools / "pdsh").unlink()
    with pytest.raises(ClusterError, match="pdsh"):
        extra_options(["--hostfile", hostfile(tmp_path, "good1", "good2")])


def test_a_single_node_elsewhere_is_refused_since_deepspeed_would_start_it_here(tmp_path: Path, tools: Path) -> None:
    with pytest.raises(ClusterError, match="--force_multi"):
        extra_options(["--hostfile", hostfile(tmp_path, "good1")])
    assert extra_options(["--hostfile", hostfile(tmp_path, "good1"), "--force_multi"]) == []


def test_wrong_and_missing_hostfiles_are_said(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="does not exist"):
        extra_options(["--hostfile", str(tmp_path / "nowhere")])
    (tmp_path / "wrong").write_text("node1 slots=8.5\n")
    with pytest.raises(ClusterError, match=r"slots is '8\.5'"):
        extra_options(["--hostfile", str(tmp_path / "wrong")])


def test_only_the_deepspeed_command_that_starts_our_script_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ["/venv/bin/deepspeed", "--hostfile", "hostfiles/localhost", f"{ROOT}/qwen_edit_zero/train.py", "run.seed=1"]
    for command in (["python", *ours[1:]], [*ours[:3], "other/train.py"], [], ours[:1]):
        monkeypatch.setattr(sys, "argv", list(command))
        prepare()
        assert sys.argv == command
    monkeypatch.setattr(sys, "argv", list(ours))
    prepare()
    assert sys.argv == [ours[0], "--no_ssh_check", "--master_addr=127.0.0.1", *ours[1:]]
    monkeypatch.chdir(ROOT / "qwen_edit_zero")
    monkeypatch.setattr(sys, "argv", ["deepspeed", "--hostfile", "../hostfiles/localhost", "train.py"])
    prepare()
    assert sys.argv[1] == "--no_ssh_check"


def test_a_mistake_ends_the_command_with_one_message_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["deepspeed", "--hostfile", str(tmp_path / "x"), "qwen_edit_zero/train.py"])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as caught:
        prepare()
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the hostfile")
    assert error.count("\n") == 1


def test_the_module_that_every_import_of_torch_loads_is_cheap() -> None:
    source = Path(deepspeed_launch.__file__).read_text()
    top = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert top == ["from __future__ import annotations", "import os", "import sys"]
    assert os.path.isfile(ROOT / "qwen_edit_zero/train.py")
