"""All ways to train one model on n ranks, by name; each is assembled in a file of its family.

    way             what a rank holds                              its share of the global batch
    one process     everything, on rank 0; the others do nothing   all of it
    DDP             everything                                     1/n of the samples
    ZeRO-1, 2, 3    1/n of optimizer state, gradients, weights     1/n of the samples
    fully_shard     the same as ZeRO-3, by PyTorch                 1/n of the samples
    pipeline        some of the layers                             all of it, in micro-batches
    tensor          1/n of every matrix                            all of it
      + sequence    and 1/n of the positions between the layers    all of it

With 4 ranks or more, and an even number of them, two techniques on a mesh:

    FSDP x TP       1/n of every matrix                            2/n of the samples
    PP x DP         one of two stages                              2/n of them, in micro-batches

A new way is one function (a model, a setting) -> Ready, and one line here. Jobs, `make gpu`, the
benches and the tests of parity take their models from the same functions.
"""

from functools import partial

from manyhands.ways.data_parallel import ddp
from manyhands.ways.fsdp import fsdp, sharded_optimizer
from manyhands.ways.mesh import fsdp_and_tensor, pipeline_and_replicas
from manyhands.ways.pipeline import one_f_one_b
from manyhands.ways.ready import Make, has_mesh, one_process
from manyhands.ways.tensor import tensor_parallel

WAYS: dict[str, Make] = {
    "one process": one_process,
    "DDP": ddp,
    "ZeRO-1": partial(sharded_optimizer, stage=1),
    "ZeRO-2": partial(sharded_optimizer, stage=2),
    "ZeRO-3": fsdp,
    "fully_shard": partial(fsdp, native=True),
    "pipeline (1F1B)": one_f_one_b,
    "tensor": tensor_parallel,
    "tensor + sequence": partial(tensor_parallel, with_sequence=True),
}
ON_A_MESH: dict[str, Make] = {"FSDP x TP": fsdp_and_tensor, "PP x DP": pipeline_and_replicas}
# The same techniques by PyTorch, by the name of the way by hand.
NATIVE: dict[str, Make] = {
    "DDP": partial(ddp, native=True),
    "ZeRO-3": WAYS["fully_shard"],
    "pipeline (1F1B)": partial(one_f_one_b, native=True),
    "tensor": partial(tensor_parallel, native=True),
    "tensor + sequence": partial(tensor_parallel, native=True, with_sequence=True),
}
NATIVE_ON_A_MESH: dict[str, Make] = {
    name: partial(way, native=True) for name, way in ON_A_MESH.items()
}


def ways_for(ranks: int) -> dict[str, Make]:
    """The ways to train on so many ranks."""
    return WAYS | ON_A_MESH if has_mesh(ranks) else dict(WAYS)


def native_for(ranks: int) -> dict[str, Make]:
    """The ways of PyTorch on so many ranks."""
    return NATIVE | NATIVE_ON_A_MESH if has_mesh(ranks) else dict(NATIVE)
