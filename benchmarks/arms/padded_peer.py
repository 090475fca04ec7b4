"""`collab`, on an emulated device: a step of a trainer is a real one that takes PAD_S, however small the model.

Run like the command itself. When each step began and ended is noted in the file STEPS, if one is named. With HOSTILE
it is one of the liars of our tests.
"""

from __future__ import annotations

import os
import runpy
import time

from collab_cli.app import main
from collab_trainer.trainer import Trainer
from collab_trainer.work import Gradients, LocalSteps, Work

PAD_S = float(os.environ.get("PAD_S", "0"))  # an auxiliary takes no steps
honest_step = Trainer._step
begun = 0.0


def step(self: Trainer) -> None:
    global begun
    begun = time.time()
    honest_step(self)
    if path := os.environ.get("STEPS"):
        with open(path, "a") as file:
            file.write(f"{begun} {time.time()}\n")


def pad(kind: type[LocalSteps] | type[Gradients]) -> None:
    honest_end = kind.end_step

    def end_step(self: Work) -> None:
        honest_end(self)  # type: ignore[arg-type]
        time.sleep(max(0.0, begun + PAD_S - time.time()))  # a part of the step: the trainer measures its own rate

    kind.end_step = end_step  # type: ignore[method-assign]


Trainer._step = step  # type: ignore[method-assign]
for kind in (LocalSteps, Gradients):
    pad(kind)
if "HOSTILE" in os.environ:
    runpy.run_path("tests/swarm/hostile_peer.py")
else:
    main()
