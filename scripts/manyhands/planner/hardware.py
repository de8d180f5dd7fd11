"""GPUs and their links, from data sheets; and the planner's constants, each with its source.

    C   FLOP/s of matrix products     W   bytes/s of a link     C/W   FLOPs per byte: lesson 14

A data sheet says what a part can do at most. What programs reach of that, others have measured with
programs that do nothing else: the shares below. FRAGMENTATION, float8 on B200 and the 96 GB H100
are estimates, as told beside them. None of all these was fitted to a training run.

Sources. Sheets: NVIDIA's of A100, H100, H200 and HGX B200. Products: Azure's AI benchmarking guide
(8192 x 8192 matrices: 254 TFLOP/s on A100, 1290 in float8 on H100) and Bekman, "ML Engineering",
compute/accelerator (products that go on for long: 755 TFLOP/s on H200, 1429 on B200; float8 on B200
by the same share). Memory and links: Azure's guide (copies; all-reduce in a node: 230 GB/s of 300
on A100, 370 of 450 on H100 in rings). Fused attention: FlashAttention-2 reaches half of the peak on
A100 and 0.3 on H100, FlashAttention-3 0.5 on H100 (Dao 2023, https://arxiv.org/abs/2307.08691;
Shah et al. 2024, https://arxiv.org/abs/2407.08608). Latencies: NCCL, src/graph/tuning.cc (hwLat of
a ring, NVLink and network, "Simple"). Prices, of 2026 and in round numbers, are an input.
"""

from typing import NamedTuple

from manyhands.tensor.cost import Link, between_nodes

GIB = 2**30


class Gpu(NamedTuple):
    """A GPU in its node, by the data sheets; bandwidths are in one direction."""

    name: str
    memory_bytes: int  # as programs see it
    flops_per_s: float  # of dense bfloat16 matrices
    matmul_share: float  # of that, what large products reach for long
    float8_flops_per_s: float  # what large float8 products reach; without them those of bfloat16
    attention_share: float  # of the peak, what fused attention reaches forward and backward
    memory_bytes_per_s: float
    node: Link  # to the other GPUs of the node
    network: Link  # to other nodes: this GPU's share of the node's network cards
    per_node: int
    watts: float
    dollars_per_hour: float


def nvlink(bytes_per_s: float) -> Link:
    """Inside a node."""
    return Link("NVLink", bytes_per_s, 3.4e-6)


def infiniband(bytes_per_s: float) -> Link:
    """Between nodes; the bandwidth is that of one GPU's network card."""
    return Link("InfiniBand", bytes_per_s, 9.6e-6)


A100 = Gpu(
    name="A100-80GB",
    memory_bytes=int(79.2 * GIB),
    flops_per_s=312e12,
    matmul_share=0.81,
    float8_flops_per_s=0.81 * 312e12,
    attention_share=0.5,
    memory_bytes_per_s=2039e9,
    node=nvlink(300e9),
    network=infiniband(25e9),
    per_node=8,
    watts=400,
    dollars_per_hour=2.0,
)
H100 = Gpu(
    name="H100-80GB",
    memory_bytes=int(79.2 * GIB),
    flops_per_s=989e12,
    matmul_share=0.76,
    float8_flops_per_s=1290e12,
    attention_share=0.35,
    memory_bytes_per_s=3350e9,
    node=nvlink(450e9),
    network=infiniband(50e9),
    per_node=8,
    watts=700,
    dollars_per_hour=3.0,
)
GPUS = {
    gpu.name: gpu
    for gpu in (
        A100._replace(name="A100-40GB", memory_bytes=int(39.4 * GIB), memory_bytes_per_s=1555e9),
        A100,
        H100,
        # Memory of another kind, and 500 W: the power of a chip goes with the third power of its
        # clock, so the clock falls to 0.89.
        H100._replace(
            name="H100-96GB",
            memory_bytes=int(95.0 * GIB),
            memory_bytes_per_s=2400e9,
            matmul_share=0.76 * 0.89,
            float8_flops_per_s=0.89 * 1290e12,
            watts=500,
        ),
        H100._replace(
            name="H200",
            memory_bytes=int(139.8 * GIB),
            memory_bytes_per_s=4800e9,
            dollars_per_hour=3.5,
        ),
        Gpu(
            name="B200",
            memory_bytes=int(178.0 * GIB),
            flops_per_s=2250e12,
            matmul_share=0.64,
            float8_flops_per_s=2860e12,
            attention_share=0.35,
            memory_bytes_per_s=7700e9,
            node=nvlink(900e9),
            network=infiniband(50e9),
            per_node=8,
            watts=1000,
            dollars_per_hour=4.5,
        ),
    )
}


def group_link(gpu: Gpu, size: int, stride: int = 1) -> Link:
    """What joins a group of `size` GPUs, neighbours in which are `stride` GPUs apart.

    Inside a node it is the node's link. A larger group has per_node / stride GPUs in each node, and
    so the use of as many network cards.
    """
    if size * stride <= gpu.per_node:
        return gpu.node
    return between_nodes(gpu.node, gpu.network, max(1, gpu.per_node // stride))


MEMORY_SHARE = 0.84  # of the memory's bandwidth: copies reach 0.79 to 0.90 on A100, H100 and H200
# The first FlashAttention beside the second: 25 to 40 % of the peak on A100 beside 50 to 73 % (Dao
# 2023, abstract).
FLASH1 = 0.6
LINK_SHARE = 0.8  # of a link's: rings reach 0.77 to 0.82 in a node, and 0.85 to 0.96 across nodes
# The CUDA context takes 0.9 to 1.8 GB, and the buffers of a NCCL communicator 1 to 1.6 GB.
CONTEXT_BYTES = int(2.0 * GIB)
# What the allocator holds beyond the tensors that come and go. Guo et al. 2024 (GMLake,
# https://arxiv.org/abs/2401.08156) saw 0.15 on average in runs that were chosen as hard ones; a
# plain pre-training repeats the same sizes in each step.
FRAGMENTATION = 0.05
# A data centre's power over that of its computers. Google reports 1.1 for its own; the average of
# all that Uptime Institute asks is 1.56.
POWER_USAGE = 1.1
