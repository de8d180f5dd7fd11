"""Rules of thumb: which technique, how many tensor ranks, how many ranks for FSDP."""

import itertools
import math

import pytest

from manyhands.mesh.choosing import CLASSES, approach, ranks_to_fit, smallest_tensor_degree
from manyhands.planner.hardware import GPUS
from manyhands.planner.memory import Layout, Training, states
from manyhands.planner.shape import MODELS

GB = 10**9


def test_the_five_classes_of_80_gb_gpus():
    """Half of 80 GB hold 2.5 billion parameters, a node's eight halves hold 20 billion."""
    assert approach(int(2.5e9), 1, 80 * GB, 8) == "one GPU"
    assert approach(int(2.5e9), 64, 80 * GB, 8) == "DDP"
    assert approach(70 * GB, 64, 80 * GB, 64) == "FSDP"
    assert approach(20 * GB, 64, 80 * GB, 63) == "TP or PP"
    assert approach(20 * GB + 1, 64, 80 * GB, 63) == "FSDP with TP or PP"
    assert approach(405 * GB, 64, 80 * GB, 64) == "FSDP with TP or PP"
    assert approach(20 * GB, 64, 80 * GB, 63, per_node=4) == "FSDP with TP or PP"
    assert approach(20 * GB, 4, 80 * GB, 4) == "FSDP with TP or PP"  # eight would do, four do not


def test_a_larger_model_never_takes_a_simpler_technique():
    for gpus, sequences in itertools.product((1, 8, 64, 512), (1, 64, 512)):
        sizes = [int(1.3**k * 1e6) for k in range(60)]
        found = [CLASSES.index(approach(size, gpus, 80 * GB, sequences)) for size in sizes]
        assert found == sorted(found) and found[-1] == len(CLASSES) - 1


def test_1024_sequences_feed_2048_gpus_with_two_tensor_ranks():
    assert smallest_tensor_degree(1024, 2048) == 2
    assert smallest_tensor_degree(2048, 2048) == smallest_tensor_degree(6144, 2048) == 1
    assert smallest_tensor_degree(4, 12) == 3  # 4 shares of a sequence each
    assert smallest_tensor_degree(6, 8) == 4  # 2 shares of three
    assert smallest_tensor_degree(1, 16, per_node=16) == 16
    for sequences, gpus, per_node in ((1, 16, 8), (5, 9, 8), (7, 8, 4)):
        with pytest.raises(ValueError, match=f"{sequences} sequences"):
            smallest_tensor_degree(sequences, gpus, per_node)


def test_the_tensor_degree_is_the_number_of_gpus_over_the_common_divisor():
    """The most equal shares are gcd(sequences, GPUs)."""
    for sequences, gpus in itertools.product(range(1, 40), range(1, 40)):
        assert smallest_tensor_degree(sequences, gpus, 40) == gpus // math.gcd(sequences, gpus)


def test_a_unit_that_does_not_fit_fits_on_no_number_of_ranks():
    assert ranks_to_fit(405 * GB, 20 * GB, 120 * GB) is None  # 6 bytes of 20 billion: all
    assert ranks_to_fit(405 * GB, 25 * GB, 80 * GB) is None
    # 16 bytes of 405 billion, in the 60.8 GB that blocks of 3.2 billion leave: 106.6
    assert ranks_to_fit(405 * GB, int(3.2e9), 80 * GB) == 107
    assert ranks_to_fit(4 * GB, GB, 80 * GB) == 1
    assert ranks_to_fit(19 * GB, GB, 82 * GB) == 4  # 76 GB in 76 GB
    assert ranks_to_fit(19 * GB + 1, GB, 82 * GB) == 5


@pytest.mark.parametrize("parameters", [10**6, 7 * GB, 405 * GB])
@pytest.mark.parametrize("unit", [10**6, 5 * GB, 13 * GB])
def test_it_is_the_first_number_whose_shares_fit(parameters, unit):
    found = ranks_to_fit(parameters, unit, 80 * GB)
    assert 16 * parameters + 6 * unit * found <= 80 * GB * found
    before = found - 1
    assert before == 0 or 16 * parameters + 6 * unit * before > 80 * GB * before


def test_what_is_whole_at_the_peak_is_what_the_planner_counts():
    training = Training(MODELS["llama-7b"], GPUS["A100-80GB"], 64, 64)
    whole = states(training, Layout(64, 1, 1, False, 3, 1), [GB] * 4)["gathered"]
    assert ranks_to_fit(4 * GB, GB, whole) is None
    assert ranks_to_fit(4 * GB, GB, whole + 16 * GB) == 4
