"""Train the language model with Lightning: the Trainer owns the loop, the ranks, the checkpoints.

torchrun --standalone --nproc-per-node=2 scripts/train_lightning.py --data embedded --steps 300
"""

from functools import partial

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from manyhands.data import corpus
from manyhands.models.transformer import Transformer
from manyhands.ranks.runtime import command_line
from manyhands.training import framework
from manyhands.training.run import save_once
from manyhands.training.schedule import learning_rate_at, set_learning_rate

L = framework.imported("lightning.pytorch")
AFTER_VALIDATION = {"save_on_train_epoch_end": False, "auto_insert_metric_name": False}


class Module(L.LightningModule):
    """The model, a step and a validation; the Trainer calls each method."""

    def __init__(self, run: framework.FrameworkRun, model: Transformer) -> None:
        super().__init__()
        self.run, self.model = run, model

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.run.config.learning_rate, fused=True)

    def on_train_start(self) -> None:
        self.run.begin(self.model, self.optimizers().optimizer, self.global_step)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        learning_rate = learning_rate_at(self.global_step, self.run.config)
        set_learning_rate(self.optimizers(), learning_rate)
        return self.model(*batch)

    def on_train_batch_end(self, outputs: dict[str, Tensor], *_: object) -> None:
        self.run.log(outputs["loss"])
        self.trainer.should_stop = self.run.is_last  # after a validation and a checkpoint

    def validation_step(self, batch: list[Tensor]) -> None:
        num_tokens = batch[1].numel()  # the weight of this batch in the mean over all ranks
        self.log("valid_loss", self.model(*batch), batch_size=num_tokens, sync_dist=True)


def main(config: framework.Config) -> None:
    """Train, keep the best weights, write the report."""
    with framework.started(config, "lightning") as (run, data, model):
        rank, world_size = run.world.rank, run.world.world_size
        save = partial(L.callbacks.ModelCheckpoint, run.folder / "checkpoints", **AFTER_VALIDATION)
        best = save(filename="best", monitor="valid_loss", save_weights_only=True)
        newest = save("{step:08d}", monitor="step", mode="max", save_top_k=3)
        trainer = L.Trainer(
            **framework.lightning_ranks(run.world),
            callbacks=[best, newest],
            max_epochs=-1,
            limit_train_batches=len(data.train) // config.batch,
            val_check_interval=config.save_every,
            check_val_every_n_epoch=None,
        )
        sampler = framework.SamplerFrom(lambda: trainer.global_step, run)
        loader = DataLoader(data.train, config.batch // world_size, sampler=sampler, drop_last=True)
        valid, _ = corpus.held_out(data, config.batch, rank, world_size)
        module = Module(run, model)
        trainer.fit(module, loader, valid, ckpt_path=run.newest("0*.ckpt"), weights_only=True)
        run.end_if_asked()
        module.load_state_dict(torch.load(best.best_model_path, weights_only=True)["state_dict"])
        save_once(module.model, run.folder / "model.pt")
        run.best_loss = best.best_model_score.item()


if __name__ == "__main__":
    command_line(main, framework.Config)
