"""What others claim in their records: whom to believe, how many, and which history to follow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from town import Town, record

from collab_core.gossip.neighbours import Neighbours
from collab_core.outlook import Outlook
from collab_core.run import Prepared, RunFolder, fingerprint, grant, run_template
from collab_core.state.history import Tip
from collab_core.swarm import directory as directory_module

ROOTS = {name: name * 64 for name in "abcdef"}
SKETCH: dict[str, Any] = {"sketch": b"", "stage": "training", "is_for_end": False}


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    made = Town(tmp_path)
    yield made
    made.close()


def test_whoever_invents_peers_does_not_push_out_those_who_were_there(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "MAX_PEERS", 3)
    for name in ("a", "b", "c", "invented-1", "invented-2"):
        town.hears(name)
    town.hears("b", epoch=7)
    known = {peer.record.name: peer.record.epoch for peer in town.directory.peers()}
    assert known == {"a": 0, "b": 7, "c": 0}
    town.hears("c", phase="left")
    town.hears("d")
    assert town.names_of(peer.peer_id for peer in town.directory.peers()) == {"a", "b", "d"}


def test_a_newcomer_believes_no_single_peer_about_how_far_the_run_is(town: Town) -> None:
    for name, epoch in {"new": 0, "early": 38, "late": 41, "liar": 2**40}.items():
        town.hears(name, epoch=epoch, gossip=SKETCH)
    neighbours = Neighbours(town.directory)  # type: ignore[arg-type]
    assert neighbours.typical_epoch() == 41
    donors = neighbours.donors(min_epoch=1)
    assert [next(iter(town.names_of([donor]))) for donor in donors] == ["late", "early", "liar"]


def test_whom_we_met_longest_ago_is_met_next(town: Town) -> None:
    for name in ("a", "b", "c"):
        town.hears(name, epoch=3, gossip=SKETCH)
    neighbours = Neighbours(town.directory)  # type: ignore[arg-type]
    met: list[str] = []
    for _ in range(30):
        met.append(neighbours.partners(1, met)[0])
    assert all(len(set(met[i : i + 3])) == 3 for i in range(28))
    assert neighbours.partners(2, met) == met[-3:-1]
    assert len({neighbours.partners(1, ())[0] for _ in range(100)}) == 3, "otherwise they are drawn at random"


class Run:
    """A run with an auxiliary of its organiser, seen by one trainer."""

    def __init__(self, town: Town) -> None:
        folder = RunFolder.create(town.folder / "run", run_template("my-run"))
        prepared = Prepared(initial_root=ROOTS["a"], assets={})
        signed = folder.signed_manifest(lambda settings, path: prepared)
        self.manifest = signed.open(None, fingerprint(folder.key().public))
        self.grant = grant(folder.key(), self.manifest.run_hash, town.id_of("aux"))
        self.town, self.outlook = town, Outlook(town.directory, self.manifest)  # type: ignore[arg-type]

    def aux(self, epoch: int, root: str, parent: str) -> None:
        state = {"epoch": epoch, "root": ROOTS[root], "parent_root": ROOTS[parent]}
        self.town.hears("aux", role="aux", grant=self.grant, **state)

    def trainer(self, name: str, epoch: int, root: str) -> None:
        self.town.hears(name, epoch=epoch, root=ROOTS[root])

    def winner(self, mine: Tip, *history: str) -> str:
        roots = {mine.epoch - len(history) + i: ROOTS[name] for i, name in enumerate(history)}
        return self.outlook.winning_tip(mine, roots).root[0]


def mine(epoch: int, root: str) -> Tip:
    return Tip(epoch=epoch, root=ROOTS[root], samples=100 * epoch, peer_id="me")


@pytest.fixture
def run(town: Town) -> Run:
    return Run(town)


def test_an_epoch_that_the_auxiliary_ended_alone_does_not_cost_everyone_what_they_did_since(run: Run) -> None:
    run.aux(2, "f", "b")
    run.trainer("other", 4, "d")
    assert run.winner(mine(4, "d"), "b", "c", "e") == "d"  # it forked at its very last epoch, and all are ahead
    assert run.winner(mine(4, "d"), "a", "c", "e") == "f"  # two epochs of its own: the organiser's history wins
    for name in ("two", "three", "four"):
        run.trainer(name, 2, "f")
    assert run.winner(mine(4, "d"), "b", "c", "e") == "f"  # most trainers are with it


def test_the_organisers_auxiliary_follows_most_trainers_and_not_a_few(run: Run, town: Town) -> None:
    town.directory._record = record("me", role="aux", grant=run.grant)
    own = Tip(epoch=2, root=ROOTS["f"], samples=200, peer_id="me", parent_root=ROOTS["b"], is_trusted=True)
    run.trainer("ahead", 4, "d")
    assert run.outlook.winning_tip(own, {}).root == ROOTS["d"]
    for name in ("two", "three"):
        run.trainer(name, 2, "f")
    assert run.outlook.winning_tip(own, {}) is own
    for name in ("two", "three"):
        run.outlook.quarantine.caught(town.id_of(name), "it lied")
    assert run.outlook.winning_tip(own, {}).root == ROOTS["d"], "who is kept out does not count"
