"""A Ray cluster of several nodes on this machine, as a process of its own that obeys its stdin.

``ray_nodes.py FOLDER`` prints the address. ``add NAME`` adds a node of one core, ``kill NAME``
kills one, ``kill head`` kills the head, ``restart head`` starts another cluster; each is answered
by the address. The end of stdin ends all. The nodes use the cores of this machine in turn: each
sees one of them.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

from asynckfold.engines import keeper
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
    for line in sys.stdin:
        word, name = line.split()
        if word == "add":
            os.sched_setaffinity(0, {next(cores)})
            nodes[name] = cluster.add_node(num_cpus=1, node_name=name)
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


if __name__ == "__main__":
    main(*sys.argv[1:])
