"""Spec of 13.13: a plan for torch's own tensor parallelism, judged by a training step."""

import logging
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel, parallelize_module

from manyhands.checks.engine.spec import Call, Place, Spec
from manyhands.checks.engine.values import Malformed, kind, malformed
from manyhands.checks.tensor.common import costs_no_more
from manyhands.instruments.ledger import Ledger
from manyhands.models.transformer import Transformer
from manyhands.tensor import dtensor

SIZES = {"vocab_size": 6, "block": 4, "heads": 2, "width": 8}
NAMES = "The names are those of model.named_modules(), such as blocks.0.mlp.up."
DOWN = 'mlp.down": RowwiseParallel(output_layouts=between)'
QKV = 'attention.qkv": ColwiseParallel(input_layouts=between)'
TOKENS = "RowwiseParallel(input_layouts=Replicate())"
NORMS = "for name in [*norms, "
COLUMNS_FIRST = "qkv and up are cut by columns, out and down by rows."
LOCAL = "output_layouts=Shard(-1), use_local_output=False"


def as_plan(value: object, model: nn.Module) -> dict[str, ParallelStyle]:
    """A dict from names of modules to styles."""
    if not isinstance(value, Mapping):
        raise malformed(value, "a dict: a module's name -> a style")
    names = [name for name, _ in model.named_modules()]
    for name, style in value.items():
        if name not in names and not any(sign in str(name) for sign in "*?["):
            words = "torch passes over a name that no module has."
            raise Malformed(f"a style for {name!r}, and no module has this name", words, NAMES)
        if not isinstance(style, ParallelStyle):
            shown = style.__name__ if isinstance(style, type) else kind(style)
            words = "A style is an object, such as ColwiseParallel()."
            raise Malformed(f"{shown} for {name!r}", words, "Call the class: ColwiseParallel().")
    return dict(value)


def plan_seen(answer: Callable, case: Call, place: Place) -> dict:
    """Loss, gradients and scores of one step with the plan, and what it costs."""
    # A wrong plan is told in a verdict; torch's own lines would come before it.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    torch.manual_seed(case.num_blocks)
    model = Transformer(layers=case.num_blocks, **SIZES)
    inputs, targets = torch.randint(6, (2, 3, 4))
    with torch.no_grad():  # with the small weights of a new model, norms hardly get a gradient
        for param in model.parameters():
            param.copy_(torch.randn_like(param))
    styles = as_plan(answer(case.num_blocks, sequence=case.sequence), model)
    model = parallelize_module(model, init_device_mesh("cpu", (place.n,)), styles)
    model.head.weight = model.tokens.weight
    between: list[int] = []
    for name, module in model.named_modules():
        if "norm" in name:
            module.register_forward_pre_hook(lambda _, x: between.append(local(x[0]).numel()))
    with Ledger() as ledger, loss_parallel():
        scores = model(inputs)
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
        loss.backward()
    named = dict(model.named_parameters())
    seen = {"the loss": full(loss.detach()), "the layout of the scores": layout(scores)}
    seen |= {f"the gradient of {name}": full(param.grad) for name, param in named.items()}
    seen["numbers of the parameters on a rank"] = sum(local(p).numel() for p in named.values())
    seen["numbers that go into the norms on a rank"] = sum(between)
    seen["messages"] = len(ledger.entries)
    seen["bytes of the messages"] = sum(entry.nbytes for entry in ledger.entries)
    return seen


def full(tensor: Tensor | None) -> Tensor | None:
    """A tensor with the parts of all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """A tensor as far as it is on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def layout(scores: Tensor) -> str:
    """How the scores are laid out."""
    if not isinstance(scores, DTensor):
        return "a plain tensor"
    (placed,) = scores.placements
    return f"Shard({placed.dim % 3})" if isinstance(placed, Shard) else f"{placed}"


plan = Spec(
    todo="13.13",
    truth=dtensor.plan,
    layouts=(((0, 1),),),
    cases=lambda n: [(1, False), (2, True)],
    observe=plan_seen,
    same=costs_no_more(
        "numbers of the parameters on a rank",
        "numbers that go into the norms on a rank",
        "messages",
        "bytes of the messages",
        tolerance=1e-4,
    ),
    guards_group=False,
    max_messages=1000,
    limit_s=12.0,
    mistake_s=10.0,  # torch works out each operation anew
    tell=lambda case: f"a step with plan({case.num_blocks}, sequence={case.sequence})",
    advice={
        "": "Go through the modules one by one: how does x come in, and how does it go on?",
        "the layout of the scores": f"The scores stay cut: {LOCAL}.",
    },
    hints=(
        "In each block: qkv and up are cut by columns, out and down by rows. The names are those "
        "of model.named_modules(), such as blocks.0.attention.qkv.",
        "Embedding by rows with input_layouts=Replicate(). The head by columns; its scores stay "
        "cut: output_layouts=Shard(-1), and use_local_output=False so that they stay DTensors.",
        "With sequence, Shard(1) in place of Replicate() wherever x goes between layers, norms are "
        'SequenceParallel(), and "dropout" is PrepareModuleOutput from Replicate() to Shard(1).',
    ),
    mistakes="""
        use_local_output=False => use_local_output=True :: The scores are plain tensors, and
            loss_parallel must know that they are parts. | use_local_output=False for the head.
        output_layouts=Shard(-1) => output_layouts=Replicate() :: The scores are gathered, and they
            should stay cut by the vocabulary. | output_layouts=Shard(-1) for the head.
        between = Shard(1) if sequence else Replicate() => sequence = False; between = Replicate()
            :: `sequence` is ignored. | With sequence, x between the layers is Shard(1).
        mlp.up": ColwiseParallel(input_layouts=between) => mlp.up":
            RowwiseParallel(output_layouts=between) ::
            mlp.up is cut by input features. | {COLUMNS_FIRST}
        {DOWN} => mlp.down": ColwiseParallel(input_layouts=between) ::
            mlp.down is cut by output features.
        {TOKENS} => ColwiseParallel() ::
            The embedding is cut by its width. | RowwiseParallel cuts it by tokens.
        {TOKENS} => RowwiseParallel() ::
            The embedding's input is taken to be cut. | input_layouts=Replicate()
        attention.out": RowwiseParallel(output_layouts=between) => attention.out": RowwiseParallel()
            ::
            With sequence, the attention's output is whole on every rank. | output_layouts=between
        for block in ( => for block in list(
        for i in range(num_blocks)): => for i in range(num_blocks))[:1]: ::
            Only the first block is cut. | Write an entry for every block.
        norms = [ => norms = [] and [ ::
            The blocks' norms are left out. | With sequence they are SequenceParallel().
        {NORMS}"norm"] => for name in [*norms] ::
            The last norm is left out. | With sequence it is SequenceParallel().
        SequenceParallel() for name => SequenceParallel(sequence_dim=0) for name ::
            The norms are told that dimension 0, the batch, is cut. | Positions are dimension 1.
        styles["dropout"] => _ = {}; _["dropout"] :: With sequence, "dropout" is left out, so x
            stays whole there. | PrepareModuleOutput from Replicate() to Shard(1) for "dropout".
        f"{block}.{DOWN}, =>  :: mlp.down is left out. | {COLUMNS_FIRST}
    """,
    module=globals(),
)
