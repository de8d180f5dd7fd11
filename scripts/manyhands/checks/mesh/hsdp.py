"""Spec of 14.12: what hybrid sharding sends and keeps."""

import random

from manyhands.checks.engine.spec import Call, Spec
from manyhands.checks.engine.values import integer, record
from manyhands.mesh import hsdp


def hybrids() -> list[Call]:
    """One rank, one axis, both; numbers that no size divides; two bytes and eight."""
    odd = 2 * random.randint(500, 900) + 1
    return [
        (12, 1, 1, None),
        (12, 1, 4, None),
        (12, 3, 1, None),
        (12, 2, 3, None),
        (odd, 1, 2, None),
        (odd, 3, 4, 2),
        (10, 7, 3, 2),
        (5, 2, 8, None),
        (8_030_261_249, 16, 8, 8),
    ]


def bytes_of(answer: object, case: Call) -> dict:
    """The call, without what is not given."""
    more = {} if case.bytes_per_number is None else {"bytes_per_number": case.bytes_per_number}
    return answer(case.num_params, case.replicas, case.shards, **more)


def tell_hybrid(case: Call) -> str:
    """The call as it is made."""
    of = "" if case.bytes_per_number is None else f", bytes_per_number={case.bytes_per_number}"
    sizes = f"replicas={case.replicas}, shards={case.shards}"
    return f"hsdp_bytes({case.num_params:_}, {sizes}{of})"


MINE = "-(-num_params // shards) * bytes_per_number"
COLUMN = "2 * (replicas - 1) * mine // replicas"
ROW = "Two gathers and a reduction send (shards - 1) pieces of a shard each."
AVERAGE = "The replicas average a shard: an all-reduce of r ranks sends 2 (r - 1) / r of it."
PADDED = "Round up: -(-num_params // shards) numbers are a shard of the padded vector."
OF_A_SHARD = "Weights, gradients and the two numbers of AdamW: 4 times a shard."
hsdp_bytes = Spec(
    todo="14.12",
    truth=hsdp.hsdp_bytes,
    cases=hybrids,
    observe=bytes_of,
    form=record(["shard", "replicate", "kept"], integer),
    independent=True,
    tell=tell_hybrid,
    advice={"shard": ROW, "replicate": AVERAGE, "kept": OF_A_SHARD},
    hints=(
        "How many bytes does a shard of the padded vector have? All three numbers are made of it.",
        "A gather of s ranks sends (s - 1) shards from each, and so does a reduction. In a step "
        "there are two gathers and one reduction.",
        f"{AVERAGE} Multiply first, and divide by r with // last. {OF_A_SHARD}",
    ),
    mistakes="""
        {MINE} => num_params // shards * bytes_per_number ::
            A shard is rounded down, and the vector is padded to a multiple of `shards`. | {PADDED}
        {MINE} => (num_params // shards + 1) * bytes_per_number ::
            A shard has one number too many where `shards` divides the parameters.
        {MINE} => -(-num_params // (shards * replicas)) * replicas * bytes_per_number ::
            The vector is padded to a multiple of all ranks, and of `shards` is enough.
        {MINE} => num_params * bytes_per_number // shards :: The padding of the vector is left out.
        {MINE} => -(-num_params // (shards * replicas)) * bytes_per_number ::
            The model is divided over all ranks, but each replica has a whole one.
        {MINE} => -(-num_params // shards) * 4 ::
            `bytes_per_number` is not used. | Multiply a shard's numbers by it.
        {MINE} => num_params * bytes_per_number ::
            Every rank is taken to have the whole vector. | {PADDED}
        3 * (shards - 1) * mine => 2 * (shards - 1) * mine ::
            One of the two gathers or the reduction is left out. | {ROW}
        3 * (shards - 1) * mine => 3 * shards * mine :: A rank sends a shard to itself as well.
        {COLUMN} => (replicas - 1) * mine // replicas :: This is half an all-reduce. | {AVERAGE}
        {COLUMN} => 2 * (replicas - 1) * mine * shards // replicas ::
            The replicas average the whole gradient, and not a shard of it.
        {COLUMN} => 2 * (replicas - 1) * mine ::
            A shard is sent whole to every other replica, and twice.
        {COLUMN} => 2 * (replicas - 1) * (mine // replicas) ::
            The division comes too early and loses a part. | Multiply first, and divide last.
        (1 + 1 + 2) * mine => 3 * mine ::
            One of weights, gradients and the optimizer's two numbers is left out. | {OF_A_SHARD}
        (1 + 1 + 2) * mine => (4 * mine) // replicas ::
            What a rank keeps is divided by the replicas, which hold the same shards.
    """,
    module=globals(),
)
