"""The compute that well-known trainings took, from the papers and from estimates that cite them.

    PF/s-days |                    .       one PF/s-day: 1e15 operations per second for a day
              |             .  .
              |      . .
              |  . .
              '-------------------- year

Sources: Amodei and Hernandez 2018, "AI and Compute", https://openai.com/research/ai-and-compute
(to 2017; they aim at a factor of 2 to 3); Brown et al. 2020, arXiv 2005.14165, appendix D;
Chowdhery et al. 2022, arXiv 2204.02311; Llama Team 2024, arXiv 2407.21783. Dates are the papers'.
"""

import math
from typing import NamedTuple

PF_S_DAY = 1e15 * 24 * 3600  # operations


class Training(NamedTuple):
    """One training: when its paper came out, and what it took."""

    name: str
    year: int
    month: int
    petaflops_days: float

    @property
    def time(self) -> float:
        """The date in years."""
        return self.year + (self.month - 1) / 12


ALEXNET_PF_S_DAYS = 0.0058
TRAININGS = (
    Training("AlexNet", 2012, 12, ALEXNET_PF_S_DAYS),
    Training("Visualizing CNNs", 2013, 11, 0.0062),
    Training("Seq2Seq", 2014, 9, 0.085),
    Training("VGG", 2014, 9, 0.098),
    Training("DeepSpeech2", 2015, 12, 0.30),
    Training("Neural Machine Translation", 2016, 9, 79),
    Training("Xception", 2016, 10, 5.0),
    Training("Architecture Search", 2016, 11, 22),
    Training("AlphaGo Zero", 2017, 10, 300_000 * ALEXNET_PF_S_DAYS),
    Training("GPT-3", 2020, 5, 3640),
    Training("PaLM", 2022, 4, 2.56e24 / PF_S_DAY),
    Training("Llama 3 405B", 2024, 7, 6 * 405e9 * 15.6e12 / PF_S_DAY),
)


def doubling_months(first: Training, last: Training) -> float:
    """In how many months the compute doubled between two trainings, on average."""
    doublings = math.log2(last.petaflops_days / first.petaflops_days)
    return 12 * (last.time - first.time) / doublings
