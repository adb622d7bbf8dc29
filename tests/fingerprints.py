"""The same sweeps, the same bits: fingerprints of many kinds of sweep, compared with a revision.

``python -m tests.fingerprints`` prints one line for each kind. With ``--against REVISION`` the same
sweeps run in a checkout of that revision, too, and the exit code is 1 if any fingerprint differs.
``--only WORD`` chooses kinds whose names contain the word, and may be repeated.

Threads, groups and memory format are given, so that a rule that chooses them changes nothing here.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asynckfold import AsyncKFold, BestWeights, CVResults, EarlyStopping, load_results
from asynckfold.cli import main as command
from asynckfold.models import DBN, Pretraining

Kind = Callable[[Path], CVResults]
KINDS: dict[str, Kind] = {}
N, CLASSES = 60, 3
HERE = Path(__file__).resolve()


def kind(function: Kind) -> Kind:
    """Enter a kind of sweep under the name of its function."""
    KINDS[function.__name__.replace("_", " ")] = function
    return function


# Samples, models and optimizers


def samples() -> tuple[Any, Any]:
    """Return separable X (N, 8) and classes y (N,)."""
    draws = np.random.default_rng(0)
    targets = np.arange(N) % CLASSES
    inputs = draws.normal(size=(N, 8)).astype(np.float32)
    inputs[:, :CLASSES] += 2 * np.eye(CLASSES, dtype=np.float32)[targets]
    return inputs, targets.astype(np.int64)


def images() -> tuple[Any, Any]:
    """Return X (N, 1, 12, 12) and classes y (N,)."""
    draws = np.random.default_rng(1)
    targets = np.arange(N) % CLASSES
    return draws.normal(size=(N, 1, 12, 12)).astype(np.float32), targets.astype(np.int64)


class Net(nn.Sequential):
    """An MLP with dropout and BatchNorm: random streams and buffers matter."""

    def __init__(self, width: int = 16, classes: int = CLASSES) -> None:
        norm, drop = nn.BatchNorm1d(width), nn.Dropout(0.2)
        super().__init__(nn.Linear(8, width), norm, nn.ReLU(), drop, nn.Linear(width, classes))


class Conv(nn.Sequential):
    """Two convolutions with BatchNorm."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(54, CLASSES)),
        )


class Heads(nn.Module):
    """A class and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2))
        self.kind, self.mass = nn.Linear(8, CLASSES), nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        hidden = self.body(inputs)
        return {"kind": self.kind(hidden), "mass": self.mass(hidden)[:, 0]}


class TwoInputs(nn.Module):
    """A vector and an age, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def forward(self, vector: Tensor, age: Tensor) -> Tensor:
        logits: Tensor = self.net(torch.cat([vector, age[:, None].float() / 90], 1))
        return logits


class Words(torch.utils.data.Dataset[Any]):
    """Token ids of 2 to 9 words."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draws = np.random.default_rng(index)
        return torch.from_numpy(draws.integers(1, 20, 2 + index % 8)), index % 2


class Mean(nn.Module):
    """The mean of the words; padding counts as nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.out(self.embed(ids).sum(1) / (ids > 0).sum(1, keepdim=True))
        return logits


class Noisy(torch.utils.data.Dataset[Any]):
    """A stream: each read draws noise."""

    targets = samples()[1].tolist()

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        inputs, targets = samples()
        return torch.from_numpy(inputs[index]) + 0.1 * torch.randn(8), int(targets[index])


def padded(items: list[Any]) -> tuple[Tensor, Tensor]:
    """Collate texts of different length."""
    ids, targets = zip(*items, strict=True)
    return nn.utils.rnn.pad_sequence(list(ids), batch_first=True), torch.tensor(targets)


def adam(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    """Return Adam."""
    return torch.optim.Adam(model.parameters(), lr)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(model.parameters(), 5e-2, momentum=0.9)


def step(model: nn.Module, batch: Any, state: Any) -> dict[str, Tensor]:
    """Add a penalty to the loss."""
    inputs, targets = batch
    outputs = model(inputs)
    return {"loss": state.criterion(outputs, targets) + 1e-3 * outputs.square().mean()}


def train(context: Any) -> None:
    """Train a job by a loop of one's own."""
    for _ in range(context.epoch_start, context.epochs):
        for inputs, targets in context.train_loader:
            context.optimizer.zero_grad()
            loss = context.criterion(context.model(inputs), targets)
            loss.backward()
            context.optimizer.step()
        context.report(train_loss=loss.item())


def sweep(
    root: Path,
    models: Any = None,
    schedulers: Any = ("cosine",),
    opt_fn: Any = adam,
    params: dict[str, Any] | None = None,
    data: Any = None,
    folds: Any = 3,
    criterion: Any = None,
    space: Any = None,
    **settings: Any,
) -> CVResults:
    """Run a sweep with one thread per job, without fusion unless it is given."""
    fixed = {"fuse": False, "threads_per_job": 1, "n_jobs": 2, "devices": "cpu", "verbose": 0}
    settings = {**fixed, "baseline": None, "report": False, "random_state": 0, **settings}
    data, criterion = samples() if data is None else data, criterion or nn.CrossEntropyLoss()
    kfold = AsyncKFold(folds, data, str(root), criterion, 8, **settings)
    params = {"epochs": 2, "memory_format": "contiguous", **(params or {})}
    results: CVResults = kfold(
        models or {"net": Net}, list(schedulers), opt_fn, params, params=space
    )
    return results


# Kinds of sweep


@kind
def plain(root: Path) -> CVResults:
    return sweep(root, {"net": Net, "wide": lambda: Net(24)}, ["cosine", "constant", "reduce"])


@kind
def serial(root: Path) -> CVResults:
    return sweep(root, engine="serial")


@kind
def threads(root: Path) -> CVResults:
    return sweep(root, {"conv": Conv}, data=images(), threads_per_job=2)


@kind
def channels_last(root: Path) -> CVResults:
    return sweep(root, {"conv": Conv}, params={"memory_format": "channels_last"}, data=images())


@kind
def fused(root: Path) -> CVResults:
    return sweep(root, schedulers=["cosine", "warm"], fuse=3)


@kind
def fused_convolutions(root: Path) -> CVResults:
    return sweep(root, {"conv": Conv}, ["cosine", "step"], sgd, data=images(), fuse=6)


@kind
def hogwild_of_one(root: Path) -> CVResults:
    return sweep(root, opt_fn=sgd, params={"trainer": "hogwild", "processes": 1})


@kind
def allreduce(root: Path) -> CVResults:
    return sweep(root, params={"trainer": "allreduce", "processes": 2})


@kind
def averaging(root: Path) -> CVResults:
    return sweep(root, params={"trainer": "averaging", "processes": 2, "steps_per_round": 2})


@kind
def parameter_server_of_one(root: Path) -> CVResults:
    return sweep(root, opt_fn=sgd, params={"trainer": "parameter_server", "processes": 1})


@kind
def deep_belief_network(root: Path) -> CVResults:
    inputs, targets = samples()
    net = {"dbn": lambda: DBN(8, (8, 6), CLASSES, pretraining=Pretraining(epochs=1))}
    return sweep(root, net, data=(1 / (1 + np.exp(-inputs)), targets))


def on_the_command_line(root: Path, source: str, *words: str) -> CVResults:
    flags = ("--models", "mlp", "--folds", "3", "--epochs", "2", "--batch-size", "8", "--seed", "0")
    fixed = (
        "--fuse",
        "no",
        "--threads-per-job",
        "1",
        "--n-jobs",
        "2",
        "--devices",
        "cpu",
        "--quiet",
    )
    end = (
        "--memory-format",
        "contiguous",
        "--baseline",
        "none",
        "--no-report",
        "--root",
        str(root),
    )
    command(["run", "--data", source, *flags, *fixed, *end, *words])
    return load_results(root)


@kind
def csv(root: Path) -> CVResults:
    inputs, targets = samples()
    rows = [
        ",".join([*map(repr, map(float, row)), "ab"[at % 2], f"class{target}"])
        for at, (row, target) in enumerate(zip(inputs, targets, strict=True))
    ]
    head = ",".join([*(f"x{at}" for at in range(8)), "town", "kind"])
    path = root.with_suffix(".csv")
    path.write_text("\n".join([head, *rows]) + "\n")
    return on_the_command_line(root, f"csv:{path}")


@kind
def folder(root: Path) -> CVResults:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (N, 8, 8, 3), np.uint8)
    for at, image in enumerate(pixels):
        path = root.with_suffix(".images") / f"class{at % CLASSES}" / f"{at}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return on_the_command_line(root, f"folder:{root.with_suffix('.images')}", "--augment")


@kind
def npz(root: Path) -> CVResults:
    inputs, targets = samples()
    path = root.with_suffix(".npz")
    np.savez(path, X=inputs, y=targets)
    return on_the_command_line(root, f"npz:{path}", "--param", "lr=1e-3,1e-2")


@kind
def bf16(root: Path) -> CVResults:
    return sweep(root, params={"precision": "bf16"})


@kind
def repeats(root: Path) -> CVResults:
    return sweep(root, n_repeats=2)


@kind
def groups(root: Path) -> CVResults:
    return sweep(root, groups=np.arange(N) // 4)


@kind
def streamed(root: Path) -> CVResults:
    return sweep(root, data=Noisy(), random_samples=True)


@kind
def refit(root: Path) -> CVResults:
    results = sweep(root, schedulers=["cosine", "onecycle"], refit=True)
    refitted = results.refitted
    assert refitted is not None
    return refitted


@kind
def ragged(root: Path) -> CVResults:
    return sweep(root, {"mean": Mean}, data=Words(), collate_fn=padded)


@kind
def dict_inputs(root: Path) -> CVResults:
    inputs, targets = samples()
    ages = np.random.default_rng(0).integers(0, 90, N)
    return sweep(root, {"two": TwoInputs}, data=({"vector": inputs, "age": ages}, targets))


@kind
def several_outputs(root: Path) -> CVResults:
    inputs, targets = samples()
    both = {"kind": targets, "mass": inputs.sum(1)}

    def loss(outputs: Any, targets: Any) -> Tensor:
        mass = nn.functional.mse_loss(outputs["mass"], targets["mass"])
        return nn.functional.cross_entropy(outputs["kind"], targets["kind"]) + mass

    def accuracy_of_kind(targets: Any, outputs: Any) -> float:
        return float((outputs["kind"].argmax(axis=1) == targets["kind"]).mean())

    scoring = {"accuracy_of_kind": accuracy_of_kind}
    return sweep(root, {"heads": Heads}, data=(inputs, both), criterion=loss, scoring=scoring)


@kind
def regression(root: Path) -> CVResults:
    inputs, _ = samples()
    data = inputs, inputs.sum(1, keepdims=True)
    net = {"net": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))}
    return sweep(root, net, data=data, criterion=nn.MSELoss(), stratify="quantile")


@kind
def several_labels(root: Path) -> CVResults:
    inputs, _ = samples()
    data = inputs, (inputs[:, :4] > 0).astype(np.float32)
    return sweep(root, {"net": lambda: Net(classes=4)}, data=data, criterion=nn.BCEWithLogitsLoss())


@kind
def own_step(root: Path) -> CVResults:
    return sweep(root, training_step=step)


@kind
def own_loop(root: Path) -> CVResults:
    return sweep(root, fit_fn=train)


@kind
def early_stopping(root: Path) -> CVResults:
    callbacks = [EarlyStopping(patience=1), BestWeights()]
    return sweep(root, callbacks=callbacks, inner_valid=0.25, params={"epochs": 6})


@kind
def by_batch(root: Path) -> CVResults:
    return sweep(root, schedulers=["cosine", "onecycle"], params={"lr_step": "batch"})


@kind
def accumulated(root: Path) -> CVResults:
    return sweep(root, params={"accumulate": 2, "clip_grad_norm": 1.0})


@kind
def preprocessed(root: Path) -> CVResults:
    from sklearn.preprocessing import StandardScaler

    return sweep(root, preprocess=StandardScaler(), sampler="balanced")


@kind
def grid(root: Path) -> CVResults:
    return sweep(root, {"net": Net}, space={"lr": [1e-3, 1e-2], "width": [8, 16]})


@kind
def weights_of_classes(root: Path) -> CVResults:
    def criterion(train_targets: Any) -> nn.Module:
        counts = torch.bincount(torch.as_tensor(train_targets), minlength=CLASSES)
        return nn.CrossEntropyLoss(1 / counts.float())

    return sweep(root, criterion=criterion)


# Comparison


def fingerprint(results: CVResults) -> str:
    """Return one hash of all jobs' results, and of the losses of their epochs."""
    losses = results.to_frame("epoch").select_dtypes("number")
    kept = losses[[name for name in ("train_loss", "valid_loss") if name in losses]]
    digest = hashlib.sha256(np.ascontiguousarray(kept.to_numpy(float)).tobytes())
    return f"{results.fingerprint[:24]} {digest.hexdigest()[:8]}"


def fingerprints(words: Iterable[str] = ()) -> dict[str, str]:
    """Run the kinds whose names contain one of `words`, all without; return name → fingerprint."""
    words, output = list(words), {}
    for name, function in KINDS.items():
        if words and not any(word in name for word in words):
            continue
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    output[name] = fingerprint(function(Path(folder, "run")))
            except (Exception, SystemExit) as error:  # noqa: BLE001 a kind that fails is a line
                output[name] = f"failed: {type(error).__name__}: {str(error)[:300]}"
        print(f"{name:28} {output[name]}", flush=True)
    return output


def at_revision(revision: str, names: Iterable[str]) -> dict[str, str]:
    """Run this script in a checkout of a revision; what ran before is kept with temporary files."""
    script = HERE.read_text()
    key = hashlib.sha256(f"{script}{revision}{torch.__version__}{os.getuid()}".encode()).hexdigest()
    kept = Path(tempfile.gettempdir(), f"fingerprints-{key[:16]}.json")
    known: dict[str, str] = json.loads(kept.read_text()) if kept.exists() else {}
    only = [word for name in names if name not in known for word in ("--only", name)]
    if only:
        with tempfile.TemporaryDirectory() as folder:
            tree, listing = Path(folder, "tree"), Path(folder, "fingerprints.json")
            git = ["git", "-C", str(HERE.parents[1]), "worktree"]
            subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
            try:
                copy = Path(folder, HERE.name)
                copy.write_text(script)
                environment = {**os.environ, "PYTHONPATH": str(tree)}
                arguments = [sys.executable, str(copy), "--json", str(listing), *only]
                subprocess.run(arguments, cwd=folder, env=environment, check=True)
            finally:
                subprocess.run([*git, "remove", "--force", str(tree)], check=True)
            known |= json.loads(listing.read_text())
        kept.write_text(json.dumps(known))
    return known


def main(arguments: list[str] | None = None) -> int:
    """Print the fingerprints; with a revision, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", metavar="REVISION", help="compare with this revision")
    parser.add_argument("--only", action="append", default=[], metavar="WORD")
    parser.add_argument("--json", metavar="FILE", help="write name → fingerprint there")
    options = parser.parse_args(arguments)
    here = fingerprints(options.only)
    if options.json:
        Path(options.json).write_text(json.dumps(here))
    if not options.against:
        return 0
    there = at_revision(options.against, here)
    changed = [name for name in here if here[name] != there[name] or "failed:" in here[name]]
    for name in changed:
        print(f"DIFFERS {name}: {there[name]} at {options.against}, {here[name]} here")
    print(f"{len(here) - len(changed)} of {len(here)} kinds of sweep have equal fingerprints")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
