"""The peak FLOP/s of known GPUs: dense products of bfloat16 matrices, summed in float32.

Data sheets often print the number for sparse matrices, which is twice as large. The numbers below
are for dense ones. They are what the matrix units could do at the clock of the data sheet; a GPU
that is limited in power or temperature stays below it with any program.
Sources: the data sheets at https://www.nvidia.com/en-us/data-center/, and NVIDIA's papers on the
architectures of its RTX cards; for most of them see also get_peak_flops in
https://github.com/pytorch/torchtitan/blob/main/torchtitan/tools/utils.py.
"""

from typing import NamedTuple


class Peak(NamedTuple):
    """Peak of a GPU in FLOP/s, and where NVIDIA states it."""

    flops_per_s: float
    source: str


PEAKS = {  # part of the name that torch gives -> peak; where several fit, the first counts
    "B200": Peak(2250e12, "NVIDIA HGX B200 data sheet"),
    "H200 NVL": Peak(835e12, "NVIDIA H200 data sheet"),
    "H200": Peak(989e12, "NVIDIA H200 data sheet"),
    "GH200": Peak(990e12, "NVIDIA GH200 data sheet"),
    "H100 NVL": Peak(835e12, "NVIDIA H100 NVL data sheet"),
    "H100 PCIe": Peak(756e12, "NVIDIA H100 data sheet"),
    "H100": Peak(989e12, "NVIDIA H100 data sheet"),
    "A100": Peak(312e12, "NVIDIA A100 data sheet"),
    "A30": Peak(165e12, "NVIDIA A30 data sheet"),
    "A40": Peak(149.7e12, "NVIDIA A40 data sheet"),
    "A10": Peak(125e12, "NVIDIA A10 data sheet"),
    "L40S": Peak(362e12, "NVIDIA L40S data sheet"),
    "L4": Peak(121e12, "NVIDIA L4 data sheet"),
    "RTX 5090": Peak(209.5e12, "NVIDIA RTX Blackwell GPU architecture, appendix A"),
    "RTX 4090": Peak(165.2e12, "NVIDIA Ada GPU architecture, appendix A"),
    "RTX 3090": Peak(71e12, "NVIDIA Ampere GA102 GPU architecture, appendix A"),
}
GOAL = 0.5  # utilisation to reach on an H100 or H200
SLICE = " MIG "  # in the name of a part of a GPU, whose peak is a part as well


def peak_of(name: str) -> Peak | None:
    """The peak of the GPU with this name; None where it is not known.

    "L4" is no part of the word "L40S": a key fits whole words of the name only.
    """
    words = f" {name.replace('-', ' ')} "
    if SLICE in words:
        return None
    return next((peak for key, peak in PEAKS.items() if f" {key} " in words), None)


def utilisation(rows: list[dict], flops_per_s: float) -> None:
    """Add to each row that has a speed its share of the peak `flops_per_s`."""
    for row in rows:
        if "flops_per_s" in row:
            row["utilisation"] = row["flops_per_s"] / flops_per_s
