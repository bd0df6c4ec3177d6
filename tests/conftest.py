"""For all tests: no network, and Ctrl-C works also where the tests were started in the background."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited by every program that a test starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
