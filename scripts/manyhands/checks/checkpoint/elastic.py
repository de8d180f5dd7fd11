"""Exercise 11.11: which samples a rank takes in a step, for any number of ranks."""

import random

from manyhands.checkpoint import elastic
from manyhands.checks.engine.spec import Call, Spec


def takings() -> list[Call]:
    """One rank; even and uneven shares; a later epoch with a tail; more ranks than samples."""
    seed = random.randint(1, 1000)
    return [
        (0, 0, 1, 10, 4, 0),
        (1, 0, 1, 10, 4, 0),
        (1, 1, 2, 13, 4, seed),
        (2, 0, 2, 13, 4, seed),
        (3, 1, 2, 13, 4, seed),
        (random.randint(7, 20), 2, 3, 26, 6, seed),
        (random.randint(7, 20), 0, 4, 26, 6, seed),
        (random.randint(7, 20), 3, 4, 26, 6, seed),
        (5, 4, 5, 26, 3, seed),
    ]


MANUAL = "generator = torch.Generator().manual_seed(seed + epoch)"
SHARED = "shared = order[place * batch : (place + 1) * batch]"
EACH = "batch // world_size"
OF_EPOCH = "Of the step, divmod(step, num_samples // batch) gives the epoch and the place in it."

samples_of_step = Spec(
    todo="11.11",
    truth=elastic.samples_of_step,
    cases=takings,
    advice={"": "Take the step's numbers first, then this rank's share of them."},
    hints=(
        "Which samples a step has must not depend on the number of ranks. So first find the "
        "numbers of the whole step, and only then this rank's share of them.",
        OF_EPOCH,
        "Shuffle with torch.randperm(num_samples, generator=...), cut the step's `batch` numbers "
        "out, and take every world_size-th of these: shared[rank::world_size].tolist().",
    ),
    mistakes="""
        divmod(step, num_samples // batch) => divmod(step, -(-num_samples // batch)) ::
            The epoch has one step too many: its last samples fill no batch. | Leave the tail out:
            num_samples // batch steps.
        divmod(step, num_samples // batch) => (0, step % (num_samples // batch)) ::
            Every epoch has the order of the first one. | {OF_EPOCH}
        {MANUAL} => generator = torch.Generator().manual_seed(seed) ::
            Every epoch has the order of the first one. | Seed with seed + epoch.
        {MANUAL} => generator = torch.Generator().manual_seed(epoch) ::
            The seed that is given is not used.
        {MANUAL} => generator = torch.Generator().manual_seed(seed + step) ::
            Every step shuffles anew, so two steps of an epoch may have the same sample.
        {MANUAL} => generator = torch.Generator().manual_seed(seed + epoch + rank) :: Every rank has
            an order of its own, so two ranks may have the same sample. | Seed all ranks alike.
        order = torch.randperm(num_samples, generator=generator) => order =
            torch.arange(num_samples) :: The samples are not shuffled. | torch.randperm
        {SHARED} => shared = order[step * batch : (step + 1) * batch] :: The step is not counted
            from the epoch's beginning, so a later epoch has no samples. | {OF_EPOCH}
        shared[rank::world_size] => shared ::
            Every rank takes the whole batch. | Take every world_size-th: [rank::world_size].
        shared[rank::world_size] => shared[rank * ({EACH}) : (rank + 1) * ({EACH})] ::
            The rank takes neighbours instead of every n-th; where the ranks do not divide the
            batch, samples are left out. | shared[rank::world_size]
        {SHARED} => shared = order[rank::world_size][place * ({EACH}) : (place + 1) * ({EACH})]
        shared[rank::world_size] => shared :: The samples are divided among the ranks before the
            step is cut out. Where the ranks do not divide the batch, the steps then depend on their
            number. | Cut the step out first, then this rank's share.
        shared[rank::world_size].tolist() => shared[rank::world_size] ::
            A tensor is returned, and a list of numbers is asked for. | .tolist()
    """,
    module=globals(),
)
