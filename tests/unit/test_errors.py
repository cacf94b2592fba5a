"""Errors cross process boundaries whole."""

from __future__ import annotations

import copy
import pickle

import pytest

from sennit import errors

SPECIAL = {
    "InvalidInput": lambda: errors.InvalidInput("page_size", expected="a positive integer", got=0, hint="use 16"),
    "PlanMismatch": lambda: errors.PlanMismatch("q", expected="3 rows", got=(2, 4)),
    "UnsupportedFeature": lambda: errors.UnsupportedFeature("tree", "not implemented"),
    "OutOfPages": lambda: errors.OutOfPages("4 pages needed", needed=4, free=1, total=16),
    "PagesReleased": lambda: errors.PagesReleased("sequence 3 ...", sequence=3, length=5, shortest=24),
    "RequestFailed": lambda: errors.RequestFailed("got NaN", requests=[3, 5], named="prompts[{}]"),
}
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle {p}": lambda e, p=p: pickle.loads(pickle.dumps(e, p)) for p in range(pickle.HIGHEST_PROTOCOL + 1)},
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", errors.__all__)
def test_a_copied_error_has_the_type_the_text_and_the_attributes_of_the_first(name, how):
    error = SPECIAL.get(name, lambda: getattr(errors, name)("what went wrong"))()
    error.__dict__["note"] = ["added on the way"]
    twin = COPIES[how](error)
    assert twin is not error
    assert type(twin) is type(error)
    assert (str(twin), twin.args, vars(twin)) == (str(error), error.args, vars(error))
