# ---
# manyhands: {title: Collectives, goal: "Build broadcast and the ring all-reduce from send and recv, count every message, and predict which all-reduce is the fastest", job: {flags: "--only all_reduce --max-mb 4"}}
# ---

# %% [markdown]
# # 04 Collectives: what ranks can say to each other
#
# When several processors train one model, they have to exchange numbers. They do so in a few fixed
# patterns, the **collectives**, in which all processors take part together. Data parallelism,
# sharding and tensor parallelism are made of these patterns. (A pipeline sends from one rank to the
# next, and mixtures of experts use one more pattern, the all-to-all.)
#
# ![Four ranks hold coloured blocks; broadcast copies one block to all, reduce adds all blocks up on one rank, gather collects them on one rank, all-gather collects them on all, reduce-scatter leaves each rank one piece of the sum, and all-reduce leaves the whole sum on all](figures/collectives_overview.svg)
#
# PyTorch offers each pattern as one call. What happens inside, and how long will it take? In this lesson
# you build collectives yourself, from messages only: one rank sends, and another receives. Sections 1 to 7
# lead from a riddle to its solution. The sections after that are optional, and no later lesson needs them.
#
# The exercises have fixed numbers, by which other lessons refer to them. They begin with 4.2, and 4.4, 4.5,
# 4.8, 4.11 and 4.12 belong to the optional sections.

# %%
import math
import os
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from IPython.display import Image, display
from torch import Tensor

from manyhands.checks import collectives as check, score
from manyhands.collectives.bench import PROGRAMS, SLOW, race, time_collectives
from manyhands.collectives.figures import against_ranks
from manyhands.collectives.trees import Group, all_reduce_tree
from manyhands.instruments import figures
from manyhands.instruments.ledger import Ledger, calls, traffic
from manyhands.instruments.replay import record, replay
from manyhands.instruments.timing import in_turn, slowest_rank
from manyhands.jobs import watch
from manyhands.ranks import lab
from manyhands.ranks.failures import RuleBroken
from manyhands.ranks.lab import run_ranks
from manyhands.ranks.network import SlowNetwork

lab.warm_up()
print(
    f"torch {torch.__version__}, {os.cpu_count()} cores; the ranks of this notebook use CPU + gloo"
)

# %% [markdown]
# ## 1. A riddle
#
# A **rank** is one process of a job; its number is called the rank, too. Suppose that every rank holds a
# tensor of 8 MB, such as the gradients of a small model with two million parameters, and that every rank
# needs the sum of all these tensors. This is an **all-reduce**. Here are two programs that do it, A and B.
# Both leave the right sum on every rank, and both are made of the same kind of messages, sent from one rank
# and received by another.
#
# The ranks are connected by a slow network, which this course simulates: every rank has a network
# card that sends one message at a time and receives one at a time. Each message has a delay of 4 ms
# and then travels at 100 MB/s. So a message of 8 MB takes 4 ms + 80 ms = 84 ms. The messages are
# real; only the time that they take is simulated. First look at two ranks.

# %%
NBYTES = 8_000_000
RANKS = [2, 4, 8]

for name, (seconds,) in race(PROGRAMS, [2], NBYTES).items():
    print(f"program {name} on 2 ranks: {1e3 * seconds:.0f} ms")
print(f"one message of {NBYTES:,} bytes: {1e3 * SLOW.message_s(NBYTES):.0f} ms")

# %% [markdown]
# Eight ranks hold four times as much data as two. How long will A and B take on 8 ranks? Write down
# both numbers before you run the next cell.

# %%
a_on_8_ms, b_on_8_ms = None, None  # your numbers

# %% answer="true"
a_on_8_ms, b_on_8_ms = 700, 400  # a guess: four times the data, four times the time

# %%
riddle_s = race(PROGRAMS, RANKS, NBYTES)
for name, said in (("A", a_on_8_ms), ("B", b_on_8_ms)):
    ms = 1e3 * riddle_s[name][-1]
    num_messages = riddle_s[name][-1] / SLOW.message_s(NBYTES)
    print(
        f"program {name} on 8 ranks: you said {said} ms, measured {ms:.0f} ms, "
        f"the time of {num_messages:.1f} messages of the whole tensor"
    )
if riddle_s["A"][-1] < riddle_s["B"][-1]:
    print("This machine is busy: run the cell again.")
figures.show(
    against_ranks(RANKS, riddle_s, looks={"A": "naive", "B": "ring"}),
    "Time of two all-reduces of 8 MB against the number of ranks: A climbs steeply, B hardly.",
)

# %% [markdown]
# Every rank that joins makes A slower by about the same amount. The time of B grows much less: on 8
# ranks B needs only the time of a few messages of the whole tensor. Yet in that time eight tensors
# have been added up, and all eight ranks have received the sum. How does B do that, and what holds A
# up? In section 7 you will know, because by then you will have written B yourself.

# %% [markdown]
# ## 2. Send and receive
#
# How do numbers get from one rank to another? `run_ranks(fn, 2)` starts two ranks, calls `fn` in
# each, and returns the two results as a list. Ranks share no memory, so they send each other
# messages, with two calls:
#
# - `dist.send(tensor, dst=1)` sends the numbers in `tensor` to rank 1.
# - `dist.recv(tensor, src=0)` waits for a message from rank 0 and writes it into `tensor`, whose
#   size and type must be those of the tensor that was sent.
#
# Here rank 0 holds 10 and rank 1 holds 20. Watch what rank 1 holds after the message.


# %% tags=["nbval-check-output"]
def first_message():
    rank = dist.get_rank()
    tensor = torch.tensor([10.0 + 10.0 * rank])
    if rank == 0:
        dist.send(tensor, dst=1)
    else:
        dist.recv(tensor, src=0)
    return tensor.item()


run_ranks(first_message, 2)

# %% [markdown]
# Both ranks hold 10. The program was the same on both, but the `if` made them do different things.
# The library that carries the messages, the **backend**, is gloo between CPUs and NCCL between GPUs.
#
# ### The ledger
#
# The cost of a collective depends on which rank sends how many bytes to which other rank. A `Ledger`
# records every message inside its `with` block. A number of type float32 takes 4 bytes.


# %% tags=["nbval-check-output"]
def recorded(fn, *args):
    with Ledger() as ledger:
        fn(*args)
    return ledger.entries


for entries in run_ranks(recorded, 2, first_message):
    for entry in entries:
        print(f"rank {entry.rank}: {entry.op}, partner {entry.peer}, {entry.nbytes} bytes")

# %% [markdown]
# ### Groups
#
# Not every pattern involves all ranks. A **process group** is a list of ranks, and every function
# that you write in this lesson and that sends messages has an argument `group` for one. `None` means
# all ranks. Inside a group the ranks are numbered from 0 again. So ask for your number in the group
# with `dist.get_rank(group)` and for the number of ranks with `dist.get_world_size(group)`, and name
# the partner of a message by `group_dst` or `group_src`. Here ranks 3 and 1 of a job form a group, in
# this order, and the first sends its number to the second.


# %% tags=["nbval-check-output"]
def message_in_a_group():
    group = dist.new_group([3, 1], sort_ranks=False)  # every rank of the job makes this call
    rank = dist.get_rank(group)  # -1 for ranks outside the group
    tensor = torch.tensor([float(dist.get_rank())])
    if rank == 0:
        dist.send(tensor, group=group, group_dst=1)
    elif rank == 1:
        dist.recv(tensor, group=group, group_src=0)
    return dist.get_rank(), rank, tensor.item()


for job_rank, group_rank, value in run_ranks(message_in_a_group, 4):
    print(f"rank {job_rank} of the job, {group_rank} in the group, holds {value:.0f}")

# %% [markdown]
# Rank 1 of the job received the 3 of its partner. It is easy to confuse the rank in the job with the
# rank in the group, so the checks will try your functions with such groups.
#
# ### Tensors that are not in one piece
#
# A message is one piece of memory. A column of a matrix is not, because its numbers lie far apart.
# The context manager `flat`, given below, helps: `with flat(tensor) as vector:` gives you a vector
# that can be sent, and whatever you write into the vector is in `tensor` afterwards.

# %% show="true"
from manyhands.collectives.trees import flat

# %% [markdown]
# Are PyTorch's own calls as careful? `dist.send` refuses a column with an error. Now try
# `dist.all_reduce` on the second column of a matrix, which is full of ones on rank 0 and of twos on
# rank 1, first directly and then inside `flat`. The second column should become 3, and the other
# columns should stay as they are.


# %%
def all_reduce_of_a_column():
    directly = torch.full((4, 3), 1.0 + dist.get_rank())
    dist.all_reduce(directly[:, 1])
    in_flat = torch.full((4, 3), 1.0 + dist.get_rank())
    with flat(in_flat[:, 1]) as vector:
        dist.all_reduce(vector)
    return {"directly": directly.tolist(), "in flat": in_flat.tolist()}


# NCCL, the backend of GPUs, forbids this. With rules="" it runs even where that is enforced.
for rank, found in enumerate(run_ranks(all_reduce_of_a_column, 2, rules="")):
    for way, rows in found.items():
        print(f"rank {rank}, {way:8}:", *rows)

# %% [markdown]
# With gloo (seen in PyTorch 2.13) the direct call raises no error but gives a wrong result: starting
# at the column's first number, it takes four numbers that lie side by side in memory, so it adds up
# parts of other columns. That is why the functions of this lesson use `flat`, and why their checks
# try columns too.
#
# ### Putting two tensors together
#
# A **reduction** combines the tensors of all ranks into one, number by number. The **operation** says
# how: it is the sum, the average, the minimum or the maximum. The function `combine` combines two
# tensors at a time, and changes its first argument in place. Why does it not divide if the operation
# is the average? Averaging 2 and 4 gives 3, and averaging that with 9 gives 6, but the average of 2,
# 4 and 9 is 5. So `combine` only adds, and you divide once at the end, by the number of ranks.

# %% show="true"
from manyhands.collectives.trees import combine

# %% [markdown]
# ## 3. One to all: broadcast
#
# How does the tensor of one rank, the **root**, reach all others? The simplest way is that the root
# sends the tensor to every other rank, one after the other. Use `flat`, and remember that `root` is a
# number inside the group.

# %% exercise="broadcast_naive" todo="4.2" minutes=10 difficulty=1 points=1
from manyhands.collectives.trees import broadcast_naive

# %% check="4.2" tags=["nbval-check-output"]
check.broadcast_naive(broadcast_naive)

# %% [markdown]
# With 8 ranks the root sends 7 messages, one after the other, and while one of them travels, six
# ranks have nothing to do. But a rank that has the tensor can pass it on. Then the number of ranks
# that have the tensor doubles in every **round**, which is a set of messages that travel at the same
# time. This pattern is called a **tree**.
#
# ![On the left rank 0 sends to ranks 1 to 7, seven messages in a row; on the right the tree needs three rounds: 0 to 1, then 0 to 2 and 1 to 3, then four messages at once from ranks 0 to 3 to ranks 4 to 7](figures/collectives_tree.svg)
#
# In the figure rank 0 is the root. To allow any root, count places from the root: on n ranks, a
# rank's place is `(rank - root) % n`, and the rank at place p is `(p + root) % n`.

# %% exercise="broadcast_tree" todo="4.3" minutes=20 difficulty=2 points=2
from manyhands.collectives.trees import broadcast_tree

# %% check="4.3" tags=["nbval-check-output"]
check.broadcast_tree(broadcast_tree)

# %% [markdown]
# ### Predict: the root's messages
#
# How many messages does the root send on 64 ranks, with each version? Write your numbers down. Most
# laptops cannot run 64 ranks, so the cell below measures 8 ranks and evaluates the formula for 64.

# %%
naive_64, tree_64 = None, None  # your numbers

# %% answer="true"
naive_64, tree_64 = 63, 6


# %% tags=["nbval-check-output"]
def sent_by_root(fn, world_size):
    entries = run_ranks(recorded, world_size, fn, torch.zeros(1000))[0]
    return calls(entries)["send"]


if check.ready("4.2", "4.3"):
    for fn, said, formula in (
        (broadcast_naive, naive_64, lambda n: n - 1),
        (broadcast_tree, tree_64, lambda n: math.ceil(math.log2(n))),
    ):
        measured = sent_by_root(fn, 8)
        print(
            f"{fn.__name__}: 64 ranks: you said {said}, formula {formula(64)}; "
            f"8 ranks: formula {formula(8)}, measured {measured}"
        )
        assert measured == formula(8)

# %% [markdown]
# ## 4. All to all, through one rank
#
# How do the tensors of all ranks become one sum, on every rank? The simplest all-reduce is given
# below: all ranks send to rank 0, which adds up what comes in and broadcasts the sum.

# %% show="true"
from manyhands.collectives.trees import all_reduce_naive

# %% [markdown]
# A tree can do the same in fewer rounds, because it also works backwards: on 8 ranks four ranks send
# to four others, which combine the tensors they receive with their own. Then two ranks send to two,
# and one sends to rank 0. After that, `broadcast_tree` takes the sum back to all ranks. The function
# that does all this, `all_reduce_tree`, was imported at the top; in section 8 you can write its first
# half.
#
# How many bytes does the busiest rank send and receive in each version?


# %% tags=["nbval-check-output"]
def busiest_bytes(fn, world_size, nbytes):
    """The most bytes that any rank sends, and the most that any rank receives."""
    results = run_ranks(recorded, world_size, fn, torch.zeros(nbytes // 4))
    sent, received = [0] * world_size, [0] * world_size
    for (sender, receiver), count in traffic(entry for mine in results for entry in mine).items():
        sent[sender] += count
        received[receiver] += count
    return max(sent), max(received)


if check.ready("4.2"):
    for fn, tensors in ((all_reduce_naive, 7), (all_reduce_tree, 3)):
        sent, received = busiest_bytes(fn, 8, nbytes=8000)
        assert sent == received == tensors * 8000
        print(
            f"{fn.__name__:16} 8 ranks, 8000 bytes: sends up to {sent}, receives up to {received}"
        )

# %% [markdown]
# Rank 0 is the busiest in both. In the naive version it receives seven tensors and sends seven; in
# the tree it receives three and sends three. The more ranks there are, the longer all others wait for
# rank 0. To share the work evenly, every rank has to send and receive at the same time.

# %% [markdown]
# ## 5. When everybody sends first
#
# How can all ranks send and receive at the same time? Take two ranks: each sends its tensor to the
# other, then receives. Read the function and predict what happens.
#
# ![Two ranks each block in send, waiting for the other to receive, and neither gets to its recv; when send and receive are started together, both messages pass](figures/collectives_deadlock.svg)


# %%
def both_send_first():
    partner = 1 - dist.get_rank()
    outgoing, incoming = torch.ones(1000), torch.empty(1000)
    dist.send(outgoing, dst=partner)
    dist.recv(incoming, src=partner)


try:
    run_ranks(both_send_first, 2, timeout_s=3)
except RuntimeError as error:
    print(error)

# %% [markdown]
# With gloo, a `send` returns only when the receiver has taken the message, even if it has only a few
# bytes. So each rank waits in `send` for the other to call `recv`, and neither gets there. This is a
# **deadlock**. Outside this course such a program hangs until its time-out, which is half an hour by default;
# here the limit is short, and the error message names the line in which each rank waits. Other backends
# differ: MPI, the message passing interface of most supercomputers, may buffer a small message and return at
# once, and NCCL returns once the message is queued on the GPU. So a program with this mistake may work on one
# backend and hang on another.
#
# One cure is a fixed order: even ranks send first, and odd ranks receive first. But then only one
# direction is in use at a time. It is better to *start* both messages, then wait for both.
#
# - `dist.isend(tensor, group=..., group_dst=...)` and `dist.irecv(...)` return at once (the i stands
#   for "immediate"). Each call returns a **work** object, and its `work.wait()` returns when the
#   message has been transferred. (With NCCL it returns at once, and what the GPU computes after it
#   waits for the message.)
# - `dist.batch_isend_irecv([...])` starts several messages together. It takes a list of
#   `dist.P2POp(dist.isend, tensor, group=group, group_peer=...)`, or the same with `dist.irecv`, and
#   returns a list of works. Between GPUs this is the safe way, because NCCL carries separate messages
#   between two ranks one after the other, so two sends that are queued first block each other. The
#   messages of a batch are carried all at once.
#
# Do not touch a tensor that is being sent or received until its work is complete. Wait for each work
# only once, because a second `wait` for the same receive can hang.

# %% exercise="start_exchange" todo="4.6" minutes=8 difficulty=1 points=1
from manyhands.collectives.ring import start_exchange

# %% check="4.6" tags=["nbval-check-output"]
check.start_exchange(start_exchange)

# %% [markdown]
# Two functions, both given, call yours; every ring in this lesson is built from them. `exchange`
# starts both messages and waits for both. `exchange_and_combine` receives into a temporary tensor,
# and combines this tensor with the one that the rank holds.

# %% show="true"
from manyhands.collectives.ring import exchange, exchange_and_combine

# %% [markdown]
# ## 6. The ring
#
# How can an all-reduce keep all ranks equally busy? Arrange n ranks in a ring, and divide every
# tensor into n chunks. In each step every rank sends one chunk to the next rank and receives one from
# the rank before it. There is no root, and all links are in use all the time.
#
# ![Four ranks in a ring, each with four chunks; in one step every rank sends one chunk to the next rank and receives another from the rank before it](figures/collectives_ring.svg)
#
# ### All-gather
#
# An all-reduce in a ring has two halves, and the **all-gather** is the simpler one, so begin with it.
# Every rank holds a list `chunks` of n tensors. On rank r only `chunks[r]` is filled, and the other
# entries are room for the chunks of the other ranks; in the end all lists are full. In step 0 each
# rank sends its own chunk, as in the figure. In every later step it passes on the chunk that it
# received last. After n-1 steps each chunk has reached every rank.
#
# Take 4 ranks, and write down on paper what rank 0 sends and receives in steps 0, 1 and 2, before you
# write code. `exchange` accepts any chunk, even a column of a matrix.

# %% exercise="all_gather_ring" todo="4.7" minutes=20 difficulty=2 points=2
from manyhands.collectives.ring import all_gather_ring

# %% check="4.7" tags=["nbval-check-output"]
check.all_gather_ring(all_gather_ring)

# %% [markdown]
# ### Reduce-scatter
#
# Now write the other half, the **reduce-scatter**. Every rank holds n chunks of its own numbers, and
# in the end rank r must hold the sum of all ranks' chunk r. So a sum travels round the ring and
# grows: each rank adds its own part, which `exchange_and_combine` does, and sends the sum on. The sum
# for rank r starts at rank r+1, and arrives at rank r last.
#
# Again, begin on paper: with 4 ranks, which chunk does rank 0 send in step 0, and which one does it
# receive in the same step?

# %% exercise="reduce_scatter_ring" todo="4.9" minutes=15 difficulty=2 points=2
from manyhands.collectives.ring import reduce_scatter_ring

# %% check="4.9" tags=["nbval-check-output"]
check.reduce_scatter_ring(reduce_scatter_ring)

# %% [markdown]
# ### All-reduce
#
# Now you have both halves and can put them together. `vector.tensor_split(n)` splits a vector into n
# chunks whose sizes differ by at most 1. The chunks are views, so whatever you write into them is in
# the vector.

# %% exercise="all_reduce_ring" todo="4.10" minutes=5 difficulty=1 points=1
from manyhands.collectives.ring import all_reduce_ring

# %% check="4.10" tags=["nbval-check-output"]
check.all_reduce_ring(all_reduce_ring)

# %% [markdown]
# ### Look: your own ring, step by step
#
# The next figure is drawn from the messages that *your* `all_reduce_ring` has really sent. A column
# is a rank, a row is a chunk, and a cell names the ranks whose numbers are in that chunk so far. The
# arrows are the messages of a round. If your notebook has widgets, a slider below the figure takes
# you through the rounds. After which round is the first chunk complete?

# %%
if check.ready("4.10"):
    messages, results = zip(*run_ranks(record, 4, all_reduce_ring), strict=True)
    states = replay(messages, results)
    figures.show_rounds(
        states, "The ring all-reduce of 4 ranks: its start and six rounds, drawn from messages."
    )

# %% [markdown]
# In the first three rounds the sums grow. After them every rank holds one chunk that is complete:
# the reduce-scatter is done. In the last three rounds, the all-gather, the complete chunks travel
# on and overwrite the unfinished ones. Try `all_reduce_tree` or `all_reduce_naive` in that cell, too.
#
# ### Predict: the bytes of a ring
#
# 4 ranks all-reduce a tensor of 4800 bytes in a ring. How many messages does each rank send, and
# how many bytes in all? Write both down before you run the next cell.

# %%
ring_messages, ring_bytes = None, None  # your numbers, for one rank

# %% answer="true"
ring_messages, ring_bytes = 6, 7200  # 2 (n-1) chunks of 1200 bytes

# %% tags=["nbval-check-output"]
if check.ready("4.10"):
    entries = run_ranks(recorded, 4, all_reduce_ring, torch.zeros(1200))[0]
    sends = [entry for entry in entries if entry.op == "send"]
    num_bytes = sum(entry.nbytes for entry in sends)
    score("messages sent by a rank", ring_messages, 2 * 3, len(sends))
    score("bytes sent by a rank", ring_bytes, 2 * 3 / 4 * 4800, num_bytes, "bytes")
    assert (len(sends), num_bytes) == (2 * 3, 2 * 3 / 4 * 4800)

# %% [markdown]
# What happens with more ranks? For 1 to 8 ranks, the table shows how many bytes the busiest rank
# sends in each of the three all-reduces, as a multiple of the tensor's size. Compare how the columns
# grow.

# %% tags=["nbval-check-output"]
if check.ready("4.2", "4.10"):
    print("ranks  naive  tree   ring   2(n-1)/n")
    for n in (1, 2, 4, 8):
        sent = [
            busiest_bytes(fn, n, 3360)[0] / 3360
            for fn in (all_reduce_naive, all_reduce_tree, all_reduce_ring)
        ]
        print(f"{n:5}  {sent[0]:5.2f}  {sent[1]:5.2f}  {sent[2]:5.2f}  {2 * (n - 1) / n:5.2f}")
        assert sent[:2] == [n - 1, math.log2(n)] and sent[2] == 2 * (n - 1) / n

# %% [markdown]
# The naive column grows with n and the tree's with log2 n, but the busiest rank of the ring never sends as
# much as twice a tensor of at least n numbers, however many ranks there are. Patarasuk and Yuan (2009)
# proved that the ring's factor of 2(n-1)/n is a lower bound as long as the ranks do the adding. That is why
# rings carry the gradients of many large jobs. Fewer bytes are enough only if the switches of the network
# add up messages on their way. SHARP does so between nodes (Graham et al. 2016), and NVLink SHARP, which
# NCCL calls NVLS, does so between GPUs that are joined by switches of NVLink.

# %% [markdown]
# ## 7. The riddle solved
#
# Why did A become so much slower with more ranks, and B only a little? A is the naive all-reduce, and
# B is the ring. Each message takes the **latency** $\alpha$, however small it is, and a time $\beta$
# per byte; $1/\beta$ is the **bandwidth**. So
#
# $$\text{time} = \text{rounds} \times (\alpha + \beta \times \text{bytes of one message})$$
#
# | all-reduce of $S$ bytes on $n$ ranks | rounds | bytes of one message |
# |---|---|---|
# | naive | $2(n-1)$: rank 0 takes one message after the other | $S$ |
# | tree | $2\lceil\log_2 n\rceil$ | $S$ |
# | ring | $2(n-1)$ | $S/n$ |
#
# The naive version and the ring have equally many rounds. But in a naive round one message travels
# while all other ranks wait for rank 0; in a round of the ring every rank sends, so each message
# needs to be only one chunk. More ranks mean more rounds, but smaller messages. That is why the bytes
# of a ring never take longer than those of two whole tensors would, and only the latencies keep
# adding up.
#
# How fast is the tree? Work out its time for 8 MB on 8 ranks, with the network's 4 ms and 100 MB/s,
# and write it down. Then race the three, with your own ring.

# %%
tree_on_8_ms = None  # your number

# %% answer="true"
tree_on_8_ms = 504  # 2 * 3 rounds of 4 ms + 80 ms

# %%
PRICES = {  # rounds, and what share of the tensor a message holds
    "all_reduce_naive": lambda n: (2 * (n - 1), 1),
    "all_reduce_tree": lambda n: (2 * math.ceil(math.log2(n)), 1),
    "all_reduce_ring": lambda n: (2 * (n - 1), 1 / n),
}


def model_s(name, world_size):
    count, share = PRICES[name](world_size)
    return count * SLOW.message_s(share * NBYTES)


if check.ready("4.2", "4.10"):
    three = {fn.__name__: fn for fn in (all_reduce_naive, all_reduce_tree, all_reduce_ring)}
    race_s = race(three, RANKS, NBYTES)
    predicted_ms = {name: round(1e3 * model_s(name, 8)) for name in three}
    measured_ms = {name: round(1e3 * race_s[name][-1]) for name in three}
    for name, said in zip(three, (a_on_8_ms, tree_on_8_ms, b_on_8_ms), strict=True):
        score(f"{name} on 8 ranks", said, predicted_ms[name], measured_ms[name], "ms", "at least")
    ring_ms = measured_ms["all_reduce_ring"]
    for other in ("naive", "tree"):
        print(f"{other} / ring on 8 ranks: {measured_ms[f'all_reduce_{other}'] / ring_ms:.1f}")
    if ring_ms > min(measured_ms.values()):
        print("The ring should be the fastest. This machine is busy: run the cell again.")
    lines_s = {name: [model_s(name, n) for n in RANKS] for name in three}
    figures.show(
        against_ranks(RANKS, race_s, lines_s),
        "Time of three all-reduces of 8 MB on the slow network, measured and by the formula.",
    )

# %% [markdown]
# The points lie above the lines, because the formula leaves out the adding, the copying in memory, and
# ranks that wait for a core; the busier your machine, the larger the gap. But the riddle is solved. Rank 0
# held A up, because every message went through it. In B no rank has more to do than any other, so the
# ring's lead over A grows with the number of ranks. The tree has the fewest rounds, but it loses to the
# ring because each of its messages is the whole tensor. For small tensors, where only the rounds count, the
# tree would win.
#
# Here the core of this lesson ends. If you go on to lesson 05 now, first run the notebook's last code
# cell, which counts what you have done.

# %% [markdown]
# ## 8. All to one: reduce and gather (optional)
#
# Does the tree help in the other direction, too? It does, because it also works backwards. In the
# last round of the broadcast on 8 ranks, four ranks sent to four others. In the first round of a
# **reduce**, those four send their tensors back, and the receivers combine them with their own. Then
# two ranks send to two, and one sends to the root. This is the first half of `all_reduce_tree`;
# `broadcast_tree` is the second.

# %% exercise="reduce_tree" todo="4.4" minutes=15 difficulty=2 points=2
from manyhands.collectives.trees import reduce_tree

# %% check="4.4" tags=["nbval-check-output"]
check.reduce_tree(reduce_tree)

# %% [markdown]
# A **gather** collects the tensors without combining them. Every rank holds a list `chunks`, with one
# tensor for each rank. On rank r only `chunks[r]` is filled; the other entries are room for the
# chunks of the other ranks. Afterwards the root's list is full. The chunks may have different sizes.

# %% exercise="gather" todo="4.5" minutes=10 difficulty=1 points=1
from manyhands.collectives.trees import gather

# %% check="4.5" tags=["nbval-check-output"]
check.gather(gather)

# %% [markdown]
# ## 9. Chunks in pieces (optional)
#
# In a reduce-scatter, receiving takes time, and so does adding. Can the two go on at once? If a large
# chunk is sent in **pieces**, the first piece can be combined while the next ones still travel. So
# start to receive all pieces and to send all pieces. Then wait for one receive after the other, and
# combine each piece once it has arrived. `tensor.split(size)` splits a tensor into pieces of `size`
# numbers, which are views. The chunk you send may be a little larger than the one you receive, and so
# have one piece more: 10 numbers on 4 ranks make two chunks of 3 and two of 2.

# %% exercise="exchange_in_pieces" todo="4.8" minutes=15 difficulty=2 points=2
from manyhands.collectives.ring import exchange_in_pieces

# %% check="4.8" tags=["nbval-check-output"]
check.exchange_in_pieces(exchange_in_pieces)

# %% [markdown]
# Is this worth the effort here? The next cell exchanges 16 MB between two ranks, alternately whole
# and in pieces.


# %%
def whole_and_in_pieces():
    partner = 1 - dist.get_rank()
    outgoing, total = torch.zeros(4 * 2**20), torch.zeros(4 * 2**20)
    steps = (exchange_and_combine, exchange_in_pieces)
    return in_turn([partial(f, outgoing, partner, total, partner, "sum") for f in steps], 12)


if check.ready("4.6", "4.8"):
    whole, pieces = map(median, slowest_rank(run_ranks(whole_and_in_pieces, 2)))
    print(f"whole {1e3 * whole:.0f} ms, in pieces {1e3 * pieces:.0f} ms", end="; ")
    print(f"pieces / whole: {pieces / whole:.2f}")

# %% [markdown]
# Pieces can save at most the time of adding, and each of them costs the latency of one more message.
# On a machine whose few cores carry the messages *and* add, the gain is uncertain: the ratio changes
# from run to run, and it may lie on either side of 1. Between GPUs, carrying and adding do overlap,
# because a network card can carry a finished piece while the GPU adds the next one. So NCCL works in
# pieces throughout.

# %% [markdown]
# ## 10. Beside the library, and as a job (optional)
#
# How good is your ring? The next cell all-reduces 16 MB on 4 ranks, alternately by your ring and by
# gloo. Look at the last number, your time divided by the library's.


# %%
def beside_the_library():
    tensor = torch.zeros(4 * 2**20)
    return in_turn([partial(all_reduce_ring, tensor), partial(dist.all_reduce, tensor)], 9)


if check.ready("4.10"):
    by_hand, library = map(median, slowest_rank(run_ranks(beside_the_library, 4)))
    print(f"by hand {1e3 * by_hand:.0f} ms, library {1e3 * library:.0f} ms", end="; ")
    print(f"by hand / library: {by_hand / library:.2f}")

# %% [markdown]
# A few lines of Python are usually not far behind the library, because nearly all of the time goes
# into moving and adding numbers, which compiled code does in both cases. The ratio changes from run
# to run, because the ranks share the cores with everything else on the machine. `make bench` measures
# the same at 64 MB with many pairs.
#
# ### What does NCCL stand for?
#
# Is NCCL a "common" or a "collective" communications library? Both names can be found in lectures.
# Its own documentation says NVIDIA **Collective** Communications Library
# (https://docs.nvidia.com/deeplearning/nccl/), and after this lesson you know why: it is a library of
# collectives. gloo, the one used here, is another. Which of the two does this installation have?

# %%
print("gloo:", dist.is_gloo_available(), " NCCL:", dist.is_nccl_available())

# %% [markdown]
# ### What would hang on GPUs?
#
# Does a program that works with gloo also work with NCCL? Not always, because NCCL is stricter. It
# keeps one queue for each pair of ranks in a group, and matches messages by their place in that queue
# alone: it ignores tags, and does not notice when the two tensors differ in size. The first message
# of a pair also sets up a connection, for which both ranks have to be there. You can find such
# mistakes without a GPU, because `run_ranks(..., rules="nccl")` runs on gloo, but holds every call to
# NCCL's rules and stops at the first one that breaks them.
#
# Here each of three ranks starts to send to the next one, then receives from the one before it, and
# waits for its own message last. With gloo `isend` returns at once, so this works. What will the
# rules say?


# %%
def round_the_circle():
    rank, n = dist.get_rank(), dist.get_world_size()
    outgoing, incoming = torch.tensor([float(rank)]), torch.empty(1)
    work = dist.isend(outgoing, dst=(rank + 1) % n)
    dist.recv(incoming, src=(rank - 1) % n)
    work.wait()
    return incoming.item()


print("gloo:", run_ranks(round_the_circle, 3, rules=""))
try:
    run_ranks(round_the_circle, 3, rules="nccl")
except RuleBroken as broken:
    print(textwrap.fill(f"NCCL's rules: {broken}", 100))

# %% [markdown]
# With NCCL's rules even `isend` waits here: each rank sets up the connection to the next one, which
# is busy setting up its own, and the circle is closed. On GPUs the program would hang in its first
# step if, as by default, each pair sets up its connection at its first message. Your ring sends the same
# messages, but as one batch, which NCCL carries together. The rules have no objection to it.


# %%
def ring_of_ones():
    tensor = torch.ones(12)
    all_reduce_ring(tensor)
    return tensor.unique().tolist()


if check.ready("4.6", "4.10"):
    print(run_ranks(ring_of_ones, 3, rules="nccl"))

# %% [markdown]
# ### A job with your functions in it
#
# The next cell writes your functions to `mine/collectives.py` and starts a job with them. The script
# measures all-reduces at several sizes, with your ring among them, and compares them with the library's
# all-reduce and with the rate at which the machine copies memory. Without `--only` it measures all
# collectives. `ranks=4` asks for four ranks. On a cluster with GPUs the same file uses NCCL:
# `sbatch sbatch/collectives.sbatch --impl mine`.
#
# While the job runs, the cell shows its progress and its last lines of output. All of its output is
# in a file in the folder `runs` beside this notebook. The line in it that begins with `yours` names
# those of your functions that the script can call; `--only` chooses among them.
#
# In the table that the script prints, the column "algorithm" is the tensor's size divided by the
# time. The column "bus" multiplies it by 2(n-1)/n, the part of the tensor that a rank sends in a
# ring, so "bus" can be compared with the speed of a link, for any n. The column "predicted" is the
# time by the formula of section 7, with an $\alpha$ and a $\beta$ that the script fits to messages on
# this machine (section 11). If other programs delayed some of these messages, the prediction may even
# fall as the size grows; then it says nothing.

# %%
if check.ready("4.2", "4.10"):
    check.keep()
    folder = watch.run(
        *("../sbatch/collectives.sbatch", "--impl", "mine"),
        *("--only", "all_reduce", "--max-mb", 1),
        ranks=4,
    )

# %%
if check.ready("4.2", "4.10"):
    display(Image(folder / "bandwidth.png", alt="Bus bandwidth of the all-reduces against size"))

# %% [markdown]
# This figure does not look like the one of section 7. "native" is the library's all-reduce, and the
# dashed grey line is the rate at which this machine copies memory. Between ranks of one machine,
# messages *are* copies in memory: rank 0 has no network card at which the others would queue, and
# with few cores each of the ring's many steps waits for its turn. So here the naive version can be as
# fast as the ring or faster, and for small tensors it nearly always is. The ring was made for ranks
# that have a link each, as on a cluster.

# %% [markdown]
# ## 11. When does the ring pay? (optional)
#
# The riddle had a network whose $\alpha$ and $\beta$ you knew. What are they on this machine? Measure
# single messages: two ranks play ping-pong, and half of a round trip is one message. Each size is
# tried several times, and the lower quartile is taken, because a busy machine makes a message slower,
# never faster. Compare the times of the small messages with each other, then those of the large ones.

# %%
SIZES = [2**k for k in range(3, 24, 2)]  # 8 bytes to 8 MB


def ping_pong(sizes, repeats=30):
    """Time of one message (s) for each size (bytes): the lower quartile of the repeats."""
    rank, quartiles = dist.get_rank(), []
    for nbytes in sizes:
        tensor, times = torch.zeros(nbytes // 4), []
        for _ in range(repeats):
            start = time.perf_counter()
            if rank == 0:
                dist.send(tensor, dst=1)
                dist.recv(tensor, src=1)
            else:
                dist.recv(tensor, src=0)
                dist.send(tensor, dst=0)
            times.append((time.perf_counter() - start) / 2)
        quartiles.append(sorted(times)[repeats // 4])
    return quartiles


machine_s = run_ranks(ping_pong, 2, SIZES)[0]
for nbytes, seconds in zip(SIZES, machine_s, strict=True):
    print(
        f"{nbytes:9,} bytes: {1e6 * seconds:8.0f} microseconds, {nbytes / seconds / 1e9:6.3f} GB/s"
    )

# %% [markdown]
# Thirty bytes take about as long as a few thousand, because nearly all of the time is latency. Only for
# large messages does the time grow with the size. (If other programs are busy on your machine, some times
# are far too long. Run the cell again.)
#
# Two numbers, $\alpha$ and $\beta$, describe such a table roughly. Now fit them. The longest time is many
# times the shortest, so an ordinary least-squares fit would be determined almost entirely by the largest
# messages. Let every message count by its *relative* error instead. `torch.linalg.lstsq(A, b).solution` is
# the x for which the squares of A x - b have the smallest sum; A has a row for each message and a column
# for each unknown.

# %% exercise="fit_alpha_beta" todo="4.11" minutes=15 difficulty=2 points=2
from manyhands.collectives.alpha_beta import fit_alpha_beta

# %% check="4.11" tags=["nbval-check-output"]
check.fit_alpha_beta(fit_alpha_beta)

# %%
if check.ready("4.11"):
    alpha_s, beta_s = fit_alpha_beta(SIZES, machine_s)
    print(f"this machine: alpha {1e6 * alpha_s:.0f} microseconds, 1/beta {1e-9 / beta_s:.2f} GB/s")
    print(f"latency takes half of the time at {alpha_s / beta_s:,.0f} bytes, and more below that")

# %% [markdown]
# ### From a message to a collective
#
# The last line printed above gives the size at which latency takes half of the time; for smaller
# messages it takes more. To predict a collective, you also need its rounds and its messages. Section
# 7 had a table of them for three all-reduces. You know nine programs for six collectives now: write a
# function that gives, for each program, the number of rounds and the size of a message.

# %% exercise="rounds_and_message" todo="4.12" minutes=15 difficulty=2 points=2
from manyhands.collectives.alpha_beta import rounds_and_message

# %% check="4.12" tags=["nbval-check-output"]
check.rounds_and_message(rounds_and_message)

# %% [markdown]
# ### Predict: where does the ring beat the tree?
#
# An all-reduce on 4 ranks takes 4 rounds as a tree and 6 as a ring, but the messages of the ring are
# four times smaller. So the tree should win for small tensors, and the ring for large ones. On the
# slow network of section 1 (4 ms, 100 MB/s), from how many bytes on is the ring faster? Write your
# number down, then check that a fit finds the network's two numbers again.

# %%
crossing_bytes = None  # your number

# %% answer="true"
crossing_bytes = 320_000  # 4 (a + b S) = 6 (a + b S/4), so S = 0.8 a / b; a = 4 ms, 1/b = 100 MB/s


# %%
def slow_ping_pong(sizes, repeats):
    with SlowNetwork(*SLOW):
        return ping_pong(sizes, repeats)


if check.ready("4.11"):
    slow_sizes = [2**k for k in range(10, 21, 2)]
    slow_s = run_ranks(slow_ping_pong, 2, slow_sizes, 5)[0]
    slow_alpha_s, slow_beta_s = fit_alpha_beta(slow_sizes, slow_s)
    print(f"slow network: alpha {1e3 * slow_alpha_s:.2f} ms, 1/beta {1e-6 / slow_beta_s:.0f} MB/s")

# %% [markdown]
# The fit finds roughly the numbers that were put in. Messages take longer than that, because the machine
# has a latency of its own, and because a simulated delay is a sleep, which always lasts a bit longer than
# requested. Now run all nine programs on 4 ranks, on the slow network and on this machine without it. In
# each pair of numbers, compare the predicted time with the measured one. Where does the model hold?

# %%
TODOS = ("4.2", "4.3", "4.4", "4.5", "4.6", "4.7", "4.9", "4.10")
CHUNKED = ("gather", "all_gather_ring", "reduce_scatter_ring")
if check.ready(*TODOS, "4.11"):
    nine = {
        fn.__name__: fn
        for fn in (
            *(broadcast_naive, broadcast_tree, reduce_tree, gather, all_gather_ring),
            *(reduce_scatter_ring, all_reduce_naive, all_reduce_tree, all_reduce_ring),
        )
    }
    slow_sizes = [2**k for k in (12, 16, 19, 20)]
    on_network = run_ranks(time_collectives, 4, nine, slow_sizes, SLOW, 2, CHUNKED)[0]
    on_machine = run_ranks(time_collectives, 4, nine, [2**12, 2**20], None, 9, CHUNKED)[0]


# %%
def predicted_s(name, world_size, nbytes, alpha_s, beta_s):
    count, message_bytes = rounds_and_message(name, world_size, nbytes)
    return count * (alpha_s + beta_s * message_bytes)


def print_table(title, measured, alpha_s, beta_s):
    print(f"{title + ', ms: predicted | measured':40}{2**12:,} bytes{2**20:12,} bytes")
    for name in nine:
        cells = [
            f"{1e3 * predicted_s(name, 4, nbytes, alpha_s, beta_s):6.1f}"
            f" |{1e3 * measured[name, nbytes]:6.1f}"
            for nbytes in (2**12, 2**20)
        ]
        print(f"{name:30}{cells[0]:>18}{cells[1]:>18}")


if check.ready(*TODOS, "4.11", "4.12"):
    print_table("slow network", on_network, slow_alpha_s, slow_beta_s)
    print()
    print_table("this machine", on_machine, alpha_s, beta_s)

# %% [markdown]
# On the slow network the two times agree to within about a quarter on a quiet machine, so two numbers and a
# count of messages describe a network well. On the machine itself they mostly do not agree: with few cores
# the collectives take longer than predicted, often several times as long. The model assumes that the
# messages of one round travel at the same time, but on a machine with fewer cores than ranks they take
# turns, since a rank needs a core to send, and to add up as well. A model is only as good as its
# assumptions, and these hold better on a cluster, where each rank has its own processor and network link.
#
# Where do tree and ring cross? Set their times equal and solve for the size $S$:
#
# $$4\,(\alpha + \beta S) = 6\,(\alpha + \beta S/4) \quad\Rightarrow\quad S = 0.8\,\alpha/\beta$$

# %%
if check.ready(*TODOS, "4.11", "4.12"):
    faster = [
        nbytes
        for nbytes in slow_sizes
        if on_network["all_reduce_ring", nbytes] < on_network["all_reduce_tree", nbytes]
    ]
    below = max((n for n in slow_sizes if n < min(faster, default=math.inf)), default=0)
    print(
        f"ring beats tree: you said from {crossing_bytes} bytes, "
        f"formula {0.8 * SLOW.latency_s * SLOW.bytes_per_s:,.0f}, with the fitted numbers "
        f"{0.8 * slow_alpha_s / slow_beta_s:,.0f}; measured: slower at {below:,}, "
        f"faster at {min(faster, default=math.nan):,} bytes"
    )

# %%
if check.ready(*TODOS, "4.11", "4.12"):
    names = ("all_reduce_naive", "all_reduce_tree", "all_reduce_ring")
    fine = [2 ** (k / 4) for k in range(48, 81)]
    times_ms = {
        name: (slow_sizes, [1e3 * on_network[name, nbytes] for nbytes in slow_sizes])
        for name in names
    }
    model_ms = {
        name: (fine, [1e3 * predicted_s(name, 4, n, slow_alpha_s, slow_beta_s) for n in fine])
        for name in names
    }
    figure, ax = figures.new_figure(width=6, height=4)
    figures.measured_and_predicted(ax, times_ms, model_ms, "tensor size (bytes)", "time (ms)")
    figures.show(
        figure, "Time of three all-reduces against tensor size, on 4 ranks and the slow network."
    )

# %% [markdown]
# On a quiet machine the formula's size lies between the two measured sizes. If both measured sizes
# are larger, the machine was busy: the ring has more messages in a row, so anything that delays
# messages delays the ring most. In the figure the tree is best for small tensors and the ring for
# large ones. The naive version is never the best, though for small tensors it may match or beat the
# ring, because both need six messages in a row. Good libraries make use of this crossing, too: NCCL
# and MPI choose the pattern by the size of the tensor. The rule "tree for small, ring for large"
# holds for the tree of this lesson, which sends the whole tensor in every round. NCCL also has double
# trees, through which a tensor flows in small pieces. They reach nearly the full bandwidth with far
# fewer rounds than a ring (Sanders et al. 2009; Jeaugey 2019).

# %% [markdown]
# ## Recap
#
# You can now
#
# - write a collective from send and receive, in a group, for any root, size and type,
# - avoid a deadlock, and recognise one,
# - say how many messages and bytes a collective costs, and check it with a ledger,
# - predict its time from rounds, latency and bandwidth, and say when the prediction fails,
# - say why gradients often travel in rings.
#
# | you wrote | PyTorch's own |
# |---|---|
# | `broadcast_naive`, `broadcast_tree` | `dist.broadcast` |
# | `all_gather_ring` | `dist.all_gather` |
# | `reduce_scatter_ring` | `dist.reduce_scatter` |
# | `all_reduce_ring` | `dist.all_reduce` |
# | `reduce_tree`, `gather` (optional) | `dist.reduce`, `dist.gather` |
#
# **Questions**
#
# <details><summary>Eight GPUs all-reduce 1 GB in a ring. How much does each of them send? And how much on 512 GPUs?</summary>
#
# Each GPU sends 2 x 7/8 = 1.75 GB on 8 GPUs, and 2 x 511/512 = 1.996 GB on 512. The bytes hardly
# grow, but the number of messages in a row grows from 14 to 1022, and each costs the latency. That is
# why libraries also use trees on very many GPUs.
# </details>
#
# <details><summary>Ranks 0 to 6 call all-reduce, and rank 7 calls broadcast. What do you see?</summary>
#
# At best an error, often a hang, and sometimes wrong numbers: in this lesson's functions, messages
# are matched by their order between two ranks, and nothing in a message says which call it belongs
# to.
# </details>

# %%
check.summary()

# %% [markdown]
# **Sources**: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication
# Operations in MPICH", https://doi.org/10.1177/1094342005051521; Patarasuk and Yuan 2009,
# "Bandwidth optimal all-reduce algorithms for clusters of workstations",
# https://doi.org/10.1016/j.jpdc.2008.09.002; Sanders, Speck and Träff 2009, "Two-tree algorithms
# for full bandwidth broadcast, reduction and scan", https://doi.org/10.1016/j.parco.2009.09.001;
# Graham et al. 2016, "Scalable Hierarchical Aggregation Protocol (SHArP): A Hardware Architecture
# for Efficient Data Reduction", https://doi.org/10.1109/COMHPC.2016.006; on NVLS, NCCL's authors in
# https://github.com/NVIDIA/nccl/issues/1031; Jeaugey 2019, "Massively Scale Your Deep Learning
# Training with NCCL 2.4",
# https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/; PyTorch
# documentation, "Distributed communication package",
# https://docs.pytorch.org/docs/stable/distributed.html.
