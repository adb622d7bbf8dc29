"""Two quick mutations; ``python -m tests.mutants`` tries all."""

from __future__ import annotations

import pytest

from tests.mutants import HOME, MUTATIONS, turns_red


@pytest.mark.parametrize("name", ["no seals", "no fence against late writers"])
def test_a_safeguard_that_is_taken_out_is_noticed(name: str) -> None:
    (mutation,) = (item for item in MUTATIONS if item.name == name)
    assert turns_red(mutation)


def test_every_mutation_has_its_text_still_in_the_code() -> None:
    for mutation in MUTATIONS:
        assert mutation.old in (HOME / "asynckfold" / mutation.file).read_text(), mutation.name
