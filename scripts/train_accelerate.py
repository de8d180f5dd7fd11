"""Train the language model with Hugging Face Accelerate: the loop stays ours, the ranks are its.

torchrun --standalone --nproc-per-node=2 scripts/train_accelerate.py --data embedded --steps 300
"""

import torch
from torch.utils.data import DataLoader

from manyhands.data import corpus
from manyhands.ddp.wrapping import mean_over_ranks
from manyhands.models.transformer import total_loss
from manyhands.ranks.runtime import command_line
from manyhands.training import framework
from manyhands.training.run import save_once
from manyhands.training.schedule import learning_rate_at, set_learning_rate

accelerate = framework.imported("accelerate")
utils = framework.imported("accelerate.utils")
ORDER = {"split_batches": True, "use_seedable_sampler": True}
NAMING = {"automatic_checkpoint_naming": True, "total_limit": 3}


class Progress:
    """What Accelerate's checkpoints lack: the step, and the lowest validation loss so far."""

    def __init__(self) -> None:
        self.step, self.best_loss = 0, float("inf")

    def state_dict(self) -> dict:
        return dict(vars(self))

    def load_state_dict(self, state: dict) -> None:
        vars(self).update(state)


def main(config: framework.Config) -> None:
    """Train, keep the best weights, write the report."""
    with framework.started(config, "accelerate") as (run, data, model):
        accelerator = accelerate.Accelerator(
            cpu=run.world.device.type == "cpu",
            # A batch of the loader is that of all ranks; the order follows from seed and epoch.
            dataloader_config=utils.DataLoaderConfiguration(**ORDER, data_seed=config.seed),
            project_config=utils.ProjectConfiguration(str(run.folder), **NAMING),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, fused=True)
        loader = DataLoader(data.train, config.batch, shuffle=True, drop_last=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerator.register_for_checkpointing(progress := Progress())
        if checkpoint := run.newest("checkpoint_*"):
            accelerator.load_state(checkpoint)
        run.begin(model, optimizer.optimizer, progress.step)
        valid, _ = corpus.held_out(data, config.batch, run.world.rank, run.world.world_size)
        while progress.step < config.steps:
            epoch, done = divmod(progress.step, len(loader))
            loader.set_epoch(epoch)  # no checkpoint holds the epoch or the place in it
            for inputs, targets in accelerator.skip_first_batches(loader, done):
                set_learning_rate(optimizer, learning_rate_at(progress.step, config))
                loss = model(inputs, targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                progress.step += 1
                run.log(loss)
                if run.is_due:
                    loss = mean_over_ranks(*total_loss(model, valid, accelerator.device))
                    if loss < progress.best_loss:
                        progress.best_loss = loss
                        save_once(model, run.folder / "model.pt")
                    accelerator.project_configuration.iteration = progress.step
                    accelerator.save_state()
                    run.end_if_asked()
                if progress.step == config.steps:
                    break
        run.best_loss = progress.best_loss


if __name__ == "__main__":
    command_line(main, framework.Config)
