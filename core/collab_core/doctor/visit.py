"""A guest's visit to a run, which nobody there sees: what cannot be found out from outside."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from collab_core.doctor.check import BOTH, Check
from collab_core.errors import Code, SwarmError
from collab_core.run import Invite
from collab_core.run.manifest import Manifest
from collab_core.state.exchange import Exchange
from collab_core.state.folder import StateFolder
from collab_core.swarm import Swarm, SwarmConfig
from collab_core.swarm.daemon import free_port
from collab_core.swarm.transport import EVERYWHERE
from collab_core.telemetry import EventLog


class Visit:
    """Our place in the network for a few seconds, with a key of its own: the peer of this machine may be at work."""

    def __init__(
        self, *, initial_peers: Sequence[str], host_maddrs: Sequence[str], port: int | None, client_mode: bool = False
    ) -> None:
        """
        Args:
            initial_peers: addresses that answer; none if nobody does.
            host_maddrs: where to listen.
            port: the one to look at; None: any.
            client_mode: do not even listen.
        """
        self._initial_peers, self._host_maddrs, self._wanted = tuple(initial_peers), tuple(host_maddrs), port
        self._client_mode = client_mode
        self._closing = contextlib.ExitStack()
        self.swarm: Swarm | None = None
        self.manifest: Manifest | None = None
        self.assets: Mapping[str, bytes] = {}

    def __enter__(self) -> Visit:
        self._folder = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="collab-doctor-")))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def start(self) -> Iterator[Check]:
        """The port and the daemon. Where the port is taken we go on with another one: there is more to find out."""
        port = self._wanted
        try:
            self.swarm = self._connect(port)
        except SwarmError as error:
            if error.code is not Code.PORT_TAKEN or not port:
                raise
            free = free_port((self._host_maddrs or EVERYWHERE)[0])
            yield Check(
                name="port",
                ok=False,
                detail=f"TCP port {port} is taken by another program, perhaps by another peer of yours",
                fix=f"`ss -ltnp 'sport = :{port}'` shows which; stop it, or take a port that is free: --port {free}",
                rules_out=BOTH,
            )
            self.swarm = self._connect(0)
        else:
            what = "is free" if port else "was chosen, as none was asked for"
            yield Check(name="port", ok=True, detail=f"TCP port {self.swarm.port} {what}")
        yield Check(name="daemon", ok=True, detail="the network daemon starts and answers")

    def _connect(self, port: int | None) -> Swarm:
        state = StateFolder(self._folder / f"port-{port}")
        self._closing.callback(state.close)
        events = EventLog(state.events)
        self._closing.callback(events.close)
        config = SwarmConfig(
            role="observer",
            initial_peers=self._initial_peers,
            host_maddrs=self._host_maddrs,
            port=port,
            client_mode=self._client_mode,
        )
        swarm = Swarm(config, state, events)
        self._closing.callback(swarm.close)
        swarm.connect()
        return swarm

    def read_manifest(self, invite: Invite) -> Iterator[Check]:
        """The run as its peers tell it, and the files its model needs."""
        self.manifest, self.assets = self.fetch_run(invite)
        settings = self.manifest.settings
        files = f", {len(self.assets)} files" if self.assets else ""
        detail = f"run {settings.name}, signed by its organiser{files}: {settings.task.name}, {settings.strategy.name}"
        yield Check(name="manifest", ok=True, detail=detail)

    def fetch_run(self, invite: Invite) -> tuple[Manifest, Mapping[str, bytes]]:
        """The manifest, checked as a joiner checks it, and the run's files.

        Raises:
            SwarmError: nobody gives them, or they are not what the invite promises.
        """
        swarm = self.swarm = self.swarm or self._connect(self._wanted)
        exchange, peers = Exchange(swarm), swarm.bootstrap_peers
        problem = SwarmError(
            Code.NO_MANIFEST,
            f"The peers of the invite answer, but none of them gave us a manifest ({', '.join(peers)}).",
            fix="Ask the organiser whether the auxiliary peer is running this run, and for a fresh invite.",
        )
        for signed in exchange.fetch_manifest(peers):
            try:
                manifest = signed.open(invite.run_hash, invite.fingerprint)
            except SwarmError as error:  # a stranger's; the next peer may have the right one
                problem = error
                continue
            return manifest, self._fetch_assets(exchange, manifest, peers)
        raise problem

    @staticmethod
    def _fetch_assets(exchange: Exchange, manifest: Manifest, peers: Sequence[str]) -> Mapping[str, bytes]:
        bad: list[str] = []
        assets = exchange.fetch_assets(manifest.assets, peers, lambda peer, reason: bad.append(reason))
        if missing := sorted(manifest.assets.keys() - assets.keys()):
            why = "; ".join(bad) or "no answer"
            raise SwarmError(
                Code.NO_ASSETS,
                f"Nobody gave us {', '.join(missing)}, which the run's model needs ({why}).",
                fix="Ask the organiser whether the auxiliary peer is running this run.",
            )
        return assets
