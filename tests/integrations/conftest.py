"""Other libraries, as these tests need them."""

import pytest

from helpers.torchvision_import import make_torchvision_importable


@pytest.fixture(autouse=True, scope="session")
def _torchvision_can_be_imported() -> None:
    make_torchvision_importable()
