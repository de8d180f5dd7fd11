"""How fast one GPU trains: tokens per second, and the model FLOPs utilisation (MFU).

    MFU = tokens per second x FLOPs per token / peak FLOP/s of the GPU

The FLOPs are those of the model, forward and backward, whatever the program really computes: what
is computed twice counts once. Weights and optimizer state are float32, products are bfloat16
(autocast). What is not a product (norms, GELU, sums, the loss) has few FLOPs and moves much memory;
torch.compile fuses it, which is why it helps.
Source: Chowdhery et al. 2022, "PaLM", https://arxiv.org/abs/2204.02311, appendix B.
"""

import gc
from collections.abc import Callable

import torch

from manyhands.gpu.measuring import Rows, one_line, run_for
from manyhands.gpu.scales import Scale, Shape
from manyhands.instruments.meters import memory_bytes, reset_peaks
from manyhands.instruments.timing import finished, median_s

WARM_S = 0.5


def speed(device: torch.device, scale: Scale) -> Rows:
    """The largest matrix product, and both models without torch.compile."""
    return [product(device, scale), *train_models(device, scale, "")]


def compiled(device: torch.device, scale: Scale) -> Rows:
    """Both models with torch.compile, which takes a minute or two before the first step."""
    return train_models(device, scale, scale.compiler)


def train_models(device: torch.device, scale: Scale, compiler: str) -> Rows:
    """A row for each model; one that fails says why, and the next one goes on."""
    rows: Rows = []
    for shape in (scale.small, scale.large):
        row: dict[str, object] = {"what": shape.name, "compiled": bool(compiler)}
        try:
            row |= train_fitting(shape, device, compiler, scale.steps)
        except Exception as problem:
            row["why"] = one_line(problem)
        rows.append(row)
        free(device, compiler)
    return rows


def product(device: torch.device, scale: Scale) -> dict[str, object]:
    """The row of a large product of bfloat16 matrices: what any training stays below."""
    n = scale.matrix
    a, b = torch.randn(2, n, n, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    run_for(lambda: finished(multiply, device), WARM_S if device.type == "cuda" else 0)
    (time_s,) = median_s([multiply], scale.steps, device)
    what = f"matrix product {n} x {n} x {n}"
    return {"what": what, "step_s": time_s, "flops_per_s": 2 * n**3 / time_s}


def train_fitting(
    shape: Shape, device: torch.device, compiler: str, steps: int
) -> dict[str, object]:
    """Train with the largest batch that fits: the shape's own, or a half, a quarter, ... of it."""
    batch = shape.batch
    while True:
        try:
            return train(shape, device, compiler, steps, batch)
        except torch.cuda.OutOfMemoryError:
            if batch == 1:
                raise
        batch //= 2
        free(device, compiler)  # not in the except block, which keeps the failed try alive


def train(
    shape: Shape, device: torch.device, compiler: str, steps: int, batch: int
) -> dict[str, object]:
    """Time training steps with one batch size; returns the numbers of a row."""
    torch.manual_seed(1)
    step = make_step(shape, device, compiler, batch)
    reset_peaks(device)
    (time_s,) = median_s([step], steps, device)
    tokens_per_s = batch * shape.block / time_s
    return {
        "parameters": shape.num_parameters,
        "batch": batch,
        "block": shape.block,
        "step_s": time_s,
        "tokens_per_s": tokens_per_s,
        "flops_per_s": tokens_per_s * shape.flops_per_token,
        "peak_bytes": memory_bytes(device) if device.type == "cuda" else None,
    }


def make_step(
    shape: Shape, device: torch.device, compiler: str, batch: int
) -> Callable[[], torch.Tensor]:
    """A training step in bfloat16 with fused AdamW; compiled by the backend `compiler`, or not."""
    model = shape.build(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs, targets = shape.tokens(device, batch)
    call = torch.compile(model, backend=compiler) if compiler else model

    def step() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = call(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def free(device: torch.device, compiler: str) -> None:
    """Give back what the last model took."""
    if compiler:
        torch.compiler.reset()  # what was compiled holds its model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
