"""Lesson 14: right answers of another shape than the course's, and wrong ones that are no slip."""

import binascii
import math

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from manyhands.checks.engine.answer import Pair
from manyhands.fsdp.units import FSDP
from manyhands.mesh.grid import DATA_AXES, coordinates, ranks_along
from manyhands.mesh.grid import make_groups as course_groups
from manyhands.mesh.parts import mark_holders
from manyhands.tensor.model import TensorParallel

# ---- 14.1 and 14.2: a grid, and groups along it ------------------------------------------------


def by_unravel(rank, sizes):
    return dict(zip(sizes, np.unravel_index(rank, tuple(sizes.values())), strict=True))


def column_of_array(axis, rank, sizes):
    grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    line = list(by_unravel(rank, sizes).values())
    line[list(sizes).index(axis)] = slice(None)
    return grid[tuple(line)]


def by_products(rank, sizes):
    left, place = math.prod(sizes.values()), {}
    for axis, size in sizes.items():
        left //= size
        place[axis] = rank // left % size
    return place


def by_search(axis, rank, sizes):
    here = {**by_products(rank, sizes), axis: None}
    every = range(math.prod(sizes.values()))
    return [other for other in every if {**by_products(other, sizes), axis: None} == here]


def two_axes_only(rank, sizes):
    (outer, _), (inner, size) = list(sizes.items())[0], list(sizes.items())[-1]
    return {outer: rank // size, inner: rank % size}


def by_names(rank, sizes):
    order = ["pp", "replicate", "shard", "dp", "tp"]
    known = {axis: sizes[axis] for axis in order if axis in sizes}
    return coordinates(rank, known)


def by_device_mesh(sizes):
    if math.prod(sizes.values()) != dist.get_world_size():
        raise ValueError(sizes)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return {axis: mesh.get_group(axis) for axis in sizes}


def by_enumeration(sizes):
    if math.prod(sizes.values()) != dist.get_world_size():
        raise ValueError("no")
    ranks = range(dist.get_world_size())
    groups = {}
    for axis in sizes:
        lines = {min(line): line for line in (ranks_along(axis, r, sizes) for r in ranks)}
        groups[axis], _ = dist.new_subgroups_by_enumeration(list(lines.values()))
    return groups


def of_the_job_where_it_is_all(sizes):
    """Makes a group only where it is not the whole job, and remembers nothing."""
    groups = course_groups(sizes)
    n = dist.get_world_size()
    return {axis: dist.group.WORLD if sizes[axis] == n else groups[axis] for axis in sizes}


def consecutive_groups(sizes):
    if math.prod(sizes.values()) != dist.get_world_size():
        raise ValueError("no")
    return {axis: dist.new_subgroups(size)[0] for axis, size in sizes.items()}


def keeps_everything(sizes):
    if math.prod(sizes.values()) != dist.get_world_size():
        raise ValueError("no")
    groups = {}
    for axis in sizes:
        for rank in range(dist.get_world_size()):
            line = ranks_along(axis, rank, sizes)
            if rank == line[0]:
                group = dist.new_group(line)
                if dist.get_rank() >= line[0]:
                    groups[axis] = group
    return groups


# ---- 14.3: shards of what is cut -----------------------------------------------------------------


def marked_by_hand(model, groups):
    tensor_ranks = dist.get_world_size(groups["tp"])
    cut = TensorParallel(model, group=groups["tp"])
    for param in (*cut.positions.parameters(), *cut.norm.parameters()):
        param.holders = tensor_ranks
    for block in cut.blocks:
        for param in (*block.norm1.parameters(), *block.norm2.parameters()):
            param.holders = tensor_ranks
    return FSDP(cut, cut.blocks, None, True, groups.get("replicate"), groups["dp"])


class KeptTogether(FSDP):
    """Right: FSDP that cuts by itself."""

    def __init__(self, model, groups):
        mark_holders(model, groups["tp"].size())
        cut = TensorParallel(model, group=groups["tp"])
        more = {"replicas": groups["replicate"]} if "replicate" in groups else {}
        super().__init__(cut, [*cut.blocks], group=groups["dp"], **more)


def one_vector(model, groups):
    """The blocks as one unit."""
    mark_holders(model, dist.get_world_size(groups["tp"]))
    part = TensorParallel(model, group=groups["tp"])
    return FSDP(part, [part.blocks], replicas=groups.get("replicate"), group=groups["dp"])


def kept_whole(model, groups):
    mark_holders(model, dist.get_world_size(groups["tp"]))
    return TensorParallel(model, group=groups["tp"])


def in_eval(model, groups):
    return KeptTogether(model, groups).eval()


# ---- 14.12: hybrid sharding ----------------------------------------------------------------------


def bytes_by_rings(num_params, replicas, shards, bytes_per_number=4):
    padded = num_params + -num_params % shards
    whole = padded * bytes_per_number
    return {
        "kept": 4 * whole // shards,
        "shard": sum((shards - 1) * whole // shards for _ in range(3)),
        "replicate": 2 * (replicas - 1) * (whole // shards) // replicas,
    }


def bytes_by_ceil(num_params, replicas, shards, bytes_per_number=4):
    mine = (num_params + shards - 1) // shards * bytes_per_number
    sent = (mine * 2 * (replicas - 1)) // replicas
    return dict(shard=3 * mine * shards - 3 * mine, replicate=sent, kept=mine << 2)


def bytes_in_floats(num_params, replicas, shards, bytes_per_number=4):
    mine = math.ceil(num_params / shards) * bytes_per_number
    return {
        "shard": 3 * (shards - 1) / shards * mine * shards,
        "replicate": 2 * (replicas - 1) / replicas * mine,
        "kept": 4 * mine,
    }


def bytes_as_a_tuple(num_params, replicas, shards, bytes_per_number=4):
    return tuple(bytes_by_ceil(num_params, replicas, shards, bytes_per_number).values())


# ---- 14.4: one norm of all parts ----------------------------------------------------------------


def norm_by_gathering(parts, group=None):
    own = sum(
        (g.double().flatten() @ g.double().flatten() / h for g, h in parts),
        torch.zeros((), dtype=torch.float64),
    )
    dist.all_reduce(own, group=group)
    return own**0.5


def norm_by_vector_norm(parts, group=None):
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64) / h**0.5 for g, h in parts]
    total = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)
    dist.all_reduce(total, group=group, async_op=True).wait()
    return torch.sqrt(total)


def norm_of_first_holder(parts, group=None):
    """As if every part with several holders were on the first ranks."""
    rank = dist.get_rank(group)
    mine = [g.double().square().sum() for g, h in parts if h == 1 or rank == 0]
    total = torch.stack(mine).sum() if mine else torch.zeros((), dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return total.sqrt()


def norm_as_a_number(parts, group=None):
    return norm_by_vector_norm(parts, group).item()


def norm_that_scales(parts, group=None):
    for grad, _ in parts:
        grad /= 2
    return 2 * norm_by_vector_norm(parts, group)


# ---- 14.5: seeds for each purpose and place -----------------------------------------------------


def seed_by_table(what, seed, place, sizes):
    if what == "weights":
        return seed
    axes = [axis for axis in sizes if axis in DATA_AXES] if what == "data" else list(sizes)
    axes = [axis for axis in axes if axis != "tp" or what == "own dropout"]
    number = int(
        np.ravel_multi_index([place[a] for a in axes], [sizes[a] for a in axes] or [1])
        if axes
        else 0
    )
    return 2**20 + 3 * (seed * 2**20 + number) + ("data", "dropout", "own dropout").index(what)


def seed_reversed(what, seed, place, sizes):
    if what == "weights":
        return seed
    number, unit = 0, 1
    for axis in reversed(list(sizes)):
        drawn = {"data": axis in DATA_AXES, "dropout": axis != "tp", "own dropout": True}[what]
        if drawn:
            number += unit * place[axis]
            unit *= sizes[axis]
    kind = {"data": 1, "dropout": 2, "own dropout": 3}[what]
    return (kind << 30) + (seed << 20) + number


def seed_by_checksum(what, seed, place, sizes):
    if what == "weights":
        return seed
    axes = {"data": DATA_AXES, "dropout": [a for a in sizes if a != "tp"], "own dropout": sizes}
    text = f"{what} {seed} {[place[axis] for axis in sizes if axis in axes[what]]}"
    return binascii.crc32(text.encode()) % 65_536


def seed_by_hash(what, seed, place, sizes):
    return seed if what == "weights" else hash((what, seed, *place.items())) % 2**32


def seed_that_empties_the_place(what, seed, place, sizes):
    right = seed_reversed(what, seed, place, sizes)
    place.pop("tp", None)
    return right


def seed_above_32_bits(what, seed, place, sizes):
    """The seed of the training is where PyTorch's generator on the CPU does not look."""
    if what == "weights":
        return seed
    return (seed << 32) + seed_reversed(what, 0, place, sizes)


def seed_of_this_rank(what, seed, place, sizes):
    return seed if what == "weights" else seed + dist.get_rank()


def seed_below_zero(what, seed, place, sizes):
    right = seed_reversed(what, seed, place, sizes)
    return right - 2**32 if what == "own dropout" else right


RIGHT = {
    "14.1": [Pair(by_unravel, column_of_array), Pair(by_products, by_search)],
    "14.2": [by_device_mesh, by_enumeration, of_the_job_where_it_is_all],
    "14.3": [marked_by_hand, KeptTogether],
    "14.12": [bytes_by_rings, bytes_by_ceil],
    "14.4": [norm_by_gathering, norm_by_vector_norm],
    "14.5": [seed_by_table, seed_reversed],
}
WRONG = {
    "14.1": [
        (Pair(two_axes_only, ranks_along), "a dict without 'dp'"),
        (Pair(by_names, ranks_along), "the names of coordinates, in order"),
    ],
    "14.2": [
        (consecutive_groups, "the ranks of the group"),
        (keeps_everything, "on a rank that is not in the group"),
    ],
    "14.3": [
        (one_vector, "The units are list(part.blocks)"),
        (kept_whole, "not in shards"),
        (in_eval, "all modules are in train"),
    ],
    "14.12": [(bytes_in_floats, "whole number"), (bytes_as_a_tuple, "a dict with 3 names")],
    "14.4": [
        (norm_of_first_holder, "gives"),
        (norm_as_a_number, "a tensor without dimensions"),
        (norm_that_scales, "changes the gradients"),
    ],
    "14.5": [
        (seed_by_checksum, ""),
        (seed_by_hash, "hash() of a text"),
        (seed_below_zero, "below 0"),
        (seed_that_empties_the_place, "changes `place`"),
        (seed_above_32_bits, "last 32 bits"),
        (seed_of_this_rank, "`place` says where the rank stands"),
    ],
}

# ---- 14.6: how equal is equal -------------------------------------------------------------------


def spread_by_levels(num_terms, dtype, in_pairs=False):
    """The squares of all errors are added up, with whole levels and no approximation."""
    squares, length = 0.0, num_terms
    if in_pairs:
        while length > 1:
            squares += num_terms / 12
            length = -(-length // 2)
    else:
        squares = (num_terms * (num_terms + 1) / 2 - 1) / 12
    return torch.finfo(dtype).eps * math.sqrt(squares / num_terms)


def spread_of_tensors(num_terms, dtype, in_pairs=False):
    one_by_one = (num_terms > 1) * num_terms / 24
    variance = torch.tensor(math.log2(num_terms) / 12 if in_pairs else one_by_one)
    return variance.sqrt() * torch.finfo(dtype).eps


def spread_by_machar(num_terms, dtype, in_pairs=False):
    """eps is found by halving."""
    eps = torch.ones((), dtype=dtype)
    while 1 + eps / 2 > 1:
        eps = eps / 2
    n = max(num_terms, 1)
    exponent = 0.5 * math.log(math.log2(n) / 12 if in_pairs else n / 24) if n > 1 else -math.inf
    return eps.double() * math.exp(exponent)


def spread_at_worst(num_terms, dtype, in_pairs=False):
    """The bound of Higham: as if all errors had the same sign."""
    depth = math.log2(num_terms) if in_pairs else num_terms - 1
    return depth * torch.finfo(dtype).eps / 2


def spread_by_a_table(num_terms, dtype, in_pairs=False):
    eps = {torch.float32: 2**-23, torch.bfloat16: 2**-7}[dtype]
    if num_terms == 1:
        return 0.0
    return eps * math.sqrt(math.log2(num_terms) / 12 if in_pairs else num_terms / 24)


def spread_in_its_own_type(num_terms, dtype, in_pairs=False):
    return torch.tensor(spread_by_levels(num_terms, dtype, in_pairs), dtype=dtype)


# ---- 14.7 and 14.8: C/W -------------------------------------------------------------------------


def tokens_in_one_line(flops_per_byte, num_ranks, bytes_per_number=2, sharded=False):
    """The same for both."""
    return bytes_per_number / 2 * flops_per_byte * (1 - 1 / num_ranks)


def tokens_of_a_whole_step(flops_per_byte, num_ranks, bytes_per_number=2, sharded=False):
    """FSDP's three messages behind its whole step."""
    sent = 0.0
    for _ in range(3 if sharded else 2):
        sent += (num_ranks - 1) * (bytes_per_number / num_ranks)
    return np.float64(sent) / (6 if sharded else 4) * flops_per_byte


def tokens_rounded_up(flops_per_byte, num_ranks, bytes_per_number=2, sharded=False):
    tokens = tokens_in_one_line(flops_per_byte, num_ranks, bytes_per_number)
    return 16 * math.ceil(tokens / 16)


def tokens_with_a_gather_less(flops_per_byte, num_ranks, bytes_per_number=2, sharded=False):
    """FSDP that keeps its weights between forward and backward, and sends half as much then."""
    ring = (num_ranks - 1) / num_ranks * bytes_per_number * flops_per_byte
    return max(ring / 2, ring / 4) if sharded else 2 * ring / (2 + 4)


def degree_by_search(width, flops_per_byte, bytes_per_number=2):
    n = 1
    while n * bytes_per_number * flops_per_byte <= 9 * width:
        n += 1
    return n


def degree_of_numpy(width, flops_per_byte, bytes_per_number=2):
    of_one = bytes_per_number * flops_per_byte
    return np.floor((9 * width + of_one) / of_one)


def degree_that_divides_the_width(width, flops_per_byte, bytes_per_number=2):
    most = degree_by_search(width, flops_per_byte, bytes_per_number)
    return next(n for n in range(most, 0, -1) if width % n == 0)


def degree_of_the_all_reduce(width, flops_per_byte, bytes_per_number=2):
    """(n - 1) / n in place of n - 1: never too long, or always. In all cases one rank."""
    limit = bytes_per_number * flops_per_byte / (9 * width)
    return 1 if limit >= 1 else int(1 / (1 - limit))


# ---- 14.9 to 14.11: which technique when -------------------------------------------------------


def approach_by_need(num_parameters, num_gpus, gpu_bytes, sequences, per_node=8):
    """How many GPUs the state needs."""
    need = -(-32 * num_parameters // gpu_bytes)
    if need == 1:
        return ("one GPU", "DDP")[num_gpus > 1]
    if need <= num_gpus <= sequences:
        return "FSDP"
    return "TP or PP" if need <= per_node <= num_gpus else "FSDP with TP or PP"


def approach_of_rules(num_parameters, num_gpus, gpu_bytes, sequences, per_node=8):
    rules = {
        "one GPU": (1, num_gpus == 1),
        "DDP": (1, num_gpus > 1),
        "FSDP": (num_gpus, sequences >= num_gpus),
        "TP or PP": (per_node, num_gpus >= per_node),
    }
    for name, (shares, holds) in rules.items():
        if holds and 8 * num_parameters / shares <= 0.25 * gpu_bytes:
            return name
    return "FSDP with TP or PP"


def approach_by_gpus(num_parameters, num_gpus, gpu_bytes, sequences, per_node=8):
    """One node needs tensor parallelism, several need FSDP."""
    if 32 * num_parameters <= gpu_bytes:
        return "one GPU" if num_gpus == 1 else "DDP"
    if num_gpus > per_node:
        return "FSDP" if sequences >= num_gpus else "FSDP with TP or PP"
    return "TP or PP"


def approach_of_one_gpu(num_parameters, num_gpus, gpu_bytes, sequences, per_node=8):
    """A single GPU has no choice."""
    if num_gpus == 1:
        return "one GPU"
    return approach_by_need(num_parameters, num_gpus, gpu_bytes, sequences, per_node)


def approach_in_small_letters(num_parameters, num_gpus, gpu_bytes, sequences, per_node=8):
    return approach_by_need(num_parameters, num_gpus, gpu_bytes, sequences, per_node).lower()


def degree_by_gcd(sequences, num_gpus, per_node=8):
    tp = num_gpus // math.gcd(sequences, num_gpus)
    if tp > per_node:
        raise ValueError(tp)
    return tp


def degree_by_shares(sequences, num_gpus, per_node=8):
    """The most shares."""
    shares = [n for n in range(1, num_gpus + 1) if not (num_gpus % n or sequences % n)]
    if shares[-1] * per_node < num_gpus:
        raise ValueError("too few sequences")
    return num_gpus / shares[-1]


def degree_in_a_node(sequences, num_gpus, per_node=8):
    """Also a divisor of the node, which nobody asks for."""
    for tp in range(1, per_node + 1):
        if per_node % tp == 0 and num_gpus % tp == 0 and sequences % (num_gpus // tp) == 0:
            return tp
    raise ValueError


def degree_or_the_largest(sequences, num_gpus, per_node=8):
    try:
        return degree_by_gcd(sequences, num_gpus, per_node)
    except ValueError:
        return per_node


def ranks_by_search(num_parameters, unit_parameters, gpu_bytes):
    if 6 * unit_parameters >= gpu_bytes:
        return None
    n = 1
    while 16 * num_parameters / n + 6 * unit_parameters > gpu_bytes:
        n += 1
    return n


def ranks_in_halves(num_parameters, unit_parameters, gpu_bytes):
    """Numbers of 2 bytes in place of bytes."""
    room = gpu_bytes / 2 - 3 * unit_parameters
    return np.ceil(8 * num_parameters / room) if room > 0 else None


def ranks_that_raise(num_parameters, unit_parameters, gpu_bytes):
    ranks = ranks_by_search(num_parameters, unit_parameters, gpu_bytes)
    if ranks is None:
        raise ValueError("a unit does not fit")
    return ranks


def ranks_up_to_a_limit(num_parameters, unit_parameters, gpu_bytes):
    ranks = ranks_by_search(num_parameters, unit_parameters, gpu_bytes)
    return None if ranks is None or ranks > 100_000 else ranks


def ranks_with_a_whole_state(num_parameters, unit_parameters, gpu_bytes):
    """Of one unit all 16 bytes are whole, and the weights of another."""
    return ranks_by_search(num_parameters, 3 * unit_parameters, gpu_bytes)


RIGHT |= {
    "14.6": [spread_by_levels, spread_of_tensors, spread_by_machar],
    "14.7": [tokens_in_one_line, tokens_of_a_whole_step],
    "14.8": [degree_by_search, degree_of_numpy],
    "14.9": [approach_by_need, approach_of_rules],
    "14.10": [degree_by_gcd, degree_by_shares],
    "14.11": [ranks_by_search, ranks_in_halves],
}
WRONG |= {
    "14.6": [
        (spread_at_worst, "times the right one"),
        (spread_by_a_table, "KeyError: torch.float16"),
        (spread_in_its_own_type, "times the right one"),
    ],
    "14.7": [
        (tokens_rounded_up, "times the right one"),
        (tokens_with_a_gather_less, "hidden behind forward as well"),
    ],
    "14.8": [
        (degree_that_divides_the_width, "times as long as products with"),
        (degree_of_the_all_reduce, "the same in every case"),
    ],
    "14.9": [
        (approach_by_gpus, "The state takes half the memory of"),
        (approach_in_small_letters, "none of the five classes"),
        (approach_of_one_gpu, "The state takes half the memory of 1.5 GPUs"),
    ],
    "14.10": [
        (degree_in_a_node, "A number of tensor ranks does it"),
        (degree_or_the_largest, "raises nothing"),
    ],
    "14.11": [
        (ranks_that_raise, "None is asked for, and no error"),
        (ranks_with_a_whole_state, "times its memory"),
        (ranks_up_to_a_limit, "times its memory"),
    ],
}
