"""The run as data: described by a person, signed by the organiser, carried by an invite.

Read in this order:
    settings.py   what a run may say
    runfile.py    reading `run.toml`; problems.py puts what is wrong into words
    template.py   what `collab new` writes: a `run.toml`, the page to join by, the package of a custom task
    keys.py       the organiser's key
    manifest.py   the canonical, signed form, whose hash is the run's identity; grants
    assets.py     small files that belong to the run, named in the manifest by their hash
    invite.py     the one string that is enough to join
    folder.py     all of it on the organiser's disk
"""

from collab_core.run.assets import Asset, AssetFolder
from collab_core.run.folder import Prepare, Prepared, RunFolder
from collab_core.run.invite import Invite, looks_like_invite
from collab_core.run.keys import OrganiserKey, fingerprint, verify
from collab_core.run.manifest import Manifest, SignedManifest, difference, grant, is_granted
from collab_core.run.runfile import load_run_file, parse_settings
from collab_core.run.settings import (
    LimitSettings,
    OptimizerSettings,
    RunSettings,
    StrategySettings,
    TaskSettings,
)
from collab_core.run.template import run_template, template_files

__all__ = [
    "Asset",
    "AssetFolder",
    "Invite",
    "LimitSettings",
    "Manifest",
    "OptimizerSettings",
    "OrganiserKey",
    "Prepare",
    "Prepared",
    "RunFolder",
    "RunSettings",
    "SignedManifest",
    "StrategySettings",
    "TaskSettings",
    "difference",
    "fingerprint",
    "grant",
    "is_granted",
    "load_run_file",
    "looks_like_invite",
    "parse_settings",
    "run_template",
    "template_files",
    "verify",
]
