"""Writing the published model into `run.toml`, and leaving everything else in it as the person wrote it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from collab_core.errors import Code, ConfigError
from collab_core.files import replace_file
from collab_core.run.folder import RunFolder
from collab_core.run.runfile import load_run_file

PLACES = ("config", "repo", "revision", "path", "root")


def new_folder(target: Path) -> Path:
    """Where a model may be published on this disk.

    Raises:
        ConfigError: BAD_OPTION, there is something already.
    """
    target = target.expanduser().absolute()
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            Code.BAD_OPTION,
            f"--to {target} already exists and is not an empty folder.",
            fix="Choose another folder: what was published is never overwritten.",
        )
    return target


def pin_model(folder: RunFolder, pins: Mapping[str, str]) -> None:
    """Say in the run file where the model is; comments and layout stay.

    Args:
        folder: whose run file to change; it must be valid.
        pins: the new `[task.options.model]`, which replaces what stood there.

    Raises:
        ConfigError: CANNOT_PIN, the file is written in a way that cannot be changed safely; nothing was changed.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError
    from tomlkit.items import Table

    text = folder.run_file.read_bytes().decode("utf-8-sig")
    before = load_run_file(folder.run_file)
    wanted = {"model": dict(pins)}
    try:
        document = tomlkit.parse(text)
        options = document["task"]["options"]
        model = options.get("model")
        if model is None or (isinstance(model, Table) and model.is_super_table()):  # only […model.config] stands there
            options["model"] = tomlkit.table()
            model = options["model"]
        for key in PLACES:
            model.pop(key, None)
        for key, value in pins.items():
            model[key] = value
        changed = tomlkit.dumps(document)
        beside = folder.run_file.with_name(f".{folder.run_file.name}.pinned")
        replace_file(beside, changed.encode())
        try:
            after = load_run_file(beside)
        finally:
            beside.unlink()
        expected = before.model_copy(
            update={"task": before.task.model_copy(update={"options": {**before.task.options, **wanted}})}
        )
        if after != expected:
            raise ValueError("the changed file says something else")
    except (TOMLKitError, ConfigError, ValueError, KeyError, TypeError, AttributeError):
        lines = "\n".join(f'{key} = "{value}"' for key, value in pins.items())
        raise ConfigError(
            Code.CANNOT_PIN,
            f"The model is published, but {str(folder.run_file)!r} is written in a way that cannot be changed safely. "
            "It was left as it is.",
            fix=f"Write this into it by hand, in place of [task.options.model]:\n\n[task.options.model]\n{lines}",
        ) from None
    replace_file(folder.run_file, changed.encode())
