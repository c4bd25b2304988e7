from __future__ import annotations

from pathlib import Path

import pytest

from qwen_edit_zero.errors import UserError
from qwen_edit_zero.planning.hardware.clusters import (
    accelerator_of_device,
    known_accelerators,
    load_accelerators,
    parse_gpus,
)
from qwen_edit_zero.planning.wording.quantities import read_bytes, read_bytes_per_second, show_bytes, show_seconds

GIB = 1024**3


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "name"),
    [
        ("A100-80", 1, 1, "A100-80"),
        ("8xA100-80", 1, 8, "A100-80"),
        ("8x8xA100-80", 8, 8, "A100-80"),
        ("8 × 8 × a100 80gb", 8, 8, "A100-80"),
        ("64xH100", 8, 8, "H100"),
        ("128x8xH100", 128, 8, "H100"),
        ("1x10xRTX-4090", 1, 10, "RTX-4090"),
        ("2x4090", 1, 2, "RTX-4090"),
        ("NVIDIA H100 NVL", 1, 1, "H100-NVL"),
        ("8xA800", 1, 8, "A800-80"),
    ],
)
def test_a_cluster_is_nodes_times_gpus_times_kind(text: str, nodes: int, gpus: int, name: str) -> None:
    cluster = parse_gpus(text)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.accelerator.name) == (nodes, gpus, name)
    assert cluster.world == nodes * gpus
    again = parse_gpus(cluster.name)
    assert again == cluster


def test_network_and_host_memory_can_be_given() -> None:
    assert parse_gpus("8x8xH100,net=200Gb/s").network == 25e9
    assert parse_gpus("8x8xH100, net=25GB/s, host=1TiB").host_memory == 1024 * GIB
    assert parse_gpus("8xH100").host_memory == 8 * known_accelerators()["H100"].host_memory


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8xA100", ["leaves open", "A100-40 or A100-80"]),
        ("0x8xA100-80", ["1 or more"]),
        ("-8xH100", ["-8", "1 or more"]),
        ("12xH100", ["no whole nodes of 8", "1x12xH100"]),
        ("8x8x8xH100", ["names no cluster", "8x8xH100"]),
        ("8x", ["names no cluster"]),
        ("", ["names no cluster"]),
        ("8xH10O", ["did you mean H100?", "--accelerators FILE"]),
        ("8xV100", ["V100 has no bf16", "A100-40"]),
        ("4xT4", ["T4 has no bf16"]),
        ("RTX 2080 Ti", ["has no bf16"]),
        ("8xTPUv5", ["not in the table", "There are: A100-40", "--accelerators FILE", "tpuv5: {memory:"]),
        ("100000x8xH100", ["800,000", "16,384"]),
        ("8xH100,net=25", ["'25' is no rate", "25GB/s"]),
        ("8xH100,net=25GB", ["no rate"]),
        ("8xH100,host=lots", ["no size"]),
        ("8xH100,fast", ["'fast' is no option", "net="]),
    ],
)
def test_what_is_no_cluster_is_told(text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_gpus(text)
    assert all(word.lower() in str(caught.value).lower() for word in words), caught.value
    assert caught.value.exit_status == 2


def test_the_table_is_plausible() -> None:
    for name, gpu in known_accelerators().items():
        assert gpu.name == name
        assert 20 * GIB < gpu.memory < 300 * GIB
        assert gpu.context < gpu.memory / 10
        assert 50e12 < gpu.bf16_flops < 3e15
        assert 2e11 < gpu.memory_bandwidth < 1e13
        assert gpu.network <= gpu.link <= gpu.memory_bandwidth
        assert gpu.source
        assert accelerator_of_device(gpu.device_names[0]) == gpu


def test_a_device_is_found_by_its_own_name() -> None:
    found = accelerator_of_device("NVIDIA A100-SXM4-40GB", memory=42_000_000_000)
    assert found is not None
    assert (found.name, found.memory) == ("A100-40", 42_000_000_000)
    assert accelerator_of_device("NVIDIA L20").name == "L20"  # type: ignore[union-attr]
    assert accelerator_of_device("Tesla T4") is None
    assert accelerator_of_device("NVIDIA A1000") is None


def test_a_file_adds_and_replaces_accelerators(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "MyGPU: {memory: 47 GiB, bf16: 300 TFLOP/s, memory_bandwidth: 900 GB/s, link: 256Gb/s}\n"
        "H100: {memory: 40 GiB, bf16: 1 PFLOP/s, memory_bandwidth: 2 TB/s, link: 32 GB/s, reached: [0.2, 0.9]}\n"
    )
    table = load_accelerators(path)
    mine = parse_gpus("2x8xmygpu", table).accelerator
    assert (mine.memory, mine.bf16_flops, mine.link) == (47 * GIB, 300e12, 32e9)
    assert table["H100"].memory == 40 * GIB
    assert table["H100"].reached == (0.2, 0.9)
    assert table["A100-80"] == known_accelerators()["A100-80"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["holds no accelerators"]),
        ("MyGPU: 80 GiB", ["MyGPU is no mapping", "memory, bf16"]),
        ("MyGPU: {memory: 80 GiB}", ["MyGPU lacks bf16, memory_bandwidth, link"]),
        ("MyGPU: {memorry: 80 GiB}", ["'memorry'", "did you mean memory?"]),
        (
            "MyGPU: {memory: a lot, bf16: 1 TFLOP/s, memory_bandwidth: 1 GB/s, link: 1 GB/s}",
            ["MyGPU.memory", "no size"],
        ),
        (
            "MyGPU: {memory: 1 GiB, bf16: 1 TFLOP/s, memory_bandwidth: 1 GB/s, link: 1 GB/s, reached: [2, 3]}",
            ["MyGPU.reached", "shares"],
        ),
        (
            "MyGPU: {memory: 1 GiB, bf16: 1 TFLOP/s, memory_bandwidth: 1 GB/s, link: 1 GB/s, masked_attention: [0, 3]}",
            ["MyGPU.masked_attention", "factors from 1"],
        ),
        ("MyGPU: [", ["is no YAML"]),
    ],
)
def test_a_file_that_is_wrong_is_told(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_accelerators(path)
    assert all(word in str(caught.value) for word in ["mine.yaml", *words]), caught.value


def test_quantities_are_read_and_shown() -> None:
    assert read_bytes("39.38 GiB") == round(39.38 * GIB)
    assert read_bytes("1TB") == 10**12
    assert read_bytes_per_second("400Gbps") == 50e9
    for wrong in ("80", "GiB", "80 Gib/s", "-1 GB", "nan GB"):
        with pytest.raises(ValueError, match="no size"):
            read_bytes(wrong)
    assert [show_bytes(n) for n in (512, 2048, 61.34 * GIB, 300 * GIB, 2.5 * 1024 * GIB)] == [
        "512 B",
        "2.0 KiB",
        "61.3 GiB",
        "300 GiB",
        "2.5 TiB",
    ]
    assert [show_seconds(s) for s in (0.123, 5.84, 60, 600, 9000, 400_000)] == [
        "0.12 s",
        "5.8 s",
        "60 s",
        "10 min",
        "2.5 h",
        "4.6 days",
    ]
