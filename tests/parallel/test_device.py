"""Rates of matrix products and the precision that follows from them."""

from pathlib import Path

import pytest
import torch

from surefoot.parallel import device
from surefoot.parallel.machine import machine, measure_disk

CPU = torch.device("cpu")


def test_precision_is_the_clearly_faster_one_and_fp32_when_there_is_little_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seconds, chosen in [([1.0, 0.5], "bf16"), ([1.0, 1.0], "fp32"), ([1.0, 0.95], "fp32"), ([1.0, 100.0], "fp32")]:
        monkeypatch.setattr(device, "product_seconds", lambda *_, seconds=seconds: seconds)
        assert device.choose_precision(CPU) == chosen


def test_precision_is_chosen_by_timing_this_device() -> None:
    assert device.choose_precision(CPU) in ("fp32", "bf16")


def test_products_of_every_dtype_are_timed() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    seconds = device.product_seconds(CPU, dtypes, 32, 64, 0.003)
    assert len(seconds) == 3
    assert all(0 < each < 10 for each in seconds)


def test_the_measured_rate_counts_two_operations_per_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "product_seconds", lambda *_: [1e-3])
    monkeypatch.setattr(device, "CPU_SIDES", (10, 100))
    assert device.measured_flops(CPU, "fp32") == pytest.approx(2 * 100**3 / 1e-3)


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA B200", 2250),
        ("Some Future GPU", None),
    ],
)
def test_published_peaks_are_found_by_the_name_torch_reports(name: str, bf16: float | None) -> None:
    assert device.published_flops(name, "bf16") == (None if bf16 is None else bf16 * 1e12)
    assert device.published_flops(name, "fp64") is None


def test_the_peak_of_a_cpu_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(device, "measured_flops", lambda *args: calls.append(args) or 5.0)
    device.peak_flops.cache_clear()
    assert device.peak_flops(CPU, "fp32") == device.peak_flops(CPU, "fp32") == 5.0
    assert len(calls) == 1
    device.peak_flops.cache_clear()


def test_the_disk_measurement_leaves_nothing_behind(tmp_path: Path) -> None:
    found = measure_disk(tmp_path / "new", write_mib=1, appends=3)
    assert list((tmp_path / "new").iterdir()) == []
    assert found.fsync_ms > 0
    assert found.write_mib_per_s > 0
    assert found.folder == str(tmp_path / "new")


def test_this_machine_has_a_core_and_some_memory() -> None:
    found = machine()
    assert found.cores >= 1
    assert 0 < found.free_memory_gib <= found.memory_gib
    assert found.cpu
