"""What a newcomer needs: layout, replica, tree and root, serving and fetching, backup, and whose history wins."""

from collab_core.state.folder import StateFolder
from collab_core.state.layout import Layout
from collab_core.state.snapshot import Snapshot
from collab_core.tree import StateTree

__all__ = ["Layout", "Snapshot", "StateFolder", "StateTree"]
