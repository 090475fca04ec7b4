"""Checkpoints elsewhere: whole states on the Hub or in a folder, for the day when no peer is there any more.

statement.py    what the checkpointer signs
content.py      the files of a checkpoint, written and read
remotes.py      where they go: the Hub, or a folder
card.py         the README beside them
"""

from collab_core.checkpoints.content import Checkpoint, load_checkpoint, write_checkpoint
from collab_core.checkpoints.remotes import FolderRemote, HubRemote, Remote, open_remote
from collab_core.checkpoints.statement import BadCheckpoint, Statement

__all__ = [
    "BadCheckpoint",
    "Checkpoint",
    "FolderRemote",
    "HubRemote",
    "Remote",
    "Statement",
    "load_checkpoint",
    "open_remote",
    "write_checkpoint",
]
