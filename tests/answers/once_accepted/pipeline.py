"""Wrong answers to lesson 12 that its checks once took for right."""

import torch.distributed as dist

from manyhands.pipeline import wiring


def sum_of_those_that_have_one(tied, group=None):
    """A rank that has found no gradient does not come."""
    wiring.sum_tied([(param, ranks) for param, ranks in tied if param.grad is not None], group)


def sum_by_all_reduce_of_those_that_have_one(tied, group=None):
    """The same, by a collective that all ranks of the group would have to call."""
    for param, ranks in tied:
        if dist.get_rank(group) in ranks and param.grad is not None:
            dist.all_reduce(param.grad, group=group)


WRONG = {"12.3": [(sum_of_those_that_have_one, ""), (sum_by_all_reduce_of_those_that_have_one, "")]}
