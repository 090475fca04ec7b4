"""Events of a peer's log as sentences for everybody: what happened to the run, not every breath of the peer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collab_core.situation import Tone
from collab_dashboard.shapes import EventView

MAX_TEXT_CHARS = 400
_ROLES = {"trainer": "trainer", "aux": "auxiliary"}


def tell(event: Mapping[str, Any]) -> EventView | None:
    """One event in words; None if it is not for the timeline, or its fields are not what they should be."""
    try:
        told = _sentence(event)
        if told is None:
            return None
        tone, text = told
        return EventView(time=float(event["time"]), kind=str(event["event"]), tone=tone, text=text[:MAX_TEXT_CHARS])
    except (KeyError, TypeError, ValueError, AttributeError):  # a line of another version's log
        return None


def _sentence(event: Mapping[str, Any]) -> tuple[Tone, str] | None:
    name, reason = event.get("name", ""), event.get("reason", "")
    match event["event"]:
        case "joined":
            where = "" if event["root"] is None else f" at epoch {event['epoch']}"
            return "good", f"This auxiliary, {name}, joined the run{where}."
        case "left":
            return "plain", f"This auxiliary left at epoch {event['epoch']}."
        case "peer_joined":
            return "good", f"{name} ({_ROLES[event['role']]}) is here."  # it may have been, before we looked
        case "peer_left":
            return "waiting", f"{name} ({_ROLES[event['role']]}) left: {reason}."
        case "epoch" if event["lost"]:
            return "waiting", f"Epoch {event['epoch']} went on without {', '.join(event['lost'])}."
        case "gradient_not_finite":
            return "bad", f"The update of epoch {event['epoch']} was not finite: everyone skipped it."
        case "refused":
            return "bad", f"{name} was refused: {reason}."
        case "quarantined" if event["is_believed"]:
            return "bad", f"{name} is kept out until epoch {event['until_epoch']}, says {event['said_by']}: {reason}."
        case "released":
            return "good", f"{name} may take part again."
        case "round_failed":
            return "waiting", f"The round of epoch {event['epoch']} failed: {reason}. It is tried again."
        case "waiting":
            return "waiting", f"Waiting at epoch {event['epoch']}: {reason}."
        case "restored":
            return "plain", f"The backup of epoch {event['epoch']} was restored."
        case "resynced":
            return "plain", f"The state of epoch {event['epoch']} was fetched from {', '.join(event['donors'])}."
        case "from_checkpoint":
            return "plain", f"Nobody else was there: went on from the checkpoint of epoch {event['epoch']}."
        case "checkpoint":
            return "good", f"The checkpoint of epoch {event['epoch']} is in {event['place']}."
        case "checkpoint_failed":
            return "bad", f"The checkpoint of epoch {event['epoch']} could not be uploaded: {reason}."
        case "archive_failed":
            return "bad", f"Epoch {event['epoch']} is not in the archive: {reason}."
        case "backup_failed":
            return "bad", f"The backup of epoch {event['epoch']} could not be written: {reason}."
        case "evaluation_failed" | "sampling_failed" | "wandb_failed" as kind:
            what = {
                "evaluation_failed": "The held-out loss cannot be measured here",
                "sampling_failed": "The model cannot be asked for text here",
                "wandb_failed": "Nothing is sent to wandb any more",
            }[kind]
            return "waiting", f"{what}: {reason}."
        case "reachability" if not event["is_reachable"]:
            return "bad", f"Others cannot connect to this auxiliary: TCP port {event['port']} is closed to them."
    return None
