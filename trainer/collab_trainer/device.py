"""Where a trainer computes. The only place that knows one kind of device from another."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from collab_core.errors import Code, TaskError


def pick_device(name: str = "auto") -> torch.device:
    """The device called `name`; `auto` takes the best there is: a GPU by CUDA, Apple's GPU, or the CPU.

    Raises:
        TaskError: there is no such device here.
    """
    available = available_devices()
    if name == "auto":
        return torch.device(available[0])
    if name == "cuda" and "cuda:0" in available:
        return torch.device("cuda:0")
    if name in available:
        return torch.device(name)
    raise TaskError(
        Code.NO_DEVICE,
        f"The device {name!r} is not available here; available: {', '.join(available)}.",
        fix="Choose one of these, or 'auto'. An NVIDIA GPU needs its driver and a torch built for CUDA.",
    )


def available_devices() -> list[str]:
    """Names that `pick_device` accepts on this machine, the best first."""
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return [*cuda, *mps, "cpu"]


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """Computes in bfloat16 where the hardware has it; elsewhere does nothing, since emulating it is slower."""
    if device.type == "cuda":
        with torch.cuda.device(device):  # of several, it asks the current one
            if torch.cuda.is_bf16_supported(including_emulation=False):
                return torch.autocast("cuda", dtype=torch.bfloat16)
    return nullcontext()


def release(device: torch.device) -> None:
    """Gives memory that torch keeps for later back to the device; the CPU has no such store."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def describe(device: torch.device) -> str:
    """The device in words, for people."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if device.type == "mps":
        return "Apple GPU"
    num_threads = torch.get_num_threads()
    return f"CPU, {num_threads} thread{'' if num_threads == 1 else 's'}"
