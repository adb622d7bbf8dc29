"""A Ray cluster of several nodes on this machine, as a process of its own that obeys its stdin.

``ray_nodes.py FOLDER`` prints the address. Each line is answered by the address:

    add NAME              a node of one core
    set NAME VALUE        a variable for the nodes to come
    kill NAME             kills a node
    kill head             kills the head
    restart head          another cluster

The end of stdin ends all. What BEFORE names comes first on a node's path.
The nodes use the cores of this machine in turn: each sees one of them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from asynckfold.system import process


def main(folder: str) -> None:
    """Start a head of one core, and obey."""
    # Here: the suite imports this file also where there is no Ray.
    from ray.cluster_utils import Cluster

    process.adopt_orphans()
    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
    os.sched_setaffinity(0, {next(cores)})
    # Neither the folder nor the temporary files of whoever trains.
    os.chdir(folder)
    os.environ["TMPDIR"] = os.environ["RAY_TMPDIR"] = folder
    head: dict[str, Any] = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes, address = {"head": cluster.head_node}, cluster.address
    print(address, flush=True)
    paths = os.environ.get("PYTHONPATH", "")
    for line in sys.stdin:
        word, name, *values = line.split()
        if word == "add":
            os.sched_setaffinity(0, {next(cores)})
            before = [os.environ.get("BEFORE", "")]
            os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, before), paths])
            nodes[name] = cluster.add_node(num_cpus=1, node_name=name)
        elif word == "set":
            os.environ[name] = " ".join(values)
        elif word == "restart":
            cluster.shutdown()
            cluster = Cluster(initialize_head=True, head_node_args=head)
            nodes, address = {"head": cluster.head_node}, cluster.address
        elif name == "head":
            # With a raylet alone a node is of no use.
            nodes[name].kill_gcs_server(check_alive=False)
            nodes[name].kill_raylet(check_alive=False)
        else:
            cluster.remove_node(nodes.pop(name), allow_graceful=False)
        print(address, flush=True)
    cluster.shutdown()
    # Only what this process has started or adopted; the agents of a killed raylet take a while.
    end_children()
    Path(folder, "ended").touch()


def end_children() -> None:
    """Kill all descendants: of each that ends, this process adopts the children."""
    end = time.monotonic() + 10.0
    while (children := process.children()) and time.monotonic() < end:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
