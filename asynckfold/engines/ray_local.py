"""A Ray of this machine alone, which ends with the run, however that ends. Ray is not imported."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from asynckfold.engines.keeper import Keeper
from asynckfold.errors import InputError
from asynckfold.system.signals import Interruption

START_SECONDS = 120.0
"""Limit of the start; on a busy machine it took 20 seconds."""

_LOOK_SECONDS = 0.2


class LocalRay:
    """A head node of its own, in a folder that goes with it.

    Raises
    ------
    InputError
        Ray does not start here.
    """

    def __init__(self, cores: int, signals: Interruption) -> None:
        # Short: Ray makes sockets below it, whose paths may have 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="akf-ray-", dir="/tmp"))
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0"]
        words += [f"--temp-dir={self._folder}", f"--num-cpus={cores}"]
        # Of this machine, and not 127.0.0.1, which Ray replaces by an address of the network.
        words += ["--node-ip-address=127.0.0.2", "--include-dashboard=false"]
        words += ["--disable-usage-stats", "--include-log-monitor=false"]
        given = {name: text for name, text in os.environ.items() if name != "RAY_ADDRESS"}
        # What Ray's processes keep for themselves goes with the folder, too.
        own = {"TMPDIR": str(self._folder), "RAY_USAGE_STATS_ENABLED": "0"}
        # By default Ray's workers have niceness 15; here `nice` says which they have.
        own["RAY_worker_niceness"] = "0"
        # From Ray 2.60 on, a token in the home folder would lock out the process that joins.
        own["RAY_AUTH_MODE"] = given.get("RAY_AUTH_MODE", "disabled")
        self._keeper = Keeper(self._folder, words, {**given, **own})
        try:
            self._wait(signals)
            self.address = (self._folder / "ray_current_cluster").read_text().strip()
        except BaseException:
            self.close()
            raise

    def _wait(self, signals: Interruption) -> None:
        end = time.monotonic() + START_SECONDS
        ended = None
        while ended is None and time.monotonic() < end:
            signals.check()
            ended = self._keeper.ended(_LOOK_SECONDS)
        code, output = ended or (1, f"no answer within {START_SECONDS:.0f} s")
        if code:
            raise InputError.one(
                "engine='ray' starts a Ray on this machine",
                f"exit code {code}: {' '.join(output.split())[-400:]}",
                "See whether `ray start --head` works here, or name a cluster by ray_address.",
            )

    def close(self) -> None:
        """End it."""
        self._keeper.close()
