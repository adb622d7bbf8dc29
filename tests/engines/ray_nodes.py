"""A Ray cluster of several nodes on this machine, as a process of its own that obeys its stdin.

``ray_nodes.py FOLDER`` prints the address. Each line is answered by the address:

    add NAME [UUID ...]   a node of one core, with GPUs that do not exist (`stand_in.pynvml`)
    set NAME VALUE        a variable for the nodes to come
    kill NAME             kills a node
    kill head             kills the head
    restart head          another cluster
    drain NAME SECONDS    a node will be preempted
    claim VERSION         the cluster says that its Python is another

The end of stdin ends all. A node has STORE_MIB of shared memory, where that is set, and no disk
behind it. What BEFORE names comes first on a node's path.
The nodes use the cores of this machine in turn: each sees one of them.
"""

from __future__ import annotations

import itertools
import json
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
    head: dict[str, Any] = {"num_cpus": 1, "include_dashboard": False, **room()}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes, address = {"head": cluster.head_node}, cluster.address
    print(address, flush=True)
    paths = os.environ.get("PYTHONPATH", "")
    for line in sys.stdin:
        word, name, *gpus = line.split()
        if word == "add":
            os.sched_setaffinity(0, {next(cores)})
            os.environ["STAND_IN_GPUS"] = " ".join(gpus)
            before = [str(STAND_IN)] if gpus else [os.environ.get("BEFORE", "")]
            os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, before), paths])
            more = {"num_gpus": len(gpus), "node_name": name, **room()}
            nodes[name] = cluster.add_node(num_cpus=1, **more)
        elif word == "claim":
            claim(address, name)
        elif word == "set":
            os.environ[name] = " ".join(gpus)
        elif word == "drain":
            drain(address, nodes[name].node_id, int(*gpus))
        elif word == "restart":
            cluster.shutdown()
            cluster = Cluster(initialize_head=True, head_node_args={**head, **room()})
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


def room() -> dict[str, int]:
    """Return the size of a node's shared memory, and have Ray take its disk for full."""
    os.environ.pop("RAY_local_fs_capacity_threshold", None)
    if not (size := os.environ.get("STORE_MIB")):
        return {}
    # Of its space, Ray leaves free what is above this part.
    os.environ["RAY_local_fs_capacity_threshold"] = "0.001"  # noqa: SIM112
    return {"object_store_memory": int(size) << 20}


def claim(address: str, python: str) -> None:
    """Have the cluster say that it has another Python."""
    from ray._raylet import GcsClient

    client, place = GcsClient(address=address), (b"CLUSTER_METADATA", b"cluster")
    known = json.loads(client.internal_kv_get(*place))
    assert known["python_version"]
    changed = json.dumps({**known, "python_version": python}).encode()
    client.internal_kv_put(place[0], changed, True, place[1])


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
