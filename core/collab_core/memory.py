"""Memory that ran out, whoever noticed: Python, torch on the CPU, or a GPU's driver. Needs no torch itself."""

from __future__ import annotations

SIGNS = ("can't allocate memory", "out of memory", "not enough memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this means that there is too little memory, not that something is wrong."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
