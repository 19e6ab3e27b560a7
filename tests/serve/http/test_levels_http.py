"""Levels over HTTP: who answered is said, all of them can be asked for, and what is not served is refused."""

import numpy as np
import pytest
from serving import ask, images, infer, level_graph, output, running, wait_for

from anyprec.errors import ServeError
from anyprec.format import write
from anyprec.run.oracle import run_graph
from anyprec.serve.models import ModelRepository, Settings

NAMES = ["1", "2", "4", "8", "fast", "auto"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    made = tmp_path_factory.mktemp("levels") / "net.apm"
    write(level_graph(), made)
    return made


@pytest.fixture(scope="module")
def server(path):
    with running({"net": path}) as found:
        yield found


def test_metadata_names_all_levels(server):
    about = ask(server.port, "GET", "/v2/models/net").json["parameters"]
    assert about["levels"] == NAMES and about["widths"] == [1, 2, 4, 8]
    assert about["accuracy"]["auto"] == 87.0 and about["accuracy"]["fast"] == 81.5


def test_answers_say_their_level_and_are_exact(server):
    x = images(8, seed=3)
    wanted = {
        name: run_graph(level_graph(), x.transpose(0, 2, 3, 1), name)["head"].reshape(8, -1) for name in NAMES[:5]
    }
    for name in NAMES:
        reply = infer(server.port, x, bits=int(name) if name.isdigit() else name)
        said = reply.json["parameters"]
        assert str(said["bits"]) == name
        assert ("stages" in said) == (name == "auto")
        stages = said.get("stages", [name] * 8)
        exact = np.stack([wanted[str(stage)][i] for i, stage in enumerate(stages)])
        assert np.array_equal(output(reply), exact)
        if name == "auto":
            assert set(stages) == {1, 8}


def test_what_went_on_is_counted(server):
    x = images(8, seed=3)
    stages = infer(server.port, x, bits="auto").json["parameters"]["stages"]

    def counts():
        text = ask(server.port, "GET", "/metrics").body.decode()
        found = {}
        for line in text.splitlines():
            if line.startswith("anyprec_cascade_images_total"):
                found["true" if 'went_on="true"' in line else "false"] = float(line.split()[-1])
        return found

    wait_for(lambda: sum(counts().values()) > 0)
    before = counts()
    infer(server.port, x, bits="auto")
    wait_for(lambda: sum(counts().values()) == sum(before.values()) + 8)
    assert counts()["true"] - before["true"] == stages.count(8)


def test_the_page_is_told_front_layers_and_shares(server):
    infer(server.port, images(2, seed=3), bits="auto")
    seen = ask(server.port, "GET", "/v2/models/net/live").json
    levels = {level["name"]: level for level in seen["levels"]}
    assert list(levels) == NAMES and seen["layers"] == ["mid"]
    assert levels["auto"]["bits"] == [[1], [8]] and levels["fast"]["bits"] == [[2]]
    assert 0 <= levels["auto"]["share"] <= 1 and levels["8"]["share"] is None
    assert any(level["front"] for level in levels.values()) and all(level["ms"] > 0 for level in levels.values())
    wait_for(lambda: ask(server.port, "GET", "/v2/models/net/live").json["window"]["went_on"] is not None)


def test_a_level_can_be_held(server):
    for name in ("fast", "auto"):
        assert ask(server.port, "POST", "/v2/models/net/precision", {"bits": name}).status == 200
        assert infer(server.port, images()).json["parameters"]["bits"] == name
    assert ask(server.port, "POST", "/v2/models/net/precision", {"policy": "adaptive"}).status == 200


def test_min_bits_leaves_plans_and_cascades_out(server):
    for _ in range(5):
        assert infer(server.port, images(), min_bits=2).json["parameters"]["bits"] in (2, 4, 8)


@pytest.mark.parametrize("bits", ["slow", "auto ", "random", "", "fast\n"])
def test_unknown_levels_are_refused_in_one_line(server, bits):
    reply = infer(server.port, images(), bits=bits)
    assert reply.status == 400 and "1, 2, 4, 8, fast, auto" in reply.json["error"] and "\n" not in reply.json["error"]


def test_only_chosen_levels_are_served(path):
    with running({"net": path}, settings=Settings(slo_s=2.0, warm_up_s=0.05, levels=("8", "auto"))) as found:
        assert ask(found.port, "GET", "/v2/models/net").json["parameters"]["levels"] == ["8", "auto"]
        assert infer(found.port, images()).json["parameters"]["bits"] in (8, "auto")
        assert infer(found.port, images(), bits=1).status == 400


def test_a_chosen_level_that_is_not_there(path):
    settings = Settings(slo_s=2.0, warm_up_s=0.05, levels=("8", "slow"))
    with pytest.raises(ServeError, match="level 'slow' is not in this model"):
        ModelRepository({"net": str(path)}, settings).load_all()
