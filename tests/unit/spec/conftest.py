import pytest
from hf_witness import Witness, build_witness


@pytest.fixture(scope="session")
def witness() -> Witness:
    return build_witness()
