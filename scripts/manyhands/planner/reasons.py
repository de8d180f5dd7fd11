"""A plan in words: where each byte and millisecond comes from, and why the best one is the best."""

from collections.abc import Sequence

from manyhands.planner.hardware import CONTEXT_BYTES, GIB
from manyhands.planner.plans import COMMUNICATION, Plan

MEMORY_SOURCES = {
    "weights": "2 bytes per parameter of the stage / tp; pp 1: / dp in ZeRO-3 (lesson 09)",
    "gradients": "their type's bytes per parameter; pp 1: / dp from ZeRO-2 on (lessons 09 and 12)",
    "optimizer": "12 bytes per parameter: float32 master and moments; / dp from ZeRO-1 on",
    "gathered": "ZeRO-3: the root and two units whole, one unit's gradients (lesson 10)",
    "activations": "lesson 09's count per block and token, times micro-batches in flight (12)",
    "logits": "tokens of a micro-batch x vocabulary / tp on the last stage",
    "allocator": "what PyTorch's allocator holds beyond the tensors that come and go",
}
TIME_SOURCES = {
    "products": "2 FLOPs per weight and token forward, 4 backward, and their matrices' traffic",
    "memory": "norms, sums, activation functions and the loss read and write memory",
    "attention": "scores of the causal half, forward and backward",
    "recomputation": "what forward did not keep, computed again in backward",
    "tensor messages": "four all-reduces per block, or their halves (lesson 13)",
    "pipeline messages": "an activation and a gradient per cut and micro-batch (lesson 12)",
    "data messages": "gathers and reductions over dp that no computation hides (lesson 10)",
    "bubble": "(pp - 1) / interleave slots in which a rank waits (lesson 12)",
    "optimizer": "AdamW reads and writes its state once per step",
}


def layout_words(plan: Plan) -> str:
    """A layout on one line."""
    layout = plan.layout
    words = [f"dp {layout.dp}", f"pp {layout.pp}", f"tp {layout.tp}"]
    words += ["sp"] if layout.sp else []
    words += [f"ZeRO-{layout.zero}", f"micro-batch {layout.micro_batch}"]
    words += [f"x {plan.grad_accumulation}"]
    words += [f"interleave {layout.interleave}"] if layout.interleave > 1 else []
    words += [f"recompute {layout.recompute}"] if layout.recompute != "none" else []
    return ", ".join(words)


def explain(plan: Plan) -> str:
    """Every part of a plan's memory and time, with where it comes from."""
    gpu = plan.training.gpu
    lines = [f"{layout_words(plan)} on {plan.training.gpus:,} x {gpu.name}", "", "memory of a GPU"]
    for name, nbytes in plan.memory.items():
        lines.append(f"  {nbytes / GIB:8.2f} GiB  {name:17}  {MEMORY_SOURCES[name]}")
    room = (gpu.memory_bytes - CONTEXT_BYTES) / GIB
    lines.append(f"  {plan.memory_bytes / GIB:8.2f} GiB  in all, of {room:.1f} GiB that are free")
    lines += ["", "time of a step"]
    for name, seconds in plan.time.items():
        lines.append(
            f"  {1e3 * seconds:10,.1f} ms  {seconds / plan.step_s:4.0%}  {name:17}  "
            f"{TIME_SOURCES[name]}"
        )
    lines.append(f"  {1e3 * plan.step_s:10,.1f} ms        in all; utilisation {plan.mfu:.1%}")
    return "\n".join(lines)


def why(plans: Sequence[Plan]) -> str:
    """One sentence: what the fastest plan that fits has over the best one on another mesh.

    Args:
        plans: as planner.plans sorts them.
    """
    if not plans or not plans[0].fits:
        return "No layout fits: take more GPUs, GPUs with more memory, or a smaller model."
    best = plans[0]
    mesh = best.layout[:3]
    others = [plan for plan in plans if plan.fits and plan.layout[:3] != mesh]
    shares = {
        "communication": sum(best.time[name] for name in COMMUNICATION) / best.step_s,
        "the bubble": best.time["bubble"] / best.step_s,
        "recomputation": best.time["recomputation"] / best.step_s,
    }
    spent = ", ".join(f"{share:.0%} on {name}" for name, share in shares.items())
    words = f"dp {mesh[0]} x pp {mesh[1]} x tp {mesh[2]} wins: it spends {spent}"
    if not others:
        return f"{words}; no other mesh fits."
    other = others[0]
    more = {name: other.time[name] - best.time[name] for name in best.time}
    worst = max(more, key=more.get)
    pp, tp = other.layout.pp, other.layout.tp
    return (
        f"{words}; the best other mesh, dp {other.layout.dp} x pp {pp} x tp {tp}, takes "
        f"{other.step_s / best.step_s - 1:.1%} longer, above all by its {worst}."
    )
