"""Every training script has a job file that starts it, and tests of its own."""

from commands import ROOT

# Those that need the extra `frameworks` are started by torchrun; tests in test_frameworks.py.
OF_FRAMEWORKS = {"lightning", "accelerate"}
OWN = ("#", "export ARRAY_FLAGS=")


def words_of_scripts() -> set[str]:
    found = {path.stem.removeprefix("train_") for path in (ROOT / "scripts").glob("train_*.py")}
    return found - OF_FRAMEWORKS


def commands(word: str) -> list[str]:
    """What bash carries out of a job file, with SCRIPT for the script's name.

    Only what a number of an array (sbatch --array) is to do differs from job to job.
    """
    lines = (ROOT / "sbatch" / f"{word}.sbatch").read_text().splitlines()
    kept = [line for line in lines if line.strip() and not line.startswith(OWN)]
    return [line.replace(f"scripts/train_{word}.py", "SCRIPT") for line in kept]


def test_every_training_script_has_a_job_that_starts_it_and_a_test():
    found = words_of_scripts()
    assert len(found) > 10 and found >= {"ddp", "mesh", "layerwise"}
    tests = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for word in found:
        line = f"\nimport train_{word}\n"
        own = tests.get(f"test_train_{word}", "".join(tests.values()))  # or one for several jobs
        assert line in own, word
    for word in found - {"single"}:
        assert commands(word)[-1].endswith(' SCRIPT "$@"')


def test_the_job_files_carry_out_the_same_commands():
    """The tests start two of them; what these do, the others do with scripts of their own."""
    for word in words_of_scripts() - {"single"}:
        assert commands(word) == commands("ddp"), f"sbatch/{word}.sbatch"
    assert commands("ddp")[-1] == 'JOB_FILE=$0 exec bash "$folder/launch.sh" SCRIPT "$@"'
