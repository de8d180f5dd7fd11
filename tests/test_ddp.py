"""Data parallelism equals one process: losses, gradients and weights after 10 AdamW steps."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyhands import ddp
from manyhands.failures import RankFailed
from manyhands.lab import run_ranks

BATCH, STEPS, VOCAB = 12, 10, 40


class Model(nn.Module):
    """Small, with what goes wrong: a tied and a frozen parameter, a buffer, two data types."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(16)
        self.wide = nn.Linear(16, 64)
        self.narrow = nn.Linear(64, 16, dtype=torch.float64)
        self.head = nn.Linear(16, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(1))

    def forward(self, tokens):
        x = self.norm(self.frozen(self.embedding(tokens))) * self.scale  # (B, 16)
        x = x + self.narrow(torch.relu(self.wide(x)).double()).float()
        return self.head(x)  # (B, VOCAB)


def data():
    generator = torch.Generator().manual_seed(5)
    return torch.randint(VOCAB, (2, STEPS, BATCH), generator=generator)


def train(model, inputs, targets):
    """Losses, last gradients and final weights; the loop knows nothing of ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    losses = []
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    module = getattr(model, "module", model)
    grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return losses, grads, {n: t.clone() for n, t in module.state_dict().items()}


def truth():
    """One process on the whole batch, from the model that rank 0 builds."""
    torch.manual_seed(0)
    return train(Model(), *data())


def train_on_rank(wrap):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # a forgotten broadcast would show
    return train(wrap(Model()), *data()[:, :, rank::size])


class Naive(nn.Module):
    """The first rung: average after backward, hidden behind the same interface."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        ddp.broadcast_state(module)
        for param in module.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self.count)
        self.left = sum(p.requires_grad for p in module.parameters())

    def count(self, _):
        self.left -= 1
        if self.left == 0:
            ddp.average_gradients(self.module)
            self.left = sum(p.requires_grad for p in self.module.parameters())

    def forward(self, x):
        return self.module(x)


def scratch(bucket_mb):
    return lambda model: ddp.BucketedDDP(model, bucket_mb)


def native(bucket_mb):
    return lambda model: ddp.torch_ddp(model, bucket_mb)


WRAPS = {
    "naive": Naive,
    **{f"by hand, {mb:g} MB": scratch(mb) for mb in (0.001, 0.01, 1, 25)},
    **{f"torch, {mb:g} MB": native(mb) for mb in (0.001, 1, 25)},
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", WRAPS)
def test_equal_to_one_process(name, world_size):
    losses, grads, weights = truth()
    results = run_ranks(train_on_rank, world_size, WRAPS[name])
    for rank_losses, rank_grads, rank_weights in results:
        assert rank_grads.keys() == grads.keys()
        for key, grad in grads.items():
            torch.testing.assert_close(rank_grads[key], grad, atol=1e-5, rtol=0)
        for key, weight in weights.items():
            torch.testing.assert_close(rank_weights[key], weight, atol=1e-5, rtol=0)
            assert torch.equal(rank_weights[key], results[0][2][key]), key  # bit-equal replicas
        assert len(rank_losses) == STEPS
    mean = torch.tensor([result[0] for result in results]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), atol=1e-5, rtol=0)


def test_no_sync_adds_up_and_the_next_backward_averages_the_sums():
    def accumulate(wrap):
        rank = dist.get_rank()
        torch.manual_seed(0)
        model = wrap(nn.Linear(3, 1))
        x = torch.arange(12.0).reshape(4, 3)  # ranks take rows 0 2 and 1 3, one at a time
        with model.no_sync():
            model(x[rank]).backward()
        alone = model.module.weight.grad.clone()
        model(x[rank + 2]).backward()
        return alone, model.module.weight.grad

    for wrap in (scratch(25), native(25)):
        (alone0, grad0), (alone1, grad1) = run_ranks(accumulate, 2, wrap)
        assert alone0.tolist() == [[0, 1, 2]] and alone1.tolist() == [[3, 4, 5]]
        assert grad0.tolist() == grad1.tolist() == [[9, 11, 13]]  # (rows 0+2 + rows 1+3) / 2


def test_a_parameter_that_backward_never_reaches_is_named():
    def unused():
        model = ddp.BucketedDDP(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
        model.forward = lambda x: ddp.BucketedDDP.forward(model, x)
        model.module.forward = lambda x: model.module["a"](x)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(RankFailed, match=r"no gradient to \['b.weight', 'b.bias'\]"):
        run_ranks(unused, 2)


def test_buckets_are_filled_from_the_last_layer_and_split_by_type():
    model = Model()
    buckets = ddp.make_buckets(model.parameters(), bucket_bytes=5000)
    names = {param: name for name, param in model.named_parameters()}
    assert [[names[p] for p in bucket] for bucket in buckets] == [
        ["narrow.bias"],
        ["narrow.weight"],  # 8192 bytes: larger than a bucket
        ["wide.bias", "wide.weight", "norm.bias", "norm.weight"],
        ["embedding.weight"],
    ]


def test_a_subgroup_leaves_other_ranks_alone():
    def in_pairs():
        pair = dist.new_group([0, 1]), dist.new_group([2, 3])
        group = pair[dist.get_rank() // 2]
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, dist.get_rank())
        wrapped = ddp.BucketedDDP(model, group=group)
        wrapped(torch.full((1, 1), float(dist.get_rank()))).backward()
        mean = ddp.mean_over_ranks(torch.tensor(float(dist.get_rank())), 1, group)
        return model.weight.item(), model.weight.grad.item(), mean

    assert run_ranks(in_pairs, 4) == [(0, 0.5, 0.5), (0, 0.5, 0.5), (2, 2.5, 2.5), (2, 2.5, 2.5)]


def test_the_mean_over_ranks_is_exact_for_uneven_counts():
    losses = torch.rand(1001, dtype=torch.float64)
    losses[7] = 100.0

    def share():
        mine = losses[dist.get_rank() :: dist.get_world_size()]
        mine = mine[:0] if dist.get_world_size() == 4 and dist.get_rank() == 3 else mine
        return ddp.mean_over_ranks(mine.sum(), len(mine))

    for world_size in (1, 2, 3):
        for mean in run_ranks(share, world_size):
            assert mean == pytest.approx(losses.mean().item(), rel=1e-12)
    kept = torch.cat([losses[r::4] for r in range(3)])
    assert run_ranks(share, 4) == [pytest.approx(kept.mean().item(), rel=1e-12)] * 4
