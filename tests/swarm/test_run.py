"""A run from end to end, with real processes: newcomers, losses, restarts."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import SwarmOfProcesses
from processes import LOOPBACK, PeerProcess, collab, wait_until, without_colours, write_run

from collab_core.state.backup import read_backup, write_backup
from collab_core.state.snapshot import Snapshot

pytestmark = pytest.mark.timeout(300)


def assert_same_history(*peers: PeerProcess) -> None:
    """Wherever two peers saw the same epoch, they had the same root."""
    wait_until(
        lambda: bool(set.intersection(*(set(peer.roots()) for peer in peers))), "an epoch that all of them saw", 60
    )
    seen: dict[int, str] = {}
    for peer in peers:
        for epoch, root in peer.roots().items():
            assert seen.setdefault(epoch, root) == root, f"{peer.state_dir.name} differs at epoch {epoch}"


def assert_never_goes_back(peer: PeerProcess) -> None:
    epochs = [event["epoch"] for event in peer.events() if event["event"] in ("epoch", "resynced")]
    assert epochs == sorted(epochs), epochs


def assert_lost_at_most_one_epoch(peer: PeerProcess, start: int, end: int) -> None:
    """Of the epochs after `start` up to `end` the peer made all, or all but one, itself; else it had to fetch them."""
    assert len(set(range(start + 1, end + 1)) - peer.roots().keys()) <= 1, peer.tail()


def test_three_peers_stay_identical_and_a_newcomer_has_the_state_before_it_contributes(
    swarm: SwarmOfProcesses, tmp_path: Path
) -> None:
    run = write_run(tmp_path)
    aux = swarm.aux(run)
    first, second = swarm.trainer("first"), swarm.trainer("second", "--client-mode")
    for peer in (aux, first, second):
        peer.wait_for_epoch(5)

    third = swarm.trainer("third")
    joined = third.wait_for("joined")
    assert joined["epoch"] >= 5
    name = joined["name"]
    contributed = aux.wait_for("epoch", lambda event: name in event["members"])
    assert contributed["epoch"] > joined["epoch"]
    third.wait_for_epoch(contributed["epoch"] + 2)
    assert joined["root"] == aux.roots()[joined["epoch"]]
    assert third.wait_for("resynced")["bytes"] > 0

    report = json.loads(collab("status", swarm.invite(), "--json").stdout)
    assert report.keys() >= {"run_id", "name", "epoch", "model_root", "peers"}
    told = {"peer_id", "name", "role", "mode", "version", "epoch", "samples", "samples_per_second", "loss"}
    assert all(peer.keys() >= told | {"model_root", "last_seen"} for peer in report["peers"])
    assert {peer["role"] for peer in report["peers"]} == {"aux", "trainer"}
    assert len(report["peers"]) == 4
    assert [peer["quarantined"] for peer in report["peers"]] == [None] * 4
    assert {peer["mode"] for peer in report["peers"]} == {"direct", "client"}
    by_epoch: dict[int, set[str]] = {}
    for peer in report["peers"]:
        by_epoch.setdefault(peer["epoch"], set()).add(peer["model_root"])
    assert all(len(roots) == 1 for roots in by_epoch.values()), by_epoch
    assert report["epoch"] >= joined["epoch"]
    home = tmp_path / "home"  # of a machine on which these peers are: the run folder alone says where they are
    home.mkdir()
    (home / report["run_id"][:16]).symlink_to(aux.state_dir.parent)
    asked = collab("status", str(run), "--json", env={"COLLAB_HOME": str(home)})
    assert [peer["name"] for peer in json.loads(asked.stdout)["peers"]] == [peer["name"] for peer in report["peers"]]

    for peer in (first, second, third, aux):
        started = time.monotonic()
        assert peer.stop(signal.SIGINT if peer is first else signal.SIGTERM) == 0, peer.tail()
        assert time.monotonic() - started < 10
        assert peer.wait_for("left")["epoch"] > 0
        assert_never_goes_back(peer)
    assert_same_history(aux, first, second, third)


def test_the_others_go_on_when_a_trainer_and_then_the_aux_are_killed(swarm: SwarmOfProcesses, tmp_path: Path) -> None:
    run = write_run(tmp_path, strategy__matchmaking_time_s=20.0)  # longer than a record lives: nobody waits that long
    aux = swarm.aux(run)
    doomed, first, second = swarm.trainer("doomed"), swarm.trainer("first"), swarm.trainer("second")
    for peer in (aux, doomed, first, second):
        peer.wait_for_epoch(3)

    doomed.kill()
    epoch = aux.last_epoch()
    wait_until(lambda: not doomed.left_behind(), "the killed trainer's children to end", 5)
    name = doomed.wait_for_last("joined")["name"]
    for peer in (aux, first, second):
        peer.wait_for_epoch(epoch + 3, timeout_s=60)
        left = peer.wait_for("peer_left", lambda event: event["name"] == name)
        without = peer.wait_for("epoch", lambda event: event["epoch"] > epoch and name not in event["members"])
        assert without["time"] < left["time"], "the round waited until the killed trainer's record had run out"
        assert_lost_at_most_one_epoch(peer, epoch, epoch + 3)

    invite, peer_id = swarm.invite(), aux.wait_for("joined")["peer_id"]
    aux.kill()
    epoch = first.last_epoch()
    wait_until(lambda: not aux.left_behind(), "the killed auxiliary's children to end", 5)
    for peer in (first, second):
        peer.wait_for_epoch(epoch + 3, timeout_s=60)
        assert_lost_at_most_one_epoch(peer, epoch, epoch + 3)

    num_events = len(aux.events())
    again = swarm.aux(run)
    assert swarm.invite() == invite
    rejoined = again.wait_for("joined", after=num_events)
    assert rejoined["peer_id"] == peer_id
    caught_up = again.wait_for("epoch", after=num_events)
    assert caught_up["epoch"] > epoch
    for peer in (first, second):
        peer.wait_for_epoch(caught_up["epoch"] + 2)
        assert_never_goes_back(peer)
    assert_same_history(again, first, second)


@pytest.mark.parametrize("victim", ["aux", "trainer"])
def test_nobody_keeps_half_an_average_when_a_reducer_dies_in_the_middle_of_a_round(
    swarm: SwarmOfProcesses, tmp_path: Path, victim: str
) -> None:
    fail = {"COLLAB_FAIL_AT": "reduce:10"}  # not before everyone is there, as it starts about as quickly as the others
    aux = swarm.aux(write_run(tmp_path), env=fail if victim == "aux" else None)
    doomed = swarm.trainer("doomed", env=fail if victim == "trainer" else None)
    survivors = [swarm.trainer("first"), swarm.trainer("second")]
    dead = aux if victim == "aux" else doomed
    wait_until(lambda: dead.process.poll() is not None, "the reducer to die", 120)
    assert dead.process.returncode == -signal.SIGKILL
    everyone = [*survivors, doomed if victim == "aux" else aux]
    for peer in everyone:
        peer.wait_for_epoch(13)
    assert any(peer.events("round_failed") for peer in everyone), "the round should have failed for somebody"
    assert_same_history(*everyone)


def test_a_lone_trainer_makes_progress_and_is_joined_later(swarm: SwarmOfProcesses, tmp_path: Path) -> None:
    run = write_run(tmp_path)
    invite_file = tmp_path / "invite"
    lone = swarm.start("lone", "train", str(run), "--batch-size", "8", "--invite-file", str(invite_file))
    lone.wait_for_epoch(2)
    friend = start_in_a_terminal(swarm, "friend", "train", invite_file.read_text(), "--batch-size", "8")
    name = friend.wait_for("joined")["name"]
    together = lone.wait_for("epoch", lambda event: len(event["members"]) == 2)
    assert name in together["members"]
    friend.wait_for_epoch(together["epoch"] + 1)
    assert_same_history(lone, friend)
    assert_never_goes_back(lone)
    assert_the_view_is_whole(friend, name)


def start_in_a_terminal(swarm: SwarmOfProcesses, name: str, *command: str) -> PeerProcess:
    """One of 80 × 24."""
    spawn = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    size = {"COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}
    return swarm.start(name, *command, "--host-maddrs", LOOPBACK, prefix=(sys.executable, "-c", spawn), env=size)


def assert_the_view_is_whole(peer: PeerProcess, name: str) -> None:
    """What was drawn for a trainer in such a terminal: all of it, and nothing that does not fit."""

    def drawn() -> str:
        return without_colours(peer.log.read_text(errors="replace"))

    for pattern in (
        rf"test-run  epoch \d+  loss \d\.\d{{3}} +you are {name}\s",
        r"now +joining",
        r"now +(working|averaging with the others)",
        r"swarm +[━─]+ +\d+ of 192 samples, [\d,]+/s",
        r"you +[━─]+ +\d+ samples, [\d,]+/s, \d+%",
        r"link +↑ \d+\.\d\d MB  ↓ \d+\.\d\d MB  in \d+\.\d s of \d+\.\d s, the last epoch",
        r"given +[\d,]+ samples in \d+ epochs?",
        rf"{name} +trainer +direct +(working|averaging|joining) +\d+ +[\d,]+ +[\d,]+ +\d\.\d{{3}} +[0-9a-f]{{6}}",
        "[▁▂▃▄▅▆▇█⠁-⣿]{8}",  # the curve of the loss
    ):
        wait_until(lambda pattern=pattern: re.search(pattern, drawn()) is not None, pattern, 30)  # type: ignore[misc]
    assert max(map(len, re.split(r"[\r\n]+", drawn()))) <= 80
    ups = re.findall(
        r"(?:\x1b\[1A\x1b\[2K)+", peer.log.read_text(errors="replace")
    )  # from the end of a drawing to its top
    assert ups
    assert max(each.count("\x1b[1A") for each in ups) < 24


def test_client_mode_trainers_survive_a_restart_of_their_only_auxiliary(
    swarm: SwarmOfProcesses, tmp_path: Path
) -> None:
    run = write_run(tmp_path)
    aux = swarm.aux(run)
    trainers = [swarm.trainer("first", "--client-mode"), swarm.trainer("second", "--client-mode")]
    for peer in (aux, *trainers):
        peer.wait_for_epoch(3)
    aux.kill()
    num_events = len(aux.events())
    again = swarm.aux(run)
    resumed = again.wait_for("epoch", after=num_events)
    for peer in trainers:
        peer.wait_for_epoch(resumed["epoch"] + 2)
    assert_same_history(again, *trainers)


def test_an_auxiliary_that_only_reduces_holds_no_state(swarm: SwarmOfProcesses, tmp_path: Path) -> None:
    aux = swarm.aux(write_run(tmp_path), "aux", "--no-as-active-peer")
    # a client-mode trainer cannot serve its state and this auxiliary has none, so one that can serve comes first
    trainers = [swarm.trainer("first")]
    trainers[0].wait_for_epoch(1)
    trainers.append(swarm.trainer("second", "--client-mode"))
    for peer in trainers:
        peer.wait_for_epoch(4)
    # while one trainer was alone it reduced its own: only with two is there something to do for others
    assisted = aux.wait_for("assisted", lambda event: len(event["members"]) == 2)
    assert assisted["bytes_sent"] > 0
    assert aux.wait_for("swarm", lambda event: event["epoch"] > assisted["epoch"])["trainers"] == 2
    report = json.loads(collab("status", swarm.invite(), "--json").stdout)
    assert [peer["model_root"] for peer in report["peers"] if peer["role"] == "aux"] == [None]
    assert_same_history(*trainers)
    assert not (aux.state_dir / "backup.collab").exists()


def test_a_stopped_run_resumes_where_it_was(swarm: SwarmOfProcesses, tmp_path: Path) -> None:
    run = write_run(tmp_path)
    aux, trainer = swarm.aux(run), swarm.trainer("trainer")
    trainer.wait_for_epoch(3)
    assert trainer.stop() == 0
    assert aux.stop() == 0
    left = aux.wait_for("left")
    num_events = len(aux.events())
    kept = json.loads(collab("models", "log", "--json", "--state-dir", str(aux.state_dir)).stdout)["versions"]
    assert [row["epoch"] for row in kept] == list(range(left["epoch"], -1, -1))
    assert {row["epoch"]: row["root"] for row in kept if row["epoch"]} == aux.roots()
    assert collab("models", "verify", "--state-dir", str(aux.state_dir)).returncode == 0
    again = swarm.aux(run)
    assert again.wait_for("restored", after=num_events)["root"] == left["root"]
    after = len(trainer.events())
    resumed = swarm.trainer("trainer")
    assert resumed.wait_for("joined", after=after)["epoch"] == left["epoch"]
    assert resumed.wait_for("epoch", after=after)["epoch"] > left["epoch"]


def test_a_killed_peer_leaves_no_process_no_port_and_no_socket_folder_in_use(
    swarm: SwarmOfProcesses, tmp_path: Path
) -> None:
    aux = swarm.aux(write_run(tmp_path))
    port = int(aux.wait_for("joined")["addresses"][0].split("/")[4])
    aux.kill()
    wait_until(lambda: not aux.left_behind(), "the daemon to end", 5)
    listening = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port]
    assert not listening


def test_an_auxiliary_whose_network_daemon_dies_ends_and_says_so(swarm: SwarmOfProcesses, tmp_path: Path) -> None:
    aux = swarm.aux(write_run(tmp_path, strategy__target_batch_size=4000))
    trainer = swarm.trainer("trainer")
    aux.wait_for_epoch(1)  # now it waits for the next round, patiently
    (daemon,) = [process for process in aux.descendants() if process.name() == "p2pd"]
    daemon.kill()
    assert aux.process.wait(20) == 1
    assert "COLLAB-203" in aux.log.read_text()
    trainer.wait_for_epoch(trainer.last_epoch() + 1)


def test_an_epoch_that_the_auxiliary_ended_alone_is_dropped_and_nobody_else_goes_back(
    swarm: SwarmOfProcesses, tmp_path: Path
) -> None:
    run = write_run(tmp_path)
    aux, trainers = swarm.aux(run), [swarm.trainer("first"), swarm.trainer("second")]
    for peer in (*trainers, aux):
        peer.wait_for_epoch(2)
    assert aux.stop() == 0
    path, run_id = aux.state_dir / "backup.collab", aux.wait_for("joined")["run_id"]
    backup = read_backup(path, run_id)
    assert backup is not None
    epoch = int(backup.tensors["run/epoch"])
    alone = {
        **{name: value + 0.5 if name.startswith("model/") else value for name, value in backup.tensors.items()},
        "run/epoch": torch.tensor(epoch + 1),
        "run/parent_root": torch.tensor(list(bytes.fromhex(backup.root)), dtype=torch.uint8),
    }
    history = {**backup.history, epoch: backup.root}
    write_backup(path, run_id, Snapshot(epoch + 1, alone), history, backup.counters)
    for trainer in trainers:
        trainer.wait_for_epoch(epoch + 5)
    before = [len(peer.events()) for peer in (aux, *trainers)]
    again = swarm.aux(run)
    assert again.wait_for("restored", after=before[0])["epoch"] == epoch + 1
    back = again.wait_for("resynced", after=before[0])
    assert back["epoch"] >= epoch + 5
    for trainer, after in zip(trainers, before[1:], strict=True):
        trainer.wait_for_epoch(back["epoch"] + 2)
        assert not [event for event in trainer.events()[after:] if event["event"] == "resynced"]
        assert_never_goes_back(trainer)
    again.wait_for("epoch", lambda event: event["epoch"] > back["epoch"], after=before[0])
    roots = {event["epoch"]: event["root"] for event in again.events()[before[0] :] if event["event"] == "epoch"}
    assert all(trainers[0].roots().get(epoch, root) == root for epoch, root in roots.items())
