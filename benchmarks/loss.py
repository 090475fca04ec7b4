"""How good the model is at equal tokens, and what that costs: bytes per peer, and time on a link of 10 Mbit/s.

No network here: peers take turns on one core, and what they send each other is counted. See `benchmarks/losses`.
Three stages, each resumable: the inner learning rate of every family of arms, the outer settings of `diloco`, then all
arms with as many seeds as there are repeats.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

from benchmarks.losses.arms import Arm
from benchmarks.losses.results import Result
from benchmarks.losses.tables import sweep_table, tables_of
from benchmarks.losses.text import LibraryText, make_task
from benchmarks.losses.training import train
from benchmarks.record import Entry, Record
from collab_core.state.layout import Layout

DATA = ("library", "corpus")
TUNED_ON = DATA[0]
LEARNING_RATES = (2e-3, 4e-3, 8e-3, 16e-3, 32e-3)  # upwards, until it gets worse
FAMILIES = {
    "synchronous": Arm(name="ddp", kind="ddp"),
    "local": Arm(name="diloco none", kind="diloco", outer_lr=0.7, momentum=0.5),
}
OUTERS = ((0.7, 0.9), (0.7, 0.5), (0.7, 0.3), (1.0, 0.5), (1.0, 0.3), (1.0, 0.0))
OTHER_LOCAL_STEPS = (25, 100, 200)
TOPK_LRS = (1.0,)
FIRST = ("DDP", "diloco none", "diloco int4", "diloco int4, overlap", "diloco int4, H 100")
"""What the suite is about, more than about the others."""
OVERLAP = 5
TOPK_LOCAL_STEPS = (10,)
MIXES = (0.0, 0.5)


class LossSuite:
    """Tune, then compare."""

    title = "Held-out loss at equal tokens"

    def run(self, record: Record, num_repeats: int) -> None:
        for arm in self.swept(record):
            self._train(record, arm, TUNED_ON, 0)
        for seed, data, arm in sorted(product(range(num_repeats), DATA, self.arms(record)), key=_urgency):
            self._train(record, arm, data, seed)

    def arms(self, record: Record) -> list[Arm]:
        """Everyone who is compared, tuned."""
        rates = {family: self._best_rate(record, arm) for family, arm in FAMILIES.items()}
        synchronous, local = rates["synchronous"], rates["local"]
        plain = self._best_outer(record, local)
        topk = self._best(record, [replace(plain, codec="topk", outer_lr=lr, momentum=0.0) for lr in TOPK_LRS])
        overlapping = self._best(record, [replace(plain, codec="int4", overlap=OVERLAP, mix=mix) for mix in MIXES])
        return [
            Arm(name="alone", kind="alone", lr=local),
            Arm(name="DDP", kind="ddp", lr=synchronous),
            Arm(name="hivemind.Optimizer", kind="hivemind", lr=synchronous, codec="fp16"),
            Arm(name="Flower FedAvg", kind="fedavg", lr=local),
            Arm(name="allreduce fp16", kind="allreduce", lr=synchronous, codec="fp16"),
            *(replace(plain, name=f"diloco {codec}", codec=codec) for codec in ("none", "fp16", "int8", "int4")),
            replace(topk, name="diloco topk"),
            replace(overlapping, name="diloco int4, overlap"),
            replace(plain, name="diloco int4, H 100", codec="int4", local_steps=100),
            Arm(name="gossip", kind="gossip", lr=local),
        ]

    def _best_rate(self, record: Record, arm: Arm) -> float:
        losses: list[float] = []
        for rate in LEARNING_RATES:
            losses.append(self._train(record, replace(arm, lr=rate), TUNED_ON, 0)["losses"][-1])
            if losses[-1] > min(losses):
                break
        return LEARNING_RATES[losses.index(min(losses))]

    def _best_outer(self, record: Record, lr: float) -> Arm:
        plain = Arm(name="diloco", kind="diloco", lr=lr)
        return self._best(record, [replace(plain, outer_lr=outer, momentum=momentum) for outer, momentum in OUTERS])

    def swept(self, record: Record) -> list[Arm]:
        """DDP, then `diloco` in fp32 with all outer settings, then the best of them and `topk` with other H."""
        ddp, plain, topk = (arm for arm in self.arms(record) if arm.name in ("DDP", "diloco none", "diloco topk"))
        outers = [replace(plain, outer_lr=outer, momentum=momentum) for outer, momentum in OUTERS]
        others = [replace(plain, local_steps=steps) for steps in OTHER_LOCAL_STEPS]
        return [ddp, *outers, *others, topk, *(replace(topk, local_steps=steps) for steps in TOPK_LOCAL_STEPS)]

    def _best(self, record: Record, arms: Iterable[Arm]) -> Arm:
        return min(arms, key=lambda arm: float(self._train(record, arm, TUNED_ON, 0)["losses"][-1]))

    def _train(self, record: Record, arm: Arm, data: str, seed: int) -> Entry:
        key = {**_key(arm), "data": data, "repeat": seed}
        if not record.entries_of(**key):
            entry = train(arm, data, seed)
            record.add({**key, **entry})
            print(f"{seed + 1} {data:<8} {arm}: {entry['losses'][-1]:.4f} in {entry['cpu_seconds']:.0f} s", flush=True)
        return record.entries_of(**key)[0]

    def results(self, record: Record, data: str) -> list[Result]:
        """Arms that were trained on this text, with the seeds they have so far."""
        num_values = Layout.of(make_task(data, 0).build_model()).num_values
        entries = {arm: record.entries_of(**_key(arm), data=data) for arm in self.arms(record)}
        return [Result(arm, each, num_values) for arm, each in entries.items() if each]

    def table(self, record: Record) -> str:
        tables = [tables_of(self.results(record, data), data) for data in DATA]
        sweep = [(arm, self._train(record, arm, TUNED_ON, 0)["losses"][-1]) for arm in self.swept(record)]
        return "\n\n".join([f"Library: {LibraryText().describe()}", *tables, sweep_table(sweep)])

    def plot(self, record: Record, path: Path) -> None:
        from benchmarks.losses.plots import draw

        draw({data: self.results(record, data) for data in DATA}, path)


def _urgency(training: tuple[int, str, Arm]) -> tuple[bool, bool]:
    """A suite that is stopped early has answered something: one seed of everyone, then more of the first arms."""
    seed, data, arm = training
    return data != TUNED_ON, seed > 0 and arm.name not in FIRST


def _key(arm: Arm) -> Entry:
    """What identifies a training; two names for the same one are one."""
    return {name: value for name, value in asdict(arm).items() if name != "name"}


SUITE = LossSuite()
