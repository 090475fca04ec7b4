"""What changed from one document to the next, as a JSON Merge Patch (RFC 7396)."""

from __future__ import annotations

from typing import Any


def merge_patch(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Only what differs. What is null in the new document is as good as missing: a patch cannot tell them apart."""
    patch: dict[str, Any] = {}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := merge_patch(before, value):
                patch[key] = inner
        elif value != before:
            patch[key] = value
    for key in old.keys() - new.keys():
        patch[key] = None
    return patch
