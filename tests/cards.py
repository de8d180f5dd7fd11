"""Print what readers would see: the verdict on each mistake of an exercise, and on each answer.

    python tests/cards.py 3.5

A sentence is judged best where a reader meets it: behind what was seen of the answer.
"""

import sys

import answers
from audit import Audit
from manyhands.checks.engine.bench import lessons


def main(todo: str) -> int:
    """Print a verdict for each; exit code 2 where there is no such exercise."""
    words = [word for word, lesson in lessons().items() if todo in lesson.exercises]
    if not words:
        print(f"cards.py: no exercise has the number {todo!r}, as in: 3.5", file=sys.stderr)
        return 2
    exercise = lessons()[words[0]].exercises[todo]
    written = [m for m in exercise.spec.mistakes if not m.ends]
    named = {f"mistake: {m.why}": m.change.make(exercise.spec.truth) for m in written}
    named |= {
        f"right: {getattr(one, '__name__', one)}": one for one in answers.right(words[0])[todo]
    }
    wrongs = answers.wrong(words[0]).get(todo, ())
    named |= {f"wrong: {getattr(one, '__name__', one)}": one for one, _ in wrongs}
    audit = Audit(exercise, list(named.values()))
    for name, verdict in zip(named, audit.verdicts(), strict=True):
        print(f"{name}\n    {verdict!r}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) == 2 else ""))
