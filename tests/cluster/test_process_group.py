"""Devices, and what libraries are told about ranks."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from qwen_edit_zero.cluster import interfaces, process_group
from qwen_edit_zero.cluster.identity import Identity
from qwen_edit_zero.cluster.process_group import choose_device
from qwen_edit_zero.errors import ClusterError
from tests.ranks import free_port, run_ranks


def identity(local_rank: int = 0, local_world_size: int = 2, launcher: str = "torchrun") -> Identity:
    return Identity(local_rank, local_rank, 2, local_world_size, launcher, "127.0.0.1", 29500)


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, driver: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(process_group, "_has_nvidia_driver", lambda: driver)


def test_each_local_rank_gets_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")  # torch numbers what is visible from 0
    assert [choose_device(identity(n), "auto") for n in range(2)] == [torch.device("cuda", n) for n in range(2)]
    assert choose_device(identity(1), "cpu") == torch.device("cpu")


def test_slurm_may_show_each_task_its_own_gpu_as_number_0(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    assert choose_device(identity(1, launcher="slurm"), "auto") == torch.device("cuda", 0)
    with pytest.raises(ClusterError, match=r"runs 2 ranks, but torch sees 1 GPU.*local rank 1 has none"):
        choose_device(identity(1), "auto")


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0, driver=False)
    assert choose_device(identity(), "auto") == torch.device("cpu")
    with pytest.raises(ClusterError, match=r"engine.device is cuda, but .* has no GPU.*engine.device=cpu"):
        choose_device(identity(), "cuda")


def test_a_gpu_that_is_there_but_cannot_be_used_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0, driver=True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ClusterError, match=r"CUDA_VISIBLE_DEVICES is '', which hides all"):
        choose_device(identity(), "auto")
    assert choose_device(identity(), "cpu") == torch.device("cpu")


def test_a_meeting_point_of_another_job_is_refused_where_rank_0_is(capsys: pytest.CaptureFixture[str]) -> None:
    def me(rank: int, address: str, launcher: str = "slurm") -> Identity:
        return Identity(rank, 0, 2, 1, launcher, address, 29500)

    with pytest.raises(ClusterError, match=r"MASTER_ADDR is 192\.0\.2\.1, which is not .*unset MASTER_ADDR"):
        process_group._check_meeting_point(me(0, "192.0.2.1"))
    with pytest.raises(ClusterError, match=r"MASTER_ADDR is node\.invalid"):
        process_group._check_meeting_point(me(0, "node.invalid"))
    for fine in (me(0, "127.0.0.1"), me(0, "localhost"), me(0, "192.0.2.1", "torchrun"), me(1, "192.0.2.1")):
        process_group._check_meeting_point(fine)
    assert "2 ranks, started by slurm, meet at localhost:29500" in capsys.readouterr().out


def _started(rank: int, world: int, port: int) -> tuple[str, str, float, dict[str, str]]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    me = Identity(rank, rank, world, world, "slurm", "127.0.0.1", port)
    device = process_group.start(me, timeout_seconds=60)
    total = torch.full((1,), float(rank))
    dist.all_reduce(total)
    backend = dist.get_backend()
    process_group.stop()
    told = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    return device.type, backend, total.item(), told


@pytest.mark.parametrize("world", [1, 3])
def test_ranks_meet_over_gloo_and_libraries_learn_who_they_are(world: int) -> None:
    port = free_port()
    results = run_ranks(_started, world, port, init_process_group=False)
    for rank, (device, backend, total, told) in enumerate(results):
        assert (device, backend, total) == ("cpu", "gloo", sum(range(world)))
        assert told == {
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip


def _port_taken(rank: int, world: int, port: int) -> str:
    try:
        process_group.start(Identity(0, 0, 2, 2, "torchrun", "127.0.0.1", port), timeout_seconds=5)
    except ClusterError as error:
        return str(error)
    return ""


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        (text,) = run_ranks(_port_taken, 1, taken.getsockname()[1], init_process_group=False)
    assert "another job uses this port" in text
    assert "MASTER_PORT" in text


def test_gloo_is_told_its_interface_only_where_it_would_bind_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = interfaces.interface_addresses()
    assert addresses.get("lo") == "127.0.0.1"
    two_nodes = Identity(0, 0, 4, 2, "slurm", "192.0.2.1", 29500)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(process_group, "interface_towards", lambda host: "eth7")
    monkeypatch.setattr(process_group, "name_resolves_to_loopback", lambda: False)
    process_group._choose_gloo_interface(two_nodes)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setattr(process_group, "name_resolves_to_loopback", lambda: True)
    process_group._choose_gloo_interface(identity())
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    process_group._choose_gloo_interface(two_nodes)
    assert os.environ.pop("GLOO_SOCKET_IFNAME") == "eth7"


def test_this_machine_knows_itself() -> None:
    assert interfaces.is_this_machine("localhost")
    assert interfaces.is_this_machine("127.0.0.1")
    assert not interfaces.is_this_machine("192.0.2.1")
    assert not interfaces.is_this_machine("no-such-host.invalid")
    assert interfaces.is_loopback("localhost")
    assert not interfaces.is_loopback("192.0.2.1")
    assert interfaces.interface_towards("127.0.0.1") is None
    assert Path("/proc/net/dev").exists()


def test_the_outward_interface_is_none_of_those_that_containers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "br-1a2b": "172.18.0.1", "ib0": "10.1.0.4"}
    monkeypatch.setattr(interfaces, "interface_addresses", lambda: there)
    monkeypatch.setattr(interfaces, "interface_towards", lambda host: None)  # no default route
    assert interfaces.outward_interface() == "ib0"
    del there["ib0"]
    assert interfaces.outward_interface() is None
    monkeypatch.setattr(interfaces, "interface_towards", lambda host: "eth3")
    assert interfaces.outward_interface() == "eth3"


def test_ranks_meet_though_torchrun_counts_a_restart_only_on_the_node_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    first, second = (Identity(rank, 0, 2, 1, "torchrun", "127.0.0.1", port) for rank in range(2))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    served = process_group.connect(first, serve=True, seconds=20)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    process_group.connect(second, serve=False, seconds=20).set("met", "yes")
    assert served.check(["met"])


def test_a_restart_does_not_read_what_the_attempt_before_left_in_the_store_of_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Identity(0, 0, 1, 1, "torchrun", "127.0.0.1", free_port())
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    agent = process_group.connect(rank, serve=True, seconds=20)
    agent.set("left", "yes")
    assert process_group.connect(rank, serve=False, seconds=20).check(["left"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not process_group.connect(rank, serve=False, seconds=20).check(["left"])
