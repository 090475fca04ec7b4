"""Ctrl-C, SIGTERM and a terminal that is closed: the first asks to leave cleanly, the second leaves now."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

from collab_cli.terminal import silence

LEAVE_WITHIN_S = 9.0
FORCED_EXIT_CODE = 3  # it did not manage to leave by itself
PARENT_VARIABLE = "COLLAB_EXIT_WITH_PARENT"
PARENT_POLL_S = 0.5


class Stopping:
    """While active, turns signals into a wish to stop.

    Until `when_asked` is called a signal interrupts whatever is going on; afterwards it only sets `event`, and the peer
    leaves by itself. Should it not manage to, the process ends anyway; the daemon ends with it.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self._began = time.monotonic()
        self._is_polite = False
        self._num_signals = 0
        self._old: dict[int, object] = {}

    def __enter__(self) -> Stopping:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: who typed that wants us to stay
            self._old[number] = signal.signal(number, self._on_signal)
        if PARENT_VARIABLE in os.environ:
            threading.Thread(target=self._follow_parent, args=(os.getppid(),), daemon=True).start()
        return self

    def _follow_parent(self, parent: int) -> None:
        """Peers of `collab demo` end with it, even if it is killed."""
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def when_asked(self) -> threading.Event:
        """From now on the caller looks at the event."""
        self._is_polite = True
        return self.event

    def at_once(self) -> None:
        """From now on a signal interrupts again, because nobody looks at the event any more."""
        self._is_polite = False
        if self.event.is_set():
            raise KeyboardInterrupt

    def after(self, seconds: float) -> None:
        """Ask by ourselves, so many seconds after the command began."""
        timer = threading.Timer(max(0.0, self._began + seconds - time.monotonic()), self._ask)
        timer.daemon = True
        timer.start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:  # nobody reads any more, and writing to a terminal that is gone is an error
            silence(sys.stdout)
            silence(sys.stderr)
        if self._num_signals:
            os._exit(130)
        self._num_signals += 1
        if not self._is_polite:
            raise KeyboardInterrupt
        self._ask()

    def _ask(self) -> None:
        """Ask the peer to leave, and see to it that it does."""
        self.event.set()
        deadline = threading.Timer(LEAVE_WITHIN_S, os._exit, args=(FORCED_EXIT_CODE,))
        deadline.daemon = True
        deadline.start()
