"""One short run of every job of the course, through its job file, on all GPUs of this machine.

It shows that the jobs work with NCCL and CUDA, not how well they train: a run takes seconds.
"""


def flags(num_ranks: int) -> dict[str, str]:
    """Name of each run -> its flags; the first word of a name is that of the job file.

    Batch and block are multiples of the ranks, and a model has as many heads as layers.
    """
    layers = max(2, num_ranks)
    sizes = f"--block {16 * layers} --layers {layers} --batch {8 * num_ranks}"
    train = f"--steps 20 {sizes} --valid-tokens 4096"
    stages = f"{train} --micro-batches {2 * num_ranks}"
    return {
        "first_job": "--networks 1",
        "loss_surface": "--grid 3 --networks 1 --blocks 2 --epochs 1",
        "batch_size": "--networks 1 --rates 0.4 --largest 64 --target 0.7 --max-steps 60",
        "collectives": "--max-mb 4 --repeats 3",
        "data_parallel": train,
        "ddp": f"{train} --impl scratch",
        "ddp torch": f"{train} --impl torch",
        "large_batch": "--seeds 2 --epochs 1 --remedy 1",
        "layerwise": "--seeds 2 --small-steps 10 --large-steps 4 --optimizer 1",
        "memory": train,
        "fsdp": f"{train} --impl zero3",
        "fsdp torch": f"{train} --impl torch --dtype bfloat16 --offload",
        "checkpoint": f"{train} --save-every 10",
        "checkpoint torch": f"{train} --save-every 10 --impl torch",
        "pipeline": stages,
        "pipeline torch": f"{stages} --impl torch",
        "tensor": train,
        "mesh": train,
        "mesh torch": f"{train} --impl torch",
        "compare": f"--steps 3 {sizes}",
    }
