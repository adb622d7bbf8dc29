"""What benchmarks share: samples, loops that users write, sweeps by asynckfold and peers, tables.

All ways train the same samples in equal batches for the same epochs, on the same folds under the
same LR schedules, and evaluate the held-out fold after each epoch. Loops write nothing to disk;
asynckfold keeps its promises: checkpoints and results.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import datasets, transforms
from torchvision.models import resnet18

from asynckfold import AsyncKFold, CVResults, get_scheduler
from asynckfold.models import MLP, VGG
from asynckfold.system import background

BATCH, EVALUATION_BATCH, FOLDS = 32, 256, 5

Indices = np.ndarray[Any, np.dtype[np.int64]]
Batches = Callable[[Indices, int, bool], Iterable[tuple[Tensor, Tensor]]]
"""(sample numbers, batch size, whether to shuffle) → batches of inputs and targets."""


digits_mlp, small_vgg = partial(MLP, 64), partial(VGG, width=0.25)


def lenet() -> nn.Module:
    """Return a LeNet with BatchNorm, for images of 28 pixels."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def resnet() -> nn.Module:
    """Return a ResNet18 for images of 32 pixels."""
    model: nn.Module = resnet18(num_classes=10)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model


def adam(model: nn.Module) -> optim.Optimizer:
    """Return Adam as users write it."""
    return optim.Adam(model.parameters(), 1e-3)


def fast_adam(model: nn.Module) -> optim.Optimizer:
    """Return Adam with torch's fused kernel."""
    return optim.Adam(model.parameters(), 1e-3, fused=True)


def noisy_patterns(shape: tuple[int, ...], samples: int) -> tuple[Tensor, Tensor]:
    """Return samples of ten noisy patterns: float32 of deviation about 3, and int64 targets."""
    random = np.random.default_rng(0)
    patterns, targets = random.normal(size=(10, *shape)), random.integers(0, 10, samples)
    values = patterns[targets] + random.normal(scale=3.0, size=(samples, *shape))
    return torch.from_numpy(values.astype(np.float32)), torch.from_numpy(targets)


def images(name: str, data: Path | None, samples: int) -> tuple[Any, Any]:
    """Return uint8 images of "digits", "mnist" or "cifar10" and their classes.

    Without `data`, the latter two are noisy patterns of the same shape. CIFAR-10 may also lie in
    ``data/train`` as images, a folder for each class.
    """
    found: Any
    if name == "digits":
        found = load_digits()
        pixels, targets = (found.images * 255 / 16).astype(np.uint8), found.target
    elif data is not None and name == "cifar10" and (data / "train").is_dir():
        files = np.array(datasets.ImageFolder(data / "train").samples, dtype=object)
        # Not all 50,000 are read.
        files = files[np.random.default_rng(0).permutation(len(files))[:samples]]
        pixels = np.stack([np.asarray(Image.open(path)) for path in files[:, 0]])
        return pixels, files[:, 1].astype(np.int64)
    elif data is not None:
        found = {"mnist": datasets.MNIST, "cifar10": datasets.CIFAR10}[name](data)
        pixels, targets = np.asarray(found.data), np.asarray(found.targets)
    else:
        shape = (28, 28) if name == "mnist" else (32, 32, 3)
        values, classes = noisy_patterns(shape, samples)
        pixels = (128 + 30 * values.numpy()).clip(0, 255).astype(np.uint8)
        targets = classes.numpy()
    chosen = np.random.default_rng(0).permutation(len(targets))[:samples]
    return pixels[chosen], targets[chosen].astype(np.int64)


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """A data set as torchvision's: PIL images through the transforms of the tutorials."""

    def __init__(self, pixels: Any, targets: Any, size: int) -> None:
        self.pixels, self.targets = pixels, targets
        centre = (0.5,) * (pixels.shape[3] if pixels.ndim == 4 else 1)
        resized = [transforms.Resize((size, size))] if size else []
        normalised = transforms.Normalize(centre, centre)
        self.transform = transforms.Compose([*resized, transforms.ToTensor(), normalised])

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.pixels[index])), int(self.targets[index])


def folds_of(targets: Tensor, count: int = FOLDS) -> list[tuple[Indices, Indices]]:
    """Return stratified folds, the same on every call."""
    folds = StratifiedKFold(count, shuffle=True, random_state=0)
    return list(folds.split(np.zeros(len(targets)), targets.numpy()))


def from_memory(inputs: Tensor, targets: Tensor) -> Batches:
    """Cut batches out of whole arrays."""

    def batches(rows: Indices, size: int, shuffle: bool) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.as_tensor(rows)
        order = order[torch.randperm(len(order))] if shuffle else order
        for part in torch.split(order, size):
            yield inputs.index_select(0, part), targets.index_select(0, part)

    return batches


def from_loader(dataset: Dataset[Any]) -> Batches:
    """Load sample by sample through a DataLoader, as users do."""

    def batches(rows: Indices, size: int, shuffle: bool) -> Iterable[tuple[Tensor, Tensor]]:
        return DataLoader(Subset(dataset, rows.tolist()), size, shuffle=shuffle)

    return batches


def sweep(
    folds: Any, dataset: Any, models: Any, schedules: Any, params: Any, **settings: Any
) -> CVResults:
    """Train all jobs by asynckfold, silently, in a folder that is deleted afterwards."""
    # Beside the caller's files: the temporary folder of the system may be in memory.
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="asynckfold-benchmark-") as folder:
        root, settings = Path(folder, "run"), {"verbose": 0, "report": False, **settings}
        kfold = AsyncKFold(folds, dataset, root, nn.CrossEntropyLoss(), BATCH, **settings)
        return kfold(models, schedules, adam, params)


@dataclass(frozen=True)
class Outcome:
    """Seconds of one way, and the mean accuracy over jobs."""

    seconds: float
    accuracy: float


@dataclass(frozen=True)
class Exercise:
    """Folds × built-in LR schedules of one model; `model` makes a new one."""

    model: Callable[[], nn.Module]
    folds: list[tuple[Indices, Indices]]
    epochs: int
    schedules: tuple[str, ...] = ("constant",)
    precision: str = "fp32"

    @property
    def jobs(self) -> list[tuple[str, int]]:
        """LR schedule and fold of each job."""
        return [(name, fold) for name in self.schedules for fold in range(len(self.folds))]

    def train(
        self, fold: int, batches: Batches, schedule: str = "constant", opt_fn: Any = adam
    ) -> float:
        """Train one job; return its accuracy after the last epoch."""
        torch.manual_seed(fold)
        model, (train, valid) = self.model(), self.folds[fold]
        optimizer, criterion = opt_fn(model), nn.CrossEntropyLoss()
        lr_schedule = get_scheduler(schedule, optimizer, self.epochs)
        right = 0
        for _ in range(self.epochs):
            model.train()
            for inputs, targets in batches(train, BATCH, True):
                optimizer.zero_grad()
                criterion(model(inputs), targets).backward()
                optimizer.step()
            lr_schedule.step()
            model.eval()
            with torch.inference_mode():
                right = sum(
                    int((model(inputs).argmax(1) == targets).sum())
                    for inputs, targets in batches(valid, EVALUATION_BATCH, False)
                )
        return right / len(valid)

    def one_by_one(self, batches: Batches, count: int, opt_fn: Any = adam) -> Outcome:
        """Train one job after another in this process, with `count` threads."""
        before, started = torch.get_num_threads(), time.perf_counter()
        torch.set_num_threads(count)
        scores = [self.train(fold, batches, schedule, opt_fn) for schedule, fold in self.jobs]
        torch.set_num_threads(before)
        return Outcome(time.perf_counter() - started, float(np.mean(scores)))

    def serial_ways(
        self, dataset: Dataset[Any], inputs: Tensor, targets: Tensor
    ) -> dict[str, Callable[[], Outcome]]:
        """Return the serial ways by name: users' loops over a data set, and over its arrays."""
        loader, memory = from_loader(dataset), from_memory(inputs, targets)
        return {
            "loader": lambda: self.one_by_one(loader, cores()),
            "serial, 1 thread": lambda: self.one_by_one(memory, 1, fast_adam),
            "serial, all threads": lambda: self.one_by_one(memory, cores(), fast_adam),
        }

    def results(self, dataset: Any, **settings: Any) -> CVResults:
        """Train all jobs by asynckfold."""
        return sweep(self.folds, dataset, *self._arguments, **settings)

    def predicted_seconds(self, dataset: Any, **settings: Any) -> float:
        """Return what asynckfold predicts for all jobs, with workers that have started."""
        kfold = AsyncKFold(self.folds, dataset, "none", nn.CrossEntropyLoss(), BATCH, **settings)
        models, schedules, params = self._arguments
        return kfold.forecast(models, schedules, adam, params).simulation.makespan

    @property
    def _arguments(self) -> tuple[Any, Any, Any]:
        params = {"epochs": self.epochs, "precision": self.precision}
        return {"model": self.model}, list(self.schedules), params

    def asynckfold(self, dataset: Any, **settings: Any) -> Outcome:
        """Train all jobs by asynckfold: the whole call, from its arguments to its page."""
        started = time.perf_counter()
        scores = self.results(dataset, report=True, **settings).cv_results_["mean_test_accuracy"]
        seconds = time.perf_counter() - started
        # The process that draws the figures must not take a core from what is timed next.
        background.wait()
        return Outcome(seconds, float(np.mean(scores)))


def in_turns(
    ways: Mapping[str, Callable[[], Outcome]], turns: int, starting: Collection[str]
) -> dict[str, list[Outcome]]:
    """Call each way once a turn; those in `starting` once before, which starts their workers."""
    for name in ways:
        if name in starting:
            ways[name]()
    turned = [{name: way() for name, way in ways.items()} for _ in range(turns)]
    return {name: [turn[name] for turn in turned] for name in ways}


PEERS = tuple(name for name in ("skorch", "ray") if find_spec(name))
"""The peers that are installed."""


def by_peer(peer: str, exercise: Exercise, inputs: Tensor, targets: Tensor) -> Outcome:
    """Train all jobs by another tool, at its best: samples in memory, a thread for each worker.

    Its workers stay for the next call.
    """
    return {"skorch": by_skorch, "ray": by_ray}[peer](exercise, inputs, targets)


def by_skorch(exercise: Exercise, inputs: Tensor, targets: Tensor) -> Outcome:
    """Run scikit-learn's grid search over skorch's nets; it evaluates after the last epoch only."""
    from skorch import NeuralNetClassifier
    from skorch.callbacks import Callback

    class Stepped(Callback):  # type: ignore[misc]
        """Steps a built-in LR schedule after each epoch."""

        def __init__(self, schedule: str, epochs: int) -> None:
            self.schedule, self.epochs = schedule, epochs

        def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **_: Any) -> None:  # noqa: N803
            self.made_ = get_scheduler(self.schedule, net.optimizer_, self.epochs)

        def on_epoch_end(self, net: Any, **_: Any) -> None:
            self.made_.step()

    started = time.perf_counter()
    net = NeuralNetClassifier(
        exercise.model,
        criterion=nn.CrossEntropyLoss,
        optimizer=optim.Adam,
        optimizer__fused=True,
        lr=1e-3,
        max_epochs=exercise.epochs,
        batch_size=BATCH,
        iterator_train__shuffle=True,
        iterator_valid__batch_size=EVALUATION_BATCH,
        train_split=None,
        callbacks=[("stepped", Stepped(exercise.schedules[0], exercise.epochs))],
        verbose=0,
    )
    search = GridSearchCV(
        net,
        {"callbacks__stepped__schedule": list(exercise.schedules)},
        cv=list(exercise.folds),
        scoring="accuracy",
        n_jobs=cores(),
        refit=False,
        error_score="raise",
    )
    search.fit(inputs.numpy(), targets.numpy())
    seconds = time.perf_counter() - started
    return Outcome(seconds, float(np.mean(search.cv_results_["mean_test_score"])))


def by_ray(exercise: Exercise, inputs: Tensor, targets: Tensor) -> Outcome:
    """Run a task per job, over arrays in Ray's shared memory."""
    import ray

    if not ray.is_initialized():
        # Else Ray 2.60 writes a token into the user's home folder, and uses it from then on.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        ray.init("local", num_cpus=cores(), include_dashboard=False, log_to_driver=False)

    def train(exercise: Exercise, inputs: Any, targets: Any, number: int) -> float:
        torch.set_num_threads(1)
        schedule, fold = exercise.jobs[number]
        # Without a copy. Arrays in shared memory are read-only, which torch warns about.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = torch.from_numpy(inputs), torch.from_numpy(targets)
        return exercise.train(fold, from_memory(*samples), schedule, fast_adam)

    task = ray.remote(num_cpus=1)(train)
    started = time.perf_counter()
    held = [ray.put(item) for item in (exercise, inputs.numpy(), targets.numpy())]
    scores = ray.get([task.remote(*held, number) for number in range(len(exercise.jobs))])
    return Outcome(time.perf_counter() - started, float(np.mean(scores)))


FLAGS: dict[str, dict[str, Any]] = {
    "--data": {"type": Path, "metavar": "DIR", "help": "torchvision's data sets; else generated"},
    "--device": {"choices": ("cpu", "cuda"), "default": "cpu", "help": "where jobs train"},
    "--peers": {"action": "store_true", "help": "also skorch and Ray, where installed"},
    "--picture": {"type": Path, "metavar": "FILE", "help": "draw the result, too"},
}


def arguments(description: str | None, turns: int, *flags: str) -> argparse.Namespace:
    """Return the parsed line of a script, which its docstring describes.

    ``flags`` are those of `FLAGS` that it takes, ``turns`` are its repetitions.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="less work and one turn: seconds")
    parser.add_argument("--turns", type=int, help=f"repetitions, by default {turns}; medians count")
    for flag in flags:
        parser.add_argument(flag, **FLAGS[flag])
    parsed = parser.parse_args()
    parsed.turns = parsed.turns or (1 if parsed.quick else turns)
    return parsed


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def shown(value: Any) -> str:
    """Return a value as text, numbers with three significant digits."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


class Table:
    """A Markdown table for standard output; rows are also told on standard error, as they come.

    The columns of ``header`` are separated by ``" | "``.
    """

    def __init__(self, title: str, header: str) -> None:
        self.title, self.columns = title, header.split(" | ")
        self.rows: list[Sequence[Any]] = []

    def add(self, *row: Any) -> None:
        """Add a row."""
        assert len(row) == len(self.columns)
        self.rows.append(row)
        cells = zip(self.columns, row, strict=True)
        print(", ".join(f"{name}: {shown(value)}" for name, value in cells), file=sys.stderr)

    def print(self, *notes: str) -> None:
        """Print the table and its notes."""
        print(f"# {self.title}\n\n{machine()}\n")
        for row in (self.columns, ["---"] * len(self.columns), *self.rows):
            print(f"| {' | '.join(map(shown, row))} |")
        print("", *(f"- {note}" for note in notes), "", sep="\n")


def machine() -> str:
    """Return processor, cores, versions and load, as one line."""
    model = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0]
    versions = (f"{name}: {metadata.version(name)}" for name in ("torch", "asynckfold"))
    load = f"load average: {os.getloadavg()[0]:.1f}"
    python = f"python: {platform.python_version()}"
    return ", ".join([f"processor: {model}", f"cores: {cores()}", python, *versions, load])
