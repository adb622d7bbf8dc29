"""A Ray cluster of several nodes on this machine, as a process of its own that obeys its stdin.

``ray_nodes.py FOLDER`` prints the address. ``add NAME [UUID …]`` adds a node of one core with GPUs
that do not exist (`stand_in.pynvml`), ``kill NAME`` kills one, ``drain NAME SECONDS`` says that it
will be preempted, ``kill head`` kills the head, ``restart head`` starts another cluster; each is
answered by the address. The end of stdin ends all.
The nodes use the cores of this machine in turn: each sees one of them.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

from asynckfold.engines import keeper
from asynckfold.system import process

STAND_IN = Path(__file__).with_name("stand_in").absolute()
"""The folder with what precedes nvidia-ml-py."""


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
        word, name, *gpus = line.split()
        if word == "add":
            os.sched_setaffinity(0, {next(cores)})
            os.environ["STAND_IN_GPUS"] = " ".join(gpus)
            os.environ["PYTHONPATH"] = f"{STAND_IN}{os.pathsep}{paths}" if gpus else paths
            nodes[name] = cluster.add_node(num_cpus=1, num_gpus=len(gpus), node_name=name)
        elif word == "drain":
            drain(address, nodes[name].node_id, int(*gpus))
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
    keeper._end_children()
    Path(folder, "ended").touch()


def drain(address: str, identity: str, seconds: int) -> None:
    """Tell the cluster that a node will be preempted, as a cloud's notice does."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

    end = (time.time_ns() // 10**6) + seconds * 1000
    client = GcsClient(address=address)
    is_accepted, why = client.drain_node(identity, DRAIN_NODE_REASON_PREEMPTION, "a test", end)
    assert is_accepted, why


if __name__ == "__main__":
    main(*sys.argv[1:])
