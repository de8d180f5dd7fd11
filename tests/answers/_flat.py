"""Answers to 10.1 to 10.4 as students give them; answers/fsdp.py takes them from here."""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from manyhands.data_parallel.replicas import pack
from manyhands.fsdp import flat, zero
from manyhands.fsdp.flat import all_gather, reduce_scatter

RIGHT: dict[str, list] = {
    "10.1": [flat.Flat],
    "10.2": [zero.ShardedOptimizer],
    "10.3": [zero.reduce_during_backward],
    "10.4": [flat.ShardedFlat],
}
WRONG: dict[str, list] = {todo: [] for todo in RIGHT}


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


def wrong(todo, words):
    return lambda answer: WRONG[todo].append((answer, words)) or answer


# ---- 10.1 Flat ------------------------------------------------------------------------------


@right("10.1")
class FlatByHand(flat.Flat):
    def __init__(self, params, group=None):
        self.params = [param for param in params]
        self.group, self.replicas = group, None
        self.n = n = dist.get_world_size(group)
        numbers = sum(param.numel() for param in self.params)
        size = (numbers + n - 1) // n
        first = self.params[0]
        self.whole = torch.zeros(n * size, dtype=first.dtype, device=first.device)
        self.padding = self.whole[numbers:].clone()
        torch.cat([p.data.reshape(-1) for p in self.params], out=self.whole[:numbers])
        self.show(self.whole)
        start = dist.get_rank(group) * size
        self.shard = nn.Parameter(self.whole[start : start + size], first.requires_grad)

    def reduce(self):
        whole = torch.zeros(self.whole.shape, dtype=self.shard.dtype)
        start = 0
        for param in self.params:
            if param.grad is not None:
                whole[start : start + param.numel()] = param.grad.flatten()
            param.grad = None
            start += param.numel()
        mine = self.shard.new_empty(self.shard.shape)
        reduce_scatter(mine, whole / self.n, self.group)
        if self.replicas is not None:
            dist.all_reduce(mine, group=self.replicas)
            mine /= dist.get_world_size(self.replicas)
        if self.shard.grad is None:
            self.shard.grad = torch.zeros_like(self.shard)
        self.shard.grad += mine


def made(
    padding=lambda self, numbers: -numbers % self.num_ranks,
    fill=lambda self, number: self.params[0].detach().new_zeros(number),
    ranks=dist.get_world_size,
    packed=pack,
    show=lambda self: self.show(self.whole),
    cut=lambda self, rank: self.whole.chunk(self.num_ranks)[rank],
    rank=dist.get_rank,
    shard=lambda part, trains: nn.Parameter(part, requires_grad=trains),
    listed=list,
):
    """A Flat with one part of __init__ done in another way."""

    class MyFlat(flat.Flat):
        def __init__(self, params, group=None):
            self.params, self.group, self.replicas = listed(params), group, None
            self.num_ranks = ranks(group)
            numbers = sum(param.numel() for param in self.params)
            self.padding = fill(self, padding(self, numbers))
            self.whole = packed([*self.params, self.padding])
            show(self)
            self.shard = shard(cut(self, rank(group)), self.params[0].requires_grad)

    return MyFlat


def uneven(self):
    numbers = sum(param.numel() for param in self.params)
    return self.whole[:numbers].tensor_split(self.num_ranks)


RIGHT["10.1"].append(made(cut=lambda self, rank: self.whole.view(self.num_ranks, -1)[rank]))
WRONG["10.1"] += [
    (made(padding=lambda self, numbers: 0), "that does not make 4 equal shards"),
    (made(padding=lambda self, numbers: self.num_ranks - numbers % self.num_ranks), "already"),
    (made(padding=lambda self, numbers: numbers % self.num_ranks), "left over, not missing"),
    (made(padding=lambda self, numbers: -numbers % dist.get_world_size()), "2 share this vector"),
    (made(ranks=lambda group: dist.get_world_size()), "2 share this vector"),
    (made(fill=lambda self, number: torch.ones(number).to(self.params[0])), "the padding is [1]"),
    (made(fill=lambda self, number: torch.empty(number).to(self.params[0])), "holds anything"),
    (made(fill=lambda self, number: torch.zeros(number)), "padding of another type"),
    (made(packed=lambda some: torch.cat([t.flatten() for t in some])), "keeps the graph"),
    (made(show=lambda self: None), "does not look into `whole`"),
    (made(cut=lambda self, rank: self.whole), "that is all of it"),
    (made(cut=lambda self, rank: self.whole.chunk(self.num_ranks)[0]), "the group's rank 0"),
    (made(cut=lambda self, rank: self.whole.chunk(self.num_ranks)[rank].clone()), "a copy"),
    (made(cut=lambda self, rank: uneven(self)[rank]), "shards must be equal"),
    (made(rank=lambda group: dist.get_rank()), "dist.get_rank(group)"),
    (made(rank=lambda group: dist.get_rank() % 2), "the part of the group's rank"),
    (made(shard=lambda part, trains: part), "the shard is a Tensor"),
    (made(shard=lambda part, trains: nn.Parameter(part)), "requires_grad=False; the shard"),
    (made(listed=lambda params: params), "may be an iterator"),
    (made(fill=lambda self, number: number), "padding is a tensor of zeros"),
    (made(fill=lambda self, number: [0.0] * number), "padding is a tensor of zeros"),
    (
        made(
            fill=lambda self, number: number,
            packed=lambda some: pack([*some[:-1], some[0].detach().new_zeros(some[-1])]),
        ),
        "`views` asks for its len",
    ),
]


def gathers(gather, words):
    WRONG["10.1"].append((type("FlatThatGathers", (flat.Flat,), {"gather": gather}), words))


def sent(self):
    return self.shard.detach().to(self.whole.dtype)


def gather_into_another(self):
    self.whole = torch.empty_like(self.whole)
    return all_gather(self.whole, sent(self), self.group)


def gather_and_wait(self):
    work = all_gather(self.whole, sent(self), self.group)
    work.wait()
    return work


gathers(lambda self: all_gather(self.whole, sent(self), self.group) and None, "returns None")
gathers(lambda self: all_gather(self.whole, sent(self)), "`group` is not passed on")
gathers(
    lambda self: all_gather(self.whole, self.whole, self.group),
    "N times as many numbers",
)
gathers(lambda self: all_gather(self.shard, self.whole, self.group), "they are swapped")
gathers(
    lambda self: all_gather(self.whole, sent(self), self.group) if dist.get_rank() == 0 else None,
    "rank 0 calls all_gather, and ranks 1, 2 and 3 not",
)
gathers(lambda self: all_gather(self.whole, self.shard.detach(), self.group), "a shorter type")
gathers(lambda self: all_gather(self.whole.clone(), sent(self), self.group), "have not come")
gathers(gather_into_another, "makes a new tensor")
gathers(gather_and_wait, "only return the work")


def reduces(
    grads=lambda p: torch.zeros_like(p) if p.grad is None else p.grad,
    drop=lambda p: setattr(p, "grad", None),
    kind=lambda self, whole: whole.to(self.shard.dtype),
    reduce=reduce_scatter,
    divide=lambda self, mine: mine.div_(self.num_ranks),
    replicate=lambda self, mine: dist.all_reduce(mine, group=self.replicas) and None,
    divide_replicas=lambda self: dist.get_world_size(self.replicas),
    put=None,
    padded=lambda self, kind: [self.padding.to(kind)],
):
    """A Flat with one part of reduce() done in another way."""

    class MyFlat(flat.Flat):
        def reduce(self):
            parts = [part for param in self.params if (part := grads(param)) is not False]
            whole = kind(self, pack([*parts, *padded(self, parts[0].dtype)]))
            for param in self.params:
                drop(param)
            mine = torch.empty_like(self.shard.detach())
            mine = reduced if (reduced := reduce(mine, whole, self.group)) is not None else mine
            if self.replicas is not None:
                replicate(self, mine)
                mine /= divide_replicas(self)
            divide(self, mine)
            mine = mine.to(self.shard.dtype)
            if put:
                put(self, mine)
            else:
                self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine

    return MyFlat


def all_reduced(mine, whole, group):
    dist.all_reduce(whole, group=group)
    mine.copy_(whole.chunk(dist.get_world_size(group))[dist.get_rank(group)])


def a_part_of_all(mine, whole, group):
    reduce_scatter(mine, whole, group)
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    whole.chunk(n)[rank].copy_(mine)
    return whole.chunk(n)[rank]


def own_part(mine, whole, group):
    mine.copy_(whole.chunk(dist.get_world_size(group))[dist.get_rank(group)])


def on_rank_0(mine, whole, group):
    if dist.get_rank() == 0:
        reduce_scatter(mine, whole, group)


class FlatThatReducesIntoItsShard(flat.Flat):
    def reduce(self):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        mine = self.shard
        reduce_scatter(mine, pack([*grads, self.padding]), self.group)
        mine /= self.num_ranks


def in_the_type_of_gradients(mine, whole, group):
    short = mine.to(whole.dtype)
    reduce_scatter(short, whole, group)
    return short


RIGHT["10.1"].append(reduces())
WRONG["10.1"] += [
    (reduces(divide=lambda self, mine: None), "the sum over the ranks"),
    (reduces(divide=lambda self, mine: mine.div_(self.num_ranks**2)), "divided twice"),
    (reduces(divide=lambda self, mine: mine.div_(dist.get_world_size())), "all ranks of the job"),
    (reduces(grads=lambda param: param.grad), "took no part in the loss"),
    (reduces(grads=lambda param: param), "these are the weights"),
    (reduces(grads=lambda p: False if p.grad is None else p.grad), "has no .grad, are left out"),
    (reduces(padded=lambda self, kind: []), "the padding, or the zeros"),
    (reduces(reduce=lambda mine, whole, group: reduce_scatter(whole, mine, group)), "are swapped"),
    (reduces(reduce=on_rank_0), "rank 0 calls reduce_scatter, and ranks 1, 2 and 3 not"),
    (FlatThatReducesIntoItsShard, "which holds the weights"),
    (reduces(drop=lambda param: None), "leaves .grad in"),
    (
        reduces(drop=lambda param: param.grad is not None and param.grad.zero_()),
        "zeros take as much memory",
    ),
    (reduces(put=lambda self, mine: setattr(self.shard, "grad", mine)), "before is lost"),
    (reduces(reduce=all_reduced), "one reduce_scatter, which sends half"),
    (reduces(reduce=a_part_of_all), "alive"),
    (reduces(reduce=own_part), "this rank's own gradients"),
    (reduces(reduce=lambda mine, whole, group: reduce_scatter(mine, whole)), "is not passed on"),
    (reduces(replicate=lambda self, mine: None), "divided by, but not added"),
    (
        reduces(replicate=lambda self, mine: None, divide_replicas=lambda self: 1),
        "self.replicas is not looked at",
    ),
    (reduces(divide_replicas=lambda self: 1), "the replicas' sum is not divided"),
    (
        reduces(kind=lambda self, whole: whole, reduce=in_the_type_of_gradients),
        "summed up in torch.bfloat16",
    ),
]


# ---- 10.2 ShardedOptimizer ------------------------------------------------------------------


def any_grad(flat):
    return any(param.grad is not None for param in flat.params)


def steps(
    whole=any_grad,
    before=lambda self: None,
    reduced=lambda self: self.flats,
    step=lambda self: self.optimizer.step(),
    clear=lambda self: self.optimizer.zero_grad(),
    gathered=lambda self: self.flats,
    wait=lambda works: [work.wait() for work in works],
):
    """A ShardedOptimizer with one part of step() done in another way."""

    class MyOptimizer(zero.ShardedOptimizer):
        def step(self):
            before(self)
            for one in reduced(self):
                if whole(one):
                    one.reduce()
            step(self)
            clear(self)
            wait([one.gather() for one in gathered(self)])

    return MyOptimizer


@right("10.2")
class OptimizerByHand(zero.ShardedOptimizer):
    def step(self):
        for one in self.flats:
            if any_grad(one):
                one.reduce()
        self.optimizer.step()
        for one in self.flats:
            one.shard.grad = None
            one.gather().wait()


@wrong("10.2", "the step is made before the gradients are reduced")
class OptimizerThatStepsFirst(zero.ShardedOptimizer):
    def step(self):
        self.optimizer.step()
        for one in self.flats:
            one.reduce()
        self.optimizer.zero_grad()
        for one in self.flats:
            one.gather().wait()


@wrong("10.2", "ran 2 times")
class OptimizerThatStepsForEach(zero.ShardedOptimizer):
    def step(self):
        for one in self.flats:
            if any_grad(one):
                one.reduce()
            self.optimizer.step()
            self.optimizer.zero_grad()
            one.gather().wait()


@wrong("10.2", "self.flats is a list")
class OptimizerThatAsksTheList(zero.ShardedOptimizer):
    def step(self):
        self.flats.reduce()


def divide_again(self):
    for one in self.flats:
        one.shard.grad /= one.num_ranks
    self.optimizer.step()


def gather_all(self):
    for one in self.flats:
        one.gather().wait()


def gather_into_whole(self):
    for one in self.flats:
        one.whole = one.gather()
    return []


RIGHT["10.2"].append(steps())
WRONG["10.2"] += [
    (steps(whole=lambda one: True), "reduce() 1 times, not 0"),
    (
        steps(reduced=lambda self: self.flats * any(map(any_grad, self.flats)), whole=bool),
        "a reduce_scatter of zeros",
    ),
    (steps(clear=lambda self: self.optimizer.zero_grad(set_to_none=False)), "zeros take as much"),
    (steps(gathered=gather_into_whole), "what it returns is the work"),
    (steps(gathered=lambda self: self.flats if dist.get_rank() == 0 else []), "rank 0 calls all_g"),
    (steps(reduced=lambda self: []), "was not reduced: shard.grad is None"),
    (steps(reduced=lambda self: self.flats[:1]), "flat 1: its shard holds"),
    (steps(whole=lambda one: one.params[0].grad is not None), "that is enough"),
    (
        steps(whole=lambda one: all(param.grad is not None for param in one.params)),
        "that is enough",
    ),
    (steps(whole=lambda one: one.shard.grad is None), "not shard.grad"),
    (steps(clear=lambda self: None), "self.optimizer.zero_grad()"),
    (steps(before=lambda self: self.optimizer.zero_grad()), "that gradient is lost"),
    (steps(gathered=lambda self: []), "is not gathered"),
    (steps(gathered=lambda self: self.flats[:1]), "flat 1: its own part is new"),
    (
        steps(
            gathered=lambda self: [], step=lambda self: (gather_all(self), self.optimizer.step())
        ),
        "older than the step",
    ),
    (steps(wait=lambda works: None), "before a gather was waited for"),
    (steps(wait=lambda works: works[-1].wait()), "before a gather was waited for"),
    (steps(step=divide_again), "divided by the ranks once more"),
    (steps(step=lambda self: None), "ran 0 times"),
]


# ---- 10.3 reduce_during_backward ------------------------------------------------------------


@right("10.3")
def reduce_when_all_are_there(flats):
    def register(one):
        def hook(_):
            if all(param.grad is not None for param in one.params):
                one.reduce()

        for param in one.params:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(hook)

    for one in flats:
        register(one)


@right("10.3")
def reduce_with_a_dict(flats):
    counts = {}

    def hook(param):
        one = owner[param]
        counts[id(one)] = (counts.get(id(one), 0) + 1) % len(one.params)
        if counts[id(one)] == 0:
            one.reduce()

    owner = {param: one for one in flats for param in one.params if param.requires_grad}
    for param in owner:
        param.register_post_accumulate_grad_hook(hook)


def trainable(one):
    return [param for param in one.params if param.requires_grad]


def hooks(
    make,
    params=trainable,
    register=lambda param, hook: param.register_post_accumulate_grad_hook(hook),
):
    def with_hooks(flats):
        for one in flats:
            hook = make(one)
            for param in params(one):
                register(param, hook)

    return with_hooks


def counting(is_last=lambda count, one: count == len(one.params), reset=True):
    def make(one):
        ready = []

        def hook(param):
            ready.append(param)
            if is_last(len(ready), one):
                one.reduce()
                if reset:
                    ready.clear()

        return hook

    return make


def by_the_engine(one):
    def hook(_):
        if all(param.grad is not None for param in one.params):
            Variable._execution_engine.queue_callback(one.reduce)

    return hook


@wrong("10.3", "as they are when it runs")
def hooks_of_the_last_flat(flats):
    for one in flats:
        ready = []

        def hook(param):
            ready.append(param)  # noqa: B023
            if len(ready) == len(one.params):  # noqa: B023
                ready.clear()  # noqa: B023
                one.reduce()  # noqa: B023

        for param in trainable(one):
            param.register_post_accumulate_grad_hook(hook)


@wrong("10.3", "as they are when it runs")
def hooks_that_reduce_the_last_flat(flats):
    for one in flats:
        ready = []

        def hook(param, ready=ready):
            ready.append(param)
            if len(ready) == len(one.params):  # noqa: B023
                ready.clear()
                one.reduce()  # noqa: B023

        for param in trainable(one):
            param.register_post_accumulate_grad_hook(hook)


@wrong("10.3", "one counter counts for several flats")
def one_list_for_all(flats):
    ready = []
    for one in flats:

        def hook(param, one=one):
            ready.append(param)
            if len(ready) == len(one.params):
                ready.clear()
                one.reduce()

        for param in trainable(one):
            param.register_post_accumulate_grad_hook(hook)


@wrong("10.3", "an int that is a default argument")
def hooks_with_an_int(flats):
    for one in flats:

        def hook(param, one=one, count=0):
            count += 1
            if count == len(one.params):
                one.reduce()

        for param in trainable(one):
            param.register_post_accumulate_grad_hook(hook)


def on_rank_0_only(one):
    alike = counting()
    return alike(one) if dist.get_rank() == 0 else lambda param: None


def at_the_first_parameter(one):
    return lambda param: one.reduce() if param is one.params[0] else None


WRONG["10.3"] += [
    (hooks(counting(lambda count, one: count > len(one.params))), "the count misses its end"),
    (hooks(on_rank_0_only), "rank 0 calls reduce_scatter, and rank 1 not"),
    (hooks(lambda one: lambda one=one: one.reduce()), "with the parameter, as its first argument"),
    (hooks(at_the_first_parameter), "at one chosen parameter"),
    (lambda flats: None, "0 of its 2 parameters have a hook"),
    (lambda flats: [one.reduce() for one in flats], "with brackets"),
    (hooks(counting(lambda count, one: count == 1)), "with 1 of 4 gradients"),
    (hooks(lambda one: lambda _: one.reduce()), "with 1 of 4 gradients"),
    (hooks(lambda one: one.reduce), "is called with the parameter"),
    (hooks(counting(reset=False)), "the counter goes on"),
    (hooks(counting(lambda count, one: count >= len(one.params), reset=False)), "set it back"),
    (hooks(counting(), params=lambda one: one.params), "look at param.requires_grad first"),
    (
        hooks(counting(), register=lambda param, hook: param.register_hook(lambda _: hook(param))),
        "runs before the gradient is written",
    ),
    (
        hooks(lambda one: lambda _: one.reduce(), params=lambda one: trainable(one)[:1]),
        "1 of its 4",
    ),
    (
        hooks(lambda one: lambda _: one.reduce(), params=lambda one: trainable(one)[-1:]),
        "1 of its 2",
    ),
    (hooks(by_the_engine), "as in stage 1"),
]


# ---- 10.4 ShardedFlat -----------------------------------------------------------------------


@right("10.4")
class ShardedFlatByStorage(flat.ShardedFlat):
    def start(self):
        if self.is_whole:
            return
        size = self.whole.numel() * self.whole.element_size()
        self.whole.untyped_storage().resize_(size)
        self.coming = self.gather()

    def wait(self):
        if not self.is_whole:
            self.start()
        if self.coming:
            self.coming.wait()  # waiting twice is no harm

    def free(self):
        if self.coming:
            self.coming.wait()
        self.whole.untyped_storage().resize_(0)


@right("10.4")
class ShardedFlatThroughAParameter(flat.ShardedFlat):
    def free(self):
        if self.coming:
            self.coming.wait()
        self.params[0].untyped_storage().resize_(0)
        self.coming = None


def sharded(words, **methods):
    WRONG["10.4"].append((type("MyShardedFlat", (flat.ShardedFlat,), methods), words))


def take(self, num_bytes=None):
    self.whole.untyped_storage().resize_(self.whole.nbytes if num_bytes is None else num_bytes)


def start_always(self):
    take(self)
    self.coming = self.gather()


def start_unless_coming(self):
    if self.coming is None:
        start_always(self)


def start_without_memory(self):
    if not self.is_whole:
        self.coming = self.gather()


def start_with_too_little(self):
    if not self.is_whole:
        take(self, self.whole.numel())
        self.coming = self.gather()


def start_with_a_shard(self):
    if not self.is_whole:
        take(self, self.shard.nbytes)
        self.coming = self.gather()


def start_with_too_much(self):
    if not self.is_whole:
        take(self, self.shard.nbytes * self.num_ranks)
        self.coming = self.gather()


def start_when_whole(self):
    if self.is_whole:
        start_always(self)


def start_on_rank_0(self):
    if not self.is_whole and dist.get_rank() == 0:
        start_always(self)


def start_and_forget(self):
    if not self.is_whole:
        take(self)
        return self.gather()


def wait_and_free(self):
    flat.ShardedFlat.wait(self)
    self.free()


def free_after_a_wait(self):
    self.wait()
    self.whole.untyped_storage().resize_(0)


def start_and_wait(self):
    if not self.is_whole:
        take(self)
        self.gather().wait()


def start_with_a_new_tensor(self):
    if self.coming is None:
        self.show(torch.empty(self.whole.shape, dtype=self.whole.dtype))
        self.coming = self.gather()


def start_without_gather(self):
    if not self.is_whole:
        take(self)


def crash(self):
    if not self.is_whole:
        self.whole.fill_(0)


def wait_only(self):
    if self.coming is not None:
        self.coming.wait()
        self.coming = None


def wait_blindly(self):
    self.coming.wait()
    self.coming = None


def free_at_once(self):
    self.whole.untyped_storage().resize_(0)
    self.coming = None


def free_by_a_new_tensor(self):
    self.whole = torch.empty(0)


def free_by_a_flag(self):
    self.is_free = True


def free_parameters(self):
    for param in self.params:
        param.data = torch.empty(0, dtype=param.dtype)
    self.whole.untyped_storage().resize_(0)


def free_all(self):
    self.whole.untyped_storage().resize_(0)
    self.shard.untyped_storage().resize_(0)


def free_by_del(self):
    del self.whole


def free_data(self):
    self.whole.data = torch.empty(0, dtype=self.whole.dtype)


sharded("gathered once more", start=start_always)
sharded("gathered once more", start=start_unless_coming)
sharded("memory has to be taken", start=start_without_memory)
sharded("numel() counts numbers", start=start_with_too_little)
sharded("numel() counts numbers", start=start_with_a_shard)
sharded("numbers may be of two types", start=start_with_too_much)
sharded("is the condition the other way", start=start_when_whole)
sharded("rank 0 calls all_gather, and ranks 1, 2 and 3 not", start=start_on_rank_0)
sharded("the work was not kept", start=start_and_forget)
sharded("given back again", wait=wait_and_free)
sharded("free calls all_gather of 80 bytes", free=free_after_a_wait)
sharded("start only starts", start=start_and_wait)
sharded("is a new tensor", start=start_with_a_new_tensor)
sharded("0 all-gathers", start=start_without_gather)
sharded("memory was used that is not there", start=crash)
sharded("has to start where nobody has", wait=wait_only)
sharded("where nothing is on its way", wait=wait_blindly)
sharded("forward would compute with what has not come", wait=lambda self: self.start())
sharded("and autograd still hold the old memory", free=free_by_a_new_tensor)
sharded("and autograd still hold the old memory", free=free_data)
sharded("when its storage has 0 bytes", free=free_by_a_flag)
sharded("the parameters have shapes", free=free_parameters)
sharded("the shard is gone", free=free_all)
sharded("has no `whole`", free=free_by_del)
sharded("would write into memory that is given back", free=free_at_once)
