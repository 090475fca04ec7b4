"""The dashboard over real HTTP: what it tells, to whom, and how much of it."""

from __future__ import annotations

import json
import math
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stage import ROOT, Stage, get, serve, until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from collab_core.errors import Code, CollabError
from collab_core.overview import survey
from collab_core.situation import state_in_words
from collab_dashboard import Dashboard, Place, RunWatch, broadcast


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path, more="[limits]\nmax_epochs = 40\n")
    made.add("harbour", "aux", phase="serving", history_samples=768)
    made.add("first", loss=2.0, samples=500, samples_per_second=10.0, epoch_samples=100, upload=2.5e6, download=1e7)
    made.add("<script>", loss=4.0, samples=268, samples_per_second=5.0, epoch_samples=28, mode="client")
    made.speak()
    yield made
    made.close()


@pytest.fixture
def watch(stage: Stage) -> RunWatch:
    return stage.watch(tokens_per_sample=64, floor=lambda: 0.5)


@pytest.fixture
def shown(watch: RunWatch) -> Iterator[Dashboard]:
    with serve(watch) as served:
        until(lambda: get(served.url + "api/runs").status == 200, "the server")
        yield served


def address(served: Dashboard) -> str:
    return served.url.replace("http", "ws") + "ws"


def test_the_api_tells_what_the_records_say(shown: Dashboard, stage: Stage) -> None:
    (listed,) = get(shown.url + "api/runs").json
    assert (listed["name"], listed["loss"], listed["num_trainers"]) == ("staged", 3.0, 2)
    run = get(f"{shown.url}api/runs/{listed['run_id'][:12]}").json
    assert run["state"] == "2 trainers are collecting samples for epoch 2."
    assert (run["samples"], run["samples_per_second"], run["max_epochs"]) == (768, 15.0, 40)
    assert run["progress"] | {"since": 0} == {"collected": 128, "target": 256, "since": 0}
    peers = {peer["name"]: peer for peer in get(shown.url + "api/runs/staged/peers").json}
    assert peers["harbour"]["is_organisers"]
    assert not peers["first"]["is_organisers"]
    assert (peers["<script>"]["link"], peers["first"]["state"]) == ("client", "newest")
    links = {name: (peer["upload"], peer["download"]) for name, peer in peers.items()}
    assert (links["first"], links["<script>"]) == ((2.5e6, 1e7), (0, 0))
    assert [row["name"] for row in run["leaderboard"]["rows"]] == ["first", "<script>"]
    points = get(shown.url + "api/runs/staged/history").json["points"]
    assert [1, 768, 3.0, 15.0, 2] in points.values()
    assert get(shown.url + "api/runs/nobody").status == 404
    assert get(shown.url + "api/runs/staged/invite.svg").headers["content-type"] == "image/svg+xml"


def test_whoever_is_kept_out_counts_no_more_and_the_reason_is_told(stage: Stage, watch: RunWatch) -> None:
    liar = stage.extras[2].identity.peer_id
    sentence = {"peer_id": liar, "until_epoch": 9, "reason": "part 0 has values that are not finite"}
    watch.look()
    stage.speak(stage.extras[0], sentences=[sentence])
    run = watch.look()
    assert run.peers[liar].quarantined is not None
    assert run.peers[liar].quarantined.reason == sentence["reason"]
    assert (run.num_trainers, run.num_quarantined, run.loss) == (1, 1, 2.0)
    assert any("kept out until epoch 9" in event.text for event in run.events.values())
    stage.speak(epoch=9, sentences=[])
    assert "may take part again" in list(watch.look().events.values())[-1].text


def test_who_left_stays_in_the_table_as_gone(stage: Stage, watch: RunWatch) -> None:
    watch.look()
    stage.speak(stage.extras[1], phase="left")
    run = watch.look()
    assert [peer.name for peer in run.peers.values() if peer.presence == "gone"] == ["first"]
    assert [peer.state for peer in run.peers.values() if peer.presence == "gone"] == ["none"]
    assert any(row.name == "first" and not row.is_here for row in run.leaderboard.rows)
    assert "first (trainer) left: said goodbye." in [event.text for event in run.events.values()]


def test_while_nobody_is_there_the_run_stays_where_it_was(stage: Stage, watch: RunWatch) -> None:
    sentence = {"peer_id": stage.extras[2].identity.peer_id, "until_epoch": 9, "reason": "part 0 is not finite"}
    stage.speak(sentences=[sentence])
    before = watch.look()
    assert before.progress.since is None, "when the last epoch ended, nobody here has seen"
    stage.speak(phase="left")
    run = watch.look()
    assert run.state == "Nobody is here. The run goes on when the first peer comes back."
    assert (run.epoch, run.samples, run.model_root) == (1, 768, ROOT)
    assert (run.num_trainers, run.samples_per_second, run.loss) == (0, 0.0, None)
    assert not any("may take part again" in event.text for event in run.events.values())
    stage.speak(phase="working", epoch=2, sentences=[sentence])
    assert watch.look().progress.since == pytest.approx(time.time(), abs=5)


def test_an_epoch_takes_long_only_beside_what_it_should_take(stage: Stage) -> None:
    settings = stage.manifest.settings

    def tone_after(seconds: float) -> str:
        return state_in_words(survey(stage.directory.peers(), stage.manifest), settings, seconds)[0]

    assert (tone_after(59), tone_after(61)) == ("good", "waiting")  # 256 samples at 15 per second
    stage.speak(samples_per_second=0.5)  # a slow run: over four minutes each
    assert (tone_after(700), tone_after(800)) == ("good", "waiting")


def test_a_restarted_auxiliary_knows_the_past_from_its_log(stage: Stage) -> None:
    start = time.time() - 2000
    me = {"event": "joined", "name": "harbour", "role": "aux", "epoch": 0, "root": None}
    past: list[dict[str, Any]] = [
        {"time": start, "run_id": "of another run", **me},
        {"time": start, "event": "peer_joined", "peer_id": "x", "name": "a stranger", "role": "trainer"},
        {"time": start, "run_id": stage.manifest.run_id, **me},
    ]
    for epoch in range(1, 1001):
        when, rest = {"time": start + epoch, "epoch": epoch}, {"samples_per_second": 10.0, "trainers": 2, "peers": 3}
        past.append({**when, "event": "swarm", "loss": 6 - epoch / 200, "samples": 100 * epoch, **rest})
        past.append({**when, "event": "epoch", "members": {"first": 60, "second": 40}, "lost": {}})
    for loss in (1.25, math.nan):
        past.append({"time": start + 1001, "event": "evaluated", "epoch": 1000, "held_out_loss": loss})
    for epoch in range(100, 1001, 50):
        what = {"epoch": epoch, "root": "cd" * 32, "revision": f"revision {epoch}", "place": "ada/run", "seconds": 1.0}
        past.append({"time": start + epoch, "event": "checkpoint", **what})
    past.append({"time": start + 1002, "event": "swarm", "epoch": "junk"})
    stage.log.write_text("".join(json.dumps(event) + "\n" for event in past) + '{"cut')
    watch = RunWatch(
        manifest=stage.manifest,
        invite=stage.invite.encode,
        peers=stage.directory.peers,
        own=lambda: stage.directory.peers()[0],
    )
    watch.follow(stage.events)
    run = watch.look()
    epochs = [point.epoch for point in run.history.points.values()]
    assert 300 <= len(epochs) <= 600
    assert epochs[:-1] == sorted(epochs[:-1])
    assert (epochs[0], epochs[-2]) in ((1, 999), (1, 1000))
    assert [tuple(one) for one in run.history.held_out.values()] == [(1000, 100_000, 1.25)]
    assert [(row.name, row.samples) for row in run.leaderboard.rows] == [("first", 60_000), ("second", 40_000)]
    assert run.leaderboard.counted_by == "auxiliary"
    assert run.progress.since == pytest.approx(start + 1000, abs=0.1)
    assert [one.revision for one in run.checkpoints] == [f"revision {epoch}" for epoch in range(1000, 400, -50)]
    assert "stranger" not in json.dumps([event.text for event in run.events.values()])


def test_prometheus_can_read_the_metrics(shown: Dashboard) -> None:
    answer = get(shown.url + "metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.body.decode().splitlines()
    sample = re.compile(r'[a-z_]+(\{run="staged",run_id="[0-9a-f]{16}"\})? [0-9.e+-]+')
    assert all(line.startswith(("# HELP ", "# TYPE ")) or sample.fullmatch(line) for line in lines)
    values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if "{" in line}
    assert values["collab_epoch"] == 1
    assert values["collab_loss"] == 3.0
    assert values["collab_trainers"] == 2
    assert "collab_checkpoint_epoch" not in values, "what is not known is left out"


def test_a_listener_hears_everything_then_only_what_changed(shown: Dashboard, stage: Stage) -> None:
    with connect(address(shown)) as socket:
        whole = json.loads(socket.recv(timeout=5))
        (run,) = whole["runs"].values()
        assert len(run["peers"]) == 3
        stage.speak(stage.extras[1], loss=1.0)
        while "loss" not in (patch := next(iter(json.loads(socket.recv(timeout=5)).get("runs", {}).values()), {})):
            pass
        assert patch["loss"] == 2.5
        assert "name" not in patch, "what stays is not said again"
        first = stage.extras[1].identity.peer_id
        assert patch["peers"][first]["loss"] == 1.0
        assert "name" not in patch["peers"][first]


def test_too_many_listeners_are_told_so_in_words(shown: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "MAX_CLIENTS", 1)
    with connect(address(shown)) as first:
        first.recv(timeout=5)
        with connect(address(shown)) as second, pytest.raises(ConnectionClosed) as closed:
            second.recv(timeout=5)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1013
        assert "Try again in a minute" in closed.value.rcvd.reason


def test_a_listener_that_talks_is_let_go(shown: Dashboard) -> None:
    for words, code in (("hello", 1008), ("x" * 5000, 1009)):  # not allowed; too big even to be read
        with connect(address(shown)) as socket:
            socket.send(words)
            with pytest.raises(ConnectionClosed):
                list(socket)
            assert socket.close_code == code


def test_other_web_pages_cannot_read_along(shown: Dashboard) -> None:
    with pytest.raises(InvalidStatus):
        connect(address(shown), origin="http://evil.example").__enter__()  # type: ignore[arg-type]
    answer = get(shown.url + "api/runs", Host="evil.example")
    assert (answer.status, b"only for the machine" in answer.body) == (421, True)
    assert "access-control-allow-origin" not in get(shown.url + "api/runs", Origin="http://evil.example").headers


def test_a_web_server_in_front_passes_on_by_which_name_it_was_asked(watch: RunWatch) -> None:
    with serve(watch, is_local=False) as served:
        until(lambda: get(served.url + "api/runs", Host="runs.example").status == 200, "the server")
        port = int(served.url.rsplit(":", 1)[1].strip("/"))
        with (
            socket.create_connection(("127.0.0.1", port)) as through,
            connect("ws://runs.example/ws", sock=through, origin="https://runs.example") as heard,  # type: ignore[arg-type]
        ):
            assert "runs" in json.loads(heard.recv(timeout=10))


def test_nothing_can_be_changed_and_every_answer_has_its_guards(shown: Dashboard) -> None:
    assert {method for path in get(shown.url + "api/openapi.json").json["paths"].values() for method in path} == {"get"}
    for path in ("", "api", "api/runs", "main.js", "metrics", "nowhere", "api/runs/staged/invite.svg"):
        headers = get(shown.url + path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert headers["x-content-type-options"] == "nosniff"


def test_the_page_names_no_other_host(shown: Dashboard) -> None:
    for path in ("", "api", "style.css", "main.js", "parts.js", "charts.js", "theme.js"):
        text = get(shown.url + path).body.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.[a-z]+", text), path
        assert "innerHTML" not in text


def test_the_api_page_lists_every_path(shown: Dashboard) -> None:
    page = get(shown.url + "api").body.decode()
    assert all(path in page for path in get(shown.url + "api/openapi.json").json["paths"])


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:80", "127.0.0.1", 80), ("8420", "127.0.0.1", 8420), (":1", "127.0.0.1", 1), ("[::1]:99", "::1", 99)],
)
def test_a_place_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert Place.parse(text, "--listen") == Place(host, port)


@pytest.mark.parametrize("text", ["", "localhost", "1.2.3.4:99999", "a b:80", "::1:80", "http://x:80", "x:٨٠"])
def test_anything_else_is_refused_in_words(text: str) -> None:
    with pytest.raises(CollabError, match="is not a host and a port") as caught:
        Place.parse(text, "--listen")
    assert caught.value.code is Code.BAD_OPTION


def test_a_place_that_cannot_be_had_is_said_before_anything_begins() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(CollabError, match=f"another program uses port {port}") as caught:
            Place("127.0.0.1", port).bind("--dashboard")
        assert caught.value.code is Code.PORT_TAKEN
    with pytest.raises(CollabError) as caught:
        Place("203.0.113.7", 8420).bind("--dashboard")
    assert caught.value.code is Code.CANNOT_LISTEN
    with pytest.raises(CollabError) as caught:
        Place("no-such-name.invalid", 8420).bind("--dashboard")
    assert caught.value.code is Code.CANNOT_LISTEN


def test_only_loopback_is_local() -> None:
    assert Place("127.0.0.1", 1).is_local
    assert Place("localhost", 1).is_local
    assert not Place("0.0.0.0", 1).is_local
