"""Arguments are declared once: whatever shows, reads or checks them follows from that."""

from __future__ import annotations

import inspect
import re
import runpy
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from asynckfold import AsyncKFold, SignatureError, fit
from asynckfold.cli import main

PACKAGE = Path(__file__).parents[2] / "asynckfold"
OF_A_CALL = "the call of an AsyncKFold"


@pytest.mark.parametrize(
    ("given", "settings", "told"),
    [
        ((5,), {"n_job": 3}, "unexpected keyword argument 'n_job'. Did you mean 'n_jobs'?"),
        ((5,), {}, "missing a required argument: 'dataset'"),
        ((5,), {"kfolds": 3}, "multiple values for argument 'kfolds'"),
        (
            None,
            {"models": [], "lr_shedules": []},
            f"{OF_A_CALL} got an unexpected keyword argument 'lr_shedules'. "
            "Did you mean 'schedulers'?",
        ),
        (None, {}, f"{OF_A_CALL}: missing a required argument: 'models'"),
    ],
)
def test_a_wrong_call_names_the_nearest_argument_and_shows_no_frame_of_ours(
    monkeypatch: pytest.MonkeyPatch, root: Path, given: Any, settings: dict[str, Any], told: str
) -> None:
    # IPython's formatter gets the frames that a notebook shows.
    monkeypatch.setattr(
        "asynckfold.errors._rendered", lambda error, trace: traceback.format_tb(trace)
    )
    wrong: Any = AsyncKFold
    if given is None:
        wrong = AsyncKFold(3, (np.zeros((9, 2)), np.zeros(9)), root, nn.CrossEntropyLoss(), 3)
    with pytest.raises(TypeError, match=re.escape(told)) as found:
        wrong(*given or (), **settings)
    assert isinstance(found.value, SignatureError)
    shown = "\n".join(found.value._render_traceback_())
    assert "wrong(*given or ()" in shown
    assert "kfold.py" not in shown
    assert not root.exists() or not any(root.iterdir())


@pytest.mark.parametrize(("wrong", "right"), [("epoch", "epochs"), ("n_job", "n_jobs")])
def test_fit_names_the_nearest_of_its_arguments_and_those_of_a_sweep(
    wrong: str, right: str
) -> None:
    given: Any = {wrong: 1}
    with pytest.raises(SignatureError, match=rf"^fit got .*'{wrong}'\. Did you mean '{right}'\?$"):
        fit(nn.Linear(2, 1), None, None, nn.MSELoss(), "nowhere", **given)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("root", "It is called 'root_dir' here."),
        ("seed", "It is called 'random_state' here."),
        ("max_epochs", "It is a key of trainer_params: {'epochs': ...}."),
        ("lr", "opt_fn, an argument of the call, makes the optimizer of a model."),
    ],
)
def test_names_of_other_libraries_lead_to_ours(name: str, told: str) -> None:
    constructor: Any = AsyncKFold
    with pytest.raises(SignatureError) as found:
        constructor(3, None, "nowhere", None, 3, **{name: 1})
    assert str(found.value) == f"AsyncKFold got an unexpected keyword argument {name!r}. {told}"


def test_the_docstring_tells_of_each_argument() -> None:
    shown = inspect.signature(AsyncKFold).parameters
    assert all(f"\n{name} : " in (AsyncKFold.__doc__ or "") for name in shown)


def test_the_reference_page_is_up_to_date() -> None:
    docs = PACKAGE.parent / "docs"
    page = docs / "reference" / "arguments.md"
    reference = runpy.run_path(str(docs / "list_arguments.py"))["reference"]
    assert page.read_text() == f"{reference()}\n", "python docs/list_arguments.py writes it"


def test_the_first_screen_shows_a_dozen_flags(capsys: pytest.CaptureFixture[str]) -> None:
    shown, sections = {}, ["data", "candidates", "training", "machine", "output", "advanced"]
    for word in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main(["run", word])
        out = capsys.readouterr().out
        shown[word] = {*re.findall(r"^  (--[a-z][\w-]+)", out, re.MULTILINE)} - {"--help-all"}
        headings = [line[:-1] for line in out.splitlines() if line[:-1] in sections]
        assert headings == [name for name in sections if name in headings]
    assert len(shown["--help"]) == 12
    assert len(shown["--help-all"]) > 70
    assert headings == sections
