"""The dashboard: a page, a JSON API and metrics over what a run's peers publish. It never trains, and changes nothing.

watch       one run, looked at once per second: peers, history, timeline
shapes      what the API tells of a run
server      the page, the API and the WebSocket
listening   where it can be reached
"""

from collab_dashboard.listening import Dashboard, Place
from collab_dashboard.shapes import ArchiveView, VersionView
from collab_dashboard.watch import RunWatch, TaskFacts

__all__ = ["ArchiveView", "Dashboard", "Place", "RunWatch", "TaskFacts", "VersionView"]
