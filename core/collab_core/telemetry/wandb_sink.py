"""The run's curves at Weights & Biases, for those who keep theirs there. Whatever happens there, the run goes on."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from collab_core.run.manifest import Manifest
from collab_core.telemetry.events import EventLog

MAX_WAITING = 1000
CLOSING_S = 4.0  # a peer that is asked to leave does so within ten seconds

CURVES = ("loss", "samples", "samples_per_second", "trainers", "peers")


class WandbSink:
    """Sends what the log tells while the block lasts, in a thread of its own: wandb may wait for its server for long.

    Args:
        project: where it goes.
        manifest: of the run; its settings are kept with the curves.
        folder: for wandb's own files.
        events: what to send, and where to say that it does not work.
    """

    def __init__(self, project: str, manifest: Manifest, folder: Path, events: EventLog) -> None:
        self._project, self._manifest, self._folder, self._events = project, manifest, folder, events
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="collab-wandb", daemon=True)

    def __enter__(self) -> WandbSink:
        self._events.listen(self._hear)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put(None)
        self._thread.join(CLOSING_S)

    def _hear(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "swarm":
                curves = {name: event[name] for name in CURVES if event[name] is not None}
                self._put({"epoch": event["epoch"], **curves})
            case "evaluated":
                self._put({"epoch": event["epoch"], "held_out_loss": event["held_out_loss"]})
            case "sampled":
                self._put({"epoch": event["epoch"], "text": event["text"]})

    def _put(self, item: dict[str, Any] | None) -> None:
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            return  # wandb is slower than the run; it will lack a point

    def _run(self) -> None:
        try:
            self._send()
        except ImportError:
            self._events.write("wandb_failed", reason="the package is missing; install it with: pip install wandb")
        except Exception as error:  # noqa: BLE001 - somebody else's package and server
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._events.write("wandb_failed", reason=reason)

    def _send(self) -> None:
        import wandb

        settings = self._manifest.settings
        run = wandb.init(
            project=self._project,
            name=settings.name,
            id=self._manifest.run_id[:16],  # after a restart the curves go on
            resume="allow",
            dir=str(self._folder),
            config=settings.model_dump(),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )
        run.define_metric("*", step_metric="epoch")
        while (item := self._waiting.get()) is not None:
            if "text" in item:
                item["text"] = wandb.Html(f"<pre>{_escaped(item['text'])}</pre>", inject=False)
            run.log(item)
        run.finish()


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
