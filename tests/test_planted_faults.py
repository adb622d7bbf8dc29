"""The planted faults of ``make faults`` can still be planted."""

from __future__ import annotations

import pytest

from tests.planted_faults import FAULTS, HOME, Fault, noticing, place_of


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_text_in_the_package_and_a_test(fault: Fault) -> None:
    assert fault.right != fault.wrong
    assert place_of(fault, HOME / "asynckfold").is_file()
    assert fault.test in noticing(fault, HOME / "tests")
