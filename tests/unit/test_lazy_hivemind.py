"""Nobody waits for what it does not need, and hivemind is whole for whoever uses it."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_peer_starts_without_scipy() -> None:
    assert run("import sys, collab_core.session, collab_trainer, collab_aux; print('scipy' in sys.modules)") == "False"


def test_who_only_looks_on_waits_for_no_torch() -> None:
    parts = "collab_core.session, collab_core.library, collab_core.overview, collab_dashboard, collab_cli.watch"
    assert run(f"import sys, {parts}; print('torch' in sys.modules)") == "False"


def test_hivemind_is_whole_for_whoever_asks_for_it_after_us_or_before() -> None:
    ours, theirs = "from collab_core.swarm import Swarm", "import hivemind; from hivemind import Optimizer"
    check = (
        "import hivemind.dht, hivemind.utils.mpfuture as m; from hivemind.utils import MPFuture; "
        "assert MPFuture is m.MPFuture; "
        "assert hivemind.__version__; assert hivemind.DHT is hivemind.dht.DHT; from hivemind.dht import *; "
        "assert not hasattr(hivemind, 'nonsense'); print('whole')"
    )
    for lines in ((ours, theirs), (theirs, ours), (ours,)):
        assert run("; ".join([*lines, check])) == "whole"
