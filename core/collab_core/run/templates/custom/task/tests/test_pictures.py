"""What must hold before others train with you."""

from __future__ import annotations

import torch
from my_run_task import Pictures

from collab_trainer.testing import check_task


def make_task() -> Pictures:
    return Pictures(seed=0, options=Pictures.Options())


def test_every_peer_can_rely_on_the_task() -> None:
    check_task(make_task())


def test_the_loss_falls() -> None:
    task = make_task()
    model = task.build_model()
    first = task.evaluate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    blocks = task.blocks(seed=1, position=None)
    for _ in range(20):
        optimizer.zero_grad()
        task.loss(model, task.samples(next(blocks))).backward()
        optimizer.step()
    assert task.evaluate(model) < 0.7 * first


def test_a_sample_shows_pictures_and_says_how_many_are_named_rightly() -> None:
    task = make_task()
    assert "% of 256 pictures are named rightly." in task.sample(task.build_model())
