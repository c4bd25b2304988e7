"""What is done for the `deepspeed` command before it starts the training script."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_edit_zero.cluster import deepspeed_launch
from qwen_edit_zero.cluster.deepspeed_launch import mended, prepare
from qwen_edit_zero.cluster.forwarding import argument_for_deepspeed
from qwen_edit_zero.errors import ClusterError, SettingsError

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


def extra_options(options: list[str], environ: dict[str, str] | None = None) -> list[str]:
    """What is added to the options of a `deepspeed` command."""
    left, arguments = mended(options, ["--print-settings"], {} if environ is None else environ)
    assert (left[: len(options)], arguments) == (options, ["--print-settings"])
    return left[len(options) :]


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
    assert sys.argv == [*ours[:3], "--no_ssh_check", "--master_addr=127.0.0.1", *ours[3:]]
    monkeypatch.chdir(ROOT / "qwen_edit_zero")
    monkeypatch.setattr(sys, "argv", ["deepspeed", "--hostfile", "../hostfiles/localhost", "train.py"])
    prepare()
    assert "--no_ssh_check" in sys.argv


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


ODD = [
    "a b",
    "$HOME/x",
    "`id`",
    "a;b",
    "it's",
    'a "b" c',
    "back\\slash \\ $x",
    "100%h",
    "*",
    "图 片",
    "{a: 'b', c: \"d\"}",
    "",
]


def as_deepspeed_does(word: str) -> str:
    """What its pdsh launcher puts into the command line for an argument of the script."""
    return '"{}"'.format(word.replace('"', '\\"')) if " " in word else word


def as_other_nodes_do(line: str) -> list[str]:
    """The words that a shell makes of a command line after pdsh has replaced what begins with %."""
    line = line.replace("%%", "\0").replace("%h", "HOST").replace("\0", "%")
    done = subprocess.run(
        ["/bin/sh", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True, env={"x": "EXPANDED"}
    )
    return done.stdout.split("\n")[:-1]


def test_arguments_reach_other_nodes_as_they_were_typed(tmp_path: Path, tools: Path) -> None:
    made = [argument_for_deepspeed(word) for word in ODD]
    assert as_other_nodes_do(" ".join(map(as_deepspeed_does, made))) == ODD
    typed = ["--print-settings", "data.manifest=/a b/$HOME"]
    _, arguments = mended(["--hostfile", hostfile(tmp_path, "good1", "good2")], typed, {})
    assert arguments == ["--print-settings", "data.manifest=/a b/\\$HOME"]
    local = ["--hostfile", hostfile(tmp_path, "localhost")]  # no shell, no quotes
    assert mended(local, typed, {})[1] == typed


def test_settings_that_cannot_be_are_said_once_before_anything_starts(tmp_path: Path, tools: Path) -> None:
    options = ["--hostfile", hostfile(tmp_path, "good1", "good2")]
    with pytest.raises(SettingsError, match=r"run\.nonsense is not a setting"):
        mended(options, ["run.nonsense=1"], {})
    with pytest.raises(SettingsError, match="batch"):
        mended([*options, "--num_gpus", "7"], ["recipes/demo.yaml", "batch.global_size=4"], {})
    assert not (tools / "ssh.log").exists()


CASE = Path(__file__).parent / "cases" / "slurm" / "forward.env"


def test_variables_reach_other_nodes_byte_for_byte(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.launcher.multinode_runner import PDSHRunner

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "variables"
    lines = [*(f"V{i}={value}" for i, value in enumerate(ODD)), "# said", "", "  INDENTED=1", 'Q="already quoted"']
    file.write_text("\n".join(lines), encoding="utf-8")
    environ = {"DS_ENV_FILE": str(file), "NCCL_SOCKET_IFNAME": "=ib0,ib1", "SECRET_KEY": "x", "OMP_NUM_THREADS": "4"}
    extra_options(["--hostfile", hostfile(tmp_path, "good1", "good2")], environ)
    runner = PDSHRunner.__new__(PDSHRunner)
    runner.exports = {}
    for line in Path(environ["DS_ENV_FILE"]).read_text(encoding="utf-8").splitlines():
        runner.add_export(*line.split("=", maxsplit=1))
    words = as_other_nodes_do(" ".join(f"{name}={value}" for name, value in runner.exports.items()))
    expected = {f"V{i}": value for i, value in enumerate(ODD)} | {"INDENTED": "1", "Q": '"already quoted"'}
    assert dict(word.split("=", 1) for word in words) == expected | {
        "NCCL_SOCKET_IFNAME": "=ib0,ib1",
        "OMP_NUM_THREADS": "4",
    }


@pytest.mark.usefixtures("tools")
def test_ssh_gives_up_a_node_that_is_lost_unless_the_user_says_how(tmp_path: Path) -> None:
    options = ["--hostfile", hostfile(tmp_path, "good1", "good2")]
    for given, then in (
        ({}, "-o ServerAliveInterval=10 -o ServerAliveCountMax=3"),
        ({"PDSH_SSH_ARGS_APPEND": "-4"}, "-4 -o ServerAliveInterval=10 -o ServerAliveCountMax=3"),
        ({"PDSH_SSH_ARGS_APPEND": "-o serveraliveinterval=0"}, "-o serveraliveinterval=0"),
    ):
        extra_options(options, given)
        assert given["PDSH_SSH_ARGS_APPEND"] == then


def test_a_line_that_is_no_variable_is_named(tmp_path: Path, tools: Path) -> None:
    with pytest.raises(ClusterError, match=r"forward\.env:12: 'NO_EQUALS' has no '='"):
        extra_options(["--hostfile", hostfile(tmp_path, "good1", "good2")], {"DS_ENV_FILE": str(CASE)})


def test_gpus_that_are_visible_are_those_that_are_used(tmp_path: Path) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "4,5"}
    for options in ([], ["--hostfile", hostfile(tmp_path, "localhost")]):
        added = extra_options(options, environ)
        assert "--include=localhost:4,5" in added
        made = next(word.removeprefix("--hostfile=") for word in added if word.startswith("--hostfile="))
        assert Path(made).read_text() == "localhost slots=6\n"
        assert "--no_ssh_check" in added
        with pytest.raises(ClusterError, match="by number only"):
            extra_options(options, {"CUDA_VISIBLE_DEVICES": "GPU-5bcd,GPU-7fe1"})
        with pytest.raises(ClusterError, match=r"would start on GPUs 0 to 0 instead of 4"):
            extra_options([*options, "--num_gpus", "1"], environ)
        assert "--include" not in "".join(extra_options([*options, "--num_gpus", "1"], {"CUDA_VISIBLE_DEVICES": "0,1"}))
    with pytest.raises(ClusterError, match="2 ranks are to start here, but CUDA_VISIBLE_DEVICES=3 shows 1 GPUs"):
        extra_options(["--hostfile", hostfile(tmp_path, "localhost")], {"CUDA_VISIBLE_DEVICES": "3"})
    assert extra_options([], {"CUDA_VISIBLE_DEVICES": ""}) == []


def test_open_mpi_gets_no_quotes_that_would_stay(tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_launch, "_openmpi_interface", lambda *_: [])
    mpirun = tools / "mpirun"
    mpirun.write_text("#!/bin/bash\n")
    mpirun.chmod(0o755)
    options = ["--hostfile", hostfile(tmp_path, "good1", "good2"), "--launcher", "openmpi"]
    assert extra_options(options, {"NCCL_IB_HCA": "mlx5_0:1"}) == []
    with pytest.raises(ClusterError, match="mpirun -x NCCL_IB_HCA"):
        extra_options(options, {"NCCL_IB_HCA": "^mlx5_0"})
    with pytest.raises(ClusterError, match="knows no --include"):
        extra_options([*options, "--include", "good1@good2"])


@pytest.mark.parametrize(
    ("content", "copied"),
    [
        ("good1 slots=2\ngood2 slots=2\n", False),
        ("# rack 1\n\ngood1   slots=2\ngood2 slots=2 # two\n", False),
        ("\ufeffgood1 slots=2\ngood2 slots=2\n", True),
        ("good1 max_slots=4 slots=2\ngood2 slots=2\n", True),
    ],
)
def test_deepspeed_gets_a_copy_of_a_hostfile_that_it_would_misread(
    tmp_path: Path, tools: Path, content: str, copied: bool
) -> None:
    (tmp_path / "hosts").write_text(content, encoding="utf-8")
    added = extra_options(["--hostfile", str(tmp_path / "hosts")])
    assert len(added) == copied
    if copied:
        assert Path(added[0].removeprefix("--hostfile=")).read_text() == "good1 slots=2\ngood2 slots=2\n"


def test_the_module_that_every_import_of_torch_loads_is_cheap() -> None:
    """In a program that is no launcher, nothing else of this package is imported, and nothing of others."""
    code = """if True:
        import sys
        before = set(sys.modules)
        from qwen_edit_zero.cluster.deepspeed_launch import prepare
        prepare()
        added = {name for name in set(sys.modules) - before if name.split(".")[0] not in sys.stdlib_module_names}
        print(*sorted(added))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    mine = [f"qwen_edit_zero.cluster.{name}" for name in ("deepspeed_launch", "torchrun_launch")]
    assert done.stdout.split() == ["qwen_edit_zero", "qwen_edit_zero.cluster", *mine]
