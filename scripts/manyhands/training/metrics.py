"""The numbers of each step: a line in metrics.jsonl, and the progress that a person sees.

    {"step": 1, "epoch": 0, "loss": 3.2, "learning_rate": 1e-4, "tokens_per_s": ..., "time_s": ...}

Only rank 0 has a `Metrics`. A line is written as soon as its step is done: a killed run keeps all.
"""

import json
import math
import time
from pathlib import Path

from manyhands.instruments.meters import STEP_PHASES, Progress
from manyhands.training import storage


class Metrics:
    """Writes and shows the numbers of each step, until it is closed."""

    def __init__(self, path: Path, step: int, num_steps: int, tokens_per_step: int) -> None:
        """Go on after `step` of `num_steps` in the file `path`; lines of later steps are dropped.

        Args:
            tokens_per_step: over all ranks.
        """
        lines = [line for line in storage.read_lines(path) if line["step"] <= step]
        storage.replace_file(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        before_s = lines[-1]["time_s"] if lines else 0.0
        self.path = path
        self.tokens_per_step = tokens_per_step
        self.error: str | None = None  # a step's numbers that could not be written
        self.start_s = time.time() - before_s
        self.file = open(path, "ab", buffering=0)
        self.progress = Progress(step, num_steps)

    def write(
        self,
        step: int,
        epoch: int,
        loss: float,
        learning_rate: float | None,
        seconds: dict[str, float],
        memory_bytes: int,
    ) -> None:
        """Write and show the numbers of a step.

        Args:
            seconds: what each of PHASES took; the checkpoint, if any, is no part of the step.
        """
        step_s = sum(seconds[phase] for phase in STEP_PHASES)
        line = {
            "step": step,
            "epoch": epoch,
            "loss": loss if math.isfinite(loss) else None,
            "learning_rate": learning_rate,
            "tokens_per_s": round(self.tokens_per_step / step_s, 1),
            "step_s": round(step_s, 6),
            **{f"{phase}_s": round(spent_s, 6) for phase, spent_s in seconds.items()},
            "memory_bytes": memory_bytes,
            "time_s": round(time.time() - self.start_s, 3),
        }
        try:
            self.file.write((json.dumps(line) + "\n").encode())
        except OSError as problem:
            self.error = f"cannot write {self.path}: {problem}"
        self.progress.show(step, f"loss {loss:.3f}, {line['tokens_per_s']:,.0f} tokens/s")

    def close(self) -> None:
        """End the file and the progress."""
        self.progress.bar.close()
        self.file.close()
