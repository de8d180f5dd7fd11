"""Where a framework keeps what this lesson builds by hand: Composer, Lightning and Accelerate.

    a need   Composer's argument   by hand   Lightning   Accelerate

Lightning's and Accelerate's cells are checked by running them, in
tests/training/test_frameworks.py. Composer's are those of its Trainer's documentation,
https://docs.mosaicml.com/projects/composer/en/latest/api_reference/generated/composer.Trainer.html.
"""

from typing import NamedTuple


class Row(NamedTuple):
    """One need, and where each of the four keeps it."""

    need: str
    composer: str
    by_hand: str
    lightning: str
    accelerate: str


ROWS = (
    Row(
        "folder",
        "save_folder, also the address of an object store",
        "an address that fsspec understands",
        "ModelCheckpoint(dirpath)",
        "ProjectConfiguration(project_dir): PROJECT_DIR/checkpoints",
    ),
    Row(
        "interval",
        "save_interval",
        "save_every, asked in the loop",
        "ModelCheckpoint(every_n_train_steps), or after each validation",
        "none: the loop calls save_state",
    ),
    Row(
        "name of a file",
        "save_filename, a pattern",
        "step-{step:08d}",
        "ModelCheckpoint(filename), a pattern",
        "checkpoint_N; N is project_configuration.iteration",
    ),
    Row(
        "number to keep",
        "save_num_checkpoints_to_keep",
        "keep the last k and the best",
        'ModelCheckpoint(save_top_k); the newest with monitor="step", mode="max"',
        "ProjectConfiguration(total_limit)",
    ),
    Row(
        "overwriting",
        "save_overwrite",
        "a step that is saved again replaces its checkpoint",
        "enable_version_counter: a second file gets -v1",
        "with automatic_checkpoint_naming save_state refuses a folder that exists",
    ),
    Row(
        "where to resume",
        "load_path",
        "load_sharded(state, folder)",
        "Trainer.fit(ckpt_path)",
        "load_state(input_dir)",
    ),
    Row(
        "the newest by itself",
        "autoresume",
        "the newest intact one",
        'Trainer.fit(ckpt_path="last")',
        "load_state() without a folder: the highest number, intact or not",
    ),
)

# What pip says when Composer is to stand beside this course's torch.
COMPOSER = {
    "remake": 'pip install --dry-run "mosaicml>=0.32" "torch==2.13.0"',
    "date": "2026-11-26",
    "says": "mosaicml 0.32.1 depends on torch<2.7.1 and >=2.6.0",
}
