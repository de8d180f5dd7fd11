"""The sentences of the report of `make gpu`, each computed from the rows that it speaks of."""

from collections.abc import Callable, Mapping, Sequence

from manyhands.gpu.peaks import GOAL
from manyhands.instruments.meters import scaled

Rows = Sequence[Mapping]
ALONE = (
    " This is a world of one: nothing travels, so the times compare what each side does around "
    "its messages."
)


def speed_words(rows: Rows, result: Mapping) -> str:
    """How much of the peak the best training reached, or what is missing to know it."""
    trained = [row for row in rows if "tokens_per_s" in row]
    if not trained:
        return ""
    best = max(trained, key=lambda row: row["flops_per_s"])
    words = (
        f"The {best['what']} model trains {best['tokens_per_s']:,.0f} tokens per second on one "
        f"device, with bfloat16 products and batches of {best['batch']} x {best['block']} tokens. "
        f"That is {scaled(best['flops_per_s'], 'FLOP/s')} of the model's own"
    )
    if "utilisation" not in best:
        return words + "; the peak of this device is not known here (--peak-tflops names it)."
    peak = result["peak"]
    words += f", {best['utilisation']:.1%} of the {scaled(peak['flops_per_s'], 'FLOP/s')} that "
    words += f"the device can reach at most ({peak['source']})."
    above = "reached" if best["utilisation"] >= GOAL else "not reached"
    return f"{words} The goal of {GOAL:.0%} on an H100 or H200 is {above} here."


def memory_words(rows: Rows, result: Mapping) -> str:
    """The largest gap between a prediction and its measurement."""
    both = [row for row in rows if "predicted" in row]
    worst = max(both, key=lambda row: abs(row["measured"] / row["predicted"] - 1))
    gap = worst["measured"] / worst["predicted"] - 1
    words = (
        "Weights, gradients and optimizer state follow from bytes per parameter, what is kept for "
        "backward from the accounting of lesson 09. The largest gap is "
        f"{gap:+.1%} ({worst['part']}, {worst['type']})."
    )
    if any("predicted" not in row for row in rows):
        words += " The GPU has more in use than its tensors: context, kernels and reserves."
    return words


def compared_words(rows: Rows, result: Mapping) -> str:
    """The ratios of the times and of the peaks, and whether the losses agree."""
    (row,) = rows
    ratio = row["by hand (s)"] / row["native (s)"]
    memory = row["by hand peak_bytes"] / row["native peak_bytes"]
    gap = abs(row["loss by hand"] - row["loss native"])
    words = (
        f"A step by hand takes {ratio:.2f} times as long as PyTorch's, and {memory:.2f} times as "
        "many bytes at its peak on rank 0. Both begin with equal weights and see one batch; their "
        f"first losses differ by {gap:.1g} nats."
    )
    return words + (ALONE if row["ranks"] == 1 else "")


def prefetch_words(rows: Rows, result: Mapping) -> str:
    """What gathering ahead gains."""
    ahead, late = (row["step_s"] for row in rows)
    words = (
        "Without gathering ahead, a unit's weights are asked for when its forward begins, and a "
        f"step takes {late / ahead:.2f} times as long."
    )
    return words + (ALONE if rows[0]["ranks"] == 1 else "")


def offload_words(rows: Rows, result: Mapping) -> str:
    """What offloading saves, and what it costs."""
    near, far = rows
    slower = far["step_s"] / near["step_s"]
    saved = near["peak_bytes"] - far["peak_bytes"]
    words = f"Offloaded shards save {scaled(max(0, saved), 'B')} at the peak of a step"
    if result["device"] == "cpu":
        words = "On a CPU, offloaded shards lie in the same memory as before"
    return f"{words}, and a step takes {slower:.2f} times as long."


def bandwidth_words(rows: Rows, result: Mapping) -> str:
    """The best bus bandwidth, and what that is."""
    sent = [row for row in rows if row["what"] != "memory copy"]
    if not sent:
        return "One rank sends nothing; the rows are copies within the memory of its device."
    best = max(sent, key=lambda row: row["bus_bytes_per_s"])
    return (
        "Bus bandwidth is what each link must carry at least, per second, as NVIDIA's nccl-tests "
        "define it, so it can be compared with the rate of the links whatever the number of ranks. "
        f"The most was {scaled(best['bus_bytes_per_s'], 'B/s')}, with {best['what']} of "
        f"{scaled(best['size_bytes'], 'B')}."
    )


def jobs_words(rows: Rows, result: Mapping) -> str:
    """How many jobs came to a good end."""
    done = sum(row["state"] == "done" for row in rows)
    return (
        f"{done} of {len(rows)} short runs came to a good end. They show that the jobs work here; "
        "a run is too short to train well. Each has a report in its folder, job-NAME."
    )


WORDS: dict[str, Callable[[Rows, Mapping], str]] = {
    "bandwidth": bandwidth_words,
    "memory": memory_words,
    "speed": speed_words,
    "compiled": speed_words,
    "ddp": compared_words,
    "fsdp": compared_words,
    "pipeline": compared_words,
    "tensor": compared_words,
    "prefetch": prefetch_words,
    "offload": offload_words,
    "jobs": jobs_words,
}
