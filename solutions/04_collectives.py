# ---
# manyhands: {title: Collectives, minutes: 150, goal: "Build broadcast, reduce, gather and the ring all-reduce from send and recv, count every message, and predict how long each takes", job: {flags: "--only all_reduce --max-mb 4"}}
# ---

# %% [markdown]
# # 04 Collectives: what ranks can say to each other
#
# When several processors train one model, they have to exchange numbers. They do so in a few fixed
# patterns, the **collectives**, in which all of them take part together. All of distributed
# training, from data parallelism to tensor parallelism, is made of these patterns.
#
# ![Four ranks hold coloured blocks; broadcast copies one block to all, reduce adds all blocks up on one rank, gather collects them on one rank, all-gather collects them on all, reduce-scatter leaves each rank one piece of the sum, and all-reduce leaves the whole sum on all](figures/collectives_overview.svg)
#
# PyTorch offers each pattern as one call. What happens inside? How many messages does it send, and
# how long will it take? In this lesson you build the collectives yourself, from two calls only: one
# that sends, and one that receives. Then you count every message, and predict the time from two
# numbers.

# %%
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from IPython.display import Image, display
from torch import Tensor

from manyhands.checks import collectives as check, score
from manyhands.collectives.trees import Group
from manyhands.instruments import figures
from manyhands.instruments.ledger import Ledger, calls, rounds, traffic
from manyhands.jobs import watch
from manyhands.ranks import lab
from manyhands.ranks.lab import run_ranks
from manyhands.ranks.network import SlowNetwork

lab.warm_up()
print(
    f"torch {torch.__version__}, {os.cpu_count()} cores; the ranks of this notebook use CPU + gloo"
)

# %% [markdown]
# ## 1. Send and receive
#
# A **rank** is one process of a job, and also its number. `run_ranks(fn, 2)` starts two ranks,
# calls `fn` in each, and returns the two results as a list. Ranks share no memory, so they send
# each other messages, with two calls:
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
# Both hold 10. The program was the same on both ranks; the `if` made them do different things.
#
# The library that carries the messages is called the **backend**. Between CPUs it is gloo, between
# GPUs it is NCCL. The calls are the same.
#
# ### The ledger
#
# To know what a collective costs, you have to know who sent how many bytes to whom. A `Ledger`
# records every message inside its `with` block. You will see one line per call. A number of type
# float32 has 4 bytes.


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
# of this lesson takes one as its last argument, `group`. `None` means all ranks. Inside a group the
# ranks count from 0 again, so ask for your place with `dist.get_rank(group)` and for the number of
# ranks with `dist.get_world_size(group)`, and name partners by `group_dst` and `group_src`. Here
# ranks 3 and 1 of a job form a group, in this order, and the first sends its number to the second.


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
# Rank 1 of the job received the 3 of its partner. To confuse the rank in the job with the rank in
# the group is one of the most common mistakes in this field, so your functions will be tried with
# such a group.
#
# ### Tensors that are not in one piece
#
# A message is one piece of memory. A column of a matrix is not, because its numbers lie far apart.
# The context manager `flat`, given below, helps: `with flat(tensor) as vector:` gives you a vector
# that can be sent, and whatever you write into the vector is in `tensor` afterwards.

# %% show="true"
from manyhands.collectives.trees import flat

# %% tags=["nbval-check-output"]
matrix = torch.arange(6.0).view(3, 2)
with flat(matrix[:, 1]) as vector:
    vector += 100
print(matrix.tolist())

# %% [markdown]
# Only the second column has changed. Are PyTorch's own calls as careful? `dist.send` refuses a column
# with an error. Now try `dist.all_reduce`, which adds up a tensor over all ranks: the second column
# should become 1 + 2 = 3 on both ranks, and the other columns should stay 1 on rank 0 and 2 on rank 1.


# %%
def all_reduce_of_a_column():
    matrix = torch.full((4, 3), 1.0 + dist.get_rank())
    dist.all_reduce(matrix[:, 1])
    return matrix.tolist()


for rank, matrix in enumerate(run_ranks(all_reduce_of_a_column, 2)):
    print(f"rank {rank}:", *matrix)

# %% [markdown]
# With gloo (seen in PyTorch 2.13) there is no error, and the result is wrong: the call takes four
# numbers that lie side by side, from the column's first one on, so it adds up parts of other columns.
# That is why every function of this lesson works on the vector of `flat`, and why its checks try
# columns too.
#
# ### Putting two tensors together
#
# A **reduction** combines the tensors of all ranks into one, number by number. The **operation**
# says how: by the sum, the smallest, the largest or the average. Two tensors are combined at a
# time. For the average, only add on the way, and divide once at the end, when all ranks are in.

# %% exercise="combine" todo="4.1" minutes=5 difficulty=1 points=1
from manyhands.collectives.trees import combine

# %% check="4.1" tags=["nbval-check-output"]
check.combine(combine)

# %% [markdown]
# ## 2. One to all: broadcast
#
# How does the tensor of one rank, the **root**, reach all others? In the simplest way the root
# sends it to everybody, one after the other.

# %% exercise="broadcast_naive" todo="4.2" minutes=10 difficulty=1 points=1
from manyhands.collectives.trees import broadcast_naive

# %% check="4.2" tags=["nbval-check-output"]
check.broadcast_naive(broadcast_naive)

# %% [markdown]
# With 8 ranks the root sends 7 messages, one after the other, and meanwhile six ranks have nothing
# to do. But a rank that has the tensor can pass it on. Then the number of ranks that have it
# doubles in every round. The pattern is a **tree**.
#
# ![On the left rank 0 sends to ranks 1 to 7, seven messages in a row; on the right the tree needs three rounds: 0 to 1, then 0 to 2 and 1 to 3, then four messages at once from ranks 0 to 3 to ranks 4 to 7](figures/collectives_tree.svg)
#
# In the figure rank 0 is the root. To allow any root, count places from the root:
# `place = (rank - root) % n`.

# %% exercise="broadcast_tree" todo="4.3" minutes=20 difficulty=2 points=2
from manyhands.collectives.trees import broadcast_tree

# %% check="4.3" tags=["nbval-check-output"]
check.broadcast_tree(broadcast_tree)

# %% [markdown]
# ### Predict: the root's messages
#
# How many messages does the root send on 64 ranks, with either version? Write your numbers down. A
# 64-rank job is too much for most laptops, so the cell below measures 8 ranks and prints the
# formula for 64 beside it.

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
        print(
            f"{fn.__name__}: 64 ranks: you said {said}, formula {formula(64)}; "
            f"8 ranks: formula {formula(8)}, measured {sent_by_root(fn, 8)}"
        )

# %% [markdown]
# ## 3. All to one: reduce and gather
#
# The tree saves the root most of its sends. Does it help in the other direction, too? It does,
# because a tree also works backwards. In the last round of the broadcast on 8 ranks, four ranks
# sent to four others. In the first round of a **reduce**, those four send their tensors back, and
# the receivers combine. Then two send to two, then one to the root.

# %% exercise="reduce_tree" todo="4.4" minutes=15 difficulty=2 points=2
from manyhands.collectives.trees import reduce_tree

# %% check="4.4" tags=["nbval-check-output"]
check.reduce_tree(reduce_tree)

# %% [markdown]
# A **gather** collects the tensors without combining them. Every rank holds a list `chunks`, with
# one tensor for each rank. On rank r only `chunks[r]` is filled; the others are room for the chunks
# of the other ranks. Afterwards the root's list is full. The chunks may have different sizes.

# %% exercise="gather" todo="4.5" minutes=10 difficulty=1 points=1
from manyhands.collectives.trees import gather

# %% check="4.5" tags=["nbval-check-output"]
check.gather(gather)

# %% [markdown]
# ### All to all: two ways to an all-reduce
#
# An **all-reduce** is a reduce whose result everybody gets. Two versions follow from the functions
# you have, and both are given. Read them: which rank has the most to do?

# %% show="true"
from manyhands.collectives.trees import all_reduce_naive, all_reduce_tree


# %%
def busiest_bytes(fn, world_size, nbytes):
    """The most bytes that any rank sends, and the most that any rank receives."""
    results = run_ranks(recorded, world_size, fn, torch.zeros(nbytes // 4))
    sent, received = [0] * world_size, [0] * world_size
    for (sender, receiver), count in traffic(entry for mine in results for entry in mine).items():
        sent[sender] += count
        received[receiver] += count
    return max(sent), max(received)


# %% tags=["nbval-check-output"]
if check.ready("4.1", "4.2", "4.3", "4.4", "4.5"):
    for fn in (all_reduce_naive, all_reduce_tree):
        sent, received = busiest_bytes(fn, 8, nbytes=8000)
        print(
            f"{fn.__name__:16} 8 ranks, 8000 bytes: sends up to {sent}, receives up to {received}"
        )

# %% [markdown]
# Rank 0 is the busiest in both. In the naive version it receives 7 times the tensor and sends it 7
# times; in the tree it is 3 times each. The more ranks, the worse: with a model of a billion
# parameters, all others would wait for rank 0. To share the work evenly, every rank has to send and
# receive at the same time.

# %% [markdown]
# ## 4. When everybody sends first
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
# With gloo, a `send` returns only when its message has been taken, even one of a few bytes. So each
# rank waits in `send` for the other to call `recv`, and neither gets there. This is a **deadlock**.
# Outside this course such a program hangs until somebody ends it. Here the wait has a limit, and
# the message names the ranks and the line in which each of them waits. Other backends differ: MPI
# may buffer a small message and return at once, and NCCL returns once the message is queued on the
# GPU. So a program with this mistake may work on one backend and hang on another.
#
# One cure is an order: even ranks send first, odd ranks receive first. It works, but uses only one
# direction at a time. It is better to *start* both messages, then wait for both.
#
# - `dist.isend(tensor, group=..., group_dst=...)` and `dist.irecv(...)` return at once (the i
#   stands for "immediate"). Each returns a **work**, and `work.wait()` returns when that message is
#   through.
# - `dist.batch_isend_irecv([...])` starts several messages together. It takes a list of
#   `dist.P2POp(dist.isend, tensor, group=group, group_peer=...)`, or the same with `dist.irecv`,
#   and returns a list of works. Between GPUs this is the safe way, because NCCL carries separate
#   messages of two ranks one after the other: if both queue their send first, both block in their
#   send. A batch goes all at once.
#
# Until its work is through, do not touch a tensor that is being sent or received. Wait for each
# work only once, because a second `wait` for the same receive can hang.

# %% exercise="start_exchange" todo="4.6" minutes=10 difficulty=1 points=1
from manyhands.collectives.ring import start_exchange

# %% check="4.6" tags=["nbval-check-output"]
check.start_exchange(start_exchange)

# %% [markdown]
# `exchange`, given below, starts both messages and waits for both. It is the step from which all
# rings are built.

# %% show="true"
from manyhands.collectives.ring import exchange

# %% [markdown]
# ## 5. The ring
#
# How can an all-reduce keep all ranks equally busy? Put the ranks in a ring. In each step every
# rank sends one chunk to the next rank and receives one from the rank before it. There is no root,
# and all links are in use all the time.
#
# ![Four ranks in a ring, each with four chunks; in one step every rank sends one chunk to the next rank and receives another from the rank before it](figures/collectives_ring.svg)
#
# ### All-gather
#
# Every rank has one chunk and needs the chunks of all. In step 0 each rank sends its own chunk. In
# every later step it passes on the chunk that it received last. After n-1 steps each chunk has
# reached every rank.
#
# Take 4 ranks, and write down on paper what rank 0 sends in steps 0, 1 and 2, before you write
# code.

# %% exercise="all_gather_ring" todo="4.7" minutes=20 difficulty=2 points=2
from manyhands.collectives.ring import all_gather_ring

# %% check="4.7" tags=["nbval-check-output"]
check.all_gather_ring(all_gather_ring)

# %% [markdown]
# ### Reduce-scatter
#
# Now the other half. Every rank holds n chunks of its own numbers, and in the end rank r must hold
# the sum of all ranks' chunk r. So a sum travels round the ring and grows: each rank adds its own
# part and sends the sum on. The sum for rank r starts at rank r+1, and arrives at rank r last.
#
# First write one step of it: send a chunk, receive another, and combine the received chunk with
# your own. Receiving takes time, and so does combining. If a large chunk is sent in **pieces**, the
# first piece can be combined while the next ones still travel. So start to receive all pieces and
# to send all pieces, then wait for one receive after the other, and combine. `tensor.split(size)`
# splits a tensor into pieces of `size` numbers, which are views. The chunk you send may be a little
# larger than the one you receive, and so have a piece more: 10 numbers on 4 ranks make two chunks
# of 3 and two of 2.

# %% exercise="exchange_and_combine" todo="4.8" minutes=15 difficulty=2 points=2
from manyhands.collectives.ring import exchange_and_combine

# %% check="4.8" tags=["nbval-check-output"]
check.exchange_and_combine(exchange_and_combine)

# %% [markdown]
# Then the ring. Again on paper first: with 4 ranks, which chunk does rank 0 send in step 0, so that
# the sum of chunk 0 arrives at rank 0 in the last step?

# %% exercise="reduce_scatter_ring" todo="4.9" minutes=15 difficulty=2 points=2
from manyhands.collectives.ring import reduce_scatter_ring

# %% check="4.9" tags=["nbval-check-output"]
check.reduce_scatter_ring(reduce_scatter_ring)

# %% [markdown]
# ### All-reduce
#
# You have both halves. `vector.tensor_split(n)` splits a vector into n chunks whose sizes differ by
# at most 1. The chunks are views, so whatever you write into them is in the vector.

# %% exercise="all_reduce_ring" todo="4.10" minutes=10 difficulty=1 points=1
from manyhands.collectives.ring import all_reduce_ring

# %% check="4.10" tags=["nbval-check-output"]
check.all_reduce_ring(all_reduce_ring)

# %% [markdown]
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
    score("messages sent by a rank", ring_messages, 2 * 3, len(sends))
    score(
        "bytes sent by a rank", ring_bytes, 2 * 3 / 4 * 4800, sum(e.nbytes for e in sends), "bytes"
    )

# %% [markdown]
# What happens with more ranks? Try 1 to 8, with a tensor of 840 numbers, because each of 1 to 8
# divides 840. The table shows how many bytes the busiest rank sends in the three all-reduces, as
# multiples of the tensor's size S. Compare how the columns grow.

# %% tags=["nbval-check-output"]
if check.ready("4.1", "4.2", "4.3", "4.4", "4.5", "4.10"):
    print("ranks  naive  tree   ring   2(n-1)/n")
    for n in range(1, 9):
        sent = [
            busiest_bytes(fn, n, 3360)[0] / 3360
            for fn in (all_reduce_naive, all_reduce_tree, all_reduce_ring)
        ]
        print(f"{n:5}  {sent[0]:5.2f}  {sent[1]:5.2f}  {sent[2]:5.2f}  {2 * (n - 1) / n:5.2f}")
        assert sent[2] == 2 * (n - 1) / n

# %% [markdown]
# The naive column grows with n and the tree's with log2 n, but the busiest rank of the ring never
# sends as much as twice the tensor, however many ranks there are. Patarasuk and Yuan (2009) proved
# that its 2(n-1)/n is a lower bound as long as the ranks do the adding. That is why rings carry the
# gradients of many large jobs. Only network switches that add up messages on their way need less
# (SHARP, Graham et al. 2016).

# %% [markdown]
# ### Look: your own ring, step by step
#
# The next figure is drawn from the messages that *your* `all_reduce_ring` has really sent. Each
# rank starts with numbers that carry its mark, so every message shows whose parts are in it. A
# column is a rank, a row is a chunk, and a cell names the ranks whose numbers are in that chunk so
# far. Arrows are the messages of the round. If your notebook has widgets, a slider below the figure
# takes you through the rounds.

# %%
from manyhands.instruments.replay import record, replay

if check.ready("4.10"):
    messages, results = zip(*run_ranks(record, 4, all_reduce_ring), strict=True)
    states = replay(messages, results)
    figures.show_rounds(
        states, "The ring all-reduce of 4 ranks: its start and six rounds, drawn from messages."
    )

# %% [markdown]
# In the first three rounds the sums grow. After them every rank holds one chunk that is complete:
# the reduce-scatter is done. In the last three rounds, the all-gather, the complete chunks travel
# on and overwrite the unfinished ones.
#
# Try `all_reduce_tree` or `all_reduce_naive` in the cell above, too.

# %% [markdown]
# ## 6. How long does it take?
#
# A message takes a fixed time, however small it is: the **latency**, called alpha. To this comes a
# time per byte, called beta; 1/beta is the **bandwidth**. So a message of $s$ bytes takes
#
# $$t(s) = \alpha + \beta s$$
#
# Which part dominates? Measure single messages on this machine: two ranks play ping-pong, and half
# of a round trip is one message. Each size is tried several times, and the lower quartile is taken,
# because a busy machine makes a message slower, never faster. Compare the times of the small
# messages with each other, then those of the large ones.

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
# Ten bytes take about as long as ten thousand, because nearly all of the time is latency. Only for
# large messages does the time grow with the size. (If other programs are busy on your machine, some
# times are too long. Run the cell again.)
#
# Two numbers describe this table. Fit them. The longest time is many times the shortest, so an
# ordinary least-squares fit would be determined by the largest messages only. Let every message
# count by its *relative* error.

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
# The last line above gives the size at which latency takes half of the time; below that size it
# takes more. How long does a whole collective take? It is a number of messages in a row, and
# messages of different ranks in the same round travel at the same time. So its time is (number of
# rounds) x (alpha + beta x bytes of one message). You know all nine collectives: say how many
# rounds each has, and how large its messages are.

# %% exercise="rounds_and_message" todo="4.12" minutes=15 difficulty=2 points=2
from manyhands.collectives.alpha_beta import rounds_and_message

# %% check="4.12" tags=["nbval-check-output"]
check.rounds_and_message(rounds_and_message)

# %% [markdown]
# ### Predict: where does the ring beat the tree?
#
# An all-reduce on 4 ranks takes 4 rounds as a tree and 6 as a ring, but the messages of the ring
# are four times smaller. So the tree should win for small tensors, and the ring for large ones.
#
# For the experiment you get a network of your own. Inside `with SlowNetwork(...)` every rank has a
# network card that carries messages at the speed you choose: here 4 ms of latency and 100 MB/s. It
# sleeps for as long as such a network would take. The messages and your functions are real; the
# time that a message takes is a model. On this network, from how many bytes on is the ring faster?
# Write your number down, then check that a fit finds the chosen speeds again.

# %%
crossing_bytes = None  # your number

# %% answer="true"
crossing_bytes = 320_000  # 4 (a + b S) = 6 (a + b S/4), so S = 0.8 a / b; a = 4 ms, 1/b = 100 MB/s

# %%
LATENCY_S, BYTES_PER_S = 4e-3, 100e6


def on_slow_network(fn, *args):
    with SlowNetwork(LATENCY_S, BYTES_PER_S):
        return fn(*args)


if check.ready("4.11"):
    slow_sizes = [2**k for k in range(10, 21, 2)]
    slow_s = run_ranks(on_slow_network, 2, ping_pong, slow_sizes, 5)[0]
    slow_alpha_s, slow_beta_s = fit_alpha_beta(slow_sizes, slow_s)
    print(f"slow network: alpha {1e3 * slow_alpha_s:.2f} ms, 1/beta {1e-6 / slow_beta_s:.0f} MB/s")

# %% [markdown]
# The fit finds roughly what was put in, with a little on top: the machine's own latency, and a
# sleep that always lasts a bit longer than asked for. Now run all nine collectives on 4 ranks.
# Compare the predicted and measured time in each pair, and look in the figure for the size at which
# the ring overtakes the tree.


# %%
def time_collectives(by_name, sizes, repeats, takes_chunks):
    """Time (s) of each collective and size (bytes): of the slowest rank, the lower quartile."""
    found = {}
    for name, fn in by_name.items():
        for nbytes in sizes:
            tensor, times = torch.zeros(nbytes // 4), []
            argument = (
                tensor.tensor_split(dist.get_world_size()) if name in takes_chunks else tensor
            )
            for _ in range(repeats):
                dist.barrier()
                start = time.perf_counter()
                fn(argument)
                slowest = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                times.append(slowest.item())
            found[name, nbytes] = sorted(times)[repeats // 4]
    return found


TODOS = ("4.1", "4.2", "4.3", "4.4", "4.5", "4.6", "4.7", "4.8", "4.9", "4.10")
CHUNKED = ("gather", "all_gather_ring", "reduce_scatter_ring")
if check.ready(*TODOS):
    nine = {
        fn.__name__: fn
        for fn in (
            *(broadcast_naive, broadcast_tree, reduce_tree, gather, all_gather_ring),
            *(reduce_scatter_ring, all_reduce_naive, all_reduce_tree, all_reduce_ring),
        )
    }
    slow_sizes = [2**k for k in (12, 14, 16, 18, 19, 20)]
    on_network = run_ranks(on_slow_network, 4, time_collectives, nine, slow_sizes, 3, CHUNKED)[0]


# %%
def predicted_s(name, world_size, nbytes, alpha_s, beta_s):
    count, message_bytes = rounds_and_message(name, world_size, nbytes)
    return count * (alpha_s + beta_s * message_bytes)


def print_table(measured, alpha_s, beta_s):
    for name in nine:
        sizes = [nbytes for known, nbytes in measured if known == name]
        cells = [
            f"{1e3 * predicted_s(name, 4, nbytes, alpha_s, beta_s):6.1f}"
            f" |{1e3 * measured[name, nbytes]:6.1f}"
            for nbytes in (sizes[0], sizes[-1])
        ]
        print(f"{name:20}{cells[0]:>18}{cells[1]:>18}")


if check.ready(*TODOS, "4.11", "4.12"):
    print(f"{'ms: predicted | measured':24}{slow_sizes[0]:,} bytes{slow_sizes[-1]:12,} bytes")
    print_table(on_network, slow_alpha_s, slow_beta_s)

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
# The lines are the predictions, and the points are measured. On a quiet machine they agree within
# about a tenth or two, so two numbers and a count of messages describe a network well. The tree is
# best for small tensors, the ring for large ones. The naive version is never the best, though for
# small tensors it may keep up with the ring, because both need six messages in a row.
#
# Where do the lines of tree and ring cross? Set their times equal and solve for the size $S$:
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
        f"formula {0.8 * LATENCY_S * BYTES_PER_S:,.0f}, with the fitted numbers "
        f"{0.8 * slow_alpha_s / slow_beta_s:,.0f}; measured: slower at {below:,}, "
        f"faster at {min(faster, default=math.nan):,} bytes"
    )

# %% [markdown]
# The two measured sizes should enclose the formula's. Good libraries use this, too: NCCL and MPI
# choose the pattern by the size of the tensor. The rule "tree for small, ring for large" holds for
# the tree of this lesson, which sends the whole tensor in every round. NCCL also has double trees,
# through which a tensor flows in small pieces. They reach nearly the full bandwidth with far fewer
# rounds than a ring (Sanders et al. 2009; Jeaugey 2019).

# %% [markdown]
# ### And on this machine, without the slow network?
#
# Here messages are copies in memory, and four ranks share the cores. Predict: will the model hold,
# and will the ring still win for the large tensor?

# %%
if check.ready(*TODOS, "4.11", "4.12"):
    on_machine = run_ranks(time_collectives, 4, nine, [2**12, 2**22], 9, CHUNKED)[0]
    print(f"{'ms: predicted | measured':24}{2**12:,} bytes{2**22:12,} bytes")
    print_table(on_machine, alpha_s, beta_s)

# %% [markdown]
# With few cores it mostly does not: the collectives take longer than predicted, often several times
# as long, and the ring may lose its lead. The model says that messages of one round go at the same
# time. On a machine with fewer cores than ranks they take turns, since a rank needs a core to send,
# and to add up as well. A model is as good as its assumptions. These hold better on a cluster,
# where each rank has its own processor and network link.

# %% [markdown]
# ## 7. Beside the library
#
# How good is your ring? The next cell all-reduces the same 16 MB on 4 ranks, by hand and by gloo,
# in turn. Look at the last number, your time divided by the library's.


# %%
def beside_the_library(repeats=9):
    tensor, times = torch.ones(4 * 2**20), {"by hand": [], "library": []}
    for _ in range(repeats):
        for name, fn in (("by hand", all_reduce_ring), ("library", dist.all_reduce)):
            tensor.fill_(1.0)
            dist.barrier()
            start = time.perf_counter()
            fn(tensor)
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    return {name: sorted(values[1:])[repeats // 2] for name, values in times.items()}


if check.ready(*TODOS):
    both = run_ranks(beside_the_library, 4)[0]
    print({name: f"{1e3 * seconds:.0f} ms" for name, seconds in both.items()})
    print(f"by hand / library: {both['by hand'] / both['library']:.2f}")

# %% [markdown]
# A few lines of Python usually come close, because nearly all of the time goes into moving and
# adding numbers, which compiled code does in both. The ratio changes from try to try, because the
# ranks share the cores with everything else on the machine. `make bench` measures the same at 64 MB
# with many pairs.
#
# ### What does NCCL stand for?
#
# Some lectures call it the "NVIDIA Common Communications Library". Its own documentation says
# NVIDIA **Collective** Communications Library (https://docs.nvidia.com/deeplearning/nccl/), and
# after this lesson you know why: it is a library of collectives. gloo, the one used here, is
# another. Which of the two does this installation of PyTorch have?

# %%
print("gloo:", dist.is_gloo_available(), " NCCL:", dist.is_nccl_available())

# %% [markdown]
# ## 8. Run it as a job, with your functions in it
#
# The next cell writes your functions to `mine/collectives.py` and starts a job with them. The
# script measures the all-reduces over several sizes, beside the library's and the machine's
# memory-copy rate. Without `--only` it measures all collectives. `ranks=4` asks for four ranks. On
# a cluster with GPUs the same file uses NCCL: `sbatch sbatch/collectives.sbatch --impl mine`.
#
# While the job runs, the cell shows its progress and what it printed last. All of its output is in
# a file in the folder `runs` beside this notebook. The line that begins with `yours` names the
# functions that the script calls; your other functions work inside them.
#
# The column "algorithm" is the tensor's size divided by the time. The column "bus" multiplies it by
# 2(n-1)/n, the part of the tensor that a rank sends in a ring, so "bus" can be compared with the
# speed of a link, for any n. The column "predicted" is the time by the model of section 6.

# %%
if check.ready(*TODOS):
    check.keep()
    folder = watch.run(
        *("../sbatch/collectives.sbatch", "--impl", "mine"),
        *("--only", "all_reduce", "--max-mb", 4),
        ranks=4,
    )

# %% [markdown]
# In the job's figure, "native" is the library's all-reduce. The dashed grey line is the rate at
# which this machine copies memory, which messages between its ranks can hardly exceed. On few cores
# each of the ring's many steps waits for its turn, so the ring is slow for small tensors; for
# larger ones the gap usually narrows. In section 6 it won for large tensors, because there every rank had a
# link of its own, as on a cluster.

# %%
if check.ready(*TODOS):
    display(Image(folder / "bandwidth.png", alt="Bus bandwidth of the all-reduces against size"))

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - write any collective from send and receive, in a group, for any root, size and type,
# - avoid a deadlock, and recognise one,
# - say how many messages and bytes a collective costs, and check it with a ledger,
# - predict its time from latency and bandwidth, and say when the prediction fails,
# - say why gradients often travel in rings.
#
# | you wrote | PyTorch's own |
# |---|---|
# | `broadcast_naive`, `broadcast_tree` | `dist.broadcast` |
# | `reduce_tree` | `dist.reduce` |
# | `gather` | `dist.gather` |
# | `all_gather_ring` | `dist.all_gather` |
# | `reduce_scatter_ring` | `dist.reduce_scatter` |
# | `all_reduce_ring` | `dist.all_reduce` |
#
# **Questions**
#
# <details><summary>An all-reduce of 1 GB on 8 GPUs in a ring. How much does each GPU send? And on 512?</summary>
#
# 2 x 7/8 = 1.75 GB, and 2 x 511/512 = 1.996 GB. The bytes hardly grow, but the number of messages
# in a row grows from 14 to 1022, and each costs the latency. That is why libraries also use trees
# on very many GPUs.
# </details>
#
# <details><summary>You all-reduce a tensor of 4 bytes, a loss, in every step. Ring or tree?</summary>
#
# Tree. Only latency counts, and a tree has 2 ceil(log2 n) messages in a row instead of 2 (n-1).
# </details>
#
# <details><summary>Ranks 0 to 6 call all-reduce, and rank 7 calls broadcast. What do you see?</summary>
#
# At best an error, often a hang, and sometimes wrong numbers: in this lesson's functions, messages
# are matched by their order between two ranks, and nothing in a message says which call it belongs
# to.
# </details>
#
# **Sources**: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication
# Operations in MPICH", https://doi.org/10.1177/1094342005051521; Patarasuk and Yuan 2009,
# "Bandwidth optimal all-reduce algorithms for clusters of workstations",
# https://doi.org/10.1016/j.jpdc.2008.09.002; Sanders, Speck and Träff 2009, "Two-tree algorithms
# for full bandwidth broadcast, reduction and scan", https://doi.org/10.1016/j.parco.2009.09.001;
# Graham et al. 2016, "Scalable Hierarchical Aggregation Protocol (SHArP): A Hardware Architecture
# for Efficient Data Reduction", https://doi.org/10.1109/COMHPC.2016.006; Jeaugey 2019, "Massively
# Scale Your Deep Learning Training with NCCL 2.4",
# https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/; PyTorch
# documentation, "Distributed communication package",
# https://docs.pytorch.org/docs/stable/distributed.html.
