"""With what a run trained, when it is reproducible, and when it may be continued."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import (
    AsyncKFold,
    CVResults,
    InputError,
    JobsFailedWarning,
    Plan,
    Problem,
    RunStore,
    TrainerParams,
)
from asynckfold.cli import main
from asynckfold.jobs.reproducibility import NODES, differences, reproducibility_of
from asynckfold.results.report.page import write_report
from asynckfold.training import software
from tests.toy import Tiny, adam, samples

PLAN = Plan((), TrainerParams(), 32, 1, 0, "cpu", ("accuracy",), "d", "f")
HERE = {"torch": "2.6.0", "CPU class": "x86_64 AVX2", "deterministic kernels": "no"}

# When a run is reproducible


CHANGED = {**HERE, "torch": "2.7.1", "CPU class": "x86_64 AVX512"}
EXACT = {**HERE, "deterministic kernels": "yes"}


@pytest.mark.parametrize(
    ("device", "sessions", "reasons"),
    [
        ("cpu", [], []),
        ("cpu", [HERE, HERE], []),
        (
            "cpu",
            [HERE, CHANGED, HERE, CHANGED],
            [
                "its sessions trained with different software: torch: 2.6.0 at first, 2.7.1 later; "
                "CPU class: x86_64 AVX2 at first, x86_64 AVX512 later"
            ],
        ),
        ("cpu", [HERE, {}], ["the software .* was not recorded"]),
        ("cpu", [{**HERE, NODES: "A; B"}], ["its nodes have different kinds of processor: A; B"]),
        ("cuda", [HERE], ["CUDA was used without deterministic kernels .*"]),
        ("cuda", [EXACT], []),
    ],
)
def test_a_run_is_reproducible_or_says_why_not(
    device: str, sessions: list[dict[str, str]], reasons: list[str]
) -> None:
    verdict = reproducibility_of(replace(PLAN, device=device), sessions)
    assert verdict.claimed is not bool(reasons)
    assert len(verdict.reasons) == len(reasons)
    for found, pattern in zip(verdict.reasons, reasons, strict=True):
        assert re.fullmatch(pattern, found)


# What is recorded


CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 106
model name\t: Intel(R) Xeon(R) Platinum
flags\t\t: fpu sse4_2 avx avx2 fma amx_tile

processor\t: 1
vendor_id\t: Other
"""


def test_processors_of_one_class_have_one_name(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO)
    found = software.software(1, cpuinfo=path)
    assert found["CPU"] == "Intel(R) Xeon(R) Platinum"
    assert "GenuineIntel 6 106" in found["CPU class"]
    assert "(amx_tile avx avx2 fma sse4_2)" in found["CPU class"]
    path.write_text(CPUINFO.replace("Platinum", "Gold"))
    assert software.software(1, cpuinfo=path)["CPU class"] == found["CPU class"]
    path.write_text(CPUINFO.replace("amx_tile", ""))
    assert software.software(1, cpuinfo=path)["CPU class"] != found["CPU class"]
    assert "CPU class" in software.software(1, cpuinfo=tmp_path / "nothing")


def test_only_variables_that_choose_kernels_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = software.software(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MKL_SECRET_TOKEN", "canary")
    assert software.software(1) == before
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX")
    assert differences(before, software.software(1))[0].startswith("thread environment: ")


# Runs


def call(root: Path, models: Any = Tiny, **settings: Any) -> CVResults:
    models = models if isinstance(models, (list, dict)) else [models]
    schedulers = settings.pop("schedulers", ["cosine"])
    kfold = AsyncKFold(
        3,
        samples(),
        root,
        nn.CrossEntropyLoss(),
        10,
        **{"baseline": None, "verbose": 0, "parallelize": False, **settings},
    )
    return kfold(models, schedulers, adam, {"epochs": 2})


def other_software(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    real = software.software
    monkeypatch.setattr(
        software, "software", lambda *facts, **how: {**real(*facts, **how), **changes}, raising=True
    )


class Tall(Tiny):
    """Another candidate."""


class Fails(Tiny):
    """A candidate that can be repaired: by the environment, as its code stays the same."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if "BROKEN" in os.environ and not self.training:
            raise ValueError("not yet")
        return super().forward(inputs)


def half_fails(root: Path) -> None:
    """Leave a run in which there is something to do again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BROKEN", "yes")
        with pytest.warns(JobsFailedWarning):
            call(root, [Tiny, Fails])


def digests(root: Path) -> dict[str, str]:
    with RunStore.read(root) as store:
        return {name: result.digest for name, result in store.results().items()}


@pytest.mark.nightly
def test_a_run_is_not_continued_with_other_software(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_fails(root)
    kept = digests(root)
    other_software(monkeypatch, torch="9.9.9")
    with pytest.raises(InputError, match=r"torch: 2\S+ there, 9\.9\.9 here") as caught:
        call(root, [Tiny, Fails])
    (problem,) = caught.value.problems
    assert isinstance(problem, Problem)
    assert "allow_different_software=True" in problem.remedy
    assert digests(root) == kept
    results = call(root, [Tiny, Fails], allow_different_software=True)
    assert results.counts["done"] == 6
    assert not results.bit_identity.claimed
    assert "9.9.9 later" in results.bit_identity.reasons[0]
    assert "not reproducible" in repr(results)
    with RunStore.read(root) as store:
        numbers = json.loads((write_report(store).parent / "results.json").read_text())
    assert numbers["bit_identity"]["claimed"] is False
    assert numbers["fingerprint"] == results.fingerprint


def test_a_finished_run_may_be_looked_at_with_any_software(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = call(root)
    other_software(monkeypatch, torch="9.9.9")
    again = call(root)
    assert again.fingerprint == first.fingerprint
    assert again.bit_identity.claimed  # nothing was trained with it


def test_compare_says_what_may_explain_a_difference(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call(root / "one")
    other_software(monkeypatch, torch="9.9.9")
    call(root / "two", random_state=1)
    assert main(["compare", str(root / "one"), str(root / "two"), "--bits"]) == 1
    out = capsys.readouterr().out
    assert f"possible cause: torch: {torch.__version__} there, 9.9.9 here" in out
    assert f"{root / 'one'}: reproducible" in out
    assert main(["compare", str(root / "one"), str(root / "one"), "--bits", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["software"] == []
    assert [item["claimed"] for item in found["claims"]] == [True, True]


def test_the_callers_deterministic_setting_reaches_the_jobs(root: Path) -> None:
    seen: list[int] = []

    class Asks(Tiny):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            seen.append(torch.get_deterministic_debug_mode())
            return super().forward(inputs)

    torch.use_deterministic_algorithms(True)
    try:
        call(root, Asks)
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(seen) == {2}
    with RunStore.read(root) as store:
        (found,) = store.software()
    assert found["deterministic kernels"] == "yes"


# A run that grows


def test_candidates_are_added_to_a_run(root: Path) -> None:
    more = {"models": {"Tiny": Tiny, "Tall": Tall}, "schedulers": ["step", "cosine"]}
    added = {"Tall/cosine", "Tall/step", "Tiny/step"}
    call(root, baseline="estimate")
    kept = digests(root)
    results = call(root, **{**more, "baseline": "estimate"})
    found = digests(root)
    assert {name: found[name] for name in kept} == kept
    assert {name.rpartition("/")[0] for name in set(found) - set(kept)} == added
    with RunStore.read(root) as store:
        assert {item.attempt for item in store.attempts()} == {1}  # nothing was trained again
        grown = [item.text for item in store.events() if item.kind == "plan"]
        assert store.baseline is not None
        assert len(store.baseline.by_candidate) == 1 + len(added)
    assert grown == [f"{3 * len(added)} jobs were added to the plan"]
    assert results.bit_identity.claimed
    # A run that had all of them from the beginning is the same.
    assert call(root.parent / "whole", **more).fingerprint == results.fingerprint
