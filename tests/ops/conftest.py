"""What the tests of this folder are run with."""

import pytest

from tests.ops.truth import IMPLEMENTATIONS


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    """One after the other; see `truth.call`."""
    return str(request.param)
