"""Accelerators: every name that `catj predict` knows, dated and sourced; what is missing is said."""

from __future__ import annotations

import pytest

from cost_aware_operator.costs.tables.hardware import HardwareError, NumberFormat, accelerator, accelerators, read

NAMES = (
    "V100-SXM2-16GB", "V100-SXM2-32GB", "A100-SXM-40GB", "A100-SXM-80GB", "H100-SXM-80GB", "H100-SXM-96GB", "H200-SXM-141GB",
    "B200-SXM-180GB", "GH200-96GB", "A10G-24GB", "L4-24GB", "L40S-48GB", "RTX-3090-24GB", "CPU",
)  # fmt: skip
ROW = {
    "name": "X1", "generation": "hopper", "bf16_tflops": "100", "memory_gib": "10", "memory_gbytes_per_s": "1000",
    "link": "NVLink", "link_gbytes_per_s": "50", "gpus_per_node": "8", "network_gbit_per_s": "400", "as_of": "2026-11-21",
    "source": "a test",
}  # fmt: skip


def test_every_name_of_the_interface_stands_in_the_table() -> None:
    assert tuple(accelerators()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_dated_sourced_and_of_its_memory(name: str) -> None:
    row = accelerator(name)
    assert row.as_of == "2026-11-21"
    assert len(row.source) > 20
    if name != "CPU":
        assert name.endswith(f"-{row.memory_gib:.0f}GB")


def test_peaks_are_dense() -> None:
    """Data sheets print twice these, with structured sparsity."""
    assert accelerator("H100-SXM-80GB").peak(NumberFormat.BF16) == 989
    assert accelerator("A100-SXM-80GB").peak(NumberFormat.BF16) == 312


def test_a_precision_without_hardware_names_the_row_and_what_it_has() -> None:
    with pytest.raises(
        HardwareError, match=r"V100-SXM2-16GB has no peak for bf16: write precision as one of fp16, fp32"
    ):
        accelerator("V100-SXM2-16GB").peak(NumberFormat.BF16)


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(HardwareError, match=r"'A100-80GB'.*nearest: A100-SXM-80GB"):
        accelerator("A100-80GB")


@pytest.mark.parametrize("column", ["memory_gib", "memory_gbytes_per_s", "link", "as_of", "source", "generation"])
def test_what_is_missing_is_an_error_that_names_row_and_column(column: str) -> None:
    with pytest.raises(HardwareError, match=f"X1: {column} is missing"):
        read([{**ROW, column: " "}])


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "many"])
def test_a_figure_is_positive_and_finite(text: str) -> None:
    with pytest.raises(HardwareError, match="X1: memory_gib"):
        read([{**ROW, "memory_gib": text}])


def test_a_row_without_any_peak_is_an_error() -> None:
    with pytest.raises(HardwareError, match="X1: no peak is given"):
        read([{**ROW, "bf16_tflops": ""}])
