"""How good the model is at equal tokens, and what that costs: bytes per peer, and time on a link of 10 Mbit/s.

No network here: the peers of a training take turns on one core, and what they send each other is counted. See
`benchmarks/losses`. First the inner learning rate of each family of arms is tuned, then the outer settings of `diloco`;
then all arms are trained with as many seeds as there are repeats. Every core trains another arm.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import ClassVar

from benchmarks.links import OVERLAP
from benchmarks.losses.arms import Arm
from benchmarks.losses.costs import Links
from benchmarks.losses.results import Result
from benchmarks.losses.tables import sweep_table, tables_of
from benchmarks.losses.text import library_text, make_task
from benchmarks.losses.training import train
from benchmarks.record import Entry, Record
from collab_core.state.layout import Layout

LEARNING_RATES = (2e-3, 4e-3, 8e-3)  # to begin with
FAMILIES = {
    "synchronous": Arm(name="DDP", kind="ddp"),
    "diloco": Arm(name="diloco none", kind="diloco", outer_lr=1.0, momentum=0.7),
    "alone": Arm(name="alone", kind="alone"),
    "fedavg": Arm(name="Flower FedAvg", kind="fedavg"),
    "gossip": Arm(name="gossip", kind="gossip"),
}
"""Arms that step alike share a learning rate: a codec is compared with what it is a codec of."""
OUTERS = ((0.7, 0.9), (0.7, 0.5), (1.0, 0.7), (1.0, 0.5), (1.0, 0.3), (1.0, 0.0), (1.5, 0.5), (1.5, 0.0))
OTHER_LOCAL_STEPS = (25, 100, 200)
TOPK_OUTERS = ((1.0, 0.7), (1.0, 0.5), (1.5, 0.0))
FEWER_KEPT = ((1024, 2.0), (64, 2.0))  # with which outer learning rate; 64 is published, for far larger models
FIRST = (
    *("DDP", "diloco none", "diloco int4", "diloco topk", "diloco none, H 100", "diloco int4, H 100"),
    *("diloco int4, overlap", "diloco topk, overlap"),
)
"""What the suite is about, more than about the others."""
PR_SET_PDEATHSIG = 1
MIXES = (0.0, 0.5)


@dataclass(frozen=True)
class LossSuite:
    """Tune, then compare."""

    has_times: ClassVar[bool] = False

    data: str
    """Which text."""

    @property
    def title(self) -> str:
        return f"Held-out loss at equal tokens, {self.data}"

    def run(self, record: Record, num_repeats: int) -> None:
        _links(record)
        # what is tuned first decides with what the next stage is tuned
        while missing := [
            arm for family in FAMILIES for arm in self._rates(record, family) if not self._has(record, arm)
        ]:
            self._train_all(record, [(arm, 0) for arm in missing])
        self._train_all(record, [(arm, 0) for arm in self._outers(record)])
        self._train_all(record, [(arm, 0) for arm in [*self._topks(record), *self._overlapping(record)]])
        self._train_all(record, [(arm, 0) for arm in self.swept(record)])
        everyone = product(range(num_repeats), self.arms(record))
        self._train_all(record, sorted(((arm, seed) for seed, arm in everyone), key=_urgency))

    def arms(self, record: Record) -> list[Arm]:
        """Everyone who is compared, tuned."""
        ddp, alone, fedavg, gossip = (
            self._best(record, self._rates(record, family)) for family in ("synchronous", "alone", "fedavg", "gossip")
        )
        plain = self._best(record, self._outers(record))
        topk = self._best(record, self._topks(record))
        overlapping = self._best(record, self._overlapping(record))
        return [
            alone,
            ddp,
            Arm(name="hivemind.Optimizer", kind="hivemind", lr=ddp.lr, codec="fp16"),
            fedavg,
            Arm(name="allreduce fp16", kind="allreduce", lr=ddp.lr, codec="fp16"),
            *(replace(plain, name=f"diloco {codec}", codec=codec) for codec in ("none", "fp16", "int8", "int4")),
            replace(topk, name="diloco topk"),
            replace(plain, name="diloco none, H 100", local_steps=100),
            replace(plain, name="diloco int4, H 100", local_steps=100, codec="int4"),
            replace(overlapping, name="diloco int4, overlap"),
            replace(overlapping, name="diloco int4, overlap, H 100", local_steps=100),
            replace(topk, name="diloco topk, overlap", overlap=OVERLAP, mix=overlapping.mix),
            gossip,
        ]

    def swept(self, record: Record) -> list[Arm]:
        """DDP, then `diloco` in fp32 with all outer settings and with other H, then `topk`."""
        ddp, plain, topk = (arm for arm in self.arms(record) if arm.name in ("DDP", "diloco none", "diloco topk"))
        others = [replace(plain, local_steps=steps) for steps in OTHER_LOCAL_STEPS]
        fewer = [replace(topk, keep=kept, outer_lr=lr, momentum=0.0) for kept, lr in FEWER_KEPT]
        return [ddp, *self._outers(record), *others, *self._topks(record), *fewer]

    # --- what is tuned ---

    def _outers(self, record: Record) -> list[Arm]:
        plain = self._best(record, self._rates(record, "diloco"))
        return [replace(plain, outer_lr=outer, momentum=momentum) for outer, momentum in OUTERS]

    def _topks(self, record: Record) -> list[Arm]:
        plain = self._best(record, self._outers(record))
        return [replace(plain, codec="topk", outer_lr=lr, momentum=momentum) for lr, momentum in TOPK_OUTERS]

    def _overlapping(self, record: Record) -> list[Arm]:
        plain = self._best(record, self._outers(record))
        return [replace(plain, codec="int4", overlap=OVERLAP, mix=mix) for mix in MIXES]

    def _rates(self, record: Record, family: str) -> list[Arm]:
        """All that are to be tried: beyond the first ones, as long as the lowest or the highest is the best."""
        arms = [replace(FAMILIES[family], lr=rate) for rate in LEARNING_RATES]
        while all(self._has(record, arm) for arm in arms):
            best = self._best(record, arms)
            if best is arms[0]:
                arms.insert(0, replace(best, lr=best.lr / 2))
            elif best is arms[-1]:
                arms.append(replace(best, lr=best.lr * 2))
            else:
                break
        return arms

    def _best(self, record: Record, arms: Iterable[Arm]) -> Arm:
        """With the first seed."""
        return min(arms, key=lambda arm: self._final(record, arm))

    def _has(self, record: Record, arm: Arm) -> bool:
        return bool(record.entries_of(**self._key(arm, 0)))

    def _final(self, record: Record, arm: Arm) -> float:
        return float(record.entries_of(**self._key(arm, 0))[0]["losses"][-1])

    # --- training ---

    def _train_all(self, record: Record, trainings: Sequence[tuple[Arm, int]]) -> None:
        """Those that are missing, as many at a time as there are cores."""
        missing = {}
        for arm, seed in trainings:
            key = self._key(arm, seed)
            if not record.entries_of(**key):
                missing[tuple(key.items())] = arm, self.data, seed
        if not missing:
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(mp_context=context, initializer=_die_with_parent) as pool:
            futures = {pool.submit(train, *training): training for training in missing.values()}
            try:
                for future in as_completed(futures):
                    (arm, _, seed), entry = futures[future], future.result()
                    record.add({**self._key(arm, seed), **entry})
                    print(f"seed {seed}: {entry['losses'][-1]:.4f} in {entry['cpu_seconds']:.0f} s, {arm}", flush=True)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for child in multiprocessing.active_children():  # else they would be waited for
                    child.kill()
                raise

    def _key(self, arm: Arm, seed: int) -> Entry:
        """What identifies a training; two names for the same one are one."""
        settings = {name: value for name, value in asdict(arm).items() if name != "name"}
        return {**settings, "num_steps": arm.num_steps, "data": self.data, "repeat": seed}

    # --- what came out ---

    def results(self, record: Record) -> list[Result]:
        """Arms that were trained, with the seeds they have so far."""
        num_values = Layout.of(make_task(self.data, 0).build_model()).num_values
        links, results = _links(record), []
        for arm in self.arms(record):
            key = self._key(arm, 0)
            del key["repeat"]
            if entries := record.entries_of(**key):
                results.append(Result(arm, sorted(entries, key=lambda entry: int(entry["repeat"])), num_values, links))
        return results

    def table(self, record: Record) -> str:
        sweep = [(arm, self._final(record, arm)) for arm in self.swept(record)]
        text = [f"Library: {library_text().describe()}"] if self.data == "library" else []
        return "\n\n".join([*text, tables_of(self.results(record), self.data), sweep_table(sweep)])

    def plot(self, record: Record, path: Path) -> None:
        from benchmarks.losses.plots import draw

        draw(self.data, self.results(record), path)


def _links(record: Record) -> Links:
    links = Links.of(Record.open(record.path.parent / "links.json", is_fresh=False, has_times=False))
    if links is None:
        raise SystemExit(
            "What arms cost on a slow link is measured by another suite. First run: python -m benchmarks links"
        )
    return links


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _urgency(training: tuple[Arm, int]) -> tuple[bool, int]:
    """A suite that is stopped early has answered something: one seed of everyone, then more of the first arms."""
    arm, seed = training
    return seed > 0 and arm.name not in FIRST, seed


LIBRARY = LossSuite("library")
CORPUS = LossSuite("corpus")
