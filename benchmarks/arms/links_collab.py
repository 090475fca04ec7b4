"""Our trainer, all of it: gradients of every step (`allreduce`), steps of its own (`diloco`), or nobody (`alone`)."""

from __future__ import annotations

from benchmarks.arms.device import Device, make_task
from benchmarks.arms.trainer import enter_together, open_trainer
from benchmarks.links import BATCH_SIZE, LOCAL_STEPS, OVERLAP
from benchmarks.team import Team
from collab_trainer import Trainer, TrainerConfig

RUN = """\
name = "links"
[strategy]
name = "{name}"
codec = "{codec}"
{more}
[optimizer]
lr = 0.003
"""


class Padded(Trainer):
    """A trainer on an emulated device."""

    emulated: Device
    is_alone_on_purpose = False
    averages_every_step = False

    def _step(self) -> None:
        self.emulated.begin_step()
        super()._step()
        self.emulated.end_step()
        if self.emulated.is_done:
            self.stop.set()

    def _should_average(self, num_samples: int) -> bool:
        if self.averages_every_step:  # otherwise it goes on until it hears that the batch is full, mostly a step more
            return num_samples > 0
        return not self.is_alone_on_purpose and super()._should_average(num_samples)


def run_text(arm: str, size: int) -> str:
    if arm == "allreduce":
        return RUN.format(name="allreduce", codec="fp16", more=f"target_batch_size = {size * BATCH_SIZE}")
    more = f"local_steps = {LOCAL_STEPS[arm]}\noverlap_steps = {OVERLAP}"
    return RUN.format(name="diloco", codec="topk" if arm == "diloco-topk" else "int4", more=more)


def main() -> None:
    team, (arm, *ips) = Team.from_argv()
    config = TrainerConfig(backup_every=0, batch_size=BATCH_SIZE)
    address = f"/ip4/{ips[team.rank]}/tcp/0"
    with open_trainer(Padded, team, make_task(), run_text(arm, team.size), config, address) as peer:
        peer.emulated = Device(team, arm)
        peer.is_alone_on_purpose, peer.averages_every_step = arm == "alone", arm == "allreduce"
        enter_together(peer, team)
        peer.run()
        peer.emulated.report()


main()
