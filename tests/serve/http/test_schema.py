"""schemathesis against the server's own OpenAPI description: made-up requests, good and bad, and what may come back."""

import re

import pytest
from hypothesis import HealthCheck, settings
from serving import ask, running

from anyprec.serve.http.bodies import RequestLimits
from anyprec.serve.http.keys import read_keys
from anyprec.serve.http.openapi import describe

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi.checks import positive_data_acceptance  # noqa: E402

# A schema cannot say that data must have as many numbers as the shape says, or that an image must be one: such requests
# are "positive" for schemathesis, and 400 here. What refusals look like is checked for them as for all.
NOT_CHECKED = [positive_data_acceptance]


KEYS = {"ANYPREC_API_KEYS": "a" * 16, "ANYPREC_CONTROL_KEYS": "c" * 16}
QUICK = settings(deadline=None, suppress_health_check=list(HealthCheck))
opened = schemathesis.openapi.from_dict(describe(["net"], keys=False, control=False))
locked = schemathesis.openapi.from_dict(describe(["net"], keys=True, control=True))


@pytest.fixture(scope="module")
def address(model_path):
    with running({"net": model_path}, request_limits=RequestLimits(body=1 << 20, json=1 << 18)) as server:
        assert ask(server.port, "GET", "/openapi.json").json == opened.raw_schema
        yield f"http://127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def locked_address(model_path):
    with running(
        {"net": model_path}, request_limits=RequestLimits(body=1 << 20, json=1 << 18), keys=read_keys(environ=KEYS)
    ) as server:
        assert ask(server.port, "GET", "/openapi.json", x_api_key="a" * 16).json == locked.raw_schema
        yield f"http://127.0.0.1:{server.port}"


def operations(pattern):
    for path, methods in describe(["net"], keys=False, control=False)["paths"].items():
        for method in methods:
            if re.search(pattern, path):
                yield path, method, re.sub(r"\W+", "_", f"{method}{path}").strip("_")


def make(schema, path, method, name, examples, check):
    @schema.include(path=path, method=method.upper()).parametrize()
    @settings(QUICK, max_examples=examples)
    def test(case, request):
        check(case, request)

    test.__name__ = test.__qualname__ = name
    return test


def check_open(case, request):
    address = request.getfixturevalue("address")
    case.call_and_validate(address, excluded_checks=NOT_CHECKED, timeout=20)


def check_locked(case, request):
    """schemathesis also repeats each request without the key, which must then be refused."""
    address = request.getfixturevalue("locked_address")
    boss = {"Authorization": "Bearer " + KEYS["ANYPREC_CONTROL_KEYS"]}
    case.call_and_validate(address, headers=boss, excluded_checks=NOT_CHECKED, timeout=20)


# A function an operation: the names that schemathesis makes for its parameters are lost on the way to pytest-xdist.
for path, method, slug in operations("^(?!.*versions)"):
    name = f"test_as_described_{slug}"
    globals()[name] = make(opened, path, method, name, 6, check_open)
for path, method, slug in operations("^/v2$|metrics|precision|/load$"):
    name = f"test_keys_as_described_{slug}"
    globals()[name] = make(locked, path, method, name, 3, check_locked)
for path, method, slug in operations(""):
    name = f"test_as_described_at_length_{slug}"
    globals()[name] = pytest.mark.slow(make(opened, path, method, name, 500, check_open))
