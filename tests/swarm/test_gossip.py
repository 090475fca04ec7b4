"""A gossip run of real processes: no leader, no group, and after the first contact nobody who is needed."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SwarmOfProcesses
from processes import BLIND_GUESS, LOOPBACK, PeerProcess, collab, wait_until, write_run
from safetensors.torch import load_file

from collab_core.run import RunFolder, run_template
from collab_core.session import open_session
from collab_core.state.backup import read_backup
from collab_core.swarm import SwarmConfig
from collab_trainer import TrainerConfig, load_task, new_replica, prepare
from collab_trainer.gossip import GossipTrainer

pytestmark = pytest.mark.timeout(240)


def test_trainers_go_on_without_the_first_peer_and_end_by_themselves_with_nearly_the_same_model(
    swarm: SwarmOfProcesses, tmp_path: Path
) -> None:
    run = write_run(
        tmp_path,
        strategy__name="gossip",
        strategy__codec="none",
        strategy__target_batch_size=32,
        optimizer__warmup_epochs=2,
        optimizer__decay="linear",
        optimizer__decay_epochs=20,
        optimizer__final_lr_fraction=0.0,
        gossip__stop="converged",
        gossip__window=3,
        gossip__num_windows=2,
    )
    aux = swarm.aux(run)
    trainers = [swarm.trainer(name) for name in ("first", "second", "third")]
    for trainer in trainers:
        trainer.wait_for("met")
    assert aux.wait_for("swarm")["trainers"] > 0
    aux.kill()
    killed_at = last_round(trainers[0])

    for trainer in trainers:
        trainer.wait_for("converged", timeout_s=120)
        assert trainer.process.wait(20) == 0, trainer.tail()
        losses = [event["held_out_loss"] for event in trainer.events("evaluated")]
        assert losses[-1] < 0.4 * BLIND_GUESS, losses
        assert not trainer.events("exchange_lost")
    assert last_round(trainers[0]) > killed_at + 5
    models = [backup_of(trainer) for trainer in trainers]
    for one, other in combinations(models, 2):
        assert float(((one - other) ** 2).sum() / (one**2).sum()) < 1e-5
    target = tmp_path / "model.safetensors"
    made = collab("models", "recover", "latest", "--state-dir", str(trainers[0].state_dir), "-o", str(target))
    assert made.returncode == 0, made.stderr
    assert torch.equal(flat(load_file(target)), models[0])


def test_two_that_reach_the_last_round_of_a_run_meet_until_they_leave_with_the_same_model(
    swarm: SwarmOfProcesses, tmp_path: Path
) -> None:
    last = 80  # so that both are there long before
    run = write_run(
        tmp_path,
        strategy__name="gossip",
        strategy__codec="none",
        strategy__target_batch_size=128,
        limits__max_epochs=last,
    )
    swarm.aux(run)
    trainers = [swarm.trainer(name, "--batch-size", size) for name, size in (("quick", "128"), ("slow", "1"))]
    for trainer in trainers:
        assert trainer.wait_for("left", timeout_s=120)["epoch"] == last
        assert trainer.process.wait(20) == 0, trainer.tail()
        assert not trainer.events("converged")
        assert [event["samples"] for event in trainer.events("round") if event["epoch"] == last][1:] == [0, 0, 0]
    assert torch.equal(*map(backup_of, trainers))
    # both are in the same round whatever their speed: who is quicker makes more of the rounds that both have to make
    together = max(trainer.events("joined")[0]["time"] for trainer in trainers)
    rounds = [[event for event in trainer.events("round") if event["samples"]] for trainer in trainers]
    quick, slow = (sum(event["time"] > together for event in made) for made in rounds)
    assert slow < quick
    assert (
        abs(sum(map(len, rounds)) + sum(trainer.events("joined")[0]["epoch"] for trainer in trainers) - 2 * last) <= 4
    )


class InThisProcess:
    """A trainer in a thread, with a session of its own."""

    def __init__(self, run: RunFolder, folder: Path, first: str = "", epochs: int = 0) -> None:
        self.log: list[dict[str, Any]] = []
        self._stop, self._ready = threading.Event(), threading.Event()
        self.addresses: list[str] = []
        self._options = run, folder, first, epochs
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    def _run(self) -> None:
        run, folder, first, epochs = self._options
        config = SwarmConfig(role="trainer", host_maddrs=(LOOPBACK,), initial_peers=(first,) if first else ())
        with open_session(run, config, state_dir=folder, prepare=prepare) as session:
            session.events.listen(self.log.append)
            self.addresses, self.invite = session.swarm.addresses, session.invite().encode()
            settings = session.manifest.settings
            task = load_task(settings.task)
            model = task.build_model()
            self.trainer = GossipTrainer(
                task=task,
                model=model,
                replica=new_replica(settings, model),
                device=torch.device("cpu"),
                session=session,
                config=TrainerConfig(batch_size=4, backup_every=2, max_epochs=epochs),
                stop=self._stop,
            )
            self.trainer.enter()
            self._ready.set()
            self.trainer.run()

    def wait_for(self, kind: str, accept: Callable[[dict[str, Any]], bool] = lambda event: True) -> dict[str, Any]:
        def happened() -> bool:
            return any(event["event"] == kind and accept(event) for event in self.log)

        try:
            wait_until(happened, kind, 60)
        except AssertionError as error:
            raise AssertionError(f"{error} among {self.log[-50:]}; known: {self.trainer.swarm.peers()}") from None
        return next(event for event in self.log if event["event"] == kind and accept(event))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(15)
        assert not self._thread.is_alive()


def toy_run(folder: Path, max_epochs: int = 0) -> RunFolder:
    text = run_template("toy").replace('name = "allreduce"', 'name = "gossip"').replace('"fp16"', '"none"')
    text = text.replace("width = 64", "width = 32").replace("target_batch_size = 256", "target_batch_size = 8")
    text, found = re.subn(r"max_epochs = \d+", f"max_epochs = {max_epochs}", text)
    assert found == 1
    return RunFolder.create(folder / "toy", text)


def test_one_that_is_much_slower_ends_with_the_others(
    short_folder: Path, closing: Callable[[Callable[[], None]], None]
) -> None:
    last = 100
    run = toy_run(short_folder, last)
    slow = InThisProcess(run, short_folder / "slow")
    closing(slow.stop)
    honest_step = slow.trainer._step

    def slow_step() -> float:
        time.sleep(1.0)
        return honest_step()

    slow.trainer._step = slow_step  # type: ignore[method-assign]
    others = [InThisProcess(run, short_folder / name, slow.addresses[0]) for name in ("first", "second")]
    for one in others:
        closing(one.stop)
    for one in (slow, *others):
        assert one.wait_for("left")["epoch"] == last
    made = [sum(event["event"] == "round" and event["samples"] > 0 for event in one.log) for one in (slow, *others)]
    assert 4 * made[0] < min(made[1:]), made
    mine, *theirs = (one.trainer.own.values() for one in (slow, *others))
    for values in theirs:
        assert float(((values - mine) ** 2).sum() / (mine**2).sum()) < 1e-4


def test_a_newcomer_takes_the_model_of_anybody_and_one_that_comes_back_its_own(
    short_folder: Path, closing: Callable[[Callable[[], None]], None]
) -> None:
    run = toy_run(short_folder)
    first = InThisProcess(run, short_folder / "first")
    closing(first.stop)
    first.wait_for("round", lambda event: event["epoch"] >= 3)

    second = InThisProcess(run, short_folder / "second", first.addresses[0])
    adopted = second.wait_for("adopted")
    assert adopted["name"] == first.trainer.swarm.name
    assert second.wait_for("round")["epoch"] > adopted["epoch"]
    second.wait_for("met")
    second.wait_for("round", lambda event: event["epoch"] >= adopted["epoch"] + 6)
    asked = collab("status", first.invite, "--json")
    assert asked.returncode == 0, asked.stderr
    status = json.loads(asked.stdout)
    assert status["model_root"] is None
    assert status["epoch"] > adopted["epoch"], "whoever is asked knows where it is itself"
    assert [peer["distance"] > 0 for peer in status["peers"]] == [True, True], status
    second.stop()
    left = second.wait_for("left")
    assert not [event for event in second.log if event["event"] == "exchange_lost"]

    again = InThisProcess(run, short_folder / "second", first.addresses[0], epochs=left["epoch"] + 3)
    assert again.wait_for("restored")["epoch"] == left["epoch"]
    assert again.wait_for("left")["epoch"] >= left["epoch"] + 3
    assert not [event for event in again.log if event["event"] in ("adopted", "exchange_lost")]
    exchanges = {event["exchange"] for event in second.log + again.log if event["event"] == "met"}
    assert exchanges <= {event["exchange"] for event in first.log if event["event"] == "met"}, "one side only"
    again.stop()


def last_round(trainer: PeerProcess) -> int:
    return max((int(event["epoch"]) for event in trainer.events("round")), default=0)


def backup_of(trainer: PeerProcess) -> torch.Tensor:
    backup = read_backup(trainer.state_dir / "backup.collab", trainer.events("joined")[0]["run_id"])
    assert backup is not None
    return flat({name.removeprefix("model/"): t for name, t in backup.tensors.items() if name.startswith("model/")})


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in sorted(tensors.items())])
