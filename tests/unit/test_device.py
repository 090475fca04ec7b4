"""Devices: what is there is used, what is not is refused in words."""

from __future__ import annotations

import pytest
import torch

from collab_core.errors import Code, TaskError
from collab_trainer.device import autocast, available_devices, describe, pick_device, release


def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


def with_two_cuda_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpus(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_auto_takes_the_cpu_when_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpus(monkeypatch)
    assert pick_device() == torch.device("cpu")


def test_auto_takes_the_first_cuda_gpu_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with_two_cuda_gpus(monkeypatch)
    assert available_devices() == ["cuda:0", "cuda:1", "cpu"]
    assert pick_device() == pick_device("cuda") == torch.device("cuda:0")
    assert pick_device("cuda:1") == torch.device("cuda:1")
    assert pick_device("cpu") == torch.device("cpu")


def test_auto_takes_the_apple_gpu_before_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpus(monkeypatch)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device() == torch.device("mps")


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps", "tpu", ""])
def test_a_missing_device_is_refused_with_those_there_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpus(monkeypatch)
    with pytest.raises(TaskError) as caught:
        pick_device(name)
    assert caught.value.code is Code.NO_DEVICE
    assert repr(name) in caught.value.message
    assert "available: cpu" in caught.value.message


def test_the_cpu_computes_in_full_precision() -> None:
    cpu = torch.device("cpu")
    with autocast(cpu):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    release(cpu)


def test_a_device_is_described_in_words() -> None:
    assert describe(torch.device("cpu")).startswith("CPU, ")
    assert describe(torch.device("mps")) == "Apple GPU"
