"""Whether others can connect to this machine; if not, whether a router or a firewall is in the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from collab_core.doctor.check import Check, Role
from collab_core.swarm import Swarm
from collab_core.swarm.addresses import host_and_port, is_public, place_of, source_towards
from collab_core.swarm.reachability import Answer, verdict

NAME = "dial-back"
AUX: frozenset[Role] = frozenset({"aux"})


def reach_checks(swarm: Swarm) -> Iterator[Check]:
    """Ask those we are connected to. Who cannot be reached can still train: it dials out, and others reduce for it."""
    answers = swarm.ask_to_dial_back()
    found = verdict(answers)
    if found is None:
        detail = "the peers we asked did not say whether they can connect to this machine"
        yield Check(name=NAME, ok=False, detail=detail, fix="Try again in a minute; `collab train` asks again too.")
        return
    if not found:
        yield _hidden(answers, _own_addresses(swarm), swarm.port)
        return
    reached = list(dict.fromkeys(place_of(*place) for answer in answers for place in answer.reached))
    is_run_public = any(map(is_public, swarm.bootstrap_addresses))
    if is_run_public and not any(map(is_public, reached)):
        detail = f"peers of your own network reach this machine ({', '.join(reached)}); others were not there to ask"
        yield Check(name=NAME, ok=True, detail=detail)
        return
    yield Check(name=NAME, ok=True, detail=f"direct: others can connect to this machine at {', '.join(reached)}")


def _own_addresses(swarm: Swarm) -> set[str]:
    """Where our packets to the peers come from, before any router touches them."""
    places = filter(None, map(host_and_port, swarm.bootstrap_addresses))
    return {source for host, _ in places if (source := source_towards(host)) is not None}


def _hidden(answers: Sequence[Answer], own: set[str], port: int) -> Check:
    missed = list(dict.fromkeys(host for answer in answers for host, _ in answer.missed))
    here = ", ".join(sorted(own, key=lambda host: ":" in host)) or "this machine"
    behind = [host for host in missed if host not in own]
    if behind:
        router = ", ".join(behind)
        detail = (
            f"client: this machine ({here}) is behind NAT. Others see the router's address {router}, and nobody gets "
            f"through it to TCP port {port}"
        )
        fix = (
            f"To reduce for others, or to be an auxiliary: in the router ({router}) forward TCP port {port} to {here} "
            f"port {port}, then start with --port {port}. Without access to the router: collab train --use-relay"
        )
    else:
        blocked = ", ".join(missed)
        detail = (
            f"client: a firewall blocks TCP port {port}. Others see {blocked}, which is this machine's own address, so "
            "no router is in between"
        )
        fix = (
            f"To reduce for others, or to be an auxiliary: let TCP port {port} in at {blocked}, for example with "
            f"`sudo ufw allow {port}/tcp`, and in the security group if this is a cloud's machine; then start with "
            f"--port {port}."
        )
    return Check(name=NAME, ok=False, detail=detail, fix=fix, rules_out=AUX)
