"""Runs over real networks: behind NAT, across a restart of the only auxiliary, on a laptop that moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import SwarmOfProcesses
from processes import PeerProcess, collab, wait_until, write_run

from . import Host, Lab

pytestmark = pytest.mark.timeout(400)

PORT = 31330


def quick_run(folder: Path) -> Path:
    """A run in which a round that lost somebody is soon over."""
    return write_run(folder, strategy__matchmaking_time_s=3.0, strategy__averaging_timeout_s=5.0)


def assert_same_roots(*peers: PeerProcess) -> None:
    """Wherever two peers saw the same epoch, they had the same root, and all of them saw one epoch together."""
    # one may have written down an epoch a moment before the others do
    wait_until(lambda: bool(set.intersection(*(set(peer.roots()) for peer in peers))), "an epoch that all of them saw")
    seen: dict[int, str] = {}
    for peer in peers:
        for epoch, root in peer.roots().items():
            assert seen.setdefault(epoch, root) == root, f"{peer.state_dir.name} differs at epoch {epoch}"


def status(swarm: SwarmOfProcesses, host: Host) -> dict[str, dict[str, Any]]:
    """What `collab status` on a host tells, by name; every peer is listed once."""
    done = collab("status", swarm.invite(), "--json", prefix=host.prefix)
    assert done.returncode == 0, done.stderr
    peers = json.loads(done.stdout)["peers"]
    assert len({peer["peer_id"] for peer in peers}) == len(peers)
    return {peer["name"]: peer for peer in peers}


def wait_for_contribution(name: str, *peers: PeerProcess, after: int) -> int:
    """Until every peer saw an epoch after `after` to which `name` contributed; returns the last of them."""

    def is_it(event: dict[str, Any]) -> bool:
        return event["epoch"] > after and name in event["members"]

    return max(peer.wait_for("epoch", is_it)["epoch"] for peer in peers)


def test_two_homes_and_one_public_auxiliary_that_restarts_and_a_laptop_that_moves(
    lab: Lab, swarm: SwarmOfProcesses, tmp_path: Path
) -> None:
    server = lab.host("server")
    homes = [lab.router("home-1"), lab.router("home-2", lan_ip4="192.168.1")]
    laptops = [lab.host(f"laptop-{n}", home) for n, home in enumerate(homes, start=1)]
    run = quick_run(tmp_path)
    aux = swarm.aux(run, "aux", "--port", str(PORT), prefix=server.prefix)
    trainers = [
        swarm.trainer(name, "--name", name, prefix=laptop.prefix)
        for name, laptop in zip(("anna", "ben"), laptops, strict=True)
    ]
    for trainer in trainers:
        found = trainer.wait_for("reachability")
        assert (found["is_reachable"], found["mode"]) == (False, "client"), found
        assert trainer.wait_for("joined")["mode"] == "client"
    # both contribute, and the terminal says in one line why others reduce for them
    for name in ("anna", "ben"):
        wait_for_contribution(name, aux, *trainers, after=0)
    assert trainers[0].log.read_text().count("so it only dials out (client mode)") == 1

    # the only peer that can be reached dies, and comes back without its state: it gets it from those behind NAT
    aux.kill()
    num_events, epoch = len(aux.events()), trainers[0].last_epoch()
    (aux.state_dir / "backup.collab").unlink(missing_ok=True)
    aux = swarm.aux(run, "aux", "--port", str(PORT), prefix=server.prefix)
    assert aux.wait_for("resynced", after=num_events)["donors"]
    for name in ("anna", "ben"):
        wait_for_contribution(name, aux, *trainers, after=epoch)

    # anna takes her laptop to ben's home: another router, another address, the same peer
    peer_id = trainers[0].wait_for("joined")["peer_id"]
    num_events = len(aux.events())
    laptops[0].plug(homes[1].lan)
    epoch = max(trainer.last_epoch() for trainer in trainers)
    moved = trainers[0].wait_for("address_changed")
    assert moved["new"] == laptops[0].ip
    wait_for_contribution("anna", aux, *trainers, after=epoch + 1)
    assert not [event for event in aux.events()[num_events:] if event["event"] == "peer_left"]
    shown = status(swarm, server)
    assert set(shown) == {"anna", "ben", aux.wait_for("joined")["name"]}
    assert shown["anna"]["peer_id"] == peer_id
    assert_same_roots(aux, *trainers)
    for peer in (*trainers, aux):
        assert peer.stop() == 0, peer.tail()


def test_a_direct_trainer_changes_its_address_and_another_one_has_a_port_forwarded(
    lab: Lab, swarm: SwarmOfProcesses, tmp_path: Path
) -> None:
    server, office = lab.host("server"), lab.host("office")
    home = lab.router("home")
    desktop = lab.host("desktop", home)
    home.forward(PORT + 1, desktop)
    aux = swarm.aux(quick_run(tmp_path), "aux", "--port", str(PORT), prefix=server.prefix)
    dora = swarm.trainer("dora", "--name", "dora", "--port", str(PORT + 1), prefix=desktop.prefix)
    carl = swarm.trainer("carl", "--name", "carl", prefix=office.prefix)
    everyone = (aux, dora, carl)

    # the router's address is one of dora's, though her machine does not know it; carl has IPv4 and IPv6
    for trainer in (dora, carl):
        assert trainer.wait_for("reachability")["is_reachable"]
        assert trainer.wait_for("joined")["mode"] == "direct"
    places = [address.rpartition("/p2p/")[0] for address in dora.wait_for("joined")["addresses"]]
    assert places == [f"/ip4/{home.ip}/tcp/{PORT + 1}", f"/ip4/{desktop.ip}/tcp/{PORT + 1}"]
    hosts = [address.split("/")[2] for address in carl.wait_for("joined")["addresses"]]
    assert hosts == [office.ip, office.ip6]
    assert_nobody_is_lost(dora, carl, members={"carl", "dora"})

    # carl's address changes: others hear of the new one, and he still reduces for them
    num_events, epoch = len(carl.events()), carl.last_epoch()
    office.change_address()
    assert carl.wait_for("address_changed", after=num_events)["new"] == office.ip
    here = (office.ip, office.ip6)  # a look that began before he moved tells of where he was
    carl.wait_for(
        "reachability", lambda seen: seen["is_reachable"] and says_only(seen["reached"], here), after=num_events
    )
    wait_for_contribution("carl", *everyone, after=epoch + 1)
    assert_nobody_is_lost(dora, carl, members={"carl", "dora"}, after=num_events)

    # then he goes where nobody can reach him, and becomes a client by himself
    num_events, epoch = len(carl.events()), carl.last_epoch()
    office.plug(home.lan)
    found = carl.wait_for("reachability", lambda seen: not seen["is_reachable"], after=num_events)
    assert found["mode"] == "client"
    wait_for_contribution("carl", *everyone, after=epoch + 1)
    assert_same_roots(aux, dora)
    assert_forks_were_dropped(carl, aux)


def says_only(places: list[str], hosts: tuple[str, ...]) -> bool:
    return all(place.split("/")[2] in hosts for place in places)


def assert_forks_were_dropped(peer: PeerProcess, reference: PeerProcess) -> None:
    """A reducer that moves in the middle of a round may be the only one to finish it. Then it has another root than
    the rest, sees that, and fetches theirs."""
    events, roots = peer.events(), reference.roots()
    for index, event in enumerate(events):
        if event["event"] == "epoch" and roots.get(event["epoch"], event["root"]) != event["root"]:
            later = [again for again in events[index:] if again["event"] == "resynced"]
            assert later, f"{peer.state_dir.name} kept another root at epoch {event['epoch']}"
    last = events[max(n for n, event in enumerate(events) if event["event"] == "epoch")]
    reference.wait_for("epoch", lambda event: event["epoch"] == last["epoch"])
    assert reference.roots()[last["epoch"]] == last["root"]


def assert_nobody_is_lost(*peers: PeerProcess, members: set[str], after: int = 0) -> None:
    """Until each saw a round of these members in which every reducer could be reached by everyone."""
    for peer in peers:
        peer.wait_for("epoch", lambda event: members <= set(event["members"]) and not event["lost"], after=after)


def test_a_trainer_behind_nat_reduces_for_another_through_a_relay(
    lab: Lab, swarm: SwarmOfProcesses, tmp_path: Path
) -> None:
    server = lab.host("server")
    run = quick_run(tmp_path)
    aux = swarm.aux(run, "aux", "--port", str(PORT), prefix=server.prefix)
    rita = swarm.trainer("rita", "--name", "rita", "--use-relay", prefix=lab.host("a", lab.router("home-1")).prefix)
    ben = swarm.trainer("ben", "--name", "ben", prefix=lab.host("b", lab.router("home-2")).prefix)
    joined = rita.wait_for("joined")
    assert joined["mode"] == "relay"
    assert "/p2p-circuit/" in joined["addresses"][0]
    assert ben.wait_for("joined")["mode"] == "client"

    def is_of_both(event: dict[str, Any]) -> bool:
        """A round in which she reduced; whoever lost her in an attempt does without her in the next one."""
        return set(event["members"]) == {"rita", "ben"} and not event["lost"] and event["share"] > 0

    hers = rita.wait_for("epoch", is_of_both)
    seen = ben.wait_for("epoch", lambda event: event["epoch"] == hers["epoch"])
    # a client sends its vector once; who reduces half of it sends that half to everyone else too
    assert hers["bytes_sent"] > 1.2 * seen["bytes_sent"]
    assert_same_roots(aux, rita, ben)
