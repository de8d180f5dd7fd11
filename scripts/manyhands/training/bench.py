"""Measures a training in one process: nanoGPT's small character recipe."""

import statistics
import tempfile
from pathlib import Path

from manyhands.instruments.benchmark import SCRIPTS, Measure, Measured, Row, run_python, spread
from manyhands.training.storage import read_json, read_lines

CHAR_RECIPE = (
    "--layers=4",
    "--block=64",
    "--batch=12",
    "--steps=300",
    "--learning-rate=3e-3",
    "--valid-tokens=0",
)
CHAR_SEEDS = (1, 2, 3)
CHAR_TOKENS_PER_STEP = 12 * 64
CHAR_WARM_UP_STEPS = 20
CHAR_THREADS = "2"


def char_recipe(data: str) -> list[Measured]:
    """Validation loss and tokens/s of train_single.py with nanoGPT's small setting."""
    losses = []
    rates = []
    for seed in CHAR_SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            flags = (*CHAR_RECIPE, f"--data={data}", f"--seed={seed}", f"--out={folder}/run")
            script = str(SCRIPTS / "train_single.py")
            printed = run_python(script, *flags, "--device=cpu", OMP_NUM_THREADS=CHAR_THREADS)
            losses.append(read_json(Path(folder, "run", "status.json"))["valid_loss"])
            lines = read_lines(Path(folder, "run", "metrics.jsonl"))
        spent_s = lines[-1]["time_s"] - lines[CHAR_WARM_UP_STEPS - 1]["time_s"]
        rates.append(CHAR_TOKENS_PER_STEP * (len(lines) - CHAR_WARM_UP_STEPS) / spent_s)
    told = next(line for line in printed.splitlines() if line.startswith("data:"))
    recipe = f"train_single.py {' '.join(CHAR_RECIPE)}; {told}"
    loop = f"the loop with its checkpoints, without start-up; {CHAR_THREADS} threads"
    return [
        (statistics.median(losses), f"{spread(losses)}, by seed; {recipe}"),
        (statistics.median(rates), f"{spread(rates)}, by seed; {loop}; {recipe}"),
    ]


MEASURES = (
    Measure(
        char_recipe,
        (
            Row(
                "nanoGPT's small character recipe, validation loss (median of 3 seeds)",
                "<= 2.41",
                "nats per character",
            ),
            Row("the same, tokens per second", ">= 20000", "tokens/s"),
        ),
        ("models/transformer.py", "training/run.py", "data/corpus.py"),
        needs_data=True,
    ),
)
