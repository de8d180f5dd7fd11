"""The memory of a training step: predicted by the accounting of lesson 09, and measured.

    weights | gradients | optimizer state      bytes per parameter, by the types they are kept in
    kept for backward                          16 D + H + 4 numbers a token and block, and the loss
    peak of a step                             when the gradient of the scores is computed

On a GPU the allocator is asked. It holds more than the tensors that live, and the GPU has more in
use than that: the program's context, kernels, and the buffers of NCCL.
"""

import gc
from typing import NamedTuple

import torch

from manyhands.gpu.measuring import Memory, Rows
from manyhands.gpu.scales import Scale, Shape
from manyhands.memory import accounting

TYPES = (torch.float32, torch.bfloat16)
BATCH = 8  # sequences; enough that activations are the larger part


class Bytes(NamedTuple):
    """Bytes of each part."""

    weights: int
    gradients: int
    optimizer: int
    kept: int  # by forward, for backward
    peak: int  # of a step


def memory(device: torch.device, scale: Scale) -> Rows:
    """Measure a step of the small model in float32 and in bfloat16, beside the prediction."""
    rows: Rows = []
    for dtype in TYPES:
        predicted = predict(scale.small, min(BATCH, scale.small.batch), dtype)
        found = measure(scale.small, min(BATCH, scale.small.batch), dtype, device)
        kind = str(dtype).removeprefix("torch.")
        for part in Bytes._fields:
            numbers = {"predicted": getattr(predicted, part), "measured": getattr(found, part)}
            rows.append({"type": kind, "part": part} | numbers)
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            held = {"held by the allocator": torch.cuda.memory_reserved(device)}
            held |= {"in use on the GPU": total - free}
            rows += [{"type": kind, "part": part, "measured": n} for part, n in held.items()]
            gc.collect()
            torch.cuda.empty_cache()
    return rows


def predict(shape: Shape, batch: int, dtype: torch.dtype) -> Bytes:
    """Bytes by the formulas, for a model whose weights, gradients and Adam's means have `dtype`."""
    tokens, nbytes = batch * shape.block, dtype.itemsize
    recipe = accounting.recipe(dtype, dtype, [dtype, dtype])
    with torch.device("meta"):  # shapes without memory
        sizes = [param.numel() for param in shape.build(torch.device("meta")).parameters()]
    held = accounting.bytes_per_rank(sizes, recipe, stage=0, world_size=1)
    block = accounting.block_activations(tokens, shape.width, shape.heads, nbytes)
    # The last norm keeps its input, a mean and a scale, and the head keeps the norm's output.
    last = nbytes * tokens * (2 * shape.width + 2)
    scores = 4 * tokens * shape.vocab  # the loss keeps their logarithms of softmax, in float32
    kept = shape.layers * sum(block.values()) + last + scores
    # Backward begins with the gradient by these logarithms, and makes that by the scores of it.
    return Bytes(*held, kept=kept, peak=held.weights + held.optimizer + kept + 2 * scores)


def measure(shape: Shape, batch: int, dtype: torch.dtype, device: torch.device) -> Bytes:
    """Bytes of tensors in the second step of a training."""
    inputs, targets = shape.tokens(device, batch)
    take_workspaces(device, dtype)
    with Memory(device) as gauge:
        model = shape.build(device, dtype)
        weights = gauge.now()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        held = gauge.now()
        gauge.begin_peak()
        loss = model(inputs, targets)
        kept = gauge.now() - held
        loss.backward()
        del loss
        gradients = gauge.now() - held
        optimizer.step()
        return Bytes(weights, gradients, held - weights, kept, gauge.peak())


def take_workspaces(device: torch.device, dtype: torch.dtype) -> None:
    """Have the libraries take their own memory for products now, so that no part counts it."""
    layer = torch.nn.Linear(64, 64, device=device, dtype=dtype)
    layer(torch.ones(64, 64, device=device, dtype=dtype)).sum().backward()
