"""Answers to lesson 09 as students give them: RIGHT ones differ from the course's own, and WRONG
ones come with words that the verdict must hold."""

import gc
import math

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from manyhands.memory import accounting
from manyhands.memory.accounting import Recipe

from . import _savings

RIGHT: dict[str, list] = {
    "9.1": [accounting.recipe],
    "9.2": [accounting.bytes_per_rank],
    "9.3": [accounting.block_activations],
    "9.4": [accounting.saved_bytes],
}
WRONG: dict[str, list] = {todo: [] for todo in RIGHT}
RIGHT |= _savings.RIGHT
WRONG |= _savings.WRONG


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


def wrong(todo, words):
    return lambda answer: WRONG[todo].append((answer, words)) or answer


# ---- 9.1 recipe -----------------------------------------------------------------------------


@right("9.1")
def recipe_of_bits(weights, gradients, states, master=None):
    optimizer = 0
    for dtype in states:
        optimizer += torch.finfo(dtype).bits // 8
    if master is not None:
        optimizer += torch.finfo(master).bits // 8
    return Recipe(weights.itemsize, gradients.itemsize, optimizer)


@right("9.1")
def recipe_of_tensors(weights, gradients, states, master=None):
    sizes = [torch.empty(1, dtype=d).element_size() for d in [weights, gradients, *states]]
    copy = master.itemsize if master else 0
    return Recipe(*torch.tensor([sizes[0], sizes[1], sum(sizes[2:]) + copy]))


def recipe_with(size=lambda dtype: dtype.itemsize, w=None, g=None, o=None, form=Recipe):
    """A recipe in which one part can be another."""

    def answer(weights, gradients, states, master=None):
        given = weights, gradients, states, master
        kept = list(states) + ([master] if master else [])
        parts = [
            w(*given) if w else [weights],
            g(*given) if g else [gradients],
            o(*given) if o else kept,
        ]
        return form(*(sum(size(dtype) for dtype in part) for part in parts))

    return answer


def listed(master):
    return [master] if master else []


WRONG["9.1"] += [
    (recipe_with(lambda dtype: dtype.itemsize * 8), "those are bits"),
    (recipe_with(lambda dtype: torch.finfo(dtype).bits), "those are bits"),
    (recipe_with(lambda dtype: torch.ones(1).element_size()), "a tensor made without dtype="),
    (recipe_with(lambda dtype: 1), "numbers were counted"),
    (recipe_with(o=lambda w, g, s, m: s), "own copy of the weights is left out"),
    (recipe_with(o=lambda w, g, s, m: listed(m)), "the states are left out"),
    (recipe_with(o=lambda w, g, s, m: s[:1] + listed(m)), "not more than 1 of the states is"),
    (recipe_with(o=lambda w, g, s, m: s[:1] * len(s) + listed(m)), "bytes of its own type"),
    (recipe_with(o=lambda w, g, s, m: [w] * len(s) + listed(m)), "bytes of its own type"),
    (recipe_with(o=lambda w, g, s, m: {*s, *listed(m)}), "9.1 not yet"),
    (recipe_with(o=lambda w, g, s, m: [*set(s), *listed(m)]), "of one type are counted once"),
    (recipe_with(o=lambda w, g, s, m: [g, g] + listed(m)), "9.1 not yet"),
    (recipe_with(o=lambda w, g, s, m: [torch.float] * 2 + listed(m)), "those of Adam"),
    (recipe_with(o=lambda w, g, s, m: [*s, m or torch.float]), "where there is none"),
    (recipe_with(o=lambda w, g, s, m: [*s, m or w]), "where there is none"),
    (recipe_with(o=lambda w, g, s, m: s + ([w] if m else [])), "mostly a longer one"),
    (recipe_with(o=lambda w, g, s, m: [*s, m]), "master is None where"),
    (
        recipe_with(o=lambda w, g, s, m: [s[0], s[1]] + listed(m)),
        "not more than 2 of the states are",
    ),
    (recipe_with(g=lambda w, g, s, m: [w]), "need not have the type of the weights"),
    (recipe_with(w=lambda w, g, s, m: [w, *listed(m)]), "master copy of the weights is the optim"),
    (recipe_with(g=lambda w, g, s, m: [g, *listed(m)]), "master copy of the weights is the optim"),
    (recipe_with(form=lambda *parts: sum(parts)), "the sum of all three"),
    (recipe_with(form=lambda w, g, o: (w + g, o)), "a plain tuple of 2"),
    (recipe_with(form=lambda w, g, o: {"weights": w}), "a dict"),
    (recipe_with(form=lambda w, g, o: Recipe(o, g, w)), "the right numbers in another order"),
    (recipe_with(form=lambda w, g, o: Recipe(str(w), g, o)), "weights a str"),
    (recipe_with(form=lambda *parts: parts), "by their names - return Recipe("),
    (recipe_with(lambda dtype: torch.finfo(dtype).bits / 8), "but a float"),
    (recipe_with(lambda dtype: 2 if dtype == torch.bfloat16 else 4), "any type may come"),
    (recipe_with(lambda dtype: {torch.float: 4, torch.bfloat16: 2}[dtype]), "any type may come"),
    (recipe_with(o=lambda w, g, s, m: [s[0]] * 2 + listed(m)), "first state was counted twice"),
]


@wrong("9.1", "the list `states` is another one")
def recipe_that_appends(weights, gradients, states, master=None):
    if master is not None:
        states.append(master)
    return Recipe(weights.itemsize, gradients.itemsize, sum(d.itemsize for d in states))


@wrong("9.1", "None - nothing is returned")
def recipe_that_prints(weights, gradients, states, master=None):
    print(weights.itemsize, gradients.itemsize)


# ---- 9.2 bytes_per_rank ---------------------------------------------------------------------


@right("9.2")
def bytes_by_padding(sizes, recipe, stage, world_size):
    w, g, o = recipe
    padded = [size + (-size) % world_size for size in sizes]
    shard = sum(padded) // world_size
    weights, gradients, states = sum(padded), sum(sizes), shard
    if stage == 0:
        weights = states = sum(sizes)
    if stage >= 2:
        gradients = shard
    if stage == 3:
        weights = shard
    optimizer = states * o
    if o > 0:
        optimizer += 4 * len(sizes)
    return Recipe(weights * w, gradients * g, optimizer)


@right("9.2")
def bytes_of_arrays(sizes, recipe, stage, world_size):
    shards = np.ceil(np.array(sizes) / world_size).astype(int)
    whole = np.array(sizes) if stage == 0 else shards * world_size
    cut = {"weights": 3, "gradients": 2, "optimizer": 1}
    full = {"weights": whole, "gradients": np.array(sizes), "optimizer": whole}
    found = {
        part: (shards if stage >= first else full[part]).sum() * getattr(recipe, part)
        for part, first in cut.items()
    }
    found["optimizer"] += 4 * len(sizes) * bool(recipe.optimizer)
    return Recipe(**found)


@right("9.2")
def bytes_with_one_rank_first(sizes, recipe, stage, world_size):
    if world_size == 1:
        stage = 0
    return accounting.bytes_per_rank(sizes, recipe, stage, world_size)


def cut_up(sizes, n):
    return sum(math.ceil(size / n) for size in sizes)


def bytes_with(
    shard=cut_up, whole=None, bare=None, w=3, g=2, o=1, count=None, form=Recipe, of=lambda r: r
):
    """A bytes_per_rank in which one part can be another."""

    def answer(sizes, recipe, stage, world_size):
        mine = shard(sizes, world_size)
        every = sum(sizes) if stage == 0 else mine * world_size
        if whole:
            every = whole(sizes, stage, mine, world_size)
        grads = bare(sizes, stage, mine, world_size) if bare else sum(sizes)
        counters = 4 * len(sizes) * (recipe.optimizer > 0)
        if count:
            counters = count(sizes, recipe, world_size, stage)
        recipe = of(recipe)
        w_cut, g_cut, o_cut = (
            stage in cut if isinstance(cut, tuple) else stage >= cut for cut in (w, g, o)
        )
        return form(
            recipe[0] * (mine if w_cut else every),
            recipe[1] * (mine if g_cut else grads),
            recipe[2] * (mine if o_cut else every) + counters,
        )

    return answer


def padded(sizes, stage, mine, n):
    return mine * n


def bare(sizes, stage, mine, n):
    return sum(sizes)


WRONG["9.2"] += [
    (bytes_with(w=1), "the weights are cut from stage 3 on, here from stage 1"),
    (bytes_with(w=2), "the weights are cut from stage 3 on, here from stage 2"),
    (bytes_with(w=9), "the weights are cut from stage 3 on, here never"),
    (bytes_with(g=1), "the gradients are cut from stage 2 on, here from stage 1"),
    (bytes_with(g=3), "the gradients are cut from stage 2 on, here from stage 3"),
    (bytes_with(o=2), "the optimizer's state is cut from stage 1 on, here from stage 2"),
    (bytes_with(w=0, g=0, o=0), "stage 0 has everything on every rank"),
    (bytes_with(whole=padded), "in stage 0 nothing is cut"),
    (bytes_with(shard=lambda s, n: sum(x // n for x in s)), "rounded down"),
    (bytes_with(shard=lambda s, n: sum(round(x / n) for x in s)), "rounded to the nearest"),
    (bytes_with(shard=lambda s, n: math.ceil(sum(s) / n)), "the sum of all was padded"),
    (bytes_with(shard=lambda s, n: sum(s) / n), "cut without padding"),
    (bytes_with(shard=lambda s, n: sum(s) // n, whole=bare), "cut without padding"),
    (bytes_with(shard=lambda s, n: sum(x // n + 1 for x in s)), "divides evenly"),
    (bytes_with(shard=lambda s, n: cut_up(s, n) * n), "padded, but not cut"),
    (bytes_with(whole=bare), "lie in the padded vectors"),
    (bytes_with(bare=lambda s, i, m, n: m * n if i else sum(s)), "nobody pads them"),
    (bytes_with(bare=padded), "in stage 0 nothing is cut"),
    (bytes_with(count=lambda s, r, n, i: 0), "counters are left out"),
    (bytes_with(count=lambda s, r, n, i: 4 * len(s)), "keeps nothing has no counters"),
    (bytes_with(count=lambda s, r, n, i: 4), "one counter in all"),
    (bytes_with(count=lambda s, r, n, i: 4 * len(s) / n * (r[2] > 0)), "a counter is not cut"),
    (bytes_with(count=lambda s, r, n, i: 4 * math.ceil(len(s) / n)), "9.2 not yet"),
    (
        bytes_with(count=lambda s, r, n, i: 4 * len(s) * bool(r[2]) // (n if i else 1)),
        "a counter is not cut",
    ),
    (bytes_with(count=lambda s, r, n, i: 4 * len(s) * (i == 0 and r[2] > 0)), "1 to 3 have count"),
    (bytes_with(count=lambda s, r, n, i: 8 * len(s) * (r[2] > 0)), "a counter takes 4 bytes"),
    (bytes_with(count=lambda s, r, n, i: 4 * len(s) * bool(i and r[2])), "stage 0 has counters"),
    (bytes_with(of=lambda r: (1, 1, 1)), "numbers were counted"),
    (bytes_with(of=lambda r: (r[0], r[0], r[2])), "those are the weights' bytes"),
    (bytes_with(form=lambda *parts: sum(parts)), "the sum of all three"),
    (bytes_with(form=lambda *parts: parts), "by their names - return Recipe("),
    (bytes_with(form=lambda w, g, o: Recipe(w / 1, g, o)), "but a float"),
    (bytes_with(form=lambda *parts: print(parts)), "nothing is returned"),
    (bytes_with(shard=lambda s, n: s // n), "`sizes` is a list of sizes"),
    (bytes_with(w=2, g=1, shard=lambda s, n: sum(x // n for x in s)), "rounded down"),
]


def bytes_without_padding(sizes, recipe, stage, world_size, counter=4):
    first = {"weights": 3, "gradients": 2, "optimizer": 1}
    cut = {part: world_size if stage >= at else 1 for part, at in first.items()}
    found = {part: getattr(recipe, part) * sum(sizes) // n for part, n in cut.items()}
    found["optimizer"] += counter * len(sizes) if recipe.optimizer else 0
    return Recipe(**found)


def bytes_without_padding_and_counters(sizes, recipe, stage, world_size):
    return bytes_without_padding(sizes, recipe, stage, world_size, counter=0)


@wrong("9.2", "bytes were padded, but")
def bytes_that_are_padded(sizes, recipe, stage, n):
    def cut(nbytes):
        return sum(-(-size * nbytes // n) for size in sizes)

    w, g, o = [nbytes * sum(sizes) for nbytes in recipe]
    if stage >= 1:
        w, o = cut(recipe.weights) * n, cut(recipe.optimizer)
    if stage >= 2:
        g = cut(recipe.gradients)
    if stage >= 3:
        w = cut(recipe.weights)
    return Recipe(w, g, o + 4 * len(sizes) * bool(recipe.optimizer))


@wrong("9.2", "in stage 0 nothing is cut, so nothing is padded")
def bytes_of_all_ranks_in_every_stage(sizes, recipe, stage, world_size):
    w, g, o = (nbytes * cut_up(sizes, world_size) * world_size for nbytes in recipe)
    return Recipe(w * world_size, g, o)


@wrong("9.2", "of all ranks, but one is asked for")
def bytes_of_all_ranks(sizes, recipe, stage, world_size):
    return Recipe(
        *(world_size * n for n in accounting.bytes_per_rank(sizes, recipe, stage, world_size))
    )


@wrong("9.2", "the counters are the optimizer's")
def bytes_with_counters_in_weights(sizes, recipe, stage, world_size):
    w, g, o = accounting.bytes_per_rank(sizes, recipe, stage, world_size)
    counters = 4 * len(sizes) if recipe.optimizer else 0
    return Recipe(w + counters, g, o - counters)


WRONG["9.2"] += [
    (bytes_without_padding, "cut without padding"),
    (bytes_without_padding_and_counters, "cut without padding"),
    (bytes_with(g=(2,), o=(1,)), "from stage 2 on, here in stage 2 alone: a later stage cuts"),
    (bytes_with(o=(1,)), "state is cut from stage 1 on, here in stage 1 alone"),
    (bytes_with(g=(1, 2)), "here in stage 1 and 2 alone"),
    (
        bytes_with(count=lambda s, r, n, i: 4 * (cut_up(s, n) if i else sum(s)) * (r[2] > 0)),
        "a counter for each number",
    ),
]


@wrong("9.2", "the list `sizes` is another one")
def bytes_that_pad_in_place(sizes, recipe, stage, world_size):
    told = accounting.bytes_per_rank(sizes, recipe, stage, world_size)
    for i, size in enumerate(sizes):
        sizes[i] = size + -size % world_size
    return told


# ---- 9.3 block_activations ------------------------------------------------------------------


@right("9.3")
def block_line_by_line(tokens, width, heads, nbytes=4):
    number = tokens * nbytes
    kept = {"down": 4 * width * number, "gelu": 4 * width * number, "dropout": 0}
    kept["up"] = kept["qkv"] = width * number
    kept["norm1"] = width * number + 2 * number
    kept["norm2"] = kept["norm1"]
    kept["attention"] = 3 * width * number + width * number + heads * number
    kept["out"] = 0
    return kept


@right("9.3")
def block_of_tensors(tokens, width, heads, nbytes=4):
    D, names = width, "norm1 qkv attention out norm2 up gelu down".split()
    numbers = torch.tensor([D + 2, D, 4 * D + heads, 0, D + 2, D, 4 * D, 4 * D])
    return dict(zip(names, tokens * nbytes * numbers, strict=True))


def block_with(scale=lambda tokens, nbytes: tokens * nbytes, form=lambda kept: kept, **numbers):
    """A block_activations in which some numbers a token can be others."""

    def answer(tokens, width, heads, nbytes=4):
        per_token = {
            name: kept // (4 * tokens)
            for name, kept in accounting.block_activations(tokens, width, heads).items()
        }
        per_token |= {name: number(tokens, width, heads) for name, number in numbers.items()}
        return form({name: scale(tokens, nbytes) * n for name, n in per_token.items()})

    return answer


def without(name):
    return lambda kept: {key: value for key, value in kept.items() if key != name}


WRONG["9.3"] += [
    (block_with(norm1=lambda t, d, h: d, norm2=lambda t, d, h: d), "two numbers of each token"),
    (block_with(norm2=lambda t, d, h: 2 * d + 2), "its output is the next operation's"),
    (block_with(norm1=lambda t, d, h: 2), "needs its input, too"),
    (block_with(qkv=lambda t, d, h: 3 * d), "that is its output"),
    (block_with(qkv=lambda t, d, h: 4 * d), "counted where attention keeps them"),
    (block_with(qkv=lambda t, d, h: 0), "not its output"),
    (block_with(qkv=lambda t, d, h: d + 3 * d * d / t), "the weights were counted"),
    (block_with(attention=lambda t, d, h: 3 * d + h), "its own output is left out"),
    (block_with(attention=lambda t, d, h: 3 * d), "its own output is left out, and one number"),
    (block_with(attention=lambda t, d, h: 4 * d), "one number a head and token is left out"),
    (block_with(attention=lambda t, d, h: 4 * d + 1), "each head has its own"),
    (block_with(attention=lambda t, d, h: 5 * d + h), "not once more"),
    (block_with(attention=lambda t, d, h: 7 * d + h), "counted twice"),
    (block_with(attention=lambda t, d, h: 2 * d + h), "are three"),
    (block_with(attention=lambda t, d, h: 4 * d + h + h * t), "never keeps those"),
    (block_with(attention=lambda t, d, h: 3 * d + 2 * h * t), "never keeps those"),
    (block_with(out=lambda t, d, h: d), "which attention has kept"),
    (block_with(up=lambda t, d, h: 4 * d), "that is its output"),
    (block_with(up=lambda t, d, h: 5 * d), "its output is the next operation's"),
    (block_with(gelu=lambda t, d, h: 0), "gelu's slope depends on its input"),
    (block_with(gelu=lambda t, d, h: d), "4 times the width"),
    (block_with(gelu=lambda t, d, h: 8 * d), "its output is the next operation's"),
    (block_with(down=lambda t, d, h: d), "that is its output"),
    (block_with(down=lambda t, d, h: 0), "which is another tensor"),
    (block_with(down=lambda t, d, h: 5 * d), "a sum keeps nothing"),
    (block_with(scale=lambda tokens, nbytes: 4 * tokens), "4 bytes whatever `nbytes` says"),
    (block_with(scale=lambda tokens, nbytes: tokens), "not their bytes"),
    (block_with(scale=lambda tokens, nbytes: nbytes), "that is for one token"),
    (block_with(scale=lambda tokens, nbytes: 1), "numbers of one token"),
    (block_with(add=lambda t, d, h: 2 * d), "under 'add'"),
    (block_with(form=without("out")), "has no key out"),
    (
        block_with(form=lambda kept: without("attention")(kept | {"atention": kept["attention"]})),
        "has no key attention - you have 'atention'",
    ),
    (block_with(form=lambda kept: kept | {"total": sum(kept.values())}), "sum of all is no oper"),
    (block_with(attention=lambda t, d, h: 4 * d * h), "heads share the width"),
    (block_with(norm1=lambda t, d, h: d + 2 / t, norm2=lambda t, d, h: d + 2 / t), "each norm"),
    (block_with(form=lambda kept: sum(kept.values())), "one number - return a dict with the keys"),
    (block_with(form=lambda kept: list(kept.values())), "a list"),
    (block_with(form=print), "nothing is returned"),
    (block_with(form=lambda kept: {k.upper(): v for k, v in kept.items()}), "has no key norm1"),
]


@wrong("9.3", "4 bytes were taken for some numbers")
def block_with_norms_of_4_bytes(tokens, width, heads, nbytes=4):
    kept = accounting.block_activations(tokens, width, heads, nbytes)
    norm = tokens * (width * nbytes + 8)
    attention = 4 * tokens * (width * nbytes + heads)
    return kept | {"norm1": norm, "norm2": norm, "attention": attention}


# ---- 9.4 saved_bytes ------------------------------------------------------------------------


@right("9.4")
def saved_with_storages_kept(run, params):
    own = {param.untyped_storage()._cdata for param in params}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    total = sum(storage.nbytes() for storage in kept.values())
    del result
    return torch.tensor(total)


@right("9.4")
def saved_with_a_list(run, params):
    tensors = []

    def pack(tensor):
        tensors.append(tensor)
        return len(tensors) - 1

    with saved_tensors_hooks(pack, tensors.__getitem__):
        result = run()
    total, seen = 0, [param.untyped_storage().data_ptr() for param in params]
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.append(storage.data_ptr())
            total += storage.size()
    del result
    return float(total)


def pointer(tensor):
    return tensor.untyped_storage().data_ptr()


def memory_of(tensor):
    return tensor.untyped_storage().nbytes()


def saved_with(
    key=pointer,
    size=memory_of,
    own=lambda params: {pointer(p) for p in params},
    is_own=lambda tensor, own: pointer(tensor) in own,
    add=sum,
    more=lambda result, params: 0,
    pack=lambda tensor: tensor,
    unpack=lambda tensor: tensor,
    call=lambda run: run(),
):
    """A saved_bytes in which one part can be another."""

    def answer(run, params):
        params = list(params)
        mine, kept = own(params), {}

        def keep(tensor):
            if not is_own(tensor, mine):
                kept[key(tensor)] = size(tensor)
            return pack(tensor)

        with saved_tensors_hooks(keep, unpack):
            result = call(run)
        return add(kept.values()) + more(result, params)

    return answer


class Each:
    """A key that no other tensor has."""

    def __init__(self, tensor):
        self.tensor = tensor


WRONG["9.4"] += [
    (saved_with(is_own=lambda tensor, own: False), "the weights were counted, too"),
    (saved_with(own=list, is_own=lambda t, own: any(t is p for p in own)), "weights"),
    (saved_with(own=list, is_own=lambda t, own: t in own), "compare the numbers in tensors"),
    (
        saved_with(own=lambda ps: {id(p) for p in ps}, is_own=lambda t, own: id(t) in own),
        "the same memory",
    ),
    (saved_with(key=Each), "counted more than once"),
    (saved_with(key=id), "counted more than once"),
    (saved_with(key=lambda tensor: tensor.data_ptr()), "counted more than once"),
    (saved_with(key=Each, size=lambda tensor: tensor.nbytes), "as if it had memory of its own"),
    (saved_with(size=lambda tensor: tensor.nbytes), "keeps alive all the memory"),
    (saved_with(size=lambda t: t.numel() * t.element_size()), "keeps alive all the memory"),
    (saved_with(key=lambda t: t.data_ptr(), size=lambda t: t.nbytes), "keeps alive all the memory"),
    (saved_with(size=lambda tensor: tensor.numel()), "numbers were counted, not bytes"),
    (saved_with(key=Each, size=lambda tensor: tensor.numel()), "numbers were counted, not bytes"),
    (saved_with(size=lambda tensor: 1), "storages were counted"),
    (saved_with(key=Each, size=lambda tensor: 1), "tensors were counted"),
    (saved_with(add=lambda sizes: sum(set(sizes))), "of one size were counted as one"),
    (saved_with(more=lambda result, params: result.nbytes), "the result of run() was counted"),
    (
        saved_with(
            is_own=lambda tensor, own: False,
            more=lambda result, params: -sum(p.nbytes for p in params),
        ),
        "autograd has not kept every one of them",
    ),
    (saved_with(is_own=lambda t, own: isinstance(t, torch.nn.Parameter)), "transposed views"),
    (saved_with(call=lambda run: run().sum().backward()), "your code ran backward"),
    (saved_with(pack=lambda tensor: None), "what the pack hook returns is what backward finds"),
    (saved_with(pack=torch.zeros_like), "the gradients are other ones"),
    (saved_with(unpack=lambda tensor: None), "pack and unpack both return the tensor"),
    (saved_with(call=torch.no_grad()(lambda run: run())), "without autograd"),
    (saved_with(call=lambda run: (run(), run())[1]), "run() was called more than once"),
    (saved_with(call=lambda run: run), "run was never called"),
    (saved_with(call=lambda run: run(None)), "a function without arguments"),
    (saved_with(add=list, more=lambda result, params: []), "a list"),
    (saved_with(add=lambda sizes: gc.collect()), "not yet"),
]


@wrong("9.4", "nothing was counted")
def saved_seen_by_unpack(run, params):
    own, kept = {pointer(param) for param in params}, {}

    def unpack(tensor):
        kept[pointer(tensor)] = memory_of(tensor)
        return tensor

    with saved_tensors_hooks(lambda tensor: tensor, unpack):
        run()
    return sum(nbytes for place, nbytes in kept.items() if place not in own)


@wrong("9.4", "nothing was counted")
def saved_after_run(run, params):
    kept = {}

    def keep(tensor):
        kept[pointer(tensor)] = memory_of(tensor)
        return tensor

    run()
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        return sum(kept.values())


@wrong("9.4", "`params` can be gone through only once")
def saved_with_params_in_the_hook(run, params):
    kept = {}

    def keep(tensor):
        if pointer(tensor) not in [pointer(param) for param in params]:
            kept[pointer(tensor)] = memory_of(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(kept.values())


@wrong("9.4", "your code ran backward")
def saved_in_backward(run, params):
    own, kept = {pointer(param) for param in params}, {}

    def keep(tensor):
        kept[pointer(tensor)] = memory_of(tensor)
        return tensor

    out = run()
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out.sum().backward()
    return sum(nbytes for place, nbytes in kept.items() if place not in own)


@wrong("9.4", "two functions: pack and unpack")
def saved_without_unpack(run, params):
    with saved_tensors_hooks(lambda tensor: tensor):
        run()


@wrong("9.4", "a clone() hides that")
def saved_with_clones(run, params):
    own, kept = {pointer(param) for param in params}, {}

    def keep(tensor):
        tensor = tensor.clone()
        kept[pointer(tensor)] = memory_of(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(nbytes for place, nbytes in kept.items() if place not in own)


@wrong("9.4", "leave the with block before you return")
def saved_with_hooks_left_active(run, params):
    own, kept = {pointer(param) for param in params}, {}

    def keep(tensor):
        kept[pointer(tensor)] = memory_of(tensor)
        return tensor

    saved_tensors_hooks(keep, lambda tensor: tensor).__enter__()
    run()
    return sum(nbytes for place, nbytes in kept.items() if place not in own)
