"""A leader closes a group that its members will take, whoever else knocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hivemind.proto import averaging_pb2

from collab_core.averaging.group import Group, Member, check_weight, round_key
from collab_core.averaging.matchmaking import Call, Matchmaking
from collab_core.identity import Identity

EPOCH = 5
KEY = round_key(bytes(32), EPOCH, "ab" * 32)


def member(peer_id: str, epoch: int = EPOCH) -> Member:
    return Member(peer_id=peer_id, epoch=epoch, weight=8.0, norm=1.0, can_reduce=True)


def request(asker: Member) -> Any:
    return averaging_pb2.JoinRequest(schema_hash=KEY, gather=asker.to_bytes())


@pytest.fixture
def peer_id(tmp_path: Path) -> Callable[[str], str]:
    return lambda name: Identity.load_or_create(tmp_path / name).peer_id


def test_who_declares_another_epoch_than_its_round_has_is_refused_and_the_others_meet(
    peer_id: Callable[[str], str],
) -> None:
    me, honest, liar = (peer_id(name) for name in ("me", "honest", "liar"))
    refused: list[tuple[str, bool]] = []

    async def scene() -> tuple[Group, int, int]:
        matchmaking = Matchmaking(
            me=me,
            stub_of=lambda peer_id: None,
            weight_cap=100.0,
            matchmaking_time_s=5.0,
            on_refused=lambda peer_id, reason, is_lie: refused.append((peer_id, is_lie)),
        )
        matchmaking.set_epoch(EPOCH)

        async def last_answer(asker: Member) -> int:
            return [message.code async for message in matchmaking.serve_join(request(asker), asker.peer_id)][-1]

        lying = asyncio.create_task(last_answer(member(liar, EPOCH + 1)))
        joining = asyncio.create_task(last_answer(member(honest)))
        await asyncio.sleep(0)
        call = Call(KEY, member(me), lambda: [me], lambda: {honest, liar}, set, lambda: False)
        group = await asyncio.wait_for(matchmaking.find_group(call), 3.0)
        return group, await lying, await joining

    group, to_liar, to_honest = asyncio.run(scene())
    assert set(group.peer_ids) == {me, honest}
    assert (to_liar, to_honest) == (averaging_pb2.PROTOCOL_VIOLATION, averaging_pb2.BEGIN_ALLREDUCE)
    assert refused == [(liar, True)]


@pytest.mark.parametrize("weight", [-1.0, 5e-324, 0.5, float("nan"), float("inf"), 101.0])
def test_a_weight_is_a_number_of_samples(weight: float) -> None:
    assert check_weight(weight, 100.0)
    assert not check_weight(0.0, 100.0)
    assert not check_weight(1.0, 100.0)
