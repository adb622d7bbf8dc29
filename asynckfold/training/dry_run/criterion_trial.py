"""What a criterion factory of the user's makes for each fold, and the rules that it must keep."""

from __future__ import annotations

from dataclasses import replace

from asynckfold.data.batches import Batches
from asynckfold.jobs.criteria import criterion_of, why_not_of_pairs
from asynckfold.training.bundle import Bundle
from asynckfold.training.dry_run.checks import Refused
from asynckfold.training.dry_run.misfit import trying
from asynckfold.training.fold_criterion import as_given, criterion_for, kind_made_by, of_rows

_RULE = "a function of train_targets must return the criterion of a training fold"


def with_criterion(bundle: Bundle, data: Batches) -> Bundle:
    """Return the bundle with the criterion of the first fold, as a function of stored targets.

    Raises
    ------
    Refused
        It raises, returns no criterion, or one of another kind for some fold.
    """
    recipe = bundle.recipe
    if recipe.make_criterion is None:
        if data.columns is None:
            return bundle
        return replace(bundle, recipe=replace(recipe, criterion=of_rows(recipe.criterion, data)))
    known, made = kind_made_by(recipe.make_criterion), []
    for fold in bundle.folds:
        with trying(_RULE, "It gets a tensor, with a class as its index."):
            made.append(as_given(criterion_for(recipe, data, fold.fitted)))
        if not callable(made[-1]) or isinstance(made[-1], type):
            raise Refused(
                _RULE,
                f"{type(made[-1]).__name__} {made[-1]!r:.60}",
                "Return for instance torch.nn.CrossEntropyLoss(weight).",
            )
        if why := why_not_of_pairs(made[-1]):
            raise Refused("criterion must be a function of outputs, and of labels or numbers", *why)
        if criterion_of(made[-1]) != known:
            name = type(made[-1]).__name__
            first = "another kind" if known is None else known.name
            raise Refused(
                "a function of train_targets must return one kind of criterion for any targets",
                f"{name} for a training fold, and {first} for the targets 0 and 1",
                "Let it take any targets, for instance by torch.bincount(train_targets, "
                "minlength=10).",
            )
    return replace(bundle, recipe=replace(recipe, criterion=of_rows(made[0], data)))
