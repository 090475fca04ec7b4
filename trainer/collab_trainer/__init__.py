"""Trainer peers: tasks and their data, devices, and the loop of four moves.

Authors of tasks need these, and `collab_trainer.testing`:
    Task                    what a task is
    TaskOptions             its options in the run file
    Batch                   what its samples are
    Block, NumberedBlocks   where its data comes from, if it is generated or found by number
    Blocks                  where it comes from otherwise
    fill_parameters         how its model begins: the same bytes everywhere
    evaluating              how to look at a model
"""

from collab_trainer.context import TaskContext
from collab_trainer.device import pick_device
from collab_trainer.evaluating import evaluating, evaluator, writer
from collab_trainer.initial import model_files, new_replica, prepare
from collab_trainer.seeding import fill_parameters, std_by_fan_in
from collab_trainer.task import (
    Batch,
    Block,
    Blocks,
    NumberedBlocks,
    Task,
    TaskOptions,
    collect_assets,
    load_task,
    tokens_per_sample,
)
from collab_trainer.trainer import Trainer, TrainerConfig

__all__ = [
    "Batch",
    "Block",
    "Blocks",
    "NumberedBlocks",
    "Task",
    "TaskContext",
    "TaskOptions",
    "Trainer",
    "TrainerConfig",
    "collect_assets",
    "evaluating",
    "evaluator",
    "fill_parameters",
    "load_task",
    "model_files",
    "new_replica",
    "pick_device",
    "prepare",
    "std_by_fan_in",
    "tokens_per_sample",
    "writer",
]
