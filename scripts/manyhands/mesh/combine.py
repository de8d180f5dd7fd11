"""Techniques combined on a mesh, by hand: the classes of lessons 10, 12 and 13 inside each other.

    a whole Transformer --tp--> 1/N of every matrix --pp--> its layers of one stage --dp--> a shard

    in a step   tp          inside each layer: sums of activations, and of their gradients
                pp          between stages: activations forward, their gradients back
                dp          around each unit: its weights come, its gradients are averaged
                replicate   the shards' gradients are averaged once more

What a gradient means: a loss is the mean over the samples of a micro-batch. So m micro-batches add
up gradients / m, and ranks with other samples (dp, shard, replicate) take the mean. Ranks with
parts of one sum (tp) add, which their layers do in backward; and the two stages that use one tied
matrix add what each of them found. A sum of means is the mean of the sums, so each technique does
its own.

Price for P parameters in fp32 with AdamW on pp x dp x tp ranks: 16 P / (pp dp tp) bytes a rank and,
while it computes, the gathered weights of a unit, or with a pipeline of its stage, 4P / (pp tp).
Each forward gathers the stage, and so does a backward that follows another one; each backward
reduces: m times 2 (dp-1)/dp x 4P / (pp tp) bytes over dp, and a little more. PyTorch's pipeline
keeps whole weights and gradients through the step instead, and sends them once.
Sources: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 3; Grattafiori et al.
2024, "The Llama 3 Herd of Models", https://arxiv.org/abs/2407.21783, section 3.3.2.
"""

from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from manyhands.data_parallel.replicas import average_gradients
from manyhands.fsdp.units import FSDP
from manyhands.mesh.grid import Groups
from manyhands.mesh.parts import (
    bounds_of,
    cut_layers,
    cut_stages,
    holders,
    loss_of,
    mark_holders,
    units_in,
)
from manyhands.pipeline.engine import LossFn
from manyhands.pipeline.wiring import Tied, find_tied, sum_tied
from manyhands.tensor.model import TensorParallel


def shard_and_cut(model: nn.Module, groups: Groups) -> FSDP:
    """FSDP x TP: cut a Transformer over groups["tp"], and shard what that leaves over groups["dp"].

    Returns FSDP around TensorParallel, with the blocks as units and all else by default: to be
    called with this rank's (inputs, targets). Its replicas are groups["replicate"], where there is
    such a group. No message is needed beyond those of the two classes.

    The order matters. Tensor parallelism cuts matrices by heads, columns and rows, so it has to
    find them whole and in shape; FSDP makes one vector of whatever is there, and gives the memory
    of the rest away. It is also the order of use: a unit's weights come over dp, and then the unit
    computes with its part over tp.

    Before the cut, all parameters are marked by mark_holders(model, number of tensor ranks).
    """
    mark_holders(model, dist.get_world_size(groups["tp"]))
    part = TensorParallel(model, group=groups["tp"])
    replicas = groups.get("replicate")
    return FSDP(part, list(part.blocks), replicas=replicas, group=groups["dp"])


class Stage(NamedTuple):
    """What a rank of a pipeline has of a model."""

    model: nn.Module  # of the stage; in shards where the mesh has dp
    inner: nn.Sequential  # its layers, with their own parameters
    tied: Tied  # those of model's parameters that another stage has, too
    loss_fn: LossFn  # of the last stage's output


def take_stage(model: nn.Module, groups: Groups) -> Stage:
    """This rank's stage of a Transformer: cut over tp, and in shards over dp where there is dp.

    The pipeline is groups["pp"], the tensor ranks are groups["tp"]. Every rank has built the whole
    model; of other stages it keeps nothing.
    """
    mark_holders(model, dist.get_world_size(groups["tp"]))
    part = TensorParallel(model, group=groups["tp"])
    layers = cut_layers(part)
    num, rank = dist.get_world_size(groups["pp"]), dist.get_rank(groups["pp"])
    stages = cut_stages(layers, bounds_of(layers, num))
    tied = [(param, ranks) for param, ranks in find_tied(stages, num) if rank in ranks]
    for param, ranks in tied:
        param.holders = holders(param) * len(ranks)
    own, loss_fn = stages[rank], loss_of(part.tokens.mine, groups["tp"])
    if "dp" not in groups:
        return Stage(own, own, tied, loss_fn)
    replicas = groups.get("replicate")
    # reshard=False: a backward right after a forward finds the weights that it has gathered.
    sharded = FSDP(own, units_in(own), reshard=False, replicas=replicas, group=groups["dp"])
    tied = [(shard_of(param, sharded), ranks) for param, ranks in tied]
    return Stage(sharded, own, tied, loss_fn)


def shard_of(param: nn.Parameter, model: FSDP) -> nn.Parameter:
    """The shard of a parameter that is a Flat of its own."""
    flats = [flat for unit in model.units for flat in unit]
    (found,) = [flat for flat in flats if any(param is one for one in flat.params)]
    assert len(found.params) == 1, "it shares its Flat with others: make it a unit"
    return found.shard


def finish_gradients(stage: Stage, groups: Groups) -> None:
    """Make this rank's gradients those of the mean loss over all samples; call it once a step.

    After the last backward, and before the gradients are clipped or used. Both stages that use a
    tied parameter add up what they found, over groups["pp"]. Where the mesh has no dp, whose FSDP
    does that in backward, the gradients become their means over groups["replicate"].
    """
    sum_tied(stage.tied, groups["pp"])
    if "dp" not in groups and "replicate" in groups:
        average_gradients(stage.model, groups["replicate"])
