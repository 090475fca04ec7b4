"""The runs as Prometheus reads them: its text format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pydantic import BaseModel

from collab_dashboard.shapes import RunView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Value = float | int | None
METRICS: tuple[tuple[str, str, str, Callable[[RunView], Value]], ...] = (
    ("collab_epoch", "gauge", "Global updates so far.", lambda run: run.epoch),
    ("collab_samples_total", "counter", "Samples behind the state everyone should have.", lambda run: run.samples),
    ("collab_samples_per_second", "gauge", "Speed of all trainers together.", lambda run: run.samples_per_second),
    ("collab_loss", "gauge", "Mean training loss of the trainers.", lambda run: run.loss),
    ("collab_held_out_loss", "gauge", "Loss on held-out data.", lambda run: run.held_out_loss),
    ("collab_epoch_samples", "gauge", "Samples of the epoch under way.", lambda run: run.progress.collected),
    ("collab_epoch_target_samples", "gauge", "Samples an epoch needs.", lambda run: run.progress.target or None),
    ("collab_trainers", "gauge", "Trainers that are there and not in quarantine.", lambda run: run.num_trainers),
    ("collab_auxiliaries", "gauge", "Auxiliaries that are there.", lambda run: run.num_auxiliaries),
    ("collab_quarantined_peers", "gauge", "Peers that are kept out of rounds.", lambda run: run.num_quarantined),
    ("collab_last_epoch_time_seconds", "gauge", "When the last epoch ended.", lambda run: run.progress.since),
    ("collab_archive_versions", "gauge", "Versions in the archive.", lambda run: _of(run.archive, "num_versions")),
    ("collab_archive_bytes", "gauge", "Size of the archive.", lambda run: _of(run.archive, "stored_bytes")),
    (
        "collab_checkpoint_epoch",
        "gauge",
        "The newest checkpoint.",
        lambda run: _of(next(iter(run.checkpoints), None), "epoch"),
    ),
)


def prometheus_text(runs: Iterable[RunView], num_clients: int) -> str:
    """All metrics of all runs. What is not known is left out."""
    runs = list(runs)
    lines = []
    for name, kind, what, value_of in METRICS:
        values = [(run, value) for run in runs if (value := value_of(run)) is not None]
        if values:
            lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_labels(run)} {value}" for run, value in values]
    lines += [
        "# HELP collab_dashboard_clients Browsers that look on.",
        "# TYPE collab_dashboard_clients gauge",
        f"collab_dashboard_clients {num_clients}",
    ]
    return "\n".join(lines) + "\n"


def _of(part: BaseModel | None, name: str) -> Value:
    value: Value = getattr(part, name, None)
    return value


def _labels(run: RunView) -> str:
    return f'{{run="{_escaped(run.name)}",run_id="{run.run_id[:16]}"}}'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
