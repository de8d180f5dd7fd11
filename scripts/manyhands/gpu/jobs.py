"""One short run of every job of the course, through its job file, on all GPUs of this machine.

It shows that the jobs work with NCCL and CUDA, not how well they train: a run takes seconds. Each
program says in TINY how: a word for each of its runs, and the flags, which may hold

    {text}      the sizes of a short training of the language model
    {sizes}     of these the sizes of the model and of its batch
    {pieces}    micro-batches, of which there are two a rank
"""

import ast
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2]


def flags(num_ranks: int) -> dict[str, str]:
    """Name of each run -> its flags; the first word of a name is that of the job file.

    Batch and block are multiples of the ranks, and a model has as many heads as layers.
    """
    layers = max(2, num_ranks)
    sizes = f"--block {16 * layers} --layers {layers} --batch {8 * num_ranks}"
    text = f"--steps 20 {sizes} --valid-tokens 4096"
    known = {"sizes": sizes, "text": text, "pieces": 2 * num_ranks}
    return {
        f"{script.stem.partition('_')[2]} {run}".strip(): words.format(**known)
        for script in sorted(SCRIPTS.glob("*_*.py"))
        for run, words in tiny(script).items()
    }


def tiny(script: Path) -> dict[str, str]:
    """What a program says in TINY; read, since a program is imported by nobody."""
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TINY":
            return ast.literal_eval(node.value)
    return {}
