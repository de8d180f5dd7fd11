"""Write a run's page, `report.html`, and its figures as PNGs; see manyhands.training.report."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import command_line
from manyhands.training.report import write_report


@dataclass(frozen=True)
class Config:
    """Write `report.html` into the folder of a run, also while the run goes on."""

    folder: Positional[str]
    """Folder of the run, such as runs/ddp-001."""


def main(config: Config) -> None:
    """Write the report and say where it lies."""
    try:
        print(f"report: {write_report(Path(config.folder))}")
    except OSError as error:
        raise BadInput(f"cannot write the report: {error}") from None


if __name__ == "__main__":
    command_line(main, Config)
