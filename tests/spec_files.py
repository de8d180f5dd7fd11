"""Where the spec of an exercise stands, read from the text: nothing of the course is imported."""

import functools
import re
from pathlib import Path

CHECKS = Path(__file__).resolve().parents[1] / "scripts/manyhands/checks"
NUMBER = re.compile(r'^\w+ = \w+\(\s*(?:todo=)?"(\d+\.\d+)",', re.MULTILINE)


@functools.cache
def spec_files() -> dict[str, Path]:
    """The number of every exercise, and the file with its spec."""
    files = sorted(CHECKS.glob("*/*.py"))
    return {number: path for path in files for number in NUMBER.findall(path.read_text())}


def spec_file(number: str) -> Path:
    """The file with the spec of an exercise, such as "9.5"; KeyError where there is none."""
    return spec_files()[number]
