"""Write the report of a run: what it did, how fast, and where the time and the machines went.

runs/ddp-001 --> report.html            one page, for a browser without a network
                 report.png             all figures on one slide, 1600 x 900
                 report-<figure>.png    each figure
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from manyhands.instruments.live import Live
from manyhands.instruments.meters import duration, idle_words, scaled
from manyhands.training.page import Row, page
from manyhands.training.record import (
    Device,
    Record,
    integral,
    loss_words,
    mean_busy,
    noun,
    read,
    scheduler_words,
)
from manyhands.training.run import Run, save_once
from manyhands.training.storage import replace_file

SILENT_AFTER_S = 60.0
IDLE_BELOW = 0.1

# ---- rows --------------------------------------------------------------------------------------


def state(record: Record) -> Row:
    """How the run stands; a run that was killed cannot say so itself."""
    word = record.status.get("state", "not started")
    if word != "running":
        return Row(word)
    if record.why_gone:
        return Row("ended without a word", remark=record.why_gone)
    last_s = record.lives[-1][1] if record.lives else 0.0
    silent_s = time.time() - max(last_s, record.status.get("time_s", 0.0))
    if silent_s < SILENT_AFTER_S:
        return Row(word)
    unknown = "" if record.why_gone == "" else "; whether it still runs cannot be seen from here"
    return Row(word, remark=f"but silent for {duration(silent_s)}{unknown}")


def counted(number: int, what: str) -> str:
    """The number with its noun: "1 node", "2 nodes"."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def shortened(names: Sequence[str], limit: int = 6) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def ranks_words(record: Record) -> str:
    """How many ranks on how many nodes: "2 ranks on 1 node"."""
    return f"{counted(len(record.ranks), 'rank')} on {counted(len(record.hosts), 'node')}"


def granted_words(record: Record) -> str:
    """What was granted: "4 GPUs (NVIDIA H100), 64 cores"."""
    cores = sum(record.granted(host, "num_cores") for host in record.hosts)
    gpus = sum(record.granted(host, "num_gpus") for host in record.hosts)
    names = sorted({rank["name"] for rank in record.ranks if "name" in rank})
    kind = f" ({', '.join(names)})" if names else ""
    return (f"{counted(gpus, 'GPU')}{kind}, " if gpus else "") + counted(cores, "core")


def used_words(record: Record) -> str:
    """What the ranks run on: "1 GPU", "2 threads of CPUs"."""
    gpus = {(rank["host"], rank["device"]) for rank in record.ranks if "cuda" in rank["device"]}
    threads = [rank.get("num_threads", 1) for rank in record.ranks if "cuda" not in rank["device"]]
    words = [counted(len(gpus), "GPU")] if gpus else []
    return ", ".join(words + ([counted(sum(threads), "CPU thread")] if threads else []))


def time_used(record: Record) -> Row:
    """Time used, and of how much: a limit of the scheduler is one life's."""
    lengths_s = [end_s - begin_s for begin_s, end_s in record.paid]
    if not lengths_s:
        return Row("-")
    remarks = []
    if limit_s := record.job.get("time_limit_s"):
        remarks.append(f"{lengths_s[-1] / limit_s:.0%} of the {duration(limit_s)} asked")
    if len(lengths_s) > 1:
        remarks.append(f"{duration(sum(lengths_s))} with the lives before it")
    return Row(lengths_s[-1], "s", ", ".join(remarks))


def restarts_words(record: Record) -> str:
    """How often the run began again, and how long nothing ran."""
    count = max(record.job.get("restarts", 0), len(record.lives) - 1)
    if not count:
        return "none"
    waits_s = [
        later[0] - before[1] for before, later in zip(record.lives, record.lives[1:], strict=False)
    ]
    times = "once" if count == 1 else f"{count} times"
    return f"restarted {times}; nothing ran for {duration(sum(waits_s))} in between"


def valid_time(record: Record) -> Row:
    """How long all validation and the test took, as a share of this start's time."""
    valid_s = record.status["valid_s"]
    begin_s, end_s = record.paid[-1] if record.paid else (0.0, 0.0)
    share = f"{valid_s / (end_s - begin_s):.0%} of the time used" if end_s > begin_s else ""
    return Row(valid_s, "s", share)


def busy(record: Record) -> Row:
    """Share of the device-hours that were busy, and how many those are."""
    bill = record.bill
    if bill.busy_h is None:
        return Row("not measured", remark=f"of {bill.charged_h:.2g} {bill.unit}-hours")
    share = bill.busy_h / bill.charged_h if bill.charged_h else 0.0
    return Row(share, "%", f"{bill.busy_h:.2g} of {bill.charged_h:.2g} {bill.unit}-hours")


def energy(record: Record) -> Row | None:
    """Energy of the GPUs, or why it is not known; None where there are none."""
    bill = record.bill
    if bill.unit != "GPU" or not record.nodes:
        return None
    if bill.energy_kwh is None:
        return Row("not known", remark=shortened(whys(record)) or "no sample")
    is_part = bill.num_told < bill.num_granted
    remark = f"of {bill.num_told} of {bill.num_granted} GPUs" if is_part else ""
    return Row(bill.energy_kwh, "kWh", remark)


def whys(record: Record) -> list[str]:
    """Why GPUs could not be measured, in NVML's words."""
    last = [rows[-1].get("gpus", []) for rows in record.nodes.values() if rows]
    return sorted({gpu["why"] for gpus in last for gpu in gpus if gpu.get("why")})


def losses(record: Record) -> dict[str, Row]:
    """Training and validation loss, with the floor where there is one; or what tasks came to."""
    name, unit = loss_words(record)
    status = record.status
    floor = record.about.get("floor")
    remark = "" if floor is None else f"floor {floor:.4f}"
    result = record.about.get("result_name")
    rows = {}
    if record.column("loss") and not result:
        rows[f"last training {name}"] = Row(record.column("loss")[-1][1], unit, remark)
    if status.get("valid_loss") is not None:
        rows[result or f"validation {name}"] = Row(status["valid_loss"], unit, remark)
    if status.get("test_loss") is not None:
        remarks = filter(None, [status["test_words"], f"from step {status['test_step']}"])
        rows[f"test {name}"] = Row(status["test_loss"], unit, ", ".join(remarks))
    return rows


def steps_words(record: Record) -> str:
    """Steps done of those to take."""
    written = record.steps[-1]["step"] if record.steps else 0
    done = max(written, record.status.get("step", 0))  # a task may be done and have no line
    total = record.about.get("config", {}).get("steps", record.status.get("steps"))
    return f"{done} of {total}" if total else f"{done}"


def summary(record: Record) -> dict[str, Row]:
    """The table of the job."""
    about = record.about
    words = {
        "job": about.get("identity", {}).get("job", "-"),
        "scheduler": scheduler_words(record.job) or "none: started by hand",
        "state": state(record),
        noun(record): steps_words(record),
        "nodes": shortened(record.job.get("nodes") or record.hosts),
        "ranks": ranks_words(record),
        "granted": granted_words(record),
        "used": used_words(record),
        "time used": time_used(record),
        "restarts": restarts_words(record),
    }
    if "valid_s" in record.status:
        words["validation and test"] = valid_time(record)
    if record.lives:
        words["busy"] = busy(record)
        words["charged by most centres"] = Row(record.bill.charged_h, f"{record.bill.unit}-hours")
    if (kwh := energy(record)) is not None:
        words["energy"] = kwh
    if whys(record) and record.bill.energy_kwh is not None:
        words["not measured"] = shortened(whys(record))
    words |= {"data": str(about.get("config", {}).get("data", "-"))} | losses(record)
    if peak := record.status.get("peak_bytes"):
        parts = shortened([f"{part} {scaled(nbytes, 'B')}" for part, nbytes in peak.items()])
        words["tensors at their peak"] = Row(sum(peak.values()), "B", f"on rank 0: {parts}")
    words |= record.status.get("notes", {})
    if (speed := record.speed()) is not None:
        words["speed"] = Row(speed, f"{record.unit}/s")
        if about.get("flops_per_token") and record.unit == "tokens":
            words["model FLOP/s"] = Row(speed * about["flops_per_token"], "FLOP/s")
    return {name: one if isinstance(one, Row) else Row(one) for name, one in words.items()}


def tiles(record: Record) -> dict[str, Row]:
    """The numbers that one looks for first."""
    rows = summary(record)
    if "model FLOP/s" in rows:
        rows["speed"] = rows["speed"]._replace(remark=str(rows["model FLOP/s"]))
    last_loss = list(losses(record))[-1:]
    names = ["state", noun(record), "time used", "speed", *last_loss, "busy", "energy"]
    return {name: rows[name] for name in names if name in rows}


def idle_lines(record: Record) -> list[str]:
    """Say which granted devices nobody used, and which ranks were idle."""
    lines = [f"{line}." for line in idle_words(record.ranks, record.job.get("nodes", ()))]
    if not any(record.samples):
        return lines
    idle = []
    for rank, samples in enumerate(record.samples):
        if not samples:
            idle.append(f"Rank {rank} wrote no samples.")
    for device in record.devices:
        if device.rank is not None and device.busy and is_idle(device, record):
            share = mean_busy(device, record.paid)
            idle.append(f"Rank {device.rank} was idle: {share:.0%} busy on average.")
    if len(idle) > 6:
        idle = [*idle[:5], f"{len(idle) - 5} more ranks likewise."]
    return lines + idle


def is_idle(device: Device, record: Record) -> bool:
    """Was a rank's device busy for less than a tenth of the time that it wrote samples?"""
    own_s = integral([(time_s, 1.0) for time_s, _ in device.busy], record.lives)
    return integral(device.busy, record.lives) * max(1, device.num_cores) < IDLE_BELOW * own_s


# ---- the files ----------------------------------------------------------------------------------


def finish(
    run: Run,
    model: nn.Module,
    valid_loss: float,
    live: Live,
    notes: Mapping[str, str] | None = None,
) -> float:
    """End a training job, on every rank: save rank 0's weights, tell, and write the report.

    Args:
        live: its highest count is told, and gets a row in the report.
        notes: more such rows, by name.

    Returns:
        valid_loss.
    """
    for words in (live.in_words(), *(notes or {}).values()):
        run.world.print(words)
    save_once(model, run.folder / "model.pt")
    run.finish(valid_loss, live.peak, notes)
    if run.world.is_main:
        run.world.print(f"report: {write_report(run.folder)}")
    return valid_loss


def write_report(folder: Path) -> Path:
    """Write `report.html`, `report.png` and every figure as a PNG; returns the page's path."""
    from manyhands.training import report_figures  # matplotlib: a second, and one rank draws

    record = read(folder)
    cards = report_figures.cards(record)
    idle = idle_lines(record)
    title = f"Run {folder.resolve().name}"
    rows = summary(record)
    numbers = tiles(record)
    lead = f"{rows['job']}: {rows['ranks']}; granted {rows['granted']}, used {rows['used']}"
    settings = dict(record.about.get("config", {}))
    settings |= {name: record.about[name] for name in ("torch", "backend") if name in record.about}
    text = page(
        title=title,
        lead=lead,
        tiles=numbers,
        cards=list(cards.values()),
        warnings=idle,
        tables={"The job": rows, "Settings": settings},
    )
    for name, card in cards.items():
        (folder / f"report-{name}.png").write_bytes(card.picture)
    told = [" ".join([name, *row.written]).strip() for name, row in numbers.items()]
    words = [lead, "   |   ".join(told[1:]), " ".join(idle)]
    picture = report_figures.slide(record, f"{title}: {rows['state']}", words)
    (folder / "report.png").write_bytes(picture)
    replace_file(folder / "report.html", text.encode())
    return folder / "report.html"
