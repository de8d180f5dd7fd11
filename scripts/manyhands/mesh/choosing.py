"""Which technique when: rules of thumb that a planner can be asked about.

    16 N bytes fit on a GPU       one GPU: nothing to do     several: replicas (DDP)
    16 N / GPUs fit               a sample for each GPU: shards (FSDP)
    16 N / node fit               fewer samples than GPUs: cut the model inside a node (TP or PP)
    none of these                 both: shards across nodes, the model cut inside them

N parameters with 16 bytes of weights, gradients and optimizer state each (lesson 09). A rule says
what can work; planner.py says how well. The first rules count half of a GPU's memory, because
activations need room, too.

Sources: the five classes are those of NVIDIA's teaching kit on generative AI, lecture 9.1; what
FSDP has whole at its peak: lesson 10.
"""

STATE_BYTES = 16  # of a parameter
CLASSES = ("one GPU", "DDP", "FSDP", "TP or PP", "FSDP with TP or PP")


def approach(
    num_parameters: int, num_gpus: int, gpu_bytes: int, sequences: int, per_node: int = 8
) -> str:
    """Return the simplest technique that can train a model, one of CLASSES.

    State fits where its bytes are at most half of gpu_bytes. In this order:

    - the whole state fits on a GPU: "one GPU" if there is one, "DDP" if there are more;
    - a share of 1/num_gpus fits, and each GPU gets a sequence of the global batch: "FSDP";
    - a share of 1/per_node fits, and there are at least per_node GPUs, so that a node holds a copy
      of the model: "TP or PP";
    - otherwise: "FSDP with TP or PP".

    Args:
        sequences: of the global batch.
    """
    state = STATE_BYTES * num_parameters
    room = gpu_bytes / 2
    if state <= room:
        return "one GPU" if num_gpus == 1 else "DDP"
    if state / num_gpus <= room and sequences >= num_gpus:
        return "FSDP"
    if state / per_node <= room and num_gpus >= per_node:
        return "TP or PP"
    return "FSDP with TP or PP"


def smallest_tensor_degree(sequences: int, num_gpus: int, per_node: int = 8) -> int:
    """Return the fewest tensor ranks with which a small global batch feeds all GPUs.

    The tp ranks of a copy of the model share its samples, so there are num_gpus / tp shares of the
    batch, and each must have the same number of whole sequences, at least one. tp divides num_gpus
    and is at most per_node.

    Raises:
        ValueError: no tp does it. `sequences` is at least 1.
    """
    for tp in range(1, per_node + 1):
        if num_gpus % tp == 0 and sequences % (num_gpus // tp) == 0:
            return tp
    raise ValueError(
        f"{sequences} sequences cannot be shared by {num_gpus} GPUs with up to {per_node} tensor "
        "ranks: take a larger batch or fewer GPUs"
    )


def ranks_to_fit(num_parameters: int, unit_parameters: int, gpu_bytes: int) -> int | None:
    """Return the fewest ranks on which FSDP has room for its state, or None if no number will do.

    A rank holds 16 bytes of its share of the parameters, not rounded. At the peak it also has the
    weights of two units whole, since one computes while the next one is gathered, and the gradients
    of one unit, all with 2 bytes per number. More ranks make shares smaller, but units stay whole.
    The root, which is whole as well (lesson 10), is left out.

    Args:
        unit_parameters: of the largest unit.
    """
    room = gpu_bytes - 3 * 2 * unit_parameters
    if room <= 0:
        return None
    return max(1, -(-STATE_BYTES * num_parameters // room))
