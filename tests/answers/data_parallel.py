"""Answers to lesson 05: RIGHT ones of other form than the course's own, and WRONG ones that are no
slip of it, with words that the verdict must hold."""

import copy
import functools
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from manyhands.collectives.ring import all_reduce_ring
from manyhands.data_parallel import loops, replicas
from manyhands.data_parallel.replicas import average_gradients, broadcast_state, pack, unpack

# ---- 5.2 ------------------------------------------------------------------------------------


def changed(**letters):
    return lambda: {"share": "G", "equal": "A", "mean": "C", "once": "B"} | letters


# ---- 5.3 ------------------------------------------------------------------------------------


def trainable(module):
    return [param for param in module.parameters() if param.requires_grad]


def gradients(params):
    return [param.grad for param in params]


def worker_with_vectors(module, server=0, group=None):
    params = trainable(module)
    there = dist.get_global_rank(group or dist.group.WORLD, server)
    gradient = torch.cat([param.grad.reshape(-1) for param in params])
    dist.send(gradient, dst=there, group=group)
    weights = torch.empty_like(gradient)
    dist.recv(weights, src=there, group=group)
    vector_to_parameters(weights, params)


def worker_that_posts_both(module, server=0, group=None):
    params = [param for param in module.parameters() if param.requires_grad]
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


def worker_with_a_batch_of_messages(module, server=0, group=None):
    params = trainable(module)
    weights = pack(params)
    send = dist.P2POp(dist.isend, pack(gradients(params)), group=group, group_peer=server)
    receive = dist.P2POp(dist.irecv, weights, group=group, group_peer=server)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    unpack(weights, params)


def worker_with_new_parameters(module, server=0, group=None):
    loops.worker_step(module, server, group)
    new: dict = {}
    for name, param in list(module.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        new.setdefault(param, nn.Parameter(param.detach().clone(), param.requires_grad))
        setattr(module.get_submodule(owner), leaf, new[param])


def worker_parameter_by_parameter(module, server=0, group=None):
    for param in trainable(module):
        dist.send(param.grad, group=group, group_dst=server)
    for param in trainable(module):
        dist.recv(param.detach(), group=group, group_src=server)


def worker_that_reduces(module, server=0, group=None):
    vector = pack(gradients(trainable(module)))
    dist.reduce(vector, group=group, group_dst=server)
    dist.broadcast(vector, group=group, group_src=server)
    unpack(vector, trainable(module))


# ---- 5.4 ------------------------------------------------------------------------------------


def others(group):
    return [r for r in range(dist.get_world_size(group)) if r != dist.get_rank(group)]


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


def server_with_an_optimizer_of_its_own(module, optimizer, group=None):
    new = torch.optim.AdamW(module.parameters(), optimizer.param_groups[0]["lr"])
    loops.server_step(module, new, group)


def server_that_keeps_the_weights(module, optimizer, group=None):
    params, total = trainable(module), 0
    for worker in others(group):
        arrived = pack(params)
        dist.recv(arrived, group=group, group_src=worker)
        total = total + arrived
    for param in params:
        param.grad = torch.zeros_like(param)
    unpack(total, gradients(params), len(others(group)))
    optimizer.step()


# ---- 5.5 ------------------------------------------------------------------------------------


def parameters_and_buffers(module):
    return [*module.parameters(), *module.buffers()]


def broadcast_data_directly(module, group=None):
    with torch.no_grad():
        for tensor in parameters_and_buffers(module):
            whole = tensor.data.contiguous()
            dist.broadcast(whole, group=group, group_src=0)
            tensor.data.copy_(whole)


def broadcast_as_objects(module, group=None):
    box = [parameters_and_buffers(module)]
    first = dist.get_global_rank(group or dist.group.WORLD, 0)
    dist.broadcast_object_list(box, src=first, group=group)
    for tensor, new in zip(parameters_and_buffers(module), box[0], strict=True):
        tensor.data.copy_(new)


def broadcast_all_at_once(module, group=None):
    tensors = [tensor.detach() for tensor in parameters_and_buffers(module)]
    whole = [tensor.contiguous() for tensor in tensors]
    works = [dist.broadcast(t, group=group, group_src=0, async_op=True) for t in whole]
    for work, tensor, new in zip(works, tensors, whole, strict=True):
        work.wait()
        tensor.copy_(new)


def broadcast_in_the_order_of_a_set(module, group=None):
    for tensor in set(parameters_and_buffers(module)):
        dist.broadcast(tensor.detach(), group=group, group_src=0)


def broadcast_to_the_next(module, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    for tensor in parameters_and_buffers(module):
        whole = tensor.detach().contiguous()
        if rank == 1:
            dist.recv(whole, group=group, group_src=0)
        if rank == 0 and n > 1:
            dist.send(whole, group=group, group_dst=1)
        tensor.detach().copy_(whole)


def broadcast_what_has_not_just_been_made(module, group=None):
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name not in ("number", "mean"):
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, group=group, group_src=0)
            tensor.detach().copy_(whole)


# ---- 5.6 ------------------------------------------------------------------------------------


def with_gradients(module):
    return [param for param in module.parameters() if param.grad is not None]


def average_with_avg(module, group=None):
    for param in with_gradients(module):
        whole = param.grad.contiguous()
        dist.all_reduce(whole, op=dist.ReduceOp.AVG, group=group)
        param.grad.copy_(whole)


def average_flat(module, group=None):
    params = with_gradients(module)
    flat = torch.cat([param.grad.flatten() for param in params]) / dist.get_world_size(group)
    dist.all_reduce(flat, group=group)
    for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.grad = part.view_as(param).clone()


def average_by_broadcast(module, group=None):
    for param in with_gradients(module):
        dist.broadcast(param.grad, group=group, group_src=0)


def average_the_weights(module, group=None):
    for param in module.parameters():
        weights = param.detach().clone()
        dist.all_reduce(weights, group=group)
        param.data = weights / dist.get_world_size(group)


# ---- 5.7 ------------------------------------------------------------------------------------


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


def replicas_with_flat_gradients(model, batches, learning_rate, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    first = dist.get_global_rank(group or dist.group.WORLD, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=first, group=group)
    for inputs, targets in batches:
        loss = ((model(inputs[rank::n]) - targets[rank::n]) ** 2).mean()
        loss.backward()
        vector = pack(gradients(model.parameters()))
        all_reduce_ring(vector, "avg", group)
        unpack(vector, gradients(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in model.state_dict().items()} if rank == 0 else {}


def replicas_of_a_copy(model, batches, learning_rate, group=None):
    return loops.train_replicas(copy.deepcopy(model), batches, learning_rate, group)


def replicas_that_return_the_original(model, batches, learning_rate, group=None):
    trained = loops.train_replicas(copy.deepcopy(model), batches, learning_rate, group)
    return model.state_dict() if trained else {}


def replicas_that_return_parameters(model, batches, learning_rate, group=None):
    trained = loops.train_replicas(model, batches, learning_rate, group)
    return {name: trained[name] for name, _ in model.named_parameters() if trained}


def replicas_with_many_optimizers(model, batches, learning_rate, group=None):
    trained = loops.train_replicas(model, [], learning_rate, group)
    for batch in batches:
        trained = loops.train_replicas(model, [batch], learning_rate, group)
    return trained


def replicas_that_step_every_second_time(model, batches, learning_rate, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    broadcast_state(model, group)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
    for number, (inputs, targets) in enumerate(batches):
        nn.functional.mse_loss(model(inputs[rank::n]), targets[rank::n]).backward()
        if number % 2:
            average_gradients(model, group)
            optimizer.step()
            optimizer.zero_grad()
    return dict(model.state_dict()) if rank == 0 else {}


# ---- 5.8 ------------------------------------------------------------------------------------


def buckets_by_sums(params, bucket_bytes):
    buckets, room, kind = [], 0, None
    for param in list(params)[::-1]:
        if not param.requires_grad:
            continue
        if kind != param.dtype or param.nbytes > room:
            buckets.append([])
            room, kind = bucket_bytes, param.dtype
        buckets[-1].append(param)
        room -= param.element_size() * param.numel()
    return buckets


def buckets_by_recursion(params, bucket_bytes):
    def pack_from(left):
        if not left:
            return []
        count = 1
        while (
            count < len(left)
            and left[count].dtype == left[0].dtype
            and sum(p.nbytes for p in left[: count + 1]) <= bucket_bytes
        ):
            count += 1
        return [tuple(left[:count]), *pack_from(left[count:])]

    return pack_from([param for param in params if param.requires_grad][::-1])


def buckets_of_a_generator(params, bucket_bytes):
    return replicas.make_buckets(reversed(params), bucket_bytes)


def buckets_by_type(params, bucket_bytes):
    params = list(params)
    kinds = dict.fromkeys(param.dtype for param in params[::-1])
    found = []
    for kind in kinds:
        mine = [param for param in params if param.dtype == kind]
        found += replicas.make_buckets(mine, bucket_bytes)
    return found


def buckets_of_equal_counts(params, bucket_bytes):
    left = [param for param in params if param.requires_grad][::-1]
    return [left[at : at + 2] for at in range(0, len(left), 2)]


# ---- 5.9 ------------------------------------------------------------------------------------


def arrivals_by_partial(module):
    arrived = []
    for name, param in module.named_parameters():
        if param.requires_grad:
            hook = functools.partial(lambda name, param: arrived.append(name), name)
            param.register_post_accumulate_grad_hook(hook)
    return arrived


def arrivals_by_a_table(module):
    names = {param: name for name, param in module.named_parameters()}
    arrived = []

    def hook(param):
        arrived.append(names[param])

    for param in names:
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(hook)
    return arrived


EVERY_NAME: list = []


def arrivals_in_one_list(module):
    EVERY_NAME.clear()
    for name, param in module.named_parameters():
        if param.requires_grad:
            hook = lambda _, name=name: EVERY_NAME.append(name)  # noqa: E731
            param.register_post_accumulate_grad_hook(hook)
    return EVERY_NAME


def arrivals_of_layers(module):
    arrived = []
    for name, layer in module.named_children():
        layer.register_full_backward_hook(lambda *_, name=name: arrived.append(name))
    return arrived


# ---- 5.10, 5.11 -----------------------------------------------------------------------------


class SenderWithANumber(replicas.BucketSender):
    """Counts the buckets that have started itself, and finds full ones by their parameters."""

    def _on_grad_ready(self, param):
        if self.sync:
            self.num_ready[self.bucket_of[param]] += 1
            full = [n == len(b) for n, b in zip(self.num_ready, self.buckets, strict=True)]
            while len(self.in_flight) < len(full) and full[len(self.in_flight)]:
                self._start(len(self.in_flight))
            if len(self.in_flight) == len(full):
                self._finish()

    def _start(self, index):
        start = 0
        for param in self.buckets[index]:
            self.flats[index][start : start + param.numel()] = param.grad.reshape(-1)
            start += param.numel()
        work = dist.all_reduce(self.flats[index], async_op=True, group=self.group)
        self.in_flight += [work]


class SenderOfTheMean(replicas.BucketSender):
    def _start(self, index):
        flat = pack(gradients(self.buckets[index]), out=self.flats[index])
        work = dist.all_reduce(flat, dist.ReduceOp.AVG, self.group, async_op=True)
        self.in_flight.append(work)


class SenderOfASet(replicas.BucketSender):
    """Has counted every gradient when it starts to send."""

    def _on_grad_ready(self, param):
        self.num_ready[self.bucket_of[param]] += self.sync
        if sum(self.num_ready) == len(self.bucket_of):
            for index in range(len(self.buckets)):
                self._start(index)
            self._finish()


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


class DDPWithFlatsOfItsOwn(replicas.BucketedDDP):
    def _start(self, index):
        flat = pack(gradients(self.buckets[index])).float() / dist.get_world_size(self.group)
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        self.in_flight.append((work, flat))

    def _finish(self):
        for bucket, (work, flat) in zip(self.buckets, self.in_flight, strict=True):
            work.wait()
            parts = flat.split([param.numel() for param in bucket])
            for param, part in zip(bucket, parts, strict=True):
                param.grad = part.view_as(param).to(param.dtype)
        self.in_flight.clear()
        self.num_ready = [0] * len(self.buckets)


class DDPWithGradientsInTheFlat(replicas.BucketedDDP):
    def _finish(self):
        for bucket, flat, work in zip(self.buckets, self.flats, self.in_flight, strict=True):
            work.wait()
            flat /= dist.get_world_size(self.group)
            parts = flat.split([param.numel() for param in bucket])
            for param, part in zip(bucket, parts, strict=True):
                param.grad = part.view_as(param)
        self.in_flight.clear()
        self.num_ready = [0] * len(self.buckets)


class DDPThatKeepsNothing(replicas.BucketedDDP):
    def _start(self, index):
        pack(gradients(self.buckets[index]), out=self.flats[index])
        dist.all_reduce(self.flats[index], group=self.group)


class DDPParameterByParameter(replicas.BucketedDDP):
    def _start(self, index):
        bucket = self.buckets[index]
        works = [dist.all_reduce(p.grad, group=self.group, async_op=True) for p in bucket]
        self.in_flight.append(works)

    def _finish(self):
        for bucket, works in zip(self.buckets, self.in_flight, strict=True):
            for param, work in zip(bucket, works, strict=True):
                work.wait()
                param.grad /= dist.get_world_size(self.group)
        self.in_flight.clear()
        self.num_ready = [0] * len(self.buckets)


class DDPFromTorch(nn.parallel.DistributedDataParallel):
    pass


def worker_that_sends_zeros(module, server=0, group=None):
    """Frozen parameters travel as well, as zeros."""
    params = list(module.parameters())
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    dist.send(replicas.pack(grads), group=group, group_dst=server)
    weights = replicas.pack(params)
    dist.recv(weights, group=group, group_src=server)
    replicas.unpack(weights, params)


def broadcast_in_one_vector(module, group=None):
    tensors = [tensor.detach() for tensor in [*module.parameters(), *module.buffers()]]
    whole = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
    dist.broadcast(whole, group=group, group_src=0)
    parts = whole.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def average_weights_instead(module, group=None):
    for param in module.parameters():
        if param.grad is not None:
            dist.all_reduce(param.data, group=group)
            param.data /= dist.get_world_size(group)


def average_and_count(module, group=None):
    replicas.average_gradients(module, group=group)
    count = torch.tensor(float(sum(p.grad is not None for p in module.parameters())))
    dist.all_reduce(count, group=group)


def watch_nodes_that_nobody_keeps(module):
    arrived = []
    for name, param in module.named_parameters():
        if param.requires_grad:
            node = param.view_as(param).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, name=name: arrived.append(name))
    return arrived


class BucketedDDPThatAsks(replicas.BucketedDDP):
    def _finish(self):
        world_size = dist.get_world_size(self.group)
        for bucket, flat, work in zip(self.buckets, self.flats, self.in_flight, strict=True):
            while not work.is_completed():
                time.sleep(0.001)
            replicas.unpack(flat, [param.grad for param in bucket], world_size)
        self.in_flight.clear()
        self.num_ready = [0] * len(self.buckets)


class BucketedDDPOfFutures(replicas.BucketedDDP):
    def _finish(self):
        futures = [work.get_future() for work in self.in_flight]
        for bucket, flat, future in zip(self.buckets, self.flats, futures, strict=True):
            future.wait()
            flat /= dist.get_world_size(self.group)
            replicas.unpack(flat, [param.grad for param in bucket])
        self.in_flight.clear()
        self.num_ready = [0] * len(self.buckets)


RIGHT: dict[str, list] = {
    "5.1": [
        loops.order_of_steps,
        lambda: list("GFDAHECB"),  # the model is built when the first batch is on the GPU
        lambda: tuple("DGFABHEC"),  # the loss is copied while backward computes
    ],
    "5.2": [loops.steps_that_change, changed(equal="A")],
    "5.3": [
        loops.worker_step,
        worker_with_vectors,
        worker_that_posts_both,
        worker_with_a_batch_of_messages,
    ],
    "5.4": [
        loops.server_step,
        server_that_takes_who_comes_first,
        server_that_posts_all_at_once,
    ],
    "5.5": [
        replicas.broadcast_state,
        broadcast_data_directly,
        broadcast_as_objects,
        broadcast_all_at_once,
    ],
    "5.6": [replicas.average_gradients, average_with_avg, average_flat],
    "5.7": [
        loops.train_replicas,
        replicas_with_torch_ddp,
        replicas_with_flat_gradients,
        replicas_of_a_copy,
    ],
    "5.8": [replicas.make_buckets, buckets_by_sums, buckets_by_recursion],
    "5.9": [replicas.watch_arrivals, arrivals_by_partial, arrivals_by_a_table],
    "5.10": [replicas.BucketSender, SenderWithANumber, SenderOfTheMean, replicas.BucketedDDP],
    "5.11": [
        replicas.BucketedDDP,
        DDPThatAverages,
        DDPWithFlatsOfItsOwn,
        BucketedDDPThatAsks,
        BucketedDDPOfFutures,
    ],
}
WRONG: dict[str, list] = {
    "5.1": [
        (lambda: "DGFAEHCB", "Backward reaches the last layer first"),
        (lambda: "DFGAHECB", "Samples have to be read"),
        (lambda: "DGFAHECBB", "occurs 2 times"),
        (lambda: "dgfahecb", "in capital letters"),
    ],
    "5.2": [
        (changed(share="C"), "already read its samples"),
        (changed(mean="A"), "there is no gradient yet"),
        (changed(equal="AD"), "Each change has one letter"),
        (lambda: "GACB", "the four names of CHANGES"),
    ],
    "5.3": [
        (worker_with_new_parameters, "the model has the same parameters"),
        (worker_parameter_by_parameter, "how many messages it sends in step 1: 3, not 1"),
        (worker_that_reduces, "Use dist.send and dist.recv"),
        (worker_that_sends_zeros, "it sends 120 numbers"),
    ],
    "5.4": [
        (server_with_an_optimizer_of_its_own, "how often the optimizer that was given steps"),
        (server_that_keeps_the_weights, "how many messages it sends in step 1: 0, not 1"),
    ],
    "5.5": [
        (broadcast_in_the_order_of_a_set, ""),
        (broadcast_to_the_next, "on rank 2 of 3"),
        (broadcast_what_has_not_just_been_made, "the value of number"),
        (broadcast_in_one_vector, "the value of wide"),
    ],
    "5.6": [
        (average_by_broadcast, "the gradient of"),
        (average_weights_instead, ""),
        (average_weights_instead, "This is the first difference"),
        (average_and_count, "no more is all-reduced than the gradients"),
    ],
    "5.7": [
        (replicas_that_return_the_original, "weights that come back"),
        (replicas_that_return_parameters, "the buffers are missing"),
        (replicas_with_many_optimizers, "the weights at step"),
        (replicas_that_step_every_second_time, "number of steps: 0"),
    ],
    "5.8": [
        (buckets_of_a_generator, "may come from a generator"),
        (buckets_by_type, "make_buckets of parameters"),
        (buckets_of_equal_counts, "make_buckets of parameters"),
    ],
    "5.9": [
        (arrivals_in_one_list, "another model"),
        (arrivals_of_layers, "the list after the first backward"),
        (watch_nodes_that_nobody_keeps, "This is the first difference"),
    ],
    "5.10": [
        (SenderOfASet, "The first bucket is sent after the last gradient is ready"),
        (DDPThatKeepsNothing, "goes on"),
        (DDPParameterByParameter, "bytes, not all_reduce of"),
        (DDPFromTorch, "a class of your own"),
    ],
    "5.11": [
        (DDPWithGradientsInTheFlat, ""),
        (DDPParameterByParameter, "bytes, not all_reduce of"),
        (DDPFromTorch, "a class of your own"),
    ],
}
