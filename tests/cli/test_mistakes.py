"""Every mistake a person can make: a code, words, exit 2, no traceback."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import SwarmOfProcesses
from processes import LOOPBACK, PeerProcess, collab, environment, wait_until, write_run

from collab_core.run import Invite


def assert_refused(finished: subprocess.CompletedProcess[str], code: int, *words: str, exit_code: int = 2) -> None:
    text = finished.stdout + finished.stderr
    assert finished.returncode == exit_code, text
    assert f"COLLAB-{code}" in text, text
    assert "Traceback" not in text
    flat = " ".join(text.replace("│", " ").split())
    for word in words:
        assert word in flat, text


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


PEER = "12D3KooWQ1fJeFovNaRwDh47pzWPTNdRpBTBG4cEwHsVNs1Td9au"


def invite_to(address: str) -> str:
    return Invite(run_hash=bytes(32), fingerprint=bytes(16), initial_peers=(address,), name="x").encode()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("hello", 110),
        (invite_to(f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}")[:-9], 111),
        ("collab9_abcdef", 112),
        ("", 110),
    ],
)
@pytest.mark.parametrize("command", ["train", "status"])
def test_a_wrong_or_cut_off_invite(command: str, text: str, code: int) -> None:
    assert_refused(collab(command, text), code)


def test_an_unreachable_first_peer_is_named(tmp_path: Path) -> None:
    address = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{PEER}"
    finished = collab("train", invite_to(address), "--state-dir", str(tmp_path))
    assert_refused(finished, 201, "connection refused", "ask the organiser")


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    assert_refused(collab("aux", str(tmp_path)), 101)
    assert_refused(collab("demo", str(tmp_path)), 101)


def test_new_does_not_overwrite(tmp_path: Path) -> None:
    assert collab("new", str(tmp_path / "a")).returncode == 0
    before = (tmp_path / "a" / "organiser.key").read_bytes()
    assert_refused(collab("new", str(tmp_path / "a")), 107)
    assert (tmp_path / "a" / "organiser.key").read_bytes() == before


def test_a_run_file_with_a_typo_names_it(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    text = (run / "run.toml").read_text()
    (run / "run.toml").write_text(text.replace("target_batch_size", "target_batchsize"))
    assert_refused(collab("aux", str(run)), 103, "target_batchsize", "target_batch_size")


def test_a_taken_port(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        finished = collab(
            "aux", str(run), "--port", str(port), "--host-maddrs", LOOPBACK, "--state-dir", str(tmp_path / "state")
        )
    assert_refused(finished, 202, str(port), "--port")


def test_an_unwritable_state_folder(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (tmp_path / "file").write_text("")
    finished = collab("aux", str(run), "--state-dir", str(tmp_path / "file" / "state"))
    assert_refused(finished, 301, "--state-dir")


def test_a_bad_address(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    assert_refused(collab("aux", str(run), "--host-maddrs", "localhost:80", "--state-dir", str(tmp_path / "s")), 207)


def test_client_mode_without_anybody_to_dial(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    assert_refused(collab("train", str(run), "--client-mode", "--state-dir", str(tmp_path / "s")), 108)


def test_an_unknown_device_and_an_unknown_task(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    assert_refused(collab("train", str(run), "--device", "tpu", "--state-dir", str(tmp_path / "s")), 403, "tpu")
    other = write_run(tmp_path, name="other", task__name="tiny-gtp")
    assert_refused(collab("aux", str(other), "--state-dir", str(tmp_path / "s")), 401, "tiny-gpt")


def test_a_busy_state_folder_a_foreign_invite_a_changed_manifest_and_other_settings(
    swarm: SwarmOfProcesses, tmp_path: Path
) -> None:
    run = write_run(tmp_path)
    aux = swarm.aux(run)
    assert_refused(collab("aux", str(run), "--state-dir", str(aux.state_dir)), 302)

    real = Invite.decode(swarm.invite())
    state = str(tmp_path / "state")
    foreign = Invite(run_hash=bytes(32), fingerprint=real.fingerprint, initial_peers=real.initial_peers, name="x")
    assert_refused(collab("train", foreign.encode(), "--state-dir", state), 205)
    forged = Invite(run_hash=real.run_hash, fingerprint=bytes(16), initial_peers=real.initial_peers, name="x")
    assert_refused(collab("train", forged.encode(), "--state-dir", state), 206)
    wrong_peer = real.initial_peers[0].rpartition("/")[0] + f"/{PEER}"
    assert_refused(collab("status", invite_to(wrong_peer)), 201, "fresh invite")

    copy = tmp_path / "copy"
    copy.mkdir()
    text = (run / "run.toml").read_text().replace("lr = 0.01", "lr = 0.02")
    (copy / "run.toml").write_text(text)
    (copy / "organiser.key").write_bytes((run / "organiser.key").read_bytes())
    options = ("--initial-peers", real.initial_peers[0], "--state-dir", state)
    assert_refused(
        collab("train", str(copy), "--no-sync-args", *options), 113, "optimizer.lr: 0.02 here, 0.01 in the run"
    )
    synced = swarm.start("synced", "train", str(copy), "--initial-peers", real.initial_peers[0], "--batch-size", "8")
    assert synced.wait_for("settings_synced")["differences"] == ["optimizer.lr: 0.02 here, 0.01 in the run"]
    synced.wait_for("epoch")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--name", "n" * 49), 108),
        (("--name", "a\x1bb"), 108),
        (("--host-maddrs", "/ip4/192.0.2.77/tcp/0"), 203),
        (("--invite-file", "/no/such/folder/invite"), 301),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: tuple[str, ...], code: int) -> None:
    run = write_run(tmp_path)
    assert_refused(collab("train", str(run), *options, "--state-dir", str(tmp_path / "s")), code)


def test_insisting_on_the_settings_of_an_invite(tmp_path: Path) -> None:
    invite = invite_to(f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}")
    assert_refused(collab("train", invite, "--no-sync-args", "--state-dir", str(tmp_path)), 108)


def test_a_port_that_another_peer_of_ours_listens_on(swarm: SwarmOfProcesses, tmp_path: Path) -> None:
    run = write_run(tmp_path)
    aux = swarm.aux(run)
    port = aux.wait_for("joined")["addresses"][0].split("/")[4]
    options = ("--host-maddrs", LOOPBACK, "--state-dir", str(tmp_path / "s"))
    assert_refused(collab("aux", str(run), "--port", port, *options), 202, port)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_joining_stops_at_once_with_exit_0(tmp_path: Path, number: signal.Signals) -> None:
    address = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{PEER}"
    peer = PeerProcess(tmp_path / "state", "train", invite_to(address))
    try:
        wait_until(lambda: "Joining" in peer.log.read_text(), "the peer to try", 30)
        started = time.monotonic()
        assert peer.stop(number) == 0, peer.tail()
        assert time.monotonic() - started < 5
        assert "Traceback" not in peer.log.read_text()
    finally:
        peer.close()


@pytest.mark.parametrize("command", [(), ("new",), ("aux",), ("train",), ("demo",), ("status",), ("publish-model",)])
def test_help_answers_at_once_and_loads_no_torch(command: tuple[str, ...]) -> None:
    script = (
        "import sys\nfrom collab_cli.app import app\n"
        "try:\n    app()\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules, 'hivemind' in sys.modules, file=sys.stderr)"
    )
    arguments = [sys.executable, "-c", script, *command, "--help"]
    finished = subprocess.run(arguments, capture_output=True, text=True, env=environment(), timeout=30, check=True)
    assert "Usage" in finished.stdout
    assert finished.stderr.split() == ["False", "False"]


def test_demo_reports_as_one_json_document_and_leaves_nothing(tmp_path: Path) -> None:
    finished = collab("demo", "--epochs", "8", "--json", timeout_s=200, env={"TMPDIR": str(tmp_path)})
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert report["epochs"] == 8
    assert report["loss"]["last"] < report["loss"]["first"] - 1
    assert report["loss"]["floor"] < report["loss"]["last"]
    assert {peer["model_root"] for peer in report["peers"]} == {report["model_root"]}
    assert [peer["role"] for peer in report["peers"]] == ["aux", "trainer", "trainer"]
    assert all(peer["epoch"] == 8 for peer in report["peers"])
    assert report["sample"]
    assert set(report) == {"run_id", "strategy", "epochs", "seconds", "loss", "model_root", "peers", "sample"}
    assert not list(tmp_path.glob("collab-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_demo_that_is_stopped_or_killed_takes_its_peers_with_it(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "collab_cli", "demo", "--epochs", "1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment(), "TMPDIR": str(tmp_path)},
    )
    try:
        assert process.stdout is not None
        assert any(line.startswith("epoch") for line in process.stdout)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 6  # three peers and their daemons
        process.send_signal(number)
        assert process.wait(15) == (0 if number is signal.SIGINT else -number)
        _, alive = psutil.wait_procs(family, timeout=15)
        assert not alive
        if number is signal.SIGINT:
            assert not list(tmp_path.glob("collab-*"))
    finally:
        process.kill()
        process.stdout.close()  # type: ignore[union-attr]
