"""Training in less memory changes no number: micro-batches add up to the large batch, a checkpoint
gives the same bits as the plain model, and bfloat16 weights with fp32 copies move as fp32 ones."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from manyhands.memory import accounting, savings
from manyhands.models.transformer import Transformer

VOCAB, BLOCK, LAYERS = 11, 8, 3


def tokens(rows: int, length: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a language model, each (rows, length)."""
    text = torch.randint(VOCAB, (rows, length + 1))
    return text[:, :-1], text[:, 1:]


def build(dropout: float = 0.0) -> Transformer:
    torch.manual_seed(3)
    return Transformer(VOCAB, BLOCK, LAYERS, heads=2, width=16, dropout=dropout)


def gradients(model: nn.Module) -> dict:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# ---- accumulate -----------------------------------------------------------------------------


class TokenLoss(nn.Module):
    """A model for sequences of any length, whose large batch is one long row of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 6)
        self.head = nn.Linear(6, VOCAB)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.table(inputs)))  # (B, T, V)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def one_large_batch(model: nn.Module, batches: list) -> torch.Tensor:
    inputs, targets = (
        torch.cat([part.reshape(1, -1) for part in parts], 1)
        for parts in zip(*batches, strict=True)
    )
    loss = model(inputs, targets)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    "shapes",
    [[(2, 4), (2, 4), (2, 4)], [(5, 3), (1, 3), (2, 3)], [(1, 8), (3, 1), (2, 5)], [(3, 3)]],
    ids=str,
)
def test_micro_batches_add_up_to_the_large_batch(shapes):
    torch.manual_seed(0)
    whole = TokenLoss()
    pieces, means = copy.deepcopy(whole), copy.deepcopy(whole)
    batches = [tokens(*shape) for shape in shapes]
    loss = one_large_batch(whole, batches)
    found = savings.accumulate(pieces, batches)
    for batch in batches:
        (means(*batch) / len(batches)).backward()
    assert not found.requires_grad and found.dim() == 0
    torch.testing.assert_close(found, loss, atol=1e-6, rtol=0)
    torch.testing.assert_close(gradients(pieces), gradients(whole), atol=1e-6, rtol=0)
    gap = max((means.get_parameter(n).grad - g).abs().max() for n, g in gradients(whole).items())
    equal = len({rows * length for rows, length in shapes}) == 1
    assert gap < 1e-6 if equal else gap > 1e-3  # a mean of means, on unequal micro-batches


def test_gradients_are_added_to_those_that_are_there():
    model, batches = build(), [tokens(2), tokens(1)]
    savings.accumulate(model, batches)
    once = {name: grad.clone() for name, grad in gradients(model).items()}
    savings.accumulate(model, batches)
    torch.testing.assert_close(gradients(model), {name: 2 * grad for name, grad in once.items()})


# ---- Checkpoint -----------------------------------------------------------------------------


def torchs_own(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def train_once(through=None, dropout=0.0, freeze=(), context=contextlib.nullcontext) -> tuple:
    """Loss, gradients, and random numbers after forward and after backward."""
    model = build(dropout)
    for name in freeze:
        model.get_parameter(name).requires_grad_(False)
    if through:
        model.through = through
    batch = tokens(4)
    torch.manual_seed(7)
    with context():
        loss = model(*batch)
    after_forward = torch.rand(3)
    loss.backward()
    return loss.detach(), gradients(model), after_forward, torch.rand(3)


FROZEN = ("blocks.1.attention.qkv.weight", "blocks.1.norm1.weight")
CASES = {
    "plain": {},
    "dropout": {"dropout": 0.3},
    "autocast": {"context": lambda: torch.autocast("cpu", torch.bfloat16)},
    "autocast with dropout": {
        "dropout": 0.3,
        "context": lambda: torch.autocast("cpu", torch.bfloat16),
    },
    "frozen": {"freeze": FROZEN},
    "block's input without a gradient": {"freeze": ("tokens.weight", "positions.weight")},
}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpointed_model_gives_the_same_bits(case):
    plain = train_once(**CASES[case])
    frozen = CASES[case].get("freeze", ())
    assert plain[1] and not set(frozen) & set(plain[1])
    for through in (savings.checkpointed, torchs_own):
        found = train_once(through, **CASES[case])
        assert found[1].keys() == plain[1].keys()
        torch.testing.assert_close(found, plain, atol=0, rtol=0)


def test_dropout_and_autocast_change_the_numbers():
    losses = {case: train_once(**CASES[case])[0].item() for case in list(CASES)[:4]}
    assert len(set(losses.values())) == len(losses)


def test_a_checkpoint_can_be_all_of_a_model_on_an_input_without_a_gradient():
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()), torch.randn(3, 4)
    other = copy.deepcopy(layer)
    torch.manual_seed(1)
    (layer(x) ** 2).sum().backward()
    torch.manual_seed(1)
    (savings.checkpointed(other, x) ** 2).sum().backward()
    assert not x.requires_grad and x.grad is None
    torch.testing.assert_close(gradients(other), gradients(layer), atol=0, rtol=0)


def test_checkpoints_keep_the_inputs_of_the_blocks_only():
    kept = {}
    for name, through in {"plain": None, "ours": savings.checkpointed, "torch": torchs_own}.items():
        model, batch = build(), tokens(4)
        if through:
            model.through = through
        kept[name] = accounting.saved_bytes(
            lambda model=model, batch=batch: model(*batch), model.parameters()
        )
    block = sum(accounting.block_activations(4 * BLOCK, 16, 2).values())
    block_input = 4 * BLOCK * 16 * 4
    assert kept["plain"] - kept["ours"] >= LAYERS * (block - 2 * block_input)
    assert kept["ours"] < kept["plain"] / 3, kept


class Tied(nn.Module):
    """Uses a weight that is registered elsewhere."""

    def __init__(self, weight):
        super().__init__()
        self.layer, self.elsewhere = nn.Linear(2, 2), [weight]

    def forward(self, x):
        return self.layer(x) @ self.elsewhere[0]


class Branches(nn.Module):
    """Leaves one layer out."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1)), torch.tensor([1, 2])),
        (Branches, torch.ones(1, 2)),
    ],
)
def test_whole_numbers_and_parameters_that_are_not_used_are_as_with_torch_s(make, x):
    found = []
    for through in (savings.checkpointed, torchs_own):
        torch.manual_seed(0)
        model = make()
        through(model, x).sum().backward()
        found.append([param.grad for param in model.parameters()])
    torch.testing.assert_close(*found, atol=0, rtol=0)


def test_a_weight_whose_gradient_would_be_lost_is_told_in_forward():
    weight = nn.Parameter(torch.ones(2, 2))
    x = torch.ones(1, 2, requires_grad=True)
    with pytest.raises(ValueError, match=r"uses a weight of shape \(2, 2\) that is not among"):
        savings.checkpointed(Tied(weight), x)
    weight.requires_grad_(False)
    savings.checkpointed(Tied(weight), x).sum().backward()
    assert x.grad is not None


def test_a_module_that_returns_more_than_a_tensor_is_told():
    pair = nn.Identity()
    pair.forward = lambda x: (x, 2 * x)
    with pytest.raises(ValueError, match="returned tuple: let it return one tensor"):
        savings.checkpointed(pair, torch.ones(2, requires_grad=True))


def test_batch_norm_counts_a_batch_twice_as_with_torch_s():
    for through in (savings.checkpointed, torchs_own):
        norm = nn.BatchNorm1d(2)
        through(norm, torch.randn(8, 2, requires_grad=True)).sum().backward()
        assert norm.num_batches_tracked == 2


# ---- MasterWeights --------------------------------------------------------------------------


def adamw(params: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)


def test_a_step_too_small_for_bfloat16_counts():
    assert torch.tensor(1.0, dtype=torch.bfloat16) + 1e-3 == 1
    short, long = (nn.Parameter(torch.ones(4, dtype=d)) for d in (torch.bfloat16, torch.float32))
    alone = nn.Parameter(short.detach().clone())
    masters = savings.MasterWeights([short], lambda ps: torch.optim.SGD(ps, lr=1e-3))
    fp32, bf16 = torch.optim.SGD([long], lr=1e-3), torch.optim.SGD([alone], lr=1e-3)
    for _ in range(64):
        for param in (short, long, alone):
            param.grad = -torch.ones_like(param)
        masters.step()
        fp32.step()
        bf16.step()
    assert torch.equal(alone, torch.ones_like(alone))  # 64 steps, each rounded away
    assert short.dtype == torch.bfloat16
    assert torch.equal(short, long.bfloat16()) and (short.float() > 1.06).all()


def test_the_copies_are_adamw_in_fp32_with_the_short_gradients():
    model = build().bfloat16()
    model.get_parameter(FROZEN[0]).requires_grad_(False)
    trainable = [param for param in model.parameters() if param.requires_grad]
    frozen = model.get_parameter(FROZEN[0]).detach().clone()
    fp32 = [nn.Parameter(param.detach().float()) for param in trainable]
    optimizer = adamw(fp32)
    masters = savings.MasterWeights(model.parameters(), adamw)
    pointers = [param.data_ptr() for param in trainable]
    for _ in range(5):
        model(*tokens(4)).backward()
        for copied, param in zip(fp32, trainable, strict=True):
            copied.grad = param.grad.float()
        masters.step()
        optimizer.step()
        assert all(param.grad is None for param in (*trainable, *masters.masters))
        for master, copied, param in zip(masters.masters, fp32, trainable, strict=True):
            assert torch.equal(master, copied) and torch.equal(param, copied.bfloat16())
    assert torch.equal(frozen, model.get_parameter(FROZEN[0]))
    assert pointers == [param.data_ptr() for param in trainable]


def test_a_parameter_without_a_gradient_stays_where_it_is():
    used, unused = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    masters = savings.MasterWeights([used, unused], adamw)
    unused.grad = torch.ones_like(unused)  # the optimizer has moments of it from here on
    places = []
    for _ in range(3):
        used.grad = torch.ones_like(used)
        masters.step()
        places.append([master.detach().clone() for master in masters.masters])
    assert places[0][1].lt(1).all() and torch.equal(places[0][1], places[2][1])
    assert (places[2][0] < places[0][0]).all()


def test_gradients_are_in_fp32_during_the_step_and_gone_after_it():
    """2 + 2 + 12 bytes per parameter between steps, 2 + 4 + 12 while the optimizer steps."""
    weight = nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
    masters = savings.MasterWeights([weight], adamw)
    seen = []
    masters.optimizer.register_step_pre_hook(
        lambda *_: seen.append([one.grad for one in (weight, *masters.masters)])
    )
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        masters.step()
    for short, full in seen:
        assert short is None and full.nbytes == 4 * weight.numel()
    states = masters.optimizer.state[masters.masters[0]]
    assert states["exp_avg"].nbytes + states["exp_avg_sq"].nbytes == 8 * weight.numel()
    assert weight.grad is None and masters.masters[0].grad is None


def one_weight():
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    return weight, savings.MasterWeights([weight], lambda ps: torch.optim.SGD(ps, 1e-3, 0.9))


def step_up(weight, masters, num_steps):
    for _ in range(num_steps):
        weight.grad = -torch.ones_like(weight)
        masters.step()


def test_a_resume_from_the_state_keeps_the_bits_that_short_weights_lose(tmp_path):
    weight, masters = one_weight()
    step_up(weight, masters, 2)
    torch.save(masters.state_dict(), tmp_path / "state.pt")
    step_up(weight, masters, 2)
    other, resumed = one_weight()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    step_up(other, resumed, 2)
    assert torch.equal(resumed.masters[0], masters.masters[0]) and torch.equal(other, weight)
    assert resumed.masters[0] != other.float()  # the short weight alone would not have done


def test_weights_that_are_loaded_later_stay_after_reload():
    weight, masters = one_weight()
    weight.data.fill_(5.0)
    masters.reload()
    step_up(weight, masters, 1)
    assert masters.masters[0].item() == pytest.approx(5.001)
