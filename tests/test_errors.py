"""One table of bad inputs: each raises its named error, in one line that says what was given and what to do."""

import hashlib
import re
import textwrap
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from torch import nn

import anyprec
from anyprec import errors
from anyprec.data import load_data
from anyprec.data.download import fetch
from anyprec.training.checkpoint import load_model
from anyprec.training.recipe import Recipe
from anyprec.zoo import build


def model():
    return build("resnet8", widths=(1, 8, 32), multiplier=0.25)


def set_to(bits):
    return lambda folder: anyprec.set_bits(model(), bits)


def empty_folder(folder):
    load_data("folder", "train", folder)


def empty_cifar_folder(folder):
    load_data("cifar10", "test", folder)


def wrong_checksum(folder):
    (folder / "there.bin").write_bytes(b"not what was published")
    wanted = hashlib.sha256(b"what was published").hexdigest()
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/there.bin"
            fetch(url, folder / "here.bin", checksum=f"sha256:{wanted}")
        finally:
            server.shutdown()


def truncated_checkpoint(folder):
    from anyprec.training.checkpoint import save_model

    save_model(model(), folder / "model.pt")
    whole = (folder / "model.pt").read_bytes()
    (folder / "model.pt").write_bytes(whole[: len(whole) // 2])
    load_model(folder / "model.pt")


def recipe_with_a_typo(folder):
    (folder / "r.toml").write_text('net = "resnet8"\ndata = "digits"\nepoch = 3\n')
    Recipe.load(folder / "r.toml")


def nothing_to_convert(folder):
    anyprec.convert(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), example=torch.zeros(1, 3, 8, 8))


def nan_data(folder):
    anyprec.calibrate(model(), [torch.full((4, 3, 8, 8), float("nan"))], widths=(4,))


def broken_profile(folder):
    (folder / "p.json").write_text('{"name": "mine"')
    anyprec.Profile.load(folder / "p.json")


TABLE = [
    ("unknown width", set_to(4), "UncalibratedBits", "bits=4 is not one of this model's widths (1, 8, 32)"),
    ("width 0", set_to(0), "UnsupportedBits", "bits=0 is not a bit-width; choose 1..8, or 32 for float"),
    ("width 9", set_to(9), "UnsupportedBits", "bits=9 is not a bit-width; choose 1..8, or 32 for float"),
    ("width -1", set_to(-1), "UnsupportedBits", "bits=-1 is not a bit-width; choose 1..8, or 32 for float"),
    ("width '4'", set_to("4"), "UnsupportedBits", "bits='4' is not a bit-width"),
    ("dict with a typo", set_to({"blocks.0.conv": 1}), "UnknownLayer", "did you mean 'blocks.0.conv"),
    ("empty data folder", empty_folder, "DataError", ""),
    ("empty CIFAR folder", empty_cifar_folder, "DataError", ""),
    ("wrong checksum", wrong_checksum, "DownloadMismatch", ""),
    ("truncated checkpoint", truncated_checkpoint, "CheckpointError", "is truncated or damaged"),
    (
        "recipe with a typo",
        recipe_with_a_typo,
        "RecipeError",
        "unknown field 'epoch'; did you mean 'epochs'?",
    ),
    ("nothing to convert", nothing_to_convert, "NothingConverted", ""),
    ("NaN data", nan_data, "DataError", ""),
    ("broken profile", broken_profile, "ProfileError", "is not a profile"),
]


@pytest.mark.parametrize(("what", "mistake", "error", "message"), TABLE, ids=[row[0] for row in TABLE])
def test_bad_input(what, mistake, error, message, tmp_path):
    with pytest.raises(getattr(errors, error)) as caught:
        mistake(tmp_path)
    text = str(caught.value)
    assert type(caught.value).__name__ == error
    assert message in text
    assert "\n" not in text and 20 < len(text) < 400, text


def test_numpy_widths_are_widths():
    network = model()
    anyprec.set_bits(network, np.int64(8))
    assert type(next(iter(anyprec.any_layers(network).values())).bits) is int


def test_the_tree_at_the_top_of_errors_is_the_tree():
    """Each class stands in it once, a subclass of AnyprecError's subclasses further to the right than its base."""
    drawn = errors.__doc__[errors.__doc__.index("    AnyprecError\n") :]  # a code block on the API page
    tree = textwrap.dedent(drawn).split("AnyprecError\n", 1)[1]
    classes = {c.__name__: c for c in vars(errors).values() if isinstance(c, type)}
    places = {}
    for line in tree.strip("\n").split("\n"):
        names = re.match(r"[|` -]*((?:\w+, )*\w+)", line)[1].split(", ")
        places.update({name: line.index(names[0]) for name in names})
    assert set(places) == set(classes) - {"AnyprecError"}
    for name, place in places.items():
        assert place == 3 * (len(classes[name].__mro__) - len(errors.AnyprecError.__mro__)), name
