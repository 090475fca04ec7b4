"""The learning rate of an epoch: warm-up, then constant, linear or half-cosine decay."""

from __future__ import annotations

from collab_core.run.settings import OptimizerSettings
from collab_core.update.exact import cosine


def learning_rate(settings: OptimizerSettings, epoch: int) -> float:
    """The learning rate of the update that ends `epoch` (counted from 0).

    Grows linearly over `warmup_epochs` and reaches `lr` with the last of them; then falls to `lr * final_lr_fraction`
    over `decay_epochs` and stays there.
    """
    if epoch < settings.warmup_epochs:
        return settings.lr * ((epoch + 1) / settings.warmup_epochs)
    if settings.decay == "constant":
        return settings.lr
    decayed_epochs = epoch - settings.warmup_epochs
    if decayed_epochs >= settings.decay_epochs:
        return settings.lr * settings.final_lr_fraction
    progress = decayed_epochs / settings.decay_epochs
    height = 1.0 - progress if settings.decay == "linear" else 0.5 * (1.0 + cosine(progress))
    return settings.lr * (settings.final_lr_fraction + (1.0 - settings.final_lr_fraction) * height)
