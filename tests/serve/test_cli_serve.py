"""`anyprec serve`: its options. What the server does with them is tested in the folders below."""

import argparse

import pytest

from anyprec.cli import main
from anyprec.cli.serve import add_arguments, build

pytest.importorskip("uvicorn")
from anyprec.serve.connections.cores import Cores
from anyprec.serve.http.keys import Keys


def server(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return build(parser.parse_args(["net.apm", *arguments]), {"net": "net.apm"}, Keys(), Cores())


def test_what_is_not_given_is_the_servers_own_default():
    """--help does not import the server, so the defaults it names are written there a second time."""
    made = server()
    limits = made.app.models.settings.limits
    assert (limits.max_batch, limits.max_queue) == (32, 1024)
    assert made.app.models.settings.max_pixels == 1 << 20
    bounds = made.app.limits
    assert (bounds.body, bounds.json, bounds.answer_json, bounds.held) == (16 << 20, 4 << 20, 64 << 20, 512 << 20)
    assert bounds.image_s == 5


def test_what_is_given_reaches_the_server():
    made = server("--max-batch", "8", "--max-body", "1MiB", "--image-timeout", "2s", "--bits", "4")
    assert made.app.models.settings.limits.max_batch == 8 and made.app.models.settings.limits.max_queue == 1024
    assert made.app.limits.body == 1 << 20 and made.app.limits.image_s == 2
    assert (made.app.models.settings.policy, made.app.models.settings.bits) == ("fixed", 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["net.apm", "--tls-key", "key.pem"], "--tls-key goes with --tls-cert"),
        (["net.apm", "--slo", "50"], "has no unit; write 50ms or 50s"),
        (["net.apm", "--trusted-proxy", "nowhere"], "is no address"),
        (["missing.apm", "--port", "0"], "missing.apm"),
    ],
)
def test_mistakes(arguments, words, capsys):
    assert main(["serve", *arguments]) == 2
    assert words in capsys.readouterr().err
