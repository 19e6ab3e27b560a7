"""schemathesis against the server's own OpenAPI description: made-up requests, good and bad, and what may come back."""

import pytest
from hypothesis import HealthCheck, settings
from serving import ask, running

from anyprec.serve.app import Bounds
from anyprec.serve.keys import read_keys
from anyprec.serve.openapi import describe

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi.checks import positive_data_acceptance  # noqa: E402

# A schema cannot say that data must have as many numbers as the shape says, or that an image must be one: such requests
# are "positive" for schemathesis, and 400 here. What refusals look like is checked for them as for all.
NOT_CHECKED = [positive_data_acceptance]


KEYS = {"ANYPREC_API_KEYS": "a" * 16, "ANYPREC_CONTROL_KEYS": "c" * 16}
QUICK = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
opened = schemathesis.openapi.from_dict(describe(["net"], keys=False, control=False))
locked = schemathesis.openapi.from_dict(describe(["net"], keys=True, control=True))


@pytest.fixture(scope="module")
def address(model_path):
    with running({"net": model_path}, bounds=Bounds(body=1 << 20, json=1 << 18)) as server:
        assert ask(server.port, "GET", "/openapi.json").json == opened.raw_schema
        yield f"http://127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def locked_address(model_path):
    with running(
        {"net": model_path}, bounds=Bounds(body=1 << 20, json=1 << 18), keys=read_keys(environ=KEYS)
    ) as server:
        assert ask(server.port, "GET", "/openapi.json").json == locked.raw_schema
        yield f"http://127.0.0.1:{server.port}"


@opened.exclude(path_regex="versions").parametrize()
@QUICK
def test_every_answer_is_as_described(case, address):
    case.call_and_validate(address, excluded_checks=NOT_CHECKED, timeout=20)


@locked.include(path_regex="^/v2$|metrics|precision|/load$").parametrize()
@settings(QUICK, max_examples=3)
def test_keys_are_asked_for_as_described(case, locked_address):
    """schemathesis also repeats each request without the key, which must then be refused."""
    boss = {"Authorization": "Bearer " + KEYS["ANYPREC_CONTROL_KEYS"]}
    case.call_and_validate(locked_address, headers=boss, excluded_checks=NOT_CHECKED, timeout=20)


@pytest.mark.slow
@opened.parametrize()
@settings(QUICK, max_examples=500)
def test_every_answer_is_as_described_at_length(case, address):
    case.call_and_validate(address, excluded_checks=NOT_CHECKED, timeout=20)
