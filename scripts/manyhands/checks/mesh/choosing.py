"""14.9 and 14.10: which technique, and how many tensor ranks."""

import random

from manyhands.checks.engine.spec import Call, Spec
from manyhands.checks.engine.values import show, text
from manyhands.checks.mesh.calls import called, in_words, number_or_none
from manyhands.mesh import choosing as truth

# ---- 14.9 ----------------------------------------------------------------------------------

PER_N = truth.STATE_BYTES * 2  # bytes of a GPU for each parameter whose state may fit


def asked(share: float, gpus: int, sequences: int, per_node: int | None = None) -> Call:
    """A model of this share of what fits on a GPU; the share's 20th is a whole number."""
    fits = 20 * random.randint(10**6, 10**8)  # parameters
    return (round(share * fits), gpus, PER_N * fits, sequences, per_node)


def models() -> list[Call]:
    """Each class; at and just beyond each limit; few sequences; small, large, unfilled nodes."""
    n = random.choice((24, 40, 56))
    beyond = 1.05
    return [
        asked(0.6, 1, 5),
        asked(0.6, n, 2 * n),
        asked(n - 0.5, n, 2 * n),
        asked(7.5, n, n - 1),
        asked(8.5, n, n - 1),
        asked(n + 0.5, n, 2 * n),
        # at the limits: a fit, as many sequences as GPUs, one node and no more
        asked(1, 1, 1),
        asked(1, n, 3),
        asked(beyond, 2, 2),
        asked(n, n, n),
        asked(n * beyond, n, n),
        asked(8, n, n // 2),
        asked(8 * beyond, n, n // 2),
        asked(5, 8, 7),
        # other nodes, sequences that the GPUs do not divide, a node's share and enough sequences
        asked(3.5, 12, 11, 4),
        asked(4.5, 12, 11, 4),
        asked(12.5, 32, 20, 16),
        asked(16.5, 32, 20, 16),
        asked(5.5, n, n + 3),
        asked(3.5, n, 2 * n, 4),
        asked(0.3, n, n // 2, 16),
        asked(2.5, n, 1),
        # within and beyond twice the room of a node, which is that of whole GPUs
        asked(15, n, n // 2),
        asked(17, n, n // 2),
        # fewer GPUs than a node has, with a state that a whole node would hold; a node and a half
        asked(3.5, 4, 3),
        asked(4.5, 4, 8),
        asked(1.5, 1, 5),
        asked(12.5, 12, 11, 16),
        asked(6.5, 12, 11),
    ]


def sizes_of(found: str, wanted: str, case: Call) -> str:
    """How many GPUs the state needs, or that the text is none of the five."""
    if found not in truth.CLASSES:
        return f"{found!r} is none of the five classes: {', '.join(map(repr, truth.CLASSES))}."
    needed = 2 * truth.STATE_BYTES * case.num_parameters / case.gpu_bytes
    return (
        f"The state takes half the memory of {show(needed, 4)} GPUs. A node has "
        f"{case.per_node or 8}, and the job has {case.num_gpus}."
    )


FSDP_RULE = "state / num_gpus <= room and sequences >= num_gpus"
NODE_RULE = "state / per_node <= room and num_gpus >= per_node"
FIRST_FSDP = f'if {FSDP_RULE}:\\n        return "FSDP"\\n    '
FIRST_NODE = f'if {NODE_RULE}:\\n        return "TP or PP"'
ORDER = "Go through the four rules in their order, and return at the first that holds."
approach = Spec(
    todo="14.9",
    truth=truth.approach,
    cases=models,
    observe=called,
    form=text,
    facts=sizes_of,
    tell=in_words("approach"),
    advice={"": ORDER},
    hints=(
        "Compute the bytes of the state, 16 per parameter, and the room for them on a GPU, which "
        "is half of gpu_bytes.",
        "Every rule compares a share with the room: the state itself, state / num_gpus, "
        "state / per_node. FSDP also needs a sequence for each GPU, and the third rule a whole "
        "node of GPUs.",
        f"{ORDER} A share that is exactly as large as the room fits.",
    ),
    mistakes=r"""
        STATE_BYTES * num_parameters => 2 * num_parameters ::
            Only the weights are counted, with 2 bytes each. | A parameter needs STATE_BYTES = 16
            bytes with its gradient and optimizer state.
        gpu_bytes / 2 => gpu_bytes :: The state may fill the whole GPU here, which leaves no room
            for activations. | State fits where 16 N bytes are at most half of a GPU's memory.
        state <= room: => state < room:
        state / num_gpus <= room => state / num_gpus < room
        state / per_node <= room => state / per_node < room ::
            A state that fills the room exactly is said not to fit. | Use <= in all three rules.
        "one GPU" if num_gpus == 1 else "DDP" => "one GPU" :: Only one of several GPUs is used. |
            Where the state fits and there are more GPUs, the answer is "DDP".
        if state <= room: => if state <= room and (num_gpus == 1 or sequences >= num_gpus): ::
            DDP is refused where there are fewer sequences than GPUs. | The first rule asks only
            whether the state fits on a GPU.
        sequences >= num_gpus => True ::
            FSDP is chosen although there are more GPUs than sequences, so that some would have
            nothing to do. | FSDP asks for sequences >= num_gpus, and for a state whose share fits.
        sequences >= num_gpus => sequences > num_gpus ::
            FSDP is refused where there are exactly as many sequences as GPUs.
        sequences >= num_gpus => sequences % num_gpus == 0 ::
            FSDP is refused where the GPUs do not divide the sequences.
        state / num_gpus <= room => True :: FSDP is chosen although the share of a GPU does not fit.
        state / per_node => state / 8 :: `per_node` is not used: every node has 8 GPUs. | The third
            rule asks whether state / per_node fits.
        state / per_node => state / num_gpus :: The third rule divides the state by all GPUs, but a
            copy of the model has to fit in one node.
        {NODE_RULE} => state / per_node <= room ::
            The third rule is taken with fewer GPUs than a node has. | It also asks for num_gpus >=
            per_node: a job of fewer GPUs has no whole node.
        {NODE_RULE} => state / min(per_node, num_gpus) <= room ::
            Where there are fewer GPUs than a node has, they are taken for a node.
        num_gpus >= per_node => num_gpus > per_node :: A job of exactly one node is refused.
        {FIRST_FSDP} =>
        {FIRST_NODE} => {FIRST_NODE}\n    if {FSDP_RULE}:\n        return "FSDP" :: The third rule
            is asked before the second, so the model is cut where FSDP would do. | {ORDER}
    """,
    module=globals(),
)

# ---- 14.10 ----------------------------------------------------------------------------------


def feedings() -> list[Call]:
    """Powers of two and not; too few sequences and too many; a node's size; no way."""
    k = random.choice((3, 5, 7))
    return [
        (64 * k, 128 * k, None),
        (16 * k, 16 * k, None),
        (32 * k, 16 * k, None),
        (4 * k, 12 * k, None),
        (6, 8, None),
        (12, 8, None),
        (40, 24, None),
        (1, 8, None),
        (1, 3, None),
        (5, 9, None),
        (1, 16, None),
        (1, 16, 16),
        (2 * k, 12 * k, 4),
        (2 * k, 12 * k, 6),
        (k, 12 * k, 12),
        (8, 8, 1),
        (7, 8, 1),
        (11, 16 * k, None),
        (10, 15, 4),
    ]


def shares_of(found: float | None, wanted: int, case: Call) -> str:
    """What the number of tensor ranks makes of the batch."""
    if found is None or found < 1 or found != int(found):
        return "The result is a whole number, at least 1."
    tp, gpus, sequences = int(found), case.num_gpus, case.sequences
    if gpus % tp:
        return f"{tp} does not divide {gpus} GPUs."
    if tp > (case.per_node or 8):
        return f"{tp} is more than a node has GPUs."
    said = f"With tp = {tp} there are {gpus // tp} shares of {sequences} sequences, "
    if sequences % (gpus // tp):
        return said + "which cannot all have the same number of whole sequences."
    return said + f"which is possible, but so it is with tp = {wanted}."


DIVIDES = "num_gpus % tp == 0 and "
EQUAL = "sequences % (num_gpus // tp) == 0"
TRIED = "range(1, per_node + 1)"
EVEN = "The num_gpus // tp shares must divide the sequences: sequences % (num_gpus // tp) == 0."
ALL_TRIED = "Try tp = 1, 2, 3, ... up to per_node, and return the first that fits."


def by_division(sequences: int, num_gpus: int, per_node: int = 8) -> int:
    """As many tensor ranks as there are GPUs for each sequence, rounded up."""
    tp = -(-num_gpus // sequences)
    if tp > per_node:
        raise ValueError(f"{tp} tensor ranks are more than a node has")
    return tp


def in_whole_shares(sequences: int, num_gpus: int, per_node: int = 8) -> int:
    """tp need not divide the GPUs: those that are left have nothing to do."""
    for tp in range(1, per_node + 1):
        if num_gpus >= tp and sequences % (num_gpus // tp) == 0:
            return tp
    raise ValueError("no tp does it")


smallest_tensor_degree = Spec(
    todo="14.10",
    truth=truth.smallest_tensor_degree,
    cases=feedings,
    observe=called,
    form=number_or_none,
    facts=shares_of,
    tell=in_words("smallest_tensor_degree"),
    advice={"": f"{ALL_TRIED} {EVEN}"},
    refusal=(
        "No number of tensor ranks up to per_node feeds all GPUs here, and the docstring asks for "
        "a ValueError.",
        "Put the raise ValueError(...) behind the loop.",
    ),
    reasons="""
        ValueError :: A number of tensor ranks does it here. | {ALL_TRIED} {EVEN}
        modulo by zero :: With more tensor ranks than GPUs there is no share. | Ask whether tp
            divides num_gpus before you divide by the number of shares.
    """,
    hints=(
        "A few numbers of tensor ranks are possible, and the smallest is asked for. So try them in "
        "their order.",
        "tp is possible if it divides num_gpus, and if the sequences can be divided by the "
        "number of shares, num_gpus // tp.",
        f"{ALL_TRIED} Behind the loop, raise ValueError.",
    ),
    mistakes="""
        {TRIED} => range(1, per_node) :: As many tensor ranks as a node has are never tried. |
            range(1, per_node + 1) ends with per_node.
        {TRIED} => range(1, 9) :: `per_node` is not used: every node has 8 GPUs. | {ALL_TRIED}
        {TRIED} => range(1, num_gpus + 1) :: There are more tensor ranks than a node has GPUs.
        {TRIED} => [2**k for k in range(per_node.bit_length())] :: Only powers of two are tried.
        {TRIED} => range(2, per_node + 1) ::
            tp = 1 is never tried, although a batch may be large enough without tensor parallelism.
        {TRIED} => range(per_node, 0, -1) ::
            This is the largest number of tensor ranks that is possible.
        {EQUAL} => sequences >= num_gpus // tp ::
            Every share has a sequence, but not every share has the same number of them. | {EVEN}
        {EQUAL} => sequences == num_gpus // tp :: Only shares of a single sequence are accepted. | A
            share may have several, as long as all have the same number.
        {EQUAL} => sequences % tp == 0 :: The sequences are divided by the tensor ranks, but these
            share the same sequences. | {EVEN}
        {EQUAL} => (num_gpus // tp) % sequences == 0 ::
            The division is upside down: the number of shares is divided by the sequences.
        return tp => return num_gpus // tp :: This is the number of copies of the model, and the
            tensor ranks of each are asked for. | Return tp.
        instead by_division :: The GPUs are divided by the sequences, and the result is rounded up.
            It need not divide the GPUs, and the shares need not be equal. | {ALL_TRIED}
        instead in_whole_shares :: The number of shares is rounded down, so some GPUs belong to no
            copy of the model. | tp has to divide num_gpus: num_gpus % tp == 0.
    """,
    module=globals(),
)
