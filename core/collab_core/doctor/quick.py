"""What every peer asks itself before it joins: only what takes no noticeable time, and only what surely fails later."""

from __future__ import annotations

from pathlib import Path

from collab_core.doctor.check import Role, guarded
from collab_core.doctor.machine import machine_checks
from collab_core.doctor.packages import package_checks
from collab_core.errors import Code, ConfigError
from collab_core.home import default_home


def check_quickly(role: Role, state_dir: Path | None) -> None:
    """Say at once what would fail in a minute, with the way out.

    Raises:
        ConfigError: MACHINE_UNFIT.
    """
    place = (state_dir or default_home()).expanduser().absolute()
    checks = [
        *guarded("packages", package_checks),
        *guarded("machine", lambda: machine_checks(place)),
    ]
    faults = [check for check in checks if not check.ok and role in check.rules_out]
    if faults:
        raise ConfigError(
            Code.MACHINE_UNFIT,
            "; ".join(f"{check.name}: {check.detail}" for check in faults) + ".",
            fix=" ".join(check.fix for check in faults) + " `collab doctor` looks at everything.",
        )
