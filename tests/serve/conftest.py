"""One service without keys, for tests that change nothing of it."""

import pytest

from tests.serve.running import packaged, serving


@pytest.fixture(scope="package")
def service():
    with serving(packaged("shared")) as running:
        yield running
