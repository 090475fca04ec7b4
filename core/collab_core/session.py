"""From what a person typed (an invite or a run folder) to a place in the swarm with a manifest that was checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from collab_core.contribution import ContributionBook
from collab_core.errors import Code, CollabError, ConfigError, StateError, SwarmError
from collab_core.home import default_home
from collab_core.run import Asset, AssetFolder, Invite, Prepare, RunFolder, difference, fingerprint, grant
from collab_core.run.invite import MAX_PEERS
from collab_core.run.manifest import Manifest, SignedManifest
from collab_core.state.exchange import Exchange
from collab_core.state.folder import StateFolder
from collab_core.swarm import Swarm, SwarmConfig
from collab_core.swarm.speed import SpeedTest
from collab_core.telemetry import EventLog


@dataclass(frozen=True, slots=True)
class Session:
    """Everything a peer needs before it has a model."""

    folder: StateFolder
    events: EventLog
    swarm: Swarm
    exchange: Exchange
    signed: SignedManifest
    manifest: Manifest
    assets: Mapping[str, bytes]
    """The run's files, by name."""
    contribution: ContributionBook

    def invite(self) -> Invite:
        """An invite through this peer, then through those it joined by."""
        told = [*self.swarm.addresses, *self.swarm.config.initial_peers]
        peers = dict.fromkeys(told or self.swarm.bootstrap_addresses)
        return Invite(
            run_hash=self.manifest.run_hash,
            fingerprint=fingerprint(bytes.fromhex(self.manifest.organiser)),
            initial_peers=tuple(peers)[:MAX_PEERS],
            name=self.manifest.settings.name,
        )

    def tell_joined(self, epoch: int, root: str | None) -> None:
        """Note that this peer takes part from now on, and as whom."""
        record = self.swarm.record
        self.events.write(
            "joined",
            run_id=self.manifest.run_id,
            version=record.version,
            role=record.role,
            mode=record.mode,
            peer_id=self.swarm.peer_id,
            name=self.swarm.name,
            addresses=self.swarm.addresses,
            epoch=epoch,
            root=root,
        )


@contextlib.contextmanager
def open_session(
    source: Invite | RunFolder,
    config: SwarmConfig,
    *,
    state_dir: Path | None,
    prepare: Prepare,
    should_sync: bool = True,
) -> Iterator[Session]:
    """Join the run; leave it, and leave nothing behind, however the block ends.

    Args:
        source: what the person gave.
        config: how to take part; its initial peers are used besides those of an invite.
        state_dir: where to keep this peer's things; by default where this machine keeps its runs.
        prepare: finds out what has to be known to sign a run folder.
        should_sync: with a run folder, take the settings of the running run where they differ from the file.
    """
    if isinstance(source, Invite):
        config = replace(config, initial_peers=(*source.initial_peers, *config.initial_peers))
    elif config.role == "aux":
        config = replace(config, stays_direct=True)
    local = source.signed_manifest(prepare) if isinstance(source, RunFolder) else None
    run_hash = local.run_hash if local is not None else source.run_hash if isinstance(source, Invite) else b""
    home = default_home() / run_hash.hex()[:16]
    config = replace(config, rumoured_peers=tuple(StateFolder.neighbours(home)))
    folder = StateFolder(state_dir) if state_dir is not None else StateFolder.first_free(home, config.role)
    with contextlib.ExitStack() as stack:
        stack.callback(folder.close)
        try:
            events = EventLog(folder.events)
        except OSError as error:
            raise StateError(
                Code.STATE_DIR_UNWRITABLE,
                f"The event log {folder.events} cannot be written: {error.strerror or error}.",
                fix="Give a folder you may write to: --state-dir SOME/FOLDER",
            ) from error
        stack.callback(events.close)
        swarm = Swarm(config, folder, events)
        stack.callback(swarm.close)
        swarm.connect()
        exchange = Exchange(swarm)
        swarm.reactor.run(SpeedTest(exchange.throttle.pass_through).listen(swarm.p2p), timeout_s=10)
        if isinstance(source, Invite):
            signed, manifest = _from_peers(source, exchange, swarm, folder)
        else:
            assert local is not None
            signed, manifest = _from_folder(local, exchange, swarm, should_sync)
            if config.role == "aux" and source.key_file.exists():
                swarm.grant = grant(source.key(), manifest.run_hash, swarm.peer_id)
        assets: Mapping[str, bytes] = {}
        if config.role != "observer":  # who only looks needs no model
            kept = source.assets if isinstance(source, RunFolder) else None
            assets = _assets(manifest, exchange, swarm, AssetFolder(folder.assets), kept)
            exchange.serve_assets(assets)
        exchange.serve_manifest(signed)  # last: who gets it from us asks us for the files next
        swarm.join(manifest.run_hash)
        book = ContributionBook(config.identity_path or folder.identity, manifest.run_id)
        yield Session(folder, events, swarm, exchange, signed, manifest, assets, book)


def with_assets(session: Session) -> Session:
    """The session of an observer that wants the model after all."""
    own = AssetFolder(session.folder.assets)
    return replace(session, assets=_assets(session.manifest, session.exchange, session.swarm, own, None))


def _assets(
    manifest: Manifest, exchange: Exchange, swarm: Swarm, own: AssetFolder, organisers: AssetFolder | None
) -> dict[str, bytes]:
    """The run's files: from the last time we were here, from the organiser's folder, or from any peer."""
    files = kept = own.read(manifest.assets)

    def missing() -> dict[str, Asset]:
        return {name: asset for name, asset in manifest.assets.items() if name not in files}

    def on_bad_donor(peer_id: str, reason: str) -> None:
        swarm.events.write("donor_failed", peer_id=peer_id, name=swarm.name_of(peer_id), reason=reason)

    if organisers is not None:
        files = files | organisers.read(missing())
    if missing():
        files = files | exchange.fetch_assets(missing(), swarm.bootstrap_peers, on_bad_donor)
    if missing():
        raise StateError(
            Code.NO_ASSETS,
            f"None of the peers we reached gave us {', '.join(sorted(missing()))}, which the run's model needs.",
            fix="Ask the organiser whether the auxiliary peer is running this run, and for a fresh invite.",
        )
    own.write({name: data for name, data in files.items() if name not in kept})
    return files


def _from_peers(
    invite: Invite, exchange: Exchange, swarm: Swarm, folder: StateFolder
) -> tuple[SignedManifest, Manifest]:
    """The manifest the invite promises, from any peer, or from the last time we were here."""
    offers = exchange.fetch_manifest(swarm.bootstrap_peers)
    with contextlib.suppress(OSError, CollabError):
        offers.append(SignedManifest.from_bytes(folder.manifest.read_bytes()))
    if not offers:
        raise SwarmError(
            Code.NO_MANIFEST,
            f"The peers of the invite answer, but none of them gave us a manifest ({', '.join(invite.initial_peers)}).",
            fix="Ask the organiser whether the auxiliary peer is running this run, and for a fresh invite.",
        )
    problem: CollabError | None = None
    for signed in offers:
        try:
            manifest = signed.open(invite.run_hash, invite.fingerprint)
        except CollabError as error:
            problem = error
            continue
        with contextlib.suppress(OSError):  # only a convenience for the next start
            folder.manifest.write_bytes(signed.to_bytes())
        return signed, manifest
    assert problem is not None
    raise problem


def _from_folder(
    local: SignedManifest, exchange: Exchange, swarm: Swarm, should_sync: bool
) -> tuple[SignedManifest, Manifest]:
    """Our own manifest, unless the running run has another one that the same organiser signed."""
    organiser = fingerprint(local.claimed_organiser)
    mine = local.open(None, organiser)
    for signed in exchange.fetch_manifest(swarm.bootstrap_peers):
        try:
            theirs = signed.open(None, organiser)
        except CollabError:
            continue  # somebody else's run, or a liar
        lines = difference(mine, theirs)
        if not lines:
            break
        if not should_sync:
            raise ConfigError(
                Code.SETTINGS_DIFFER,
                f"Your run file differs from the run: {'; '.join(lines)}.",
                fix="Change the file, or take the run's settings with --sync-args (the default).",
            )
        swarm.events.write("settings_synced", differences=lines)
        return signed, theirs
    return local, mine
