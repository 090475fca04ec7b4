"""From what a person typed (an invite or a run folder) to a place in the swarm with a manifest that was checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from collab_core.errors import Code, CollabError, ConfigError, StateError, SwarmError
from collab_core.run import Invite, RunFolder, RunSettings, difference, fingerprint, grant
from collab_core.run.invite import MAX_PEERS
from collab_core.run.manifest import Manifest, SignedManifest
from collab_core.state.exchange import Exchange
from collab_core.state.folder import StateFolder, default_home
from collab_core.swarm import Swarm, SwarmConfig
from collab_core.telemetry import EventLog

InitialRoot = Callable[[RunSettings], str]


@dataclass(frozen=True, slots=True)
class Session:
    """Everything a peer needs before it has a model."""

    folder: StateFolder
    events: EventLog
    swarm: Swarm
    exchange: Exchange
    signed: SignedManifest
    manifest: Manifest

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


@contextlib.contextmanager
def open_session(
    source: Invite | RunFolder,
    config: SwarmConfig,
    *,
    state_dir: Path | None,
    initial_root: InitialRoot,
    should_sync: bool = True,
) -> Iterator[Session]:
    """Join the run; leave it, and leave nothing behind, however the block ends.

    Args:
        source: what the person gave.
        config: how to take part; its initial peers are used besides those of an invite.
        state_dir: where to keep this peer's things; by default where this machine keeps its runs.
        initial_root: computes the root of a run's initial state, needed to sign a run folder.
        should_sync: with a run folder, take the settings of the running run where they differ from the file.
    """
    if isinstance(source, Invite):
        config = replace(config, initial_peers=(*source.initial_peers, *config.initial_peers))
    elif config.role == "aux":
        config = replace(config, stays_direct=True)
    local = source.signed_manifest(initial_root) if isinstance(source, RunFolder) else None
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
        if isinstance(source, Invite):
            signed, manifest = _from_peers(source, exchange, swarm, folder)
        else:
            assert local is not None
            signed, manifest = _from_folder(local, exchange, swarm, should_sync)
            if config.role == "aux" and source.key_file.exists():
                swarm.grant = grant(source.key(), manifest.run_hash, swarm.peer_id)
        exchange.serve_manifest(signed)
        swarm.join(manifest.run_hash)
        yield Session(folder, events, swarm, exchange, signed, manifest)


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
