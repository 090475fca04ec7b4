"""Faults on purpose: `fail_at` kills this peer in the middle of a round, for tests of what others do then."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from collab_core.errors import Code, ConfigError

ENVIRONMENT_VARIABLE = "COLLAB_FAIL_AT"


@dataclass(frozen=True, slots=True)
class FailAt:
    """Die (kill -9) at a stage of the round of an epoch, or of the first later one that gets there."""

    stage: str
    epoch: int

    @classmethod
    def from_environment(cls) -> FailAt | None:
        """`COLLAB_FAIL_AT=reduce:3` dies after reducing the first part of epoch 3."""
        text = os.environ.get(ENVIRONMENT_VARIABLE)
        if not text:
            return None
        stage, _, epoch = text.partition(":")
        if not epoch.isdigit():
            raise ConfigError(
                Code.BAD_OPTION,
                f"{ENVIRONMENT_VARIABLE}={text!r} is not a stage and an epoch.",
                fix=f"Write it like {ENVIRONMENT_VARIABLE}=reduce:3, or unset it: it kills this peer on purpose.",
            )
        return cls(stage, int(epoch))

    def reached(self, stage: str, epoch: int) -> None:
        if stage == self.stage and epoch >= self.epoch:
            os.kill(os.getpid(), signal.SIGKILL)
