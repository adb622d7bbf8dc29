"""Nodes in network namespaces of their own, without a common folder, behind a slow link."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from asynckfold.engines.keeper import Keeper
from asynckfold.store import RunStore
from tests.engines.ray_start import ended, first_checkpoint, needs_ray, sweep
from tests.faults.test_ray_spans import outcomes, told
from tests.leftovers import gone, until

RATE = "20mbit"
"""Of each link. A delay (netem) is not in every kernel."""

HEAD = "10.213.7.1"


def run(words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words.split(), capture_output=True, text=True)


def missing() -> str:
    """Return why this machine cannot have such nodes; empty if it can."""
    if not (shutil.which("ip") and shutil.which("tc")) or os.geteuid():
        return "network namespaces need ip, tc and root"
    if Path(__file__).is_relative_to("/tmp"):
        return "the nodes have a /tmp of their own, and the checkout is there"
    name = f"akp{os.getpid()}"
    try:
        words = f"link add {name} type veth peer name {name}x", f"netns add {name}"
        failed = [done.stderr for word in words if (done := run(f"ip {word}")).returncode]
        done = run(f"tc qdisc add dev {name} root tbf rate {RATE} burst 64kb latency 400ms")
        return " ".join([*failed, done.stderr]).strip()
    finally:
        run(f"ip link del {name}")
        run(f"ip netns del {name}")


class Network:
    """A head here, and nodes in namespaces, each with a folder /tmp of its own."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack, self._bridge, self._count = stack, f"akb{os.getpid()}", 1
        stack.callback(run, f"ip link del {self._bridge}")
        self._ip(f"link add {self._bridge} type bridge")
        self._ip(f"addr add {HEAD}/24 dev {self._bridge}")
        self._ip(f"link set {self._bridge} up")
        words = [*self._start(HEAD), "--head", "--port=0", f"--temp-dir={folder}"]
        given = {**os.environ, "TMPDIR": str(folder), "RAY_worker_niceness": "0", "SLOW": "0.03"}
        keeper = stack.enter_context(
            closing(Keeper(folder, [*words, "--include-dashboard=false"], given))
        )
        code, output = keeper.ended(200.0) or (1, "no answer")
        assert code == 0, output
        self.address = (folder / "ray_current_cluster").read_text().strip()

    @staticmethod
    def _ip(words: str) -> None:
        done = run(f"ip {words}")
        assert not done.returncode, done.stderr

    @staticmethod
    def _start(own: str) -> list[str]:
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
        return [*words, f"--node-ip-address={own}", "--num-cpus=1"]

    def add(self, name: str) -> None:
        """Add a node."""
        self._count += 1
        space, own = self._space(name), f"10.213.7.{self._count}"
        outer, inner = (
            f"ako{self._count}p{os.getpid()}"[:15],
            f"aki{self._count}p{os.getpid()}"[:15],
        )
        self._ip(f"netns add {space}")
        self._stack.callback(run, f"ip netns del {space}")
        self._stack.callback(self.kill, name)
        self._ip(f"link add {outer} type veth peer name {inner} netns {space}")
        self._ip(f"link set {outer} master {self._bridge} up")
        self._ip(f"-n {space} addr add {own}/24 dev {inner}")
        self._ip(f"-n {space} link set {inner} up")
        self._ip(f"-n {space} link set lo up")
        limit = f"root tbf rate {RATE} burst 64kb latency 400ms"
        for words in (
            f"tc qdisc add dev {outer} {limit}",
            f"tc -n {space} qdisc add dev {inner} {limit}",
        ):
            done = run(words)
            assert not done.returncode, done.stderr
        paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)
        given = {**os.environ, "PYTHONPATH": paths, "SLOW": "0.03", "RAY_worker_niceness": "0"}
        given.pop("TMPDIR", None)
        script = 'mount -t tmpfs tmpfs /tmp && cd /tmp && exec "$@"'
        process = subprocess.Popen(
            [
                *("ip", "netns", "exec", space, "sh", "-c", script, "sh"),
                *(*self._start(own), f"--address={self.address}", f"--node-name={name}", "--block"),
            ],
            env=given,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._stack.callback(process.wait, 60)
        self._stack.callback(self.kill, name)

    def kill(self, name: str) -> None:
        """Kill all processes of a node."""
        found = {int(pid) for pid in run(f"ip netns pids {self._space(name)}").stdout.split()}
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        gone(found, 60)

    @staticmethod
    def _space(name: str) -> str:
        return f"akf-{name}-{os.getpid()}"


pytestmark = [
    pytest.mark.nightly,
    needs_ray,
    pytest.mark.timeout(900),
]


@pytest.fixture
def network() -> Iterator[Network]:
    if why := missing():
        pytest.skip(why)
    with (
        tempfile.TemporaryDirectory(prefix="r-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        ExitStack() as stack,
    ):
        yield Network(stack, Path(folder))


def test_one_is_killed_in_the_middle_and_one_comes_late(
    root: Path, tmp_path: Path, network: Network
) -> None:
    network.add("one")
    network.add("two")
    more = {"EPOCHS": "16"}
    expected = ended(sweep("plain", "process", tmp_path / "process", **more))
    process = sweep("plain", "ray", root, network.address, N_JOBS="3", **more)

    def nodes() -> set[str]:
        with RunStore.read(root) as store:
            return {item.node for item in store.attempts()}

    first_checkpoint(root)
    until(lambda: {"one", "two"} <= nodes())
    network.kill("one")
    network.add("late")
    until(lambda: "node one is lost" in told(root))
    assert ended(process) == expected
    assert "more nodes: " in told(root)
    assert nodes() == {"", "one", "two", "late"}
    assert {*outcomes(root)} <= {"ok", "interrupted"}
    assert outcomes(root).count("ok") == 6
