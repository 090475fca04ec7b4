"""An auxiliary of a gossip run: trainers meet without it, so all it does is to let people in."""

from __future__ import annotations

import threading

from collab_aux.telling import tell_swarm
from collab_core.overview import survey
from collab_core.session import Session

LOOK_S = 0.5


class GossipAuxiliary:
    """Serves the manifest and the run's files, keeps the directory of peers, relays for those behind NAT.

    It holds no model: there is none that everybody shares. Once trainers know each other it may go, and come back.
    """

    def __init__(self, *, session: Session, stop: threading.Event) -> None:
        self._session, self.swarm, self.events = session, session.swarm, session.events
        self.stop = stop

    def enter(self) -> None:
        self.swarm.publish(phase="serving")
        self._session.tell_joined(epoch=0, root=None)

    def run(self) -> None:
        """Help until stopped; `enter` comes first."""
        told = 0
        try:
            while not self.stop.wait(LOOK_S):
                self.swarm.check_alive()
                seen = survey(self.swarm.peers(), self._session.manifest)
                if seen.epoch != told and seen.trainers:  # rounds are averaged, so they may fall
                    told = seen.epoch
                    tell_swarm(self.events, seen, epoch=told, samples=seen.samples)
        finally:
            self.events.write("left", role="aux", epoch=0, root=None, samples=0, loss=None)
