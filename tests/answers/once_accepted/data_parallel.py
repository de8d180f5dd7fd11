"""Wrong answers to lesson 05 that its checks once took for right."""

import torch.distributed as dist

from manyhands.data_parallel import replicas
from manyhands.data_parallel.replicas import pack, unpack


def worker_of_what_has_a_gradient(module, server=0, group=None):
    """A frozen parameter that has trained before still has one."""
    params = [param for param in module.parameters() if param.grad is not None]
    vector = pack([param.grad for param in params])
    dist.send(vector, group=group, group_dst=server)
    dist.recv(vector, group=group, group_src=server)
    unpack(vector, params)


def average_module_by_module(module, group=None):
    """A parameter that two modules share is averaged twice."""
    for part in module.modules():
        for param in part.parameters(recurse=False):
            if param.grad is not None:
                whole = param.grad.contiguous()
                dist.all_reduce(whole, group=group)
                param.grad.copy_(whole / dist.get_world_size(group))


class SenderOfOneForEachGradient(replicas.BucketSender):
    """A bucket that was full before its turn waits for the next gradient."""

    def _on_grad_ready(self, param):
        if not self.sync:
            return
        self.num_ready[self.bucket_of[param]] += 1
        index = len(self.in_flight)
        if index < len(self.buckets) and self.num_ready[index] == len(self.buckets[index]):
            self._start(index)
        if sum(self.num_ready) == len(self.bucket_of):
            for index in range(len(self.in_flight), len(self.buckets)):
                self._start(index)
            self._finish()


class SenderOfShortSums(replicas.BucketSender):
    """Gradients of 16 bits are added up in 16 bits."""

    def _start(self, index):
        self.flats[index] = pack([param.grad for param in self.buckets[index]])
        work = dist.all_reduce(self.flats[index], group=self.group, async_op=True)
        self.in_flight.append(work)


class DDPOfViews(replicas.BucketedDDP):
    """A gradient of 16 bits is no view of a sum in 32."""

    def _finish(self):
        size = dist.get_world_size(self.group)
        for bucket, flat, work in zip(self.buckets, self.flats, self.in_flight, strict=True):
            work.wait()
            flat /= size
            parts = flat.split([param.numel() for param in bucket])
            for param, part in zip(bucket, parts, strict=True):
                param.grad = part.view_as(param)
        self.in_flight.clear()
        self.num_ready = [0] * len(self.buckets)


WRONG = {
    "5.3": [(worker_of_what_has_a_gradient, "it sends")],
    "5.6": [(average_module_by_module, "no more is all-reduced than the gradients")],
    "5.10": [(SenderOfOneForEachGradient, "not all_reduce of"), (SenderOfShortSums, "in bfloat16")],
    "5.11": [(DDPOfViews, "")],
}
