"""Our trainer, all of it, with emulated work."""

from __future__ import annotations

from benchmarks.arms.emulated import Emulated, EpochClock
from benchmarks.arms.trainer import enter_together, open_trainer
from benchmarks.round_trip import BATCH_SIZE, NUM_BATCHES, NUM_EPOCHS
from benchmarks.team import LOOPBACK, Team
from collab_trainer import Trainer, TrainerConfig


class Timed(Trainer):
    """Tells a clock when an epoch begins."""

    clock: EpochClock

    def run_epoch(self) -> None:
        self.clock.begin(self.replica.epoch)
        super().run_epoch()


def main() -> None:
    team, _ = Team.from_argv()
    batch = team.size * NUM_BATCHES * BATCH_SIZE
    run = f'name = "round"\n[strategy]\ntarget_batch_size = {batch}\ncodec = "fp16"\n'
    config = TrainerConfig(backup_every=0, max_epochs=NUM_EPOCHS, batch_size=BATCH_SIZE)
    with open_trainer(Timed, team, Emulated(), run, config, LOOPBACK) as peer:
        peer.clock = EpochClock()
        enter_together(peer, team)
        peer.run()
        peer.clock.begin(NUM_EPOCHS)
        peer.clock.report(team)


main()
