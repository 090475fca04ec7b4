"""Every mistake a person can make: a code, words, exit 2, no traceback."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from conftest import SwarmOfProcesses, belongs_to_the_living
from processes import LOOPBACK, PeerProcess, collab, environment, wait_until, write_run

from collab_cli.app import app
from collab_core.run import Invite, RunFolder, fingerprint
from collab_core.run.manifest import SignedManifest
from collab_core.state.exchange import Exchange
from collab_core.state.folder import StateFolder
from collab_core.swarm import Swarm, SwarmConfig
from collab_core.telemetry import EventLog
from collab_trainer import prepare


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


def test_how_a_text_goes_on_is_of_no_use_without_its_beginning() -> None:
    refused = collab("sample", invite_to(f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"), "--tokens", "5", "--seed", "1")
    assert_refused(refused, 108, "--tokens and --seed can only be used with --prompt", "--prompt 'The '")


def test_a_dashboard_that_cannot_be_served_is_said_before_anything_begins(tmp_path: Path) -> None:
    invite = invite_to(f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}")
    assert_refused(collab("dashboard", invite, "--listen", "somewhere"), 108, "--listen 127.0.0.1:8420")
    run = write_run(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        refused = collab("aux", str(run), "--dashboard", place)
    assert_refused(refused, 202, f"cannot listen on {place}", "--dashboard 127.0.0.1:")


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


@pytest.fixture
def donor(tmp_path: Path) -> Iterator[tuple[Exchange, Invite, SignedManifest]]:
    """A peer that gives out whatever it is told to as the run's manifest, with the true invite and manifest."""
    signed = RunFolder(write_run(tmp_path)).signed_manifest(prepare)
    folder = StateFolder(tmp_path / "donor")
    with contextlib.closing(folder), contextlib.closing(EventLog(folder.events)) as events:
        swarm = Swarm(SwarmConfig(role="aux", host_maddrs=(LOOPBACK,)), folder, events)
        with contextlib.closing(swarm):
            swarm.connect()
            yield (
                Exchange(swarm),
                Invite(
                    run_hash=signed.run_hash,
                    fingerprint=fingerprint(signed.claimed_organiser),
                    initial_peers=tuple(swarm.addresses),
                    name="x",
                ),
                signed,
            )


def test_a_foreign_invite(donor: tuple[Exchange, Invite, SignedManifest], tmp_path: Path) -> None:
    """Its peers are there, but they are in another run."""
    exchange, invite, signed = donor
    exchange.serve_manifest(signed)
    foreign = replace(invite, run_hash=bytes(32)).encode()
    assert_refused(collab("train", foreign, "--state-dir", str(tmp_path / "s")), 205, signed.run_hash.hex()[:16])


@pytest.mark.parametrize(("altered", "code"), [("manifest", 205), ("signature", 206)])
def test_a_peer_that_serves_altered_manifest_bytes(
    donor: tuple[Exchange, Invite, SignedManifest], tmp_path: Path, altered: str, code: int
) -> None:
    exchange, invite, signed = donor
    document = signed.document.replace(b'"lr":0.01', b'"lr":0.02')
    assert document != signed.document
    served = {
        "manifest": SignedManifest(document, signed.signature),
        "signature": SignedManifest(signed.document, bytes(len(signed.signature))),
    }[altered]
    exchange.serve_manifest(served)
    assert_refused(collab("train", invite.encode(), "--state-dir", str(tmp_path / "s")), code)
    assert not (tmp_path / "s" / "manifest.json").exists()


def test_a_busy_state_folder_a_forged_invite_and_other_settings(swarm: SwarmOfProcesses, tmp_path: Path) -> None:
    run = write_run(tmp_path)
    aux = swarm.aux(run)
    assert_refused(collab("aux", str(run), "--state-dir", str(aux.state_dir)), 302)

    real = Invite.decode(swarm.invite())
    state = str(tmp_path / "state")
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


@pytest.mark.parametrize("name", ["collab-archive", "of a library"])
def test_a_thread_that_is_still_busy_does_not_spoil_the_exit_code(name: str) -> None:
    """As the archivist's, which may be measuring the held-out loss, or arrow's, which may be reading a data set."""
    script = (
        "import sys, threading, torch\nfrom collab_cli import app as command\n"
        "def measure():\n    while True:\n        torch.nn.functional.linear(torch.zeros(8, 64), torch.zeros(64, 64))\n"
        f"threading.Thread(target=measure, name={name!r}, daemon=True).start()\n"
        "command.app = lambda: (print('Left.'), sys.exit(2))\ncommand.main()"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    assert (finished.returncode, finished.stdout, finished.stderr) == (2, "Left.\n", "")


def test_what_is_to_be_done_at_the_end_is_done_before_the_command_ends() -> None:
    script = (
        "import atexit, sys\nfrom collab_cli import app as command\n"
        "command.app = lambda: (atexit.register(lambda: print('Done.')), sys.exit(3))\ncommand.main()"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    assert (finished.returncode, finished.stdout, finished.stderr) == (3, "Done.\n", "")


def test_help_of_every_command_loads_neither_torch_nor_hivemind() -> None:
    """One process for all: what is loaded stays loaded, so whoever is to blame is the first one listed."""
    names = [[str(info.name)] for info in app.registered_commands]
    for group in app.registered_groups:
        assert group.typer_instance is not None
        inside = group.typer_instance
        names += [[str(inside.info.name)], *([str(inside.info.name), str(i.name)] for i in inside.registered_commands)]
    assert {"new", "aux", "train", "demo", "status", "publish-model", "models"} <= {name for name, *_ in names}
    assert len(names) >= 18
    script = (
        "import json, sys\nfrom collab_cli.app import app\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    try:\n        app([*words, '--help'])\n    except SystemExit as end:\n        assert not end.code, words\n"
        "    heavy = {'torch', 'hivemind', 'transformers', 'numpy'} & set(sys.modules)\n"
        "    print(words, sorted(heavy), file=sys.stderr)\n"
    )
    arguments = [sys.executable, "-c", script, json.dumps([[], *names])]
    finished = subprocess.run(arguments, capture_output=True, text=True, env=environment(), timeout=60)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("Usage") == len(names) + 1
    assert finished.stderr.splitlines() == [f"{words} []" for words in [[], *names]]


def test_demo_reports_as_one_json_document_and_leaves_nothing(tmp_path: Path) -> None:
    for folder in ("home", "tmp"):
        (tmp_path / folder).mkdir()
    assert collab("new", "my-run", cwd=tmp_path).returncode == 0
    shared_before = set(Path("/dev/shm").iterdir())
    mark = {"TMPDIR": str(tmp_path / "tmp"), "COLLAB_HOME": str(tmp_path / "home")}
    command = ("demo", "my-run", "--epochs", "8", "--json")
    with Census(mark["TMPDIR"]) as census:
        finished = collab(*command, timeout_s=200, env=mark, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert report["epochs"] == 8
    assert report["loss"]["last"] < report["loss"]["first"] - 1
    assert report["loss"]["floor"] < report["loss"]["last"]
    assert {peer["model_root"] for peer in report["peers"]} == {report["model_root"]}
    assert [peer["role"] for peer in report["peers"]] == ["aux", "trainer", "trainer"]
    assert all(peer["epoch"] == 8 for peer in report["peers"])
    assert report["sample"]
    assert report.keys() >= {"run_id", "strategy", "epochs", "seconds", "loss", "model_root", "peers", "sample"}
    assert report["loss"].keys() >= {"first", "last", "floor"}
    for peer in report["peers"]:
        assert peer.keys() >= {"peer_id", "name", "role", "epoch", "samples", "loss", "model_root"}
    assert not list((tmp_path / "tmp").iterdir())

    assert len(census.processes) >= 6, "three peers and their daemons"
    assert [process for process in census.processes if process.is_running()] == []
    assert len(census.ports) >= 3
    connections = psutil.net_connections("tcp")
    assert not census.ports & {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    left = {path for path in set(Path("/dev/shm").iterdir()) - shared_before if not belongs_to_the_living(path)}
    assert left == set()


class Census:
    """Counts, in a thread, the processes that have a word in their environment, and the ports they listen at."""

    def __init__(self, word: str) -> None:
        self._word = word
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.processes: set[psutil.Process] = set()
        self.ports: set[int] = set()

    def __enter__(self) -> Census:
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.5):
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    if process in self.processes or self._word in process.environ().values():
                        self.processes.add(process)
                        listening = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
                        self.ports |= {connection.laddr.port for connection in listening}


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
