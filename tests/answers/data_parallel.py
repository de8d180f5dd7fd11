"""Answers to lesson 05 as students give them: RIGHT ones differ from the course's own, and WRONG
ones come with words that the verdict must hold. A name is the exercise, then what is done."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from manyhands.collectives.ring import all_reduce_ring
from manyhands.data_parallel import loops, replicas
from manyhands.data_parallel.replicas import average_gradients, broadcast_state, pack, unpack

RIGHT: dict[str, list] = {
    "5.1": [loops.order_of_steps],
    "5.2": [loops.steps_that_change],
    "5.3": [loops.worker_step],
    "5.4": [loops.server_step],
    "5.5": [replicas.broadcast_state],
    "5.6": [replicas.average_gradients],
    "5.7": [loops.train_replicas],
    "5.8": [replicas.average_buckets],
    "5.9": [replicas.BucketedDDP],
}
WRONG: dict[str, list] = {todo: [] for todo in RIGHT}


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


def wrong(todo, words):
    return lambda answer: WRONG[todo].append((answer, words)) or answer


# ---- 5.1 order_of_steps ---------------------------------------------------------------------

RIGHT["5.1"] += [
    lambda: list("EBOJLFIMAGKCHDN"),  # the model goes to the GPU when the first batch is ready
    lambda: tuple("ELBOJFIMADGKCHN"),  # the loss is copied while backward computes
    lambda: "EBLOJFIMAGDKCHN",
]
WRONG["5.1"] += [
    (lambda: "ELBOJFIMAKGCHDN", "backward reaches the last layer first"),
    (lambda: "ELBOJFMIAGKCHDN", "forward goes from the first layer to the last"),
    (lambda: "ELBOJFIMAGKHCDN", "AdamW makes the step out of its moments"),
    (lambda: "ELBJOFIMAGKCHDN", "stacked from samples that are decoded"),
    (lambda: "ELBOJFIMDAGKCHN", "before it can be copied"),
    (lambda: "BOJELFIMAGKCHDN", "the program has to start"),
    (lambda: "ELBOJFIMAGKCHND", "copied before the loop goes on"),
    (lambda: "ELBOJFIMAGCKHDN", "when all gradients are there"),
    (lambda: "ELBOFJIMAGKCHDN", "one copy moves the whole batch"),
    (lambda: "ELBOJFIMAGKCHN", "step D (the loss is copied to the CPU, to be printed) is missing"),
    (lambda: "ELBOJFIMAGKCHDND", "stands there 2 times"),
    (lambda: "elbojfimagkchdn", "capital letters"),
    (lambda: "E L B O J F I M A G K C H D N", "' ' is none of the 15 steps"),
    (lambda: "ELBOJFIMAGKCHDNP", "'P' is none of the 15 steps"),
    (lambda: dict.fromkeys("ELBOJFIMAGKCHDN"), "as one text"),
]


# ---- 5.2 steps_that_change ------------------------------------------------------------------


def changed(**letters):
    return lambda: {"share": "B", "equal": "L", "mean": "C", "once": "D"} | letters


RIGHT["5.2"] += [changed(equal="I"), lambda: dict(once="D", mean="C", share="B", equal="L")]
WRONG["5.2"] += [
    (changed(share="J"), "has still read the whole batch"),
    (changed(share="E"), "every rank holds the whole model"),
    (changed(share="G"), "already computed with its samples"),
    (changed(share="N"), "the next batch is another one"),
    (changed(equal="E"), "when the weights come to differ"),
    (changed(equal="B"), "samples can be read before"),
    (changed(equal="M"), "already computed with unequal weights"),
    (changed(mean="K"), "backward does not wait for it"),
    (changed(mean="M"), "there is no gradient yet"),
    (changed(mean="A"), "there is no gradient yet"),
    (changed(mean="H"), "moments are already made"),
    (changed(once="A"), "waits for nobody"),
    (changed(once="N"), "needs no printed loss"),
    (changed(mean="c"), "capital letters"),
    (changed(mean=5), "'mean' has 5 - give one letter"),
    (changed(equal="LI"), "only the first of the steps"),
    (changed(equal=["L", "I"]), "only the first of the steps"),
    (lambda: {"share": "B", "equal": "L", "mean": "C"}, "the four names of CHANGES"),
    (lambda: "BLCD", "the four names of CHANGES"),
]


# ---- 5.3 worker_step ------------------------------------------------------------------------


def trainable(module):
    return [param for param in module.parameters() if param.requires_grad]


def gradients(params):
    return [param.grad for param in params]


@right("5.3")
def worker_with_vectors(module, server=0, group=None):
    params = trainable(module)
    there = dist.get_global_rank(group or dist.group.WORLD, server)
    gradient = torch.cat([param.grad.reshape(-1) for param in params])
    dist.send(gradient, dst=there, group=group)
    weights = torch.empty_like(gradient)
    dist.recv(weights, src=there, group=group)
    vector_to_parameters(weights, params)


@right("5.3")
def worker_that_posts_both(module, server=0, group=None):
    params = [param for param in module.parameters() if param.grad is not None]
    weights = parameters_to_vector(params).detach()
    coming = dist.irecv(weights, group=group, group_src=server)
    going = dist.isend(parameters_to_vector(gradients(params)), group=group, group_dst=server)
    going.wait()
    coming.wait()
    start = 0
    with torch.no_grad():
        for param in params:
            param.copy_(weights[start : start + param.numel()].view_as(param))
            start += param.numel()


@right("5.3")
def worker_with_a_batch_of_messages(module, server=0, group=None):
    params = trainable(module)
    weights = pack(params)
    send = dist.P2POp(dist.isend, pack(gradients(params)), group=group, group_peer=server)
    receive = dist.P2POp(dist.irecv, weights, group=group, group_peer=server)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    unpack(weights, params)


def worker_with(outgoing=gradients, to=None, incoming=pack, take=unpack, also=None):
    """A worker_step in which one part can be another."""

    def answer(module, server=0, group=None):
        params = trainable(module)
        place = {"group": group, "peer": server} if to is None else to(server, group)
        dist.send(pack(outgoing(params)), group=place["group"], group_dst=place["peer"])
        weights = incoming(params)
        dist.recv(weights, group=place["group"], group_src=place["peer"])
        take(weights, params)
        if also:
            also(module, server, group)

    return answer


def worker_takes_nothing(weights, params):
    for param, part in zip(params, weights.split([p.numel() for p in params]), strict=True):
        param = part.view_as(param)


WRONG["5.3"] += [
    (worker_with(outgoing=list), "the weights were sent, not the gradients"),
    (worker_with(outgoing=lambda ps: gradients(ps[::-1])), "pack in the same order"),
    (worker_with(outgoing=lambda ps: [p.grad.double() for p in ps]), "have become float64"),
    (worker_with(outgoing=lambda ps: [p.grad * 0 for p in ps]), "cleared before it was sent"),
    (worker_with(to=lambda server, _: {"group": None, "peer": server}), "`group` is not passed on"),
    (worker_with(to=lambda _, group: {"group": group, "peer": 0}), "the server need not be 0"),
    (worker_with(take=worker_takes_nothing), "still has its old weights"),
    (worker_with(take=lambda w, ps: unpack(w, ps[::-1])), "is not what the server sent"),
    (worker_with(take=lambda w, ps: unpack(w, gradients(ps))), "still has its old weights"),
    (worker_with(take=lambda w, ps: unpack(w, ps, 2)), "is not what the server sent"),
    (worker_with(also=worker_with()), "sent 2 message(s)"),
]


@wrong("5.3", "the mean is the server's to take")
def worker_divides(module, server=0, group=None):
    num_workers = dist.get_world_size(group) - 1
    worker_with(lambda params: [p.grad / num_workers for p in params])(module, server, group)


@wrong("5.3", "frozen parameters have no gradient")
def worker_packs_frozen(module, server=0, group=None):
    worker_with(outgoing=lambda _: gradients(module.parameters()))(module, server, group)


@wrong("5.3", "in worker_keeps_what_recv_returns:  unpack(weights, params) - dist.recv fills")
def worker_keeps_what_recv_returns(module, server=0, group=None):
    params = trainable(module)
    dist.send(pack(gradients(params)), group=group, group_dst=server)
    weights = dist.recv(pack(params), group=group, group_src=server)
    unpack(weights, params)


@wrong("5.3", "a generator can be gone through only once")
def worker_with_a_generator(module, server=0, group=None):
    params = (param for param in module.parameters() if param.requires_grad)
    dist.send(pack([param.grad for param in params]), group=group, group_dst=server)
    weights = pack([*params])
    dist.recv(weights, group=group, group_src=server)


@wrong("5.3", "waits for none of its messages")
def worker_never_waits(module, server=0, group=None):
    params = trainable(module)
    dist.isend(pack(gradients(params)), group=group, group_dst=server)
    weights = pack(params)
    dist.irecv(weights, group=group, group_src=server)
    unpack(weights, params)


@wrong("5.3", "need no such number")
def worker_translates_none(module, server=0, group=None):
    there = dist.get_global_rank(group, server)
    dist.send(pack(gradients(trainable(module))), there, group=group)


@wrong("5.3", "inside `with torch.no_grad():`")
def worker_writes_under_autograd(module, server=0, group=None):
    def take(weights, params):
        for param, part in zip(params, weights.split([p.numel() for p in params]), strict=True):
            param.copy_(part.view_as(param))

    worker_with(take=take)(module, server, group)


@wrong("5.3", "group_dst=server to send")
def worker_counts_over_the_job(module, server=0, group=None):
    params = trainable(module)
    dist.send(pack(gradients(params)), dst=server, group=group)
    weights = pack(params)
    dist.recv(weights, src=server, group=group)
    unpack(weights, params)


@wrong("5.3", "one message a parameter")
def worker_parameter_by_parameter(module, server=0, group=None):
    for param in trainable(module):
        dist.send(param.grad, group=group, group_dst=server)
    for param in trainable(module):
        dist.recv(param.detach(), group=group, group_src=server)


@wrong("5.3", "frozen parameters travel along")
def worker_sends_frozen(module, server=0, group=None):
    params = list(module.parameters())
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    dist.send(pack(grads), group=group, group_dst=server)


@wrong("5.3", "look for the missing dist.recv")
def worker_only_sends(module, server=0, group=None):
    dist.send(pack(gradients(trainable(module))), group=group, group_dst=server)


@wrong("5.3", "sent 0 message(s)")
def worker_does_nothing(module, server=0, group=None):
    return None


@wrong("5.3", "send first, then receive")
def worker_waits_first(module, server=0, group=None):
    params = trainable(module)
    weights = pack(params)
    dist.recv(weights, group=group, group_src=server)
    unpack(weights, params)
    dist.send(pack(gradients(params)), group=group, group_dst=server)


@wrong("5.3", "use dist.send and dist.recv")
def worker_reduces(module, server=0, group=None):
    vector = pack(gradients(trainable(module)))
    dist.reduce(vector, group=group, group_dst=server)
    dist.broadcast(vector, group=group, group_src=server)
    unpack(vector, trainable(module))


@wrong("5.3", "read before it was through")
def worker_does_not_wait(module, server=0, group=None):
    params = trainable(module)
    dist.send(pack(gradients(params)), group=group, group_dst=server)
    weights = torch.full_like(pack(params), 7)
    coming = dist.irecv(weights, group=group, group_src=server)
    unpack(weights, params)
    coming.wait()


@wrong("5.3", "requires_grad has changed")
def worker_freezes(module, server=0, group=None):
    worker_with()(module, server, group)
    module.requires_grad_(True)


# ---- 5.4 server_step ------------------------------------------------------------------------


def others(group):
    return [r for r in range(dist.get_world_size(group)) if r != dist.get_rank(group)]


@right("5.4")
def server_that_takes_who_comes_first(module, optimizer, group=None):
    params, total = trainable(module), 0
    for _ in others(group):
        arrived = pack(params)
        dist.recv(arrived, group=group)
        total = total + arrived
    mean = total / len(others(group))
    for param, part in zip(params, mean.split([p.numel() for p in params]), strict=True):
        param.grad = part.view_as(param).clone()
    optimizer.step()
    optimizer.zero_grad()
    weights = parameters_to_vector(params).detach()
    for work in [dist.isend(weights, group=group, group_dst=other) for other in others(group)]:
        work.wait()


@right("5.4")
def server_that_posts_all_at_once(module, optimizer, group=None):
    params = trainable(module)
    arrived = [pack(params) for _ in others(group)]
    pairs = list(zip(others(group), arrived, strict=True))
    for work in [dist.irecv(vector, group=group, group_src=other) for other, vector in pairs]:
        work.wait()
    optimizer.zero_grad()
    for vector in arrived:
        parts = vector.split([param.numel() for param in params])
        for param, part in zip(params, parts, strict=True):
            part = part.view_as(param) / len(arrived)
            param.grad = part if param.grad is None else param.grad + part
    optimizer.step()
    for other in others(group):
        there = dist.get_global_rank(group or dist.group.WORLD, other)
        dist.send(pack(params), dst=there, group=group)


def server_with(
    start=torch.zeros_like,
    add=torch.Tensor.add_,
    divisor=len,
    step=lambda optimizer: optimizer.step(),
    outgoing=list,
    before=None,
):
    """A server_step in which one part can be another."""

    def answer(module, optimizer, group=None):
        workers, params = others(group), trainable(module)
        total, arrived = start(pack(params)), pack(params)
        for worker in workers:
            dist.recv(arrived, group=group, group_src=worker)
            add(total, arrived)
        for param in params:
            param.grad = torch.zeros_like(param)
        unpack(total, gradients(params), divisor(workers))
        early = pack(params)
        step(optimizer)
        for worker in workers:
            dist.send(early if before else pack(outgoing(params)), group=group, group_dst=worker)

    return answer


WRONG["5.4"] += [
    (server_with(divisor=lambda workers: 1), "that is the sum over the 3 workers"),
    (server_with(divisor=lambda workers: len(workers) + 1), "the server is no worker"),
    (server_with(divisor=lambda workers: len(workers) ** 2), "divided twice"),
    (server_with(start=torch.clone), "added to what a tensor held before"),
    (server_with(add=torch.Tensor.copy_), "one worker alone"),
    (server_with(step=lambda optimizer: None), "the optimizer has not stepped"),
    (server_with(before=True), "those are the weights from before the step"),
    (server_with(outgoing=gradients), "those are the gradients"),
    (server_with(outgoing=lambda params: params[::-1]), "the order of module.parameters()"),
]


@wrong("5.4", "the optimizer stepped 3 times")
def server_steps_per_worker(module, optimizer, group=None):
    params = trainable(module)
    for param in params:
        param.grad = torch.zeros_like(param)
    for worker in others(group):
        arrived = pack(params)
        dist.recv(arrived, group=group, group_src=worker)
        unpack(arrived, gradients(params))
        optimizer.step()
    for worker in others(group):
        dist.send(pack(params), group=group, group_dst=worker)


@wrong("5.4", "the optimizer has not stepped")
def server_answers_at_once(module, optimizer, group=None):
    params, total = trainable(module), 0
    for worker in others(group):
        arrived = pack(params)
        dist.recv(arrived, group=group, group_src=worker)
        total = total + arrived
        dist.send(pack(params), group=group, group_dst=worker)
    for param in params:
        param.grad = torch.zeros_like(param)
    unpack(total, gradients(params), len(others(group)))
    optimizer.step()


@wrong("5.4", "stepped when 1 of 3 gradients were in")
def server_does_not_wait_for_all(module, optimizer, group=None):
    params, arrived = trainable(module), pack(trainable(module))
    first, *rest = others(group)
    dist.recv(arrived, group=group, group_src=first)
    for param in params:
        param.grad = torch.zeros_like(param)
    unpack(arrived, gradients(params))
    optimizer.step()
    for worker in rest:
        dist.recv(arrived, group=group, group_src=worker)
    for worker in others(group):
        dist.send(pack(params), group=group, group_dst=worker)


@wrong("5.4", "the optimizer has not stepped")
def server_sends_first(module, optimizer, group=None):
    for worker in others(group):
        dist.send(pack(trainable(module)), group=group, group_dst=worker)
    arrived = pack(trainable(module))
    for worker in others(group):
        dist.recv(arrived, group=group, group_src=worker)


@wrong("5.4", "steps before are still in there")
def server_never_clears(module, optimizer, group=None):
    params, workers = trainable(module), others(group)
    for param in params:
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
    for worker in workers:
        arrived = pack(params)
        dist.recv(arrived, group=group, group_src=worker)
        parts = arrived.split([param.numel() for param in params])
        for param, part in zip(params, parts, strict=True):
            param.grad += part.view_as(param) / len(workers)
    optimizer.step()
    for worker in workers:
        dist.send(pack(params), group=group, group_dst=worker)


@wrong("5.4", "holds the moments of all steps before")
def server_with_an_optimizer_of_its_own(module, optimizer, group=None):
    new = torch.optim.AdamW(module.parameters(), optimizer.param_groups[0]["lr"])
    server_with()(module, new, group)


@wrong("5.4", "cleared again before the step")
def server_clears_before_the_step(module, optimizer, group=None):
    server_with(step=lambda o: (o.zero_grad(), o.step()))(module, optimizer, group)


@wrong("5.4", "and dist.get_rank(group)")
def server_counts_over_the_whole_job(module, optimizer, group=None):
    if group is None:
        return server_with()(module, optimizer)
    arrived = pack(trainable(module))
    for worker in [r for r in range(dist.get_world_size()) if r != dist.get_rank()]:
        dist.recv(arrived, group=group, group_src=worker)


@wrong("5.4", "the server is no worker")
def server_counts_itself_in(module, optimizer, group=None):
    arrived = pack(trainable(module))
    for worker in range(dist.get_world_size(group)):
        dist.recv(arrived, group=group, group_src=worker)


@wrong("5.4", "itself: rank 2, not [0, 1, 3]")
def server_thinks_it_is_rank_0(module, optimizer, group=None):
    arrived = pack(trainable(module))
    for worker in range(1, dist.get_world_size(group)):
        dist.recv(arrived, group=group, group_src=worker)


@wrong("5.4", "`group` is not passed on")
def server_without_group(module, optimizer, group=None):
    server_with()(module, optimizer)


@wrong("5.4", "use group_dst=... and group_src=...")
def server_counts_over_the_job(module, optimizer, group=None):
    params = trainable(module)
    arrived, total = pack(params), torch.zeros_like(pack(params))
    for worker in others(group):
        dist.recv(arrived, src=worker, group=group)
        total += arrived
    for param in params:
        param.grad = torch.zeros_like(param)
    unpack(total, gradients(params), len(others(group)))
    optimizer.step()
    for worker in others(group):
        dist.send(pack(params), dst=worker, group=group)


@wrong("5.4", "frozen parameters travel along")
def server_with_frozen(module, optimizer, group=None):
    arrived = pack(list(module.parameters()))
    dist.recv(arrived, group=group, group_src=others(group)[0])


@wrong("5.4", "use dist.send and dist.recv")
def server_gathers(module, optimizer, group=None):
    vector = pack(trainable(module))
    everything = [torch.empty_like(vector) for _ in range(dist.get_world_size(group))]
    dist.gather(vector, everything, group=group, group_dst=dist.get_rank(group))


@wrong("5.4", "sent 0 message(s)")
def server_keeps_the_weights(module, optimizer, group=None):
    params, total = trainable(module), 0
    for worker in others(group):
        arrived = pack(params)
        dist.recv(arrived, group=group, group_src=worker)
        total = total + arrived
    for param in params:
        param.grad = torch.zeros_like(param)
    unpack(total, gradients(params), len(others(group)))
    optimizer.step()


@wrong("5.4", "`param.grad` is None")
def server_unpacks_into_none(module, optimizer, group=None):
    params, total, arrived = trainable(module), 0, pack(trainable(module))
    for worker in others(group):
        dist.recv(arrived, group=group, group_src=worker)
        total = total + arrived
    unpack(total, gradients(params), len(others(group)))


# ---- 5.5 broadcast_state --------------------------------------------------------------------


def parameters_and_buffers(module):
    return [*module.parameters(), *module.buffers()]


@right("5.5")
def broadcast_data_directly(module, group=None):
    with torch.no_grad():
        for tensor in parameters_and_buffers(module):
            dist.broadcast(tensor.data, group=group, group_src=0)


@right("5.5")
def broadcast_as_objects(module, group=None):
    box = [parameters_and_buffers(module)]
    first = dist.get_global_rank(group or dist.group.WORLD, 0)
    dist.broadcast_object_list(box, src=first, group=group)
    for tensor, new in zip(parameters_and_buffers(module), box[0], strict=True):
        tensor.data.copy_(new)


@right("5.5")
def broadcast_all_at_once(module, group=None):
    tensors = [tensor.detach() for tensor in parameters_and_buffers(module)]
    works = [dist.broadcast(t, group=group, group_src=0, async_op=True) for t in tensors]
    for work in works:
        work.wait()


@wrong("5.5", "registered with persistent=False")
def broadcast_state_dict(module, group=None):
    for tensor in module.state_dict().values():
        dist.broadcast(tensor, group=group, group_src=0)


@wrong("5.5", "a set has none")
def broadcast_a_set(module, group=None):
    for tensor in {*module.parameters(), *module.buffers()}:
        dist.broadcast(tensor.detach(), group=group, group_src=0)


@wrong("5.5", "here are several types")
def broadcast_packed(module, group=None):
    vector = pack(parameters_and_buffers(module))
    dist.broadcast(vector, group=group, group_src=0)
    unpack(vector, parameters_and_buffers(module))


@wrong("5.5", "before the message is through")
def broadcast_without_wait(module, group=None):
    for tensor in parameters_and_buffers(module):
        dist.broadcast(tensor.detach(), group=group, group_src=0, async_op=True)


@wrong("5.5", "inside `with torch.no_grad():`")
def broadcast_under_autograd(module, group=None):
    for tensor in parameters_and_buffers(module):
        new = tensor.detach().clone()
        dist.broadcast(new, group=group, group_src=0)
        tensor.copy_(new)


@wrong("5.5", "group_src=0 names the group's first rank")
def broadcast_global_rank_0(module, group=None):
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0, group=group)


@wrong("5.5", "`group` is not passed on")
def broadcast_without_group(module, group=None):
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


@wrong("5.5", "not the same on all ranks")
def broadcast_own_root(module, group=None):
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=dist.get_rank())


@wrong("5.5", "go through module.buffers()")
def broadcast_no_buffers(module, group=None):
    for param in module.parameters():
        dist.broadcast(param.detach(), src=0, group=group)


@wrong("5.5", "do not filter by requires_grad")
def broadcast_no_frozen(module, group=None):
    for tensor in [*[p for p in module.parameters() if p.requires_grad], *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0, group=group)


@wrong("5.5", "rank 0's own")
def broadcast_by_averaging(module, group=None):
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_floating_point():
            dist.all_reduce(tensor.detach(), group=group)
            tensor.detach().div_(dist.get_world_size(group))


@wrong("5.5", "never reached the model")
def broadcast_into_copies(module, group=None):
    for tensor in [*module.parameters(), *module.buffers()]:
        copy = tensor.detach().clone()
        dist.broadcast(copy, src=0, group=group)
        tensor = copy


@wrong("5.5", "an optimizer that was made before")
def broadcast_new_parameters(module, group=None):
    for part in module.modules():
        for name, param in list(part.named_parameters(recurse=False)):
            new = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
            dist.broadcast(new.detach(), src=0, group=group)
            setattr(part, name, new)
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0, group=group)


@wrong("5.5", "not every rank makes the same calls")
def broadcast_only_on_rank_0(module, group=None):
    if dist.get_rank(group) == 0:
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0, group=group)


@wrong("5.5", "rank 0's own")
def broadcast_from_the_last(module, group=None):
    last = dist.get_world_size(group) - 1
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=last, group=group)


@wrong("5.5", "sent nothing")
def broadcast_nothing(module, group=None):
    return None


# ---- 5.6 average_gradients ------------------------------------------------------------------


def with_gradients(module):
    return [param for param in module.parameters() if param.grad is not None]


@right("5.6")
def average_with_avg(module, group=None):
    for param in with_gradients(module):
        dist.all_reduce(param.grad, op=dist.ReduceOp.AVG, group=group)


@right("5.6")
def average_flat(module, group=None):
    params = with_gradients(module)
    flat = torch.cat([param.grad.flatten() for param in params]) / dist.get_world_size(group)
    dist.all_reduce(flat, group=group)
    for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.grad = part.view_as(param).clone()


@wrong("5.6", "divide on every rank")
def average_divided_on_rank_0(module, group=None):
    for param in with_gradients(module):
        dist.all_reduce(param.grad, group=group)
        if dist.get_rank(group) == 0:
            param.grad /= dist.get_world_size(group)


@wrong("5.6", "names a tied parameter once")
def average_tied_twice(module, group=None):
    for _, param in module.named_parameters(remove_duplicate=False):
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad /= dist.get_world_size(group)


@wrong("5.6", "has no gradient any more")
def average_that_drops(module, group=None):
    for param in with_gradients(module):
        dist.all_reduce(param.grad, group=group)
        param.grad = None


@wrong("5.6", "sys.exit()")
def average_that_leaves(module, group=None):
    raise SystemExit


@wrong("5.6", "use print instead")
def average_in_a_debugger(module, group=None):
    breakpoint()


@wrong("5.6", "no collective was called")
def average_of_data(module, group=None):
    for param in module.parameters():
        if param.data.grad is not None:
            dist.all_reduce(param.grad, group=group)


@wrong("5.6", "// rounds down")
def average_rounded(module, group=None):
    for param in with_gradients(module):
        dist.all_reduce(param.grad, group=group)
        param.grad //= dist.get_world_size(group)


@wrong("5.6", "nobody gets to send")
def average_receives_first(module, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    for param in with_gradients(module):
        other = torch.empty_like(param.grad)
        dist.recv(other, group=group, group_src=(rank - 1) % world_size)
        dist.send(param.grad, group=group, group_dst=(rank + 1) % world_size)


@wrong("5.6", "a broadcast, no average")
def average_is_a_broadcast(module, group=None):
    for param in with_gradients(module):
        dist.broadcast(param.grad, group=group, group_src=0)


@wrong("5.6", "dist.reduce gives the sum to one rank only")
def average_by_reduce(module, group=None):
    for param in with_gradients(module):
        dist.reduce(param.grad, group=group, group_dst=0)
        param.grad /= dist.get_world_size(group)


@wrong("5.6", "`group` is not passed on")
def average_without_group(module, group=None):
    for param in with_gradients(module):
        dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)


@wrong("5.6", "it works in place")
def average_of_the_return_value(module, group=None):
    for param in with_gradients(module):
        param.grad = dist.all_reduce(param.grad, group=group) / dist.get_world_size(group)


@wrong("5.6", "group=group")
def average_group_by_position(module, group=None):
    for param in with_gradients(module):
        dist.all_reduce(param.grad, group)
        param.grad /= dist.get_world_size(group)


@wrong("5.6", "that is the sum over the ranks")
def average_is_a_sum(module, group=None):
    for param in with_gradients(module):
        dist.all_reduce(param.grad, group=group)


@wrong("5.6", "still has its own gradient")
def average_of_copies(module, group=None):
    for param in with_gradients(module):
        grad = param.grad / dist.get_world_size(group)
        dist.all_reduce(grad, group=group)


@wrong("5.6", "divide once")
def average_divided_twice(module, group=None):
    for param in with_gradients(module):
        dist.all_reduce(param.grad, op=dist.ReduceOp.AVG, group=group)
        param.grad /= dist.get_world_size(group)


@wrong("5.6", "the weights were averaged")
def average_of_weights(module, group=None):
    for param in with_gradients(module):
        dist.all_reduce(param.detach(), group=group)
        param.detach().div_(dist.get_world_size(group))


@wrong("5.6", "a loop that ends early")
def average_first_only(module, group=None):
    for param in with_gradients(module):
        dist.all_reduce(param.grad, group=group)
        param.grad /= dist.get_world_size(group)
        return


@wrong("5.6", "a frozen parameter has .grad None")
def average_forgets_frozen(module, group=None):
    for param in module.parameters():
        param.grad /= dist.get_world_size(group)
        dist.all_reduce(param.grad, group=group)


@wrong("5.6", "not every rank makes the same calls")
def average_on_rank_0(module, group=None):
    if dist.get_rank(group) == 0:
        average_with_avg(module, group)


@wrong("5.6", "frozen frozen.weight has got a gradient")
def average_fills_frozen(module, group=None):
    for param in module.parameters():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        dist.all_reduce(param.grad, op=dist.ReduceOp.AVG, group=group)


@wrong("5.6", "ReduceOp.MAX")
def average_is_a_maximum(module, group=None):
    for param in with_gradients(module):
        dist.all_reduce(param.grad, op=dist.ReduceOp.MAX, group=group)


# ---- 5.7 train_replicas ---------------------------------------------------------------------


@right("5.7")
def replicas_with_torch_ddp(model, batches, learning_rate, group=None):
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=learning_rate)
    for inputs, targets in batches:
        size = len(inputs) // dist.get_world_size(group)
        share = slice(dist.get_rank(group) * size, (dist.get_rank(group) + 1) * size)
        optimizer.zero_grad()
        nn.MSELoss()(wrapped(inputs[share]), targets[share]).backward()
        optimizer.step()
    if dist.get_rank(group):
        return {}
    return {name: value.clone() for name, value in model.state_dict().items()}


@right("5.7")
def replicas_with_flat_gradients(model, batches, learning_rate, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    first = dist.get_global_rank(group or dist.group.WORLD, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for param in model.parameters():
        dist.broadcast(param.data, src=first, group=group)
    for inputs, targets in batches:
        loss = ((model(inputs[rank::n]) - targets[rank::n]) ** 2).mean()
        loss.backward()
        vector = pack(gradients(model.parameters()))
        all_reduce_ring(vector, "avg", group)
        unpack(vector, gradients(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().cpu() for name, p in model.named_parameters()} if rank == 0 else {}


@right("5.7")
def replicas_of_a_copy(model, batches, learning_rate, group=None):
    return replicas_with()(copy.deepcopy(model), batches, learning_rate, group)


@wrong("5.7", "from another model than the one that was trained")
def replicas_that_return_the_original(model, batches, learning_rate, group=None):
    trained = replicas_with()(copy.deepcopy(model), batches, learning_rate, group)
    return model.state_dict() if trained else {}


def replicas_with(
    start=broadcast_state,
    part=lambda rank, n: slice(rank, None, n),
    targets_part=None,
    loss_of=nn.functional.mse_loss,
    average=average_gradients,
    order="clear backward average step",
    optimizer_of=torch.optim.AdamW,
    rate=1.0,
    finish=lambda model, rank: dict(model.state_dict()) if rank == 0 else {},
    scale=0,
    group_of=lambda group: group,
    num_batches=None,
):
    """A train_replicas in which one part can be another."""

    def answer(model, batches, learning_rate, group=None):
        group = group_of(group)
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        start(model, group)
        optimizer = optimizer_of(model.parameters(), learning_rate * rate * (n if scale else 1))
        for inputs, targets in list(batches)[:num_batches]:
            loss = loss_of(model(inputs[part(rank, n)]), targets[(targets_part or part)(rank, n)])
            for what in order.split():
                {
                    "clear": optimizer.zero_grad,
                    "backward": loss.backward,
                    "average": lambda: average(model, group),
                    "step": optimizer.step,
                }[what]()
        return finish(model, rank)

    return answer


def sum_gradients(model, group):
    for param in model.parameters():
        dist.all_reduce(param.grad, group=group)


WRONG["5.7"] += [
    (replicas_with(start=lambda *_: None), "broadcast_state(model, group) before the loop"),
    (replicas_with(average=sum_gradients), "that is the sum over the ranks"),
    (replicas_with(average=lambda *_: None), "are not averaged before the step"),
    (replicas_with(order="clear backward step average"), "are not averaged before the step"),
    (replicas_with(order="clear average backward step"), "are not averaged before the step"),
    (replicas_with(order="backward average step"), "backward adds to .grad"),
    (replicas_with(order="backward average clear step"), "cleared again before the step"),
    (replicas_with(part=lambda rank, n: slice(None)), "every rank computes the whole batch"),
    (replicas_with(part=lambda rank, n: slice(0, None, n)), "is read twice"),
    (replicas_with(part=lambda rank, n: slice(rank, rank + 1)), "nobody reads sample"),
    (
        replicas_with(
            part=lambda rank, n: slice(rank, None, n),
            targets_part=lambda rank, n: slice(rank * 12 // n, (rank + 1) * 12 // n),
        ),
        "inputs and targets are cut differently",
    ),
    (
        replicas_with(loss_of=lambda a, b: nn.functional.mse_loss(a, b) / dist.get_world_size()),
        "divided once more",
    ),
    (
        replicas_with(loss_of=lambda a, b: nn.functional.mse_loss(a, b, reduction="sum")),
        "a sum over the samples",
    ),
    (replicas_with(optimizer_of=torch.optim.SGD), "the optimizer is SGD"),
    (
        replicas_with(optimizer_of=lambda ps, lr: torch.optim.AdamW(ps, lr, weight_decay=0)),
        "AdamW with weight_decay 0",
    ),
    (replicas_with(optimizer_of=lambda ps, lr: torch.optim.AdamW(ps)), "AdamW's own default"),
    (replicas_with(scale=1), "nothing is to be scaled"),
    (replicas_with(group_of=lambda group: None), "dist.get_rank(group)"),
    (replicas_with(num_batches=1), "nobody reads batch 2, 3, 4"),
    (replicas_with(finish=lambda model, rank: dict(model.state_dict())), "does not return {}"),
    (replicas_with(finish=lambda model, rank: None), "a dict of tensors by name"),
    (replicas_with(finish=lambda model, rank: None if rank else dict(model.state_dict())), "{}"),
    (replicas_with(finish=lambda model, rank: model if rank == 0 else {}), "a dict of tensors"),
    (
        replicas_with(
            finish=lambda model, rank: (
                {f"module.{n}": v for n, v in model.state_dict().items()} if rank == 0 else {}
            )
        ),
        "has 'module.' before each name",
    ),
]


@wrong("5.7", "copied before training was over")
def replicas_saved_too_early(model, batches, learning_rate, group=None):
    broadcast_state(model, group)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    trained = replicas_with()(model, batches, learning_rate, group)
    return kept if trained else {}


@wrong("5.7", "rank 0 of the group returns {}")
def replicas_with_the_job_s_rank_0(model, batches, learning_rate, group=None):
    trained = replicas_with()(model, batches, learning_rate, group)
    return trained if dist.get_rank() == 0 else {}


@wrong("5.7", "optimizer.step() on every rank")
def replicas_where_only_rank_0_steps(model, batches, learning_rate, group=None):
    broadcast_state(model, group)
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[rank::n]), targets[rank::n]).backward()
        average_gradients(model, group)
        if rank == 0:
            optimizer.step()
    return model.state_dict() if rank == 0 else {}


@wrong("5.7", "made once, before the loop")
def replicas_with_many_optimizers(model, batches, learning_rate, group=None):
    for batch in batches:
        trained = replicas_with()(model, [batch], learning_rate, group)
    return trained


# ---- 5.8 average_buckets --------------------------------------------------------------------


@right("5.8")
def buckets_with_avg(buckets, group=None):
    for bucket in buckets:
        flat = torch.cat([param.grad.reshape(-1) for param in bucket])
        dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=group)
        for param, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            param.grad = part.view_as(param)


@right("5.8")
def buckets_all_in_flight(buckets, group=None):
    started = []
    for bucket in buckets:
        vector = pack(gradients(bucket)) / dist.get_world_size(group)
        started.append((bucket, vector, dist.all_reduce(vector, group=group, async_op=True)))
    for bucket, vector, work in started:
        work.wait()
        unpack(vector, gradients(bucket))


@right("5.8")
def buckets_last_first(buckets, group=None):
    replicas.average_buckets(list(buckets)[::-1], group)


def buckets_with(
    outgoing=gradients,
    reduce=lambda vector, group: dist.all_reduce(vector, group=group),
    into=gradients,
    divisor=dist.get_world_size,
    sorted_as=list,
):
    """An average_buckets in which one part can be another."""

    def answer(buckets, group=None):
        for bucket in sorted_as(buckets):
            vector = pack(outgoing(bucket))
            reduce(vector, group)
            unpack(vector, into(bucket), divisor(group))

    return answer


WRONG["5.8"] += [
    (buckets_with(divisor=lambda group: 1), "that is the sum over the ranks"),
    (buckets_with(divisor=lambda group: dist.get_world_size(group) ** 2), "divide once"),
    (buckets_with(into=list), "write into param.grad"),
    (buckets_with(outgoing=list), "pack [param.grad for param in bucket]"),
    (buckets_with(outgoing=list, into=list), "pack [param.grad for param in bucket]"),
    (buckets_with(reduce=lambda v, g: None), "nothing was sent"),
    (buckets_with(into=lambda bucket: [p.grad.clone() for p in bucket]), "own gradient"),
    (buckets_with(reduce=lambda vector, _: dist.all_reduce(vector)), "`group` is not passed on"),
    (buckets_with(reduce=lambda vector, group: None), "nothing was sent"),
    (buckets_with(outgoing=lambda b: [p.grad.float() for p in b]), "the type was changed"),
    (buckets_with(reduce=lambda v, g: dist.all_reduce(v, group=g, async_op=True)), "before wait()"),
    (buckets_with(sorted_as=lambda buckets: buckets[:1]), "put together, or left out"),
    (
        buckets_with(sorted_as=lambda buckets: buckets[:: 1 - 2 * (dist.get_rank() % 2)]),
        "go through one list, in the same order",
    ),
    (buckets_with(outgoing=lambda b: gradients(b[::-1]), into=gradients), "not in their places"),
    (buckets_with(reduce=lambda v, g: dist.broadcast(v, group=g, group_src=0)), "a broadcast"),
]


@wrong("5.8", "divided by 1 and 4")
def buckets_divided_by_their_length(buckets, group=None):
    for bucket in buckets:
        vector = pack(gradients(bucket))
        dist.all_reduce(vector, group=group)
        unpack(vector, gradients(bucket), len(bucket))


@wrong("5.8", "unpack the vector that was all-reduced")
def buckets_of_the_return_value(buckets, group=None):
    for bucket in buckets:
        vector = dist.all_reduce(pack(gradients(bucket)), group=group)
        unpack(vector, gradients(bucket), dist.get_world_size(group))


@wrong("5.8", "a bucket is sent whole, and once")
def buckets_parameter_by_parameter(buckets, group=None):
    for bucket in buckets:
        for param in bucket:
            dist.all_reduce(param.grad, group=group)
            param.grad /= dist.get_world_size(group)


@wrong("5.8", "a message has one type")
def buckets_in_one(buckets, group=None):
    params = [param for bucket in buckets for param in bucket]
    vector = pack([param.grad.double() for param in params])
    dist.all_reduce(vector, group=group)
    unpack(vector.float(), gradients(params), dist.get_world_size(group))


@wrong("5.8", "not every rank makes the same calls")
def buckets_on_rank_0(buckets, group=None):
    if dist.get_rank(group) == 0:
        replicas.average_buckets(buckets, group)


# ---- 5.9 BucketedDDP ------------------------------------------------------------------------


@right("5.9")
class DDPThatAverages(replicas.BucketedDDP):
    def _start(self, index):
        flat = self.flats[index]
        flat.copy_(torch.cat([param.grad.flatten() for param in self.buckets[index]]))
        work = dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self.group, async_op=True)
        self.in_flight.append(work)

    def _finish(self):
        for work in self.in_flight:
            work.wait()
        for bucket, flat in zip(self.buckets, self.flats, strict=True):
            start = 0
            for param in bucket:
                param.grad.copy_(flat[start : start + param.numel()].view_as(param))
                start += param.numel()
        self.in_flight, self.num_ready = [], [0 for _ in self.buckets]


@right("5.9")
class DDPWithFlatsOfItsOwn(replicas.BucketedDDP):
    def _start(self, index):
        flat = pack(gradients(self.buckets[index])) / dist.get_world_size(self.group)
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        self.in_flight.append((work, flat))

    def _finish(self):
        for bucket, (work, flat) in zip(self.buckets, self.in_flight, strict=True):
            work.wait()
            parts = flat.split([param.numel() for param in bucket])
            for param, part in zip(bucket, parts, strict=True):
                param.grad = part.view_as(param)
        self.in_flight.clear()
        self.num_ready = [0] * len(self.buckets)


@wrong("5.9", "the buckets did not start in order")
class DDPThatStartsWhenFull(replicas.BucketedDDP):
    def _on_grad_ready(self, param):
        if not self.sync:
            return
        index = self.bucket_of[param]
        self.num_ready[index] += 1
        if self.num_ready[index] == len(self.buckets[index]):
            flat = pack(gradients(self.buckets[index])) / dist.get_world_size()
            self.in_flight.append((dist.all_reduce(flat, async_op=True), flat))
        if len(self.in_flight) == len(self.buckets):
            DDPWithFlatsOfItsOwn._finish(self)


@wrong("5.9", "never started")
class DDPThatStartsOne(replicas.BucketedDDP):
    def forward(self, *args):
        return self.module(*args)

    def _on_grad_ready(self, param):
        if not self.sync:
            return
        self.num_ready[self.bucket_of[param]] += 1
        index = len(self.in_flight)
        if self.num_ready[index] == len(self.buckets[index]):
            self._start(index)
        if len(self.in_flight) == len(self.buckets):
            self._finish()


@wrong("5.9", "look at self.sync before you count")
class DDPThatCountsInNoSync(replicas.BucketedDDP):
    def forward(self, *args):
        return self.module(*args)

    def _on_grad_ready(self, param):
        if not self.sync:
            self.num_ready[self.bucket_of[param]] += 1
            return
        super()._on_grad_ready(param)


@wrong("5.9", "wait only in _finish")
class DDPThatWaitsAtOnce(replicas.BucketedDDP):
    def _start(self, index):
        super()._start(index)
        self.in_flight[-1].wait()


@wrong("5.9", "pass async_op=True")
class DDPWithoutAsync(replicas.BucketedDDP):
    def _start(self, index):
        pack(gradients(self.buckets[index]), out=self.flats[index])
        self.in_flight.append(dist.all_reduce(self.flats[index], group=self.group))


@wrong("5.9", "`group` is not passed on")
class DDPWithoutGroup(replicas.BucketedDDP):
    def _start(self, index):
        pack(gradients(self.buckets[index]), out=self.flats[index])
        self.in_flight.append(dist.all_reduce(self.flats[index], async_op=True))


@wrong("5.9", "no all-reduce was ever called")
class DDPThatOnlyCounts(replicas.BucketedDDP):
    def _on_grad_ready(self, param):
        self.num_ready[self.bucket_of[param]] += 1


@wrong("5.9", "keep each work in self.in_flight")
class DDPThatKeepsNothing(replicas.BucketedDDP):
    def _start(self, index):
        pack(gradients(self.buckets[index]), out=self.flats[index])
        dist.all_reduce(self.flats[index], group=self.group)


@wrong("5.9", "_finish ran before all buckets had started")
class DDPThatFinishesEachBucket(replicas.BucketedDDP):
    def _on_grad_ready(self, param):
        if not self.sync:
            return
        self.num_ready[self.bucket_of[param]] += 1
        index = len(self.in_flight)
        if self.num_ready[index] == len(self.buckets[index]):
            self._start(index)
            self._finish()


@wrong("5.9", "_finish ran before all buckets had started")
class DDPThatFinishesEachBucketLoosely(DDPThatFinishesEachBucket):
    def forward(self, *args):
        return self.module(*args)

    def _finish(self):
        for bucket, flat, work in zip(self.buckets, self.flats, self.in_flight, strict=False):
            work.wait()
            unpack(flat, gradients(bucket), dist.get_world_size(self.group))
        self.in_flight.clear()
        self.num_ready = [0] * len(self.buckets)


@wrong("5.9", "the bucket was started too early")
class DDPThatStartsAtEachGradient(replicas.BucketedDDP):
    def _on_grad_ready(self, param):
        self.num_ready[self.bucket_of[param]] += 1
        self._start(self.bucket_of[param])


@wrong("5.9", "is the number of its bucket")
class DDPThatLooksIntoBuckets(replicas.BucketedDDP):
    def _on_grad_ready(self, param):
        for index, bucket in enumerate(self.buckets):
            if param in bucket:
                self.num_ready[index] += 1


@wrong("5.9", "by bucket, not by parameter")
class DDPThatCountsByParameter(replicas.BucketedDDP):
    def _on_grad_ready(self, param):
        self.num_ready[param] += 1


@wrong("5.9", "and the loop goes on")
class DDPWithoutABound(replicas.BucketedDDP):
    def _on_grad_ready(self, param):
        if self.sync:
            self.num_ready[self.bucket_of[param]] += 1
            while self.num_ready[len(self.in_flight)] == len(self.buckets[len(self.in_flight)]):
                self._start(len(self.in_flight))


class Done:
    def wait(self):
        return True


@wrong("5.9", "nothing is hidden")
class DDPThatWaits(replicas.BucketedDDP):
    def _start(self, index):
        pack(gradients(self.buckets[index]), out=self.flats[index])
        dist.all_reduce(self.flats[index], group=self.group)
        self.in_flight.append(Done())


@wrong("5.9", "does it wait() before it copies")
class DDPThatDoesNotWait(replicas.BucketedDDP):
    def _finish(self):
        kept = self.in_flight  # alive, so that the message still arrives
        self.in_flight = [Done() for _ in kept]
        super()._finish()
        for work in kept:
            work.wait()


@wrong("5.9", "not copied back")
class DDPThatForgetsToCopy(replicas.BucketedDDP):
    def _finish(self):
        for work in self.in_flight:
            work.wait()
        self.in_flight.clear()
        self.num_ready = [0] * len(self.buckets)


@wrong("5.9", "the first one's counts still stand")
class DDPThatDoesNotReset(replicas.BucketedDDP):
    def forward(self, *args):
        return self.module(*args)

    def _finish(self):
        for bucket, flat, work in zip(self.buckets, self.flats, self.in_flight, strict=True):
            work.wait()
            unpack(flat, gradients(bucket), dist.get_world_size(self.group))


@wrong("5.9", "that is the sum over the ranks")
class DDPThatSums(replicas.BucketedDDP):
    def _finish(self):
        for bucket, flat, work in zip(self.buckets, self.flats, self.in_flight, strict=True):
            work.wait()
            unpack(flat, gradients(bucket))
        self.in_flight.clear()
        self.num_ready = [0] * len(self.buckets)


@wrong("5.9", "self.sync says")
class DDPThatAlwaysSyncs(replicas.BucketedDDP):
    def _on_grad_ready(self, param):
        self.sync = True
        super()._on_grad_ready(param)


@wrong("5.9", "after the last gradient is ready")
class DDPThatStartsLate(replicas.BucketedDDP):
    def _on_grad_ready(self, param):
        if not self.sync:
            return
        self.num_ready[self.bucket_of[param]] += 1
        if sum(self.num_ready) == len(self.bucket_of):
            for index in range(len(self.buckets)):
                self._start(index)
            self._finish()


@wrong("5.9", "one all-reduce a bucket")
class DDPParameterByParameter(replicas.BucketedDDP):
    def _start(self, index):
        bucket = self.buckets[index]
        for param in bucket:
            param.grad /= dist.get_world_size(self.group)
        works = [dist.all_reduce(p.grad, group=self.group, async_op=True) for p in bucket]
        self.in_flight.append(works)

    def _finish(self):
        for works in self.in_flight:
            for work in works:
                work.wait()
        self.in_flight.clear()
        self.num_ready = [0] * len(self.buckets)


@wrong("5.9", "the exercise is to build it")
class DDPFromTorch(nn.parallel.DistributedDataParallel):
    pass


@wrong("5.9", "pack [param.grad for param in bucket]")
class DDPThatPacksWeights(replicas.BucketedDDP):
    def _start(self, index):
        flat = pack(self.buckets[index], out=self.flats[index])
        self.in_flight.append(dist.all_reduce(flat, group=self.group, async_op=True))


@wrong("5.9", "write into param.grad")
class DDPThatUnpacksIntoWeights(replicas.BucketedDDP):
    def _finish(self):
        for bucket, flat, work in zip(self.buckets, self.flats, self.in_flight, strict=True):
            work.wait()
            unpack(flat, bucket, dist.get_world_size(self.group))
        self.in_flight.clear()
        self.num_ready = [0] * len(self.buckets)


@wrong("5.9", "a mean in the wrong parameter")
class DDPThatSendsAnotherFlat(replicas.BucketedDDP):
    def _start(self, index):
        flat = pack(gradients(self.buckets[index]))  # not self.flats[index], which _finish reads
        self.in_flight.append(dist.all_reduce(flat, group=self.group, async_op=True))
