"""Asynchronous SGD with a parameter server: one server, and replicas that train on their share.

``python examples/parameter_server.py`` starts a server and two replicas on this machine.
``python examples/parameter_server.py --quick`` does so for seconds.

On several machines, start each by hand, in any order:

    python examples/parameter_server.py --role server --address 10.0.0.5:29500 --replicas 2
    python examples/parameter_server.py --role replica --rank 0 --address 10.0.0.5:29500
    python examples/parameter_server.py --role replica --rank 1 --address 10.0.0.5:29500
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import torch
from torch.nn.functional import cross_entropy

from asynckfold import Hogwild, Server
from asynckfold.data.sources import load_source
from asynckfold.models import MLP


def get_data():
    digits = load_source("digits").dataset
    inputs = torch.as_tensor(digits.data).float().flatten(1) / digits.data.max()
    targets = torch.as_tensor(digits.targets)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    return inputs[order], targets[order]


def serve(args):
    model = MLP(64)
    server = Server(model, address=args.address, staleness_aware=True)
    print(server.address, flush=True)
    print(server.serve(args.replicas))
    inputs, targets = get_data()
    held_out = slice(None, len(inputs) // 5)
    with torch.no_grad():
        right = model(inputs[held_out]).argmax(1) == targets[held_out]
    print(f"accuracy {right.double().mean():.4f}")


def train(args):
    torch.set_num_threads(1)
    inputs, targets = get_data()
    # Every replica has samples of its own; a fifth is held out.
    share = torch.arange(len(inputs) // 5 + args.rank, len(inputs), args.replicas)
    model = MLP(64)
    with Hogwild(
        model.parameters(), lr=0.1, n_push=2, n_pull=2, model=model, address=args.address
    ) as optimizer:
        for _ in range(args.epochs):
            for batch in share[torch.randperm(len(share))].split(32):
                optimizer.zero_grad()
                cross_entropy(model(inputs[batch]), targets[batch]).backward()
                optimizer.step()


def start_all(args):
    def start(role, *words, **given):
        words = ["--role", role, "--replicas", args.replicas, "--epochs", args.epochs, *words]
        return subprocess.Popen([sys.executable, __file__, *map(str, words)], **given)

    server = start("server", "--address", "127.0.0.1:0", stdout=subprocess.PIPE, text=True)
    address = server.stdout.readline().strip()
    replicas = [
        start("replica", "--address", address, "--rank", rank) for rank in range(args.replicas)
    ]
    for line in server.stdout:
        print(line, end="")
    return max(process.wait() for process in [server, *replicas])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few epochs")
    parser.add_argument("--role", choices=["all", "server", "replica"], default="all")
    parser.add_argument("--address", default="127.0.0.1:29500", help="host:port of the server")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rank", type=int, default=0, help="number of this replica, from 0")
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()
    if args.quick:
        args.epochs = 10
    return {"all": start_all, "server": serve, "replica": train}[args.role](args)


if __name__ == "__main__":
    sys.exit(main())
