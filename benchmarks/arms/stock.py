"""What both arms of stock hivemind begin with."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import hivemind
import torch

from benchmarks.team import LOOPBACK, Team


@contextlib.contextmanager
def open_dht(team: Team, address: str = LOOPBACK) -> Iterator[hivemind.DHT]:
    """hivemind's own DHT, joined through rank 0; quiet, one thread of arithmetic."""
    torch.set_num_threads(1)
    logging.getLogger("hivemind").setLevel(logging.CRITICAL)
    initial_peers = team.hear("address", 0).split() if team.rank else []
    dht = hivemind.DHT(initial_peers=initial_peers, start=True, host_maddrs=[address])
    team.tell("address", str(dht.get_visible_maddrs()[0]))
    yield dht
    dht.shutdown()
