"""Trainer peers: tasks and their data, devices, and the loop of four moves."""

from collab_trainer.device import pick_device
from collab_trainer.initial import initial_root, new_replica
from collab_trainer.task import Task, load_task
from collab_trainer.trainer import Trainer, TrainerConfig

__all__ = ["Task", "Trainer", "TrainerConfig", "initial_root", "load_task", "new_replica", "pick_device"]
